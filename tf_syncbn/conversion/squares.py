"""Variances written as `E[x^2] - E[x]^2`, by means or by sums that are divided by their number: `tf.nn.normalize_moments` too.

The difference of two large numbers loses the variance where the mean is large, in float32 from a few hundred deviations on.
What is known to be such a variance is computed by the exact merge of centred squares instead, over all towers.
"""
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from tf_syncbn.conversion.axis_rules import reduced_axes
from tf_syncbn.conversion.counts import FACTORS, SAME_VALUE

__all__ = ["Squares", "find_squares", "squared"]


class Squares(NamedTuple):
    """A variance that a model computes of the mean of squares.

    Attributes:
      op: operation, the difference.
      x: tensor, what the variance is of.
      kept: tuple of int, the axes that have variances of their own.
      means: list of the ops that compute the mean of `x` over the same axes.
      made_of: list of the ops that `op` is made of, sums and means among them.
    """
    op: Any
    x: Any
    kept: tuple
    means: Any
    made_of: Any


class _Mean(NamedTuple):
    x: Any  # the tensor that is averaged
    reduced: Any  # set of axes
    ops: Any  # list, the op that hands out the mean, then what it is made of


def find_squares(sums, model):
    """Returns the list of `Squares` whose sums and means over examples are among the ops `sums`.

    `model` is a `tf_syncbn.conversion.layout.Examined`.
    """
    means = [mean for mean in (_mean(op.outputs[0], model) for op in _averages(sums, model)) if mean is not None]
    by_op = {mean.ops[0]: mean for mean in means}
    found = []
    for mean in means:
        for difference in mean.ops[0].outputs[0].consumers():
            if difference.type == "Sub" and difference.inputs[0].op is mean.ops[0] and difference in model.order:
                squares = _squares(difference, mean, by_op)
                if squares is not None:
                    found.append(squares)
    return found


def _averages(sums, model):
    """Returns the ops that may be means by sums: Means, and what Sums are multiplied or divided by numbers in; in order."""
    ops = {consumer for op in sums if op.type == "Sum" for consumer in op.outputs[0].consumers() if consumer.type in FACTORS}
    return sorted((op for op in ops | {op for op in sums if op.type == "Mean"} if op in model.order), key=model.order.get)


def _mean(tensor, model):
    """Returns the `_Mean` that a tensor is, or None."""
    op = tensor.op
    if op.type == "Mean":
        return _Mean(op.inputs[0], reduced_axes(op), [op])
    for total, number in (tuple(op.inputs), tuple(op.inputs)[::-1]):
        is_divided = op.type != "Mul"
        if total.op.type == "Sum" and (total is op.inputs[0] or not is_divided):
            reduced = reduced_axes(total.op)
            if reduced is not None and _is_number(number, not is_divided, total.op.inputs[0], reduced, model):
                return _Mean(total.op.inputs[0], reduced, [op, total.op])
    return None


def _is_number(tensor, is_inverse, x, reduced, model):
    """Tells whether a tensor is how many values of x are added up over axes, or the inverse of that."""
    number = tf.TensorShape([x.shape[axis] for axis in reduced]).num_elements()
    value = tf.get_static_value(tensor)
    if value is not None:
        wanted = number and (1 / number if is_inverse else number)
        return bool(wanted) and value.size == 1 and abs(value.item() - wanted) < 1e-6 * wanted
    if tensor.op.type in ("Reciprocal", "Inv"):
        return _is_number(tensor.op.inputs[0], not is_inverse, x, reduced, model)
    if tensor.op.type in ("RealDiv", "Div") and is_inverse and _is_one(tensor.op.inputs[0]):
        return _is_number(tensor.op.inputs[1], False, x, reduced, model)
    if not is_inverse and model.layout.is_number_of(tensor, x, reduced):
        return True
    return tensor.op.type in SAME_VALUE and _is_number(tensor.op.inputs[0], is_inverse, x, reduced, model)


def _is_one(tensor):
    value = tf.get_static_value(tensor)
    return value is not None and bool((value == 1).all())


def _squares(difference, of_squares, means):
    """Returns the `Squares` that `difference` is: the mean `of_squares` less a squared mean; or None."""
    mean = means.get(_root_of_square(difference.inputs[1]))
    if mean is None or mean.reduced != of_squares.reduced or mean.reduced is None:
        return None
    parts = _names(squared(of_squares.x.op))
    if not (parts == [mean.x.name] or mean.x.op.type == "Sub" and parts == _names(mean.x.op.inputs)):
        return None
    alike = [other for other in means.values() if other.x.name == mean.x.name and other.reduced == mean.reduced]
    kept = tuple(axis for axis in range(mean.x.shape.rank) if axis not in mean.reduced)
    return Squares(difference, mean.x, kept, [other.ops[0] for other in alike],
                   of_squares.ops + [op for other in alike for op in other.ops] + [difference.inputs[1].op])


def _root_of_square(tensor):
    """Returns the op whose output a tensor is the square of, or None."""
    base = squared(tensor.op)
    return base[0].op if len(base) == 1 else None


def squared(op):
    """Returns what an op squares, a list: a tensor, or two whose difference it squares; an empty one of other ops."""
    if op.type == "SquaredDifference":
        return list(op.inputs)
    is_square = (op.type == "Square" or op.type == "Mul" and op.inputs[0] is op.inputs[1]
                 or op.type == "Pow" and tf.get_static_value(op.inputs[1]) == 2)
    return [op.inputs[0]] if is_square else []


def _names(tensors):
    return [tensor.name for tensor in tensors]
