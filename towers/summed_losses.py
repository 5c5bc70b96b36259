"""Losses that are sums over a tower's examples, where towers average their losses.

A model that divides a sum by the batch size, a number of its own, has in N towers N losses of a part of the examples each,
divided by the number of all: their average is N times too small, and so is every gradient, which no other check would see.
"""
import warnings
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from towers.along_examples import lies_along_examples, products, reduces_first_axis, sizes_of_examples
from towers.graph_walk import VARIABLES
from towers.own_data import takes_own_data

__all__ = ["warn_of_sums"]

# What hands on a sum, or the terms of one.
_PASSES = frozenset(["Add", "AddV2", "AddN", "Cast", "CheckNumerics", "Identity", "Neg", "Pack", "Sub"])
_RESHAPES = frozenset(["ExpandDims", "Reshape", "Squeeze"])
_DIVIDES = frozenset(["Div", "DivNoNan", "RealDiv"])
_MOST_DIVISORS = 6  # whose products are looked at: what a loop discounts step by step would have too many
_MOST_OF_FACTORS = 2  # examples of a tower that a factor such as 1/2 may stand for by chance
_GIVEN = VARIABLES | frozenset(["Const", "Placeholder", "PlaceholderWithDefault"])


class Divisor(NamedTuple):
    """A number that a loss is divided by on its way.

    Attributes:
      number: float.
      is_factor: bool, whether the loss is multiplied by its inverse.
    """
    number: float
    is_factor: bool


def warn_of_sums(losses, towers, stacklevel=3):
    """Warns, once, if tower 0's loss is a sum over its examples, divided by nothing that grows with them.

    Only what is sure is said: nothing of losses whose sums go through more than additions and a few multiplications by numbers,
    nor of one that is multiplied by the number of towers, or divided by the tower's own number of examples, a tensor or an int.

    Args:
      losses: list over towers of scalar tensors.
      towers: list of `Tower`.
      stacklevel: int, as of `warnings.warn`.
    """
    num_towers, context = towers[0].context.num_towers, towers[0].context
    if num_towers == 1:
        return
    sizes = sizes_of_examples(towers)
    for summed, divisors in _sums(losses[0], context):
        if lies_along_examples(summed, context) and not _is_a_mean(summed, divisors, sizes):
            warnings.warn(
                "The loss of a tower (%r) is a sum over the tower's examples (%r), divided by nothing of the tower's, and towers "
                "average their losses: over %d towers it and its gradients come to 1/%d of those of one tower on the whole "
                "batch. Take tf.reduce_mean, or divide by the tower's own number of examples, tf.shape(x)[0]; a loss that is "
                "meant as a sum is multiplied by towers.current_tower().num_towers."
                % (losses[0].name, summed.name, num_towers, num_towers), stacklevel=stacklevel)
            return


def _sums(loss, context):
    """Yields what is added up along an axis on the way to a loss, and a tuple of `Divisor` that the sum is divided by."""
    seen, stack = set(), [(loss, ())]
    while stack:
        tensor, divisors = stack.pop()
        kind, inputs = tensor.op.type, list(tensor.op.inputs)
        if (tensor.name, divisors) in seen or len(divisors) > _MOST_DIVISORS:
            continue
        seen.add((tensor.name, divisors))
        if kind in _RESHAPES:
            stack.append((inputs[0], divisors))
        elif kind in _PASSES:
            stack.extend((source, divisors) for source in inputs)
        elif kind == "Mul":
            stack.extend(_without_factors(inputs, divisors, context))
        elif kind in _DIVIDES and _is_given(inputs[1]):
            number = _number(inputs[1])
            stack.append((inputs[0], divisors + ((Divisor(number, False),) if number else ())))
        elif kind in ("Select", "SelectV2") and inputs[0].shape.rank == 0 and any(map(_is_zero, inputs[1:])):
            stack.extend((source, divisors) for source in inputs[1:])
        elif kind == "Mean" and _is_of_sums(inputs[0]):
            stack.append((inputs[0], divisors))  # over what is no number of examples
        elif kind == "L2Loss":
            yield inputs[0], divisors
        elif kind == "Sum":
            reduces = reduces_first_axis(tensor.op)
            if reduces:
                yield inputs[0], divisors
            if reduces is not None:
                stack.append((inputs[0], divisors))  # over classes, say: of what lies along the examples still


def _is_of_sums(tensor):
    """Tells whether a tensor holds a list of scalars, or sums along an axis, so that its mean is none over examples."""
    while tensor.op.type in _RESHAPES:
        tensor = tensor.op.inputs[0]
    is_list = tensor.op.type == "Pack" and all(source.shape.rank == 0 for source in tensor.op.inputs)
    return is_list or tensor.op.type == "Sum" and reduces_first_axis(tensor.op) is True and tensor.shape.is_fully_defined()


def _without_factors(inputs, divisors, context):
    numbers = [_number(tensor) for tensor in inputs]
    if context.num_towers in numbers or 0 in numbers:
        return []  # a sum, and meant as one; or nothing
    if any(number is not None for number in numbers):
        more = tuple(Divisor(1 / number, True) for number in numbers if number)
        return [(tensor, divisors + more) for tensor, number in zip(inputs, numbers) if number is None]
    own = [tensor for tensor in inputs if takes_own_data([tensor], context)]
    return [(own[0], divisors)] if len(own) == 1 and all(_is_given(tensor) for tensor in inputs if tensor is not own[0]) else []


def _number(tensor):
    """Returns the value of a scalar that is known, else None."""
    value = tf.get_static_value(tensor)
    return float(value) if value is not None and np.size(value) == 1 else None


def _is_zero(tensor):
    return tensor.op.type == "ZerosLike" or _number(tensor) == 0


def _is_given(tensor):
    """Tells whether a tensor is a number, or one that is fed or trained: it is the same whatever the tower's examples are."""
    while tensor.op.type in ("Cast", "Identity", "ReadVariableOp"):
        tensor = tensor.op.inputs[0]
    return _number(tensor) is not None or tensor.op.type in _GIVEN


def _is_a_mean(summed, divisors, sizes):
    """Tells whether a sum along the examples, divided by some numbers, may be divided by how many the tower has.

    That is where some of the numbers together are a multiple of the tower's examples and none of the whole batch's, or the
    number of what is added up along the batch's axis and any others: a sum over [2, 7, 3] divided by 2, 14, 6 or 42. Beside a
    division by the number of the whole batch's examples a factor is none of the tower's, and nothing is where that is 1 or 2.
    """
    shape = summed.shape.as_list()
    own = [size for size in sizes if shape[0] is not None and shape[0] % size == 0]
    if not own:  # the model could not know
        return False
    size, whole = max(own), sizes[max(own)]
    others = products([shape[0] // size] + shape[1:])
    of_whole = [divisor for divisor in divisors if _is_of(divisor.number, whole, others)]
    are_factors = all(divisor.is_factor for divisor in of_whole)
    believed = [divisor for divisor in divisors if are_factors or not divisor.is_factor]
    beside = [divisor for divisor in believed if divisor not in of_whole]
    if any(_is_of(number, size, others) for number in _products(believed) - _products(beside)):
        return True
    if of_whole and size <= _MOST_OF_FACTORS:
        beside = [divisor for divisor in beside if are_factors and not divisor.is_factor]
    return any(_is_multiple(number, size) and not _is_multiple(number, whole) or _is_of(number, size, others)
               for number in _products(beside))


def _products(divisors):
    return products([divisor.number for divisor in divisors], fewest=1)


def _is_of(number, size, others):
    """Tells whether a number is that of some examples, or of what they and other axes have together."""
    return any(abs(abs(number) / (size * other) - 1) < 1e-6 for other in others)


def _is_multiple(number, of):
    times = abs(number) / of
    return times > 0.5 and abs(times - round(times)) < 1e-6 * times
