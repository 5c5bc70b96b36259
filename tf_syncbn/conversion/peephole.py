"""Moments of a batch among ops: the mean, and the mean of squared differences from it, as `tf.nn.moments` has them.

What is not found here costs an exchange more, and no exactness.
"""
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from towers.graph.op_types import QUOTIENTS, SAME_NUMBERS
from towers.graph.private import position_of

__all__ = ["ROOTS", "Moments", "find_moments"]

ROOTS = ("Log", "Pow", "Rsqrt", "Sqrt")


class Moments(NamedTuple):
    """A mean and a variance over the same axes of one tensor.

    Attributes:
      kind: "moments"; "squares", where the variance is E[x^2] - E[x]^2; "fused"; or "sums", of which no more is known.
      op: the op that hands out the variance; of "sums" the root.
      x: tensor.
      kept: tuple of int, the axes that have moments of their own.
      means, variances: lists of (op, number of the output) that hand them out.
      root: the op that takes the root of the variance, once that is known.
    """
    kind: str
    op: Any
    x: Any
    kept: tuple
    means: list
    variances: list
    root: Any = None


def find_moments(ops):
    """Finds moments among a set of operations.

    Returns:
      A dict from ops to the `Moments` whose mean or variance they hand out, and one from ops to those by squares whose variance
      they hand out.
    """
    ops = sorted(ops, key=position_of)
    means = {}  # (tensor's op, number, axes) -> the ops that average it
    for op in ops:
        if op.type == "Mean" and op.inputs[0].dtype.is_floating and _reduced(op) is not None:
            means.setdefault(_what(op), []).append(op)
    found = {}
    for of_axes in means.values():
        for op in of_axes:
            moments = _around(op, means)
            if moments is not None:
                found[op] = moments
                found.update((mean, moments) for mean, _ in moments.means)
    squares = {op: _less_square(op) for op in ops if op.type == "Sub"}
    return found, {op: moments for op, moments in squares.items() if moments is not None}


def _what(op):
    return op.inputs[0].op, op.inputs[0].value_index, _reduced(op)


def _reduced(op):
    """Returns the axes that a reduction takes together, a frozenset; None where they, or the rank, are unknown."""
    rank, axes = op.inputs[0].shape.rank, tf.get_static_value(op.inputs[1])
    return None if rank is None or axes is None else frozenset(int(axis) % rank for axis in axes.reshape([-1]))


def _around(variance, means):
    """Returns the `Moments` whose variance a Mean is, or None."""
    base = _squared(variance.inputs[0].op)
    if len(base) == 1 and base[0].op.type == "Sub":
        base = list(base[0].op.inputs)
    if len(base) != 2:
        return None
    for x, other in (base, base[::-1]):
        mean = _unchanged(other.op)
        if mean.type == "Mean" and _is_same(mean.inputs[0], x) and _reduced(mean) == _reduced(variance) and _lies_along(
                other, x, _reduced(mean)):
            kept = tuple(axis for axis in range(x.shape.rank) if axis not in _reduced(mean))
            alike = means.get(_what(mean), [mean])
            return Moments("moments", variance, mean.inputs[0], kept, [(each, 0) for each in alike], [(variance, 0)])
    return None


def _lies_along(mean, x, reduced):
    """Tells whether a mean over some axes of a tensor, reshaped perhaps, lies beside it as it should."""
    if mean.shape.rank is None or mean.shape.rank > x.shape.rank:
        return False
    sizes = [1] * (x.shape.rank - mean.shape.rank) + mean.shape.as_list()
    return all(size == (1 if axis in reduced else of_x) for axis, (size, of_x) in enumerate(zip(sizes, x.shape.as_list())))


def _less_square(op):
    """Returns the `Moments` whose variance a difference is, of a sum of squares and the square of a sum of the same; or None."""
    root = _squared(op.inputs[1].op)
    sums = _summed(root[0]) if len(root) == 1 else []
    for of_square in _summed(op.inputs[0]) if sums else ():
        base = _squared(of_square.op)
        for x in sums if base else ():
            if len(base) == 1 and _is_same(base[0], x) or x.op.type == "Sub" and all(map(_is_same, x.op.inputs, base)):
                return Moments("squares", op, base[0], (), [], [(op, 0)])
    return None


def _summed(tensor):
    """Returns what is added up, and multiplied or divided perhaps, to a tensor: a list of tensors."""
    op = tensor.op
    if op.type in ("Mean", "Sum"):
        return [op.inputs[0]] + _summed(op.inputs[0])
    if op.type in QUOTIENTS | SAME_NUMBERS | {"Mul"}:
        return [found for source in op.inputs for found in _summed(source)]
    return []


def _squared(op):
    """Returns what an op squares, a list: a tensor, or two whose difference it squares; an empty one of other ops."""
    if op.type == "SquaredDifference":
        return list(op.inputs)
    is_square = (op.type == "Square" or op.type == "Mul" and op.inputs[0] is op.inputs[1]
                 or op.type == "Pow" and tf.get_static_value(op.inputs[1]) == 2)
    return [op.inputs[0]] if is_square else []


def _unchanged(op):
    while op.type in SAME_NUMBERS:
        op = op.inputs[0].op
    return op


def _is_same(a, b):
    """Tells whether two tensors are one, or two reads of one resource variable."""
    return a is b or a.op.type == b.op.type == "ReadVariableOp" and a.op.inputs[0] is b.op.inputs[0]
