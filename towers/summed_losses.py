"""Losses that are sums over a tower's examples, where towers average their losses.

A model that divides a sum by the batch size, a number of its own, has in N towers N losses of a part of the examples each,
divided by the number of all: their average is N times too small, and so is every gradient, which no other check would see.
"""
import warnings
from typing import NamedTuple, Optional

import numpy as np
import tensorflow.compat.v1 as tf

from towers.along_examples import SIZES, Examples, lies_along_examples, products, reduces_first_axis, sizes_of_examples
from towers.exchanges import stands_at_exchange
from towers.graph_walk import VARIABLES, end_of
from towers.own_data import own_leaves, takes_own_data
from towers.private import is_in_loop

__all__ = ["warn_of_sums"]

# What hands on a sum, or the terms of one.
_PASSES = frozenset(["Add", "AddV2", "AddN", "Cast", "CheckNumerics", "Identity", "Neg", "Pack", "Sub"])
_RESHAPES = frozenset(["ExpandDims", "Reshape", "Squeeze"])
_DIVIDES = frozenset(["Div", "DivNoNan", "RealDiv"])
_OF_LOOPS = frozenset(["Enter", "Exit", "Merge", "NextIteration", "Switch"])
_MOST_DIVISORS = 6  # whose products are looked at: what a loop discounts step by step would have too many
_MOST_OF_FACTORS = 2  # examples of a tower that a factor such as 1/2 may stand for by chance
_OF_WEIGHTS = frozenset(["L2Loss", "Sqrt", "Square"])  # what decays end with, beside sums and means
_OF_NUMBERS = frozenset(["Add", "AddV2", "Cast", "Enter", "Identity", "Maximum", "Mul", "Reshape"])
_GIVEN = VARIABLES | frozenset(["Const", "Placeholder", "PlaceholderWithDefault"])


class Divisor(NamedTuple):
    """What a loss is divided by on its way.

    Attributes:
      number: float; None for the number of the tower's own examples, or of what it counts among them.
      kind: str, "factor" where the loss is multiplied by its inverse, "size" where the graph takes it of a tensor, else "number".
      name: str, the name of the op that divides.
    """
    number: Optional[float]
    kind: str
    name: str


def warn_of_sums(losses, towers, stacklevel=3):
    """Warns, once, if tower 0's loss is a sum over its examples, divided by nothing that grows with them, or what has none is.

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
    means, others = {}, []  # of sums alike one is enough
    for term, divisors, is_sum in _terms(losses[0], context):
        if not is_sum:
            others.append((term, divisors))
        elif _by_examples(divisors) or not lies_along_examples(term, context):
            continue
        elif _is_a_mean(term, divisors, sizes) or _is_a_mean(term, divisors + _divisors_within(term, context), sizes):
            means.setdefault((str(term.shape), divisors), term)
        else:
            warnings.warn(
                "The loss of a tower (%r) is a sum over the tower's examples (%r), divided by nothing of the tower's, and towers "
                "average their losses: over %d towers it and its gradients come to 1/%d of those of one tower on the whole "
                "batch. Take tf.reduce_mean, or divide by the tower's own number of examples, tf.shape(x)[0]; a loss that is "
                "meant as a sum is multiplied by towers.current_tower().num_towers."
                % (losses[0].name, term.name, num_towers, num_towers), stacklevel=stacklevel)
            return
    examples = Examples(towers)
    divided = next((term for term in _divided_by_examples(others, means, sizes, num_towers)
                    if not examples.are_in(term) and _is_of_variables(term, context)), None)
    if divided is not None:
        warnings.warn(
            "The loss of a tower (%r) divides what is of variables alone (%r), a weight decay say, by the number of the tower's "
            "own examples: over %d towers it and its gradients come to %d times those of one tower on the whole batch. Add it to "
            "the mean over the examples, decay + tf.reduce_mean(losses), or divide it by the number of all towers' examples, "
            "towers.all_reduce(tf.shape(x)[0])." % (losses[0].name, divided.name, num_towers, num_towers), stacklevel=stacklevel)


def _terms(loss, context):
    """Yields the terms of a loss, (tensor, divisors, is_sum).

    - A tensor: what is added up along its first axis, if `is_sum`; else a term that is no sum, or one of no examples.
    - A tuple of `Divisor`, what the loss divides it by.
    """
    seen, stack = set(), [(loss, (), False)]
    while stack:
        tensor, divisors, is_within = stack.pop()  # a sum, which repeats what is added to its examples
        kind, inputs = tensor.op.type, list(tensor.op.inputs)
        if (tensor.name, divisors, is_within) in seen or len(divisors) > _MOST_DIVISORS:
            continue
        seen.add((tensor.name, divisors, is_within))
        following = []
        examples = _taken_one_by_one(tensor, context)
        if examples is not None:
            yield examples, divisors + _divisors_within(tensor, context), True
        elif kind in _RESHAPES:
            following = [(inputs[0], divisors)]
        elif kind in _PASSES:
            following = [(source, divisors) for source in inputs]
        elif kind == "Mul":
            following = _without_factors(tensor.op, divisors, context)
        elif kind in _DIVIDES and (_is_given(inputs[1]) or _size(inputs[1], context) is not None):
            following = [(inputs[0], divisors + _divisor(inputs[1], tensor.op, context))]
        elif kind in ("Select", "SelectV2") and inputs[0].shape.rank == 0 and any(map(_is_zero, inputs[1:])):
            following = [(source, divisors) for source in inputs[1:]]
        elif kind == "Mean" and _is_of_sums(inputs[0]):
            following = [(inputs[0], divisors)]  # over what is no number of examples
        elif kind in _OF_LOOPS:
            following = [(source, divisors) for source in _from_round_to_round(tensor.op)]
        elif kind in ("Einsum", "MatMul"):
            for summed, other in _contracted(tensor.op):
                if other is None:
                    yield summed, divisors, True
                elif takes_own_data([other], context):
                    yield summed, divisors + _divisors_within(other, context), True
        elif kind == "L2Loss" or kind == "Sum" and reduces_first_axis(tensor.op):
            yield inputs[0], divisors, True
        if kind == "Sum" and examples is None and reduces_first_axis(tensor.op) is not None:
            following = [(inputs[0], divisors)]  # over classes, say: of what lies along the examples still
        adds_up = kind in ("Mean", "Sum") and not _is_list(inputs[0])
        if divisors and not is_within and (adds_up or kind in _OF_WEIGHTS):
            yield tensor, divisors, False
        is_within = is_within or adds_up
        stack.extend((source, by, is_within) for source, by in following)


def _from_round_to_round(op):
    """Returns what an op of a tf.while_loop of control flow 1 hands on, a list of tensors; of a tf.cond nothing."""
    if op.type == "Merge":
        return list(op.inputs) if any(source.op.type == "NextIteration" for source in op.inputs) else []
    if op.type == "Switch":
        return [op.inputs[0]] if op.inputs[0].op.type == "Merge" else []
    return [op.inputs[0]]


def _taken_one_by_one(tensor, context):
    """Returns the examples of which a tensor in a loop holds one, another in each round, and no others; else None."""
    if tensor.op.type in _OF_LOOPS | _PASSES | _DIVIDES | {"Mul", "Select", "SelectV2"} or not is_in_loop(tensor.op):
        return None  # what is followed further, or could be divided by anything
    own, found, seen, stack = own_leaves(context), None, set(), [tensor]
    while stack:
        tensor = stack.pop()
        op = tensor.op
        if end_of(tensor) in own:
            return None
        is_state = op.type in _OF_LOOPS and op.type != "Enter"
        if is_state and tensor.dtype.is_floating:  # what the largest of all is held against, say
            return None
        if op in seen or is_state or op.type in SIZES:
            continue
        seen.add(op)
        is_row = op.type == "StridedSlice" and op.get_attr("shrink_axis_mask") & 1 or (
            op.type == "GatherV2" and op.inputs[1].shape.rank == 0)
        is_row = is_row and tf.get_static_value(op.inputs[1]) is None
        if op.type == "TensorArrayScatterV3" or is_row:
            examples = op.inputs[2 if op.type == "TensorArrayScatterV3" else 0]
            if lies_along_examples(examples, context):
                found = examples
                continue
        stack.extend(op.inputs)
    return found


def _is_list(tensor):
    """Tells whether a tensor holds a list of scalars."""
    while tensor.op.type in _RESHAPES:
        tensor = tensor.op.inputs[0]
    return tensor.op.type == "Pack" and all(source.shape.rank == 0 for source in tensor.op.inputs)


def _is_of_sums(tensor):
    """Tells whether a tensor holds a list of scalars, or sums along an axis, so that its mean is none over examples."""
    if _is_list(tensor):
        return True
    while tensor.op.type in _RESHAPES:
        tensor = tensor.op.inputs[0]
    return tensor.op.type == "Sum" and reduces_first_axis(tensor.op) is True and tensor.shape.is_fully_defined()


def _contracted(op):
    """Yields (summed, other), what a product of tensors adds up along its first axis, and by what there, None by nothing."""
    if op.type == "Einsum":
        labels, _, of_output = op.get_attr("equation").decode().partition("->")
        labels = labels.split(",")
        first = labels[0][:1]
        if len(labels) == 2 and first != "." and first not in of_output:
            if first not in labels[1]:
                yield op.inputs[0], None
            elif first == labels[1][0]:
                yield op.inputs[0], op.inputs[1]
    elif op.get_attr("transpose_a"):
        yield op.inputs[0], op.inputs[1]
    elif not op.get_attr("transpose_b"):
        yield op.inputs[1], op.inputs[0]


def _divisors_within(tensor, context):
    """Returns the numbers that a tensor is divided by in its turn, or that some terms of it are: a tuple of `Divisor`."""
    found, seen, stack = (), set(), [tensor]
    while stack and len(found) < _MOST_DIVISORS:
        op = stack.pop().op
        if op in seen:
            continue
        seen.add(op)
        if op.type in _DIVIDES:
            found += _divisor(op.inputs[1], op, context)
        elif op.type == "Mul":
            found += tuple(Divisor(1 / number, "factor", op.name) for number in map(_number, op.inputs) if number)
        if op.type in _PASSES or op.type == "Mul":
            stack.extend(op.inputs)
        elif op.type in _RESHAPES or op.type in _DIVIDES or op.type in ("Mean", "Sum", "Transpose"):
            stack.append(op.inputs[0])
    return found


def _without_factors(op, divisors, context):
    """Returns what a product is of besides numbers, and all that this is divided by: a list of (tensor, divisors)."""
    inputs = list(op.inputs)
    numbers = [_number(tensor) for tensor in inputs]
    if context.num_towers in numbers or 0 in numbers:
        return []  # a sum, and meant as one; or nothing
    if any(number is not None for number in numbers):
        more = tuple(Divisor(1 / number, "factor", op.name) for number in numbers if number)
        return [(tensor, divisors + more) for tensor, number in zip(inputs, numbers) if number is None]
    own = [tensor for tensor in inputs if takes_own_data([tensor], context)]
    return [(own[0], divisors)] if len(own) == 1 and all(_is_given(tensor) for tensor in inputs if tensor is not own[0]) else []


def _divisor(tensor, op, context):
    """Returns what an op divides by, a tuple of `Divisor`, empty where that may be any number or 0."""
    number, size = _number(tensor), _size(tensor, context)
    if size is not None:
        return Divisor(None if tf.is_tensor(size) else float(size), "size", op.name),
    return (Divisor(number, "number", op.name),) if number else ()


def _size(tensor, context):
    """Returns the number that a tensor takes of a shape, an int; itself if it counts the tower's examples; else None."""
    while tensor.op.type in _OF_NUMBERS:
        sources = [source for source in tensor.op.inputs if _number(source) is None]
        if len(sources) != 1:
            return None
        tensor = sources[0]
    op = tensor.op
    if op.type == "StridedSlice" and op.get_attr("shrink_axis_mask") == 1 and op.inputs[0].dtype.is_integer:
        shape, first = op.inputs[0].op, tf.get_static_value(op.inputs[1])
        if shape.type == "Const" and first is not None:
            return int(tf.get_static_value(shape.outputs[0])[int(first[0])])
        return tensor if shape.type == "Shape" and first == [0] and lies_along_examples(shape.inputs[0], context) else None
    counts = op.type == "Size" or op.type == "Sum" and reduces_first_axis(op)
    return tensor if counts and lies_along_examples(op.inputs[0], context) else None


def _number(tensor):
    """Returns the value of a scalar that is known, else None."""
    value = tf.get_static_value(tensor)
    return float(np.reshape(value, -1)[0]) if value is not None and np.size(value) == 1 else None


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
    if any(divisor.kind == "size" and (divisor.number is None or not own or divisor.number % max(own) == 0)
           for divisor in divisors):
        return True
    if not own:  # the model could not know
        return False
    size, whole = max(own), sizes[max(own)]
    others = products([shape[0] // size] + shape[1:])
    of_whole = [divisor for divisor in divisors if _is_of(divisor.number, whole, others)]
    are_factors = all(divisor.kind == "factor" for divisor in of_whole)
    believed = [divisor for divisor in divisors if are_factors or divisor.kind != "factor"]
    beside = [divisor for divisor in believed if divisor not in of_whole]
    if any(_is_of(number, size, others) for number in _products(believed) - _products(beside)):
        return True
    if of_whole and size <= _MOST_OF_FACTORS:
        beside = [divisor for divisor in beside if are_factors and divisor.kind != "factor"]
    return any(_is_multiple(number, size) and not _is_multiple(number, whole) or _is_of(number, size, others)
               for number in _products(beside))


def _divided_by_examples(others, means, sizes, num_towers):
    """Yields those terms that are divided by the number of a tower's examples, or by what makes a sum beside them a mean.

    Args:
      others: list of (tensor, divisors), terms that are no sums over the examples.
      means: dict from (shape, divisors) to a tensor, those that are, by the tower's number.
      sizes: dict, see `sizes_of_examples`.
      num_towers: int; what is divided by that too is meant as it is.
    """
    def is_undone(divisors):
        return any(divisor.kind == "number" and divisor.number == num_towers for divisor in divisors) or any(
            _is_multiple(1 / number, size) for number in _products(divisors) for size in sizes)

    def makes_a_mean(divisors, summed, of_mean):
        shared, apart = _parted(of_mean, divisors)
        return (shared and _is_a_mean(summed, shared, sizes) and not _is_a_mean(summed, apart, sizes)
                and not is_undone(_parted(divisors, of_mean)[1]))

    for term, divisors in others:
        if _by_examples(divisors) and not is_undone(divisors) or any(
                makes_a_mean(divisors, summed, of_mean) for (_, of_mean), summed in means.items()):
            yield term


def _by_examples(divisors):
    return any(divisor.number is None for divisor in divisors)


def _parted(divisors, others):
    return [divisor for divisor in divisors if divisor in others], [divisor for divisor in divisors if divisor not in others]


def _is_of_variables(tensor, context):
    """Tells whether a tensor is of variables and numbers, none of which is taken of a shape, the batch's perhaps."""
    if takes_own_data([tensor], context):
        return False
    seen, stack = set(), [tensor.op]
    while stack:
        op = stack.pop()
        if op not in seen:
            seen.add(op)
            stack.extend(source.op for source in op.inputs)
    return any(op.type in VARIABLES for op in seen) and not any(
        op.type == "StridedSlice" or op in context.meetings.stand_ins or stands_at_exchange(op) for op in seen)


def _products(divisors):
    return products([divisor.number for divisor in divisors], fewest=1)


def _is_of(number, size, others):
    """Tells whether a number is that of some examples, or of what they and other axes have together."""
    return any(abs(abs(number) / (size * other) - 1) < 1e-6 for other in others)


def _is_multiple(number, of):
    times = abs(number) / of
    return times > 0.5 and abs(times - round(times)) < 1e-6 * times
