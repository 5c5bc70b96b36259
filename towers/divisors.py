"""What a loss is divided by on its way, and whether that makes a mean of a sum over a tower's examples."""
from typing import NamedTuple, Optional

import numpy as np
import tensorflow.compat.v1 as tf

from towers.along_examples import values_of
from towers.axes import reduces_first_axis
from towers.first_axis import lies_along_examples, products
from towers.graph_walk import VARIABLES
from towers.mapped import written_by

__all__ = ["DIVIDES", "Divisor", "MOST_DIVISORS", "PASSES", "RESHAPES", "are_undone", "by_examples", "divisors_of",
           "divisors_within", "is_a_mean", "is_given", "number_of", "size_of"]

# What hands on a sum, or the terms of one.
PASSES = frozenset(["Add", "AddV2", "AddN", "Cast", "CheckNumerics", "Identity", "Neg", "Pack", "Sub"])
RESHAPES = frozenset(["ExpandDims", "Reshape", "Squeeze"])
DIVIDES = frozenset(["Div", "DivNoNan", "RealDiv"])
MOST_DIVISORS = 6  # whose products are looked at: what a loop discounts step by step would have too many
_MOST_OF_FACTORS = 2  # examples of a tower that a factor such as 1/2 may stand for by chance
_OF_NUMBERS = frozenset(["Add", "AddV2", "Cast", "Enter", "Identity", "Maximum", "Mul", "Reshape", "Switch"])
_COMPUTES = {"Add": np.add, "AddV2": np.add, "Cast": np.float64, "Div": np.divide, "Identity": np.float64, "Mul": np.multiply,
             "RealDiv": np.divide, "Sub": np.subtract}
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


def divisors_within(tensor, context):
    """Returns the numbers that a tensor is divided by in its turn, or that some terms of it are: a tuple of `Divisor`."""
    found, seen, stack = (), set(), [tensor]
    while stack and len(found) < MOST_DIVISORS:
        op = stack.pop().op
        if op in seen:
            continue
        seen.add(op)
        if op.type in DIVIDES:
            found += divisors_of(op.inputs[1], op, context)
        elif op.type == "Mul":
            found += tuple(Divisor(1 / number, "factor", op.name) for number in map(number_of, op.inputs) if number)
        if op.type in PASSES or op.type == "Mul":
            stack.extend(op.inputs)
        elif op.type in RESHAPES or op.type in DIVIDES or op.type in ("Mean", "Sum", "Transpose"):
            stack.append(op.inputs[0])
        elif written_by(op) is not None:
            stack.append(written_by(op))
    return found


def divisors_of(tensor, op, context):
    """Returns what an op divides by, a tuple of `Divisor`, empty where that may be any number or 0."""
    number, size = number_of(tensor), size_of(tensor, context)
    if size is not None:
        return Divisor(None if tf.is_tensor(size) else float(size), "size", op.name),
    return (Divisor(number, "number", op.name),) if number else ()


def size_of(tensor, context):
    """Returns the number that a tensor takes of a shape, an int; itself if it counts the tower's examples; else None."""
    while tensor.op.type in _OF_NUMBERS:
        sources = [source for source in values_of(tensor.op) if number_of(source) is None]
        if len(sources) != 1:
            return None
        tensor = sources[0]
    op = tensor.op
    if op.type == "StridedSlice" and op.get_attr("shrink_axis_mask") == 1 and op.inputs[0].dtype.is_integer:
        shape, first = op.inputs[0].op, tf.get_static_value(op.inputs[1])
        if shape.type == "Const" and first == [0]:
            return int(tf.get_static_value(shape.outputs[0])[0])
        return tensor if shape.type == "Shape" and first == [0] and lies_along_examples(shape.inputs[0], context) else None
    counts = op.type == "Size" or op.type == "Sum" and reduces_first_axis(op)
    return tensor if counts and lies_along_examples(op.inputs[0], context) else None


def number_of(tensor, depth=4):
    """Returns the value of a scalar that is known, or computed of such in a few steps, else None."""
    while tensor.op.type in ("Enter", "Switch"):  # into a loop or a branch
        tensor = tensor.op.inputs[0]
    value, op = tf.get_static_value(tensor), tensor.op
    if value is None and op.type == "StridedSlice" and op.get_attr("shrink_axis_mask") == 1:
        value = _size_along(op.inputs[0].op, tf.get_static_value(op.inputs[1]))
    if value is None and op.type in _COMPUTES and tensor.shape.rank == 0 and depth:
        numbers = [number_of(source, depth - 1) for source in op.inputs]
        with np.errstate(all="ignore"):
            value = None if None in numbers else _COMPUTES[op.type](*map(np.float64, numbers))
        return float(value) if value is not None and np.isfinite(value) else None
    return float(np.reshape(value, -1)[0]) if value is not None and np.size(value) == 1 else None


def _size_along(shape, axis):
    """Returns a size of a shape that is known, but the first one, which `size_of` counts; else None. `axis` is an array [1]."""
    if axis is None or len(axis) != 1 or not axis[0] or shape.type not in ("Const", "Shape"):
        return None
    if shape.type == "Const":
        return tf.get_static_value(shape.outputs[0])[int(axis[0])]
    return tf.dimension_value(shape.inputs[0].shape[int(axis[0])]) if shape.inputs[0].shape.rank else None


def is_given(tensor):
    """Tells whether a tensor is a number, or one that is fed or trained: it is the same whatever the tower's examples are."""
    while tensor.op.type in ("Cast", "Identity", "ReadVariableOp", "Switch"):
        tensor = tensor.op.inputs[0]
    return number_of(tensor) is not None or tensor.op.type in _GIVEN


def is_a_mean(shape, divisors, sizes):
    """Tells whether a sum along the examples, divided by some numbers, may be divided by how many the tower has.

    `shape` is that of what is added up, a list.

    That is where some of the numbers together are a multiple of the tower's examples and none of the whole batch's, or the
    number of what is added up along the batch's axis and any others: a sum over [2, 7, 3] divided by 2, 14, 6 or 42. Beside a
    division by the number of the whole batch's examples a factor is none of the tower's, and nothing is where that is 1 or 2.
    """
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


def are_undone(divisors, sizes):
    """Tells whether some of the numbers multiply by the number of a tower's examples, of `sizes`, instead."""
    return any(_is_multiple(1 / number, size) for number in _products(divisors) for size in sizes)


def by_examples(divisors):
    """Tells whether one of the numbers is counted among the tower's own examples."""
    return any(divisor.number is None for divisor in divisors)


def _products(divisors):
    return products([divisor.number for divisor in divisors], fewest=1)


def _is_of(number, size, others):
    """Tells whether a number is that of some examples, or of what they and other axes have together."""
    return any(abs(abs(number) / (size * other) - 1) < 1e-6 for other in others)


def _is_multiple(number, of):
    times = abs(number) / of
    return times > 0.5 and abs(times - round(times)) < 1e-6 * times
