"""Rows that are chosen of others: how many there are is then told by the data, or a part of them is taken for all."""
import re

import tensorflow.compat.v1 as tf

from towers.axes import axes_behind
from towers.mapped import LISTS, axes_in_lists

__all__ = ["COUNTS", "OTHER_ROWS", "SAME_ROWS", "UNIQUE", "are_counted", "chooser", "is_one_hot"]

COUNTS = frozenset(["DynamicPartition", "Where"])  # which choose as many rows as the data say
# What makes rows that are other ones than those that it is given.
OTHER_ROWS = re.compile(
    "BatchToSpace|Crop|Diag|Dynamic|NonMax|RandomShuffle|.*Scatter|.*Segment|SpaceToBatch|.*Sparse|Unique|Where")
UNIQUE = frozenset(["Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"])
SAME_ROWS = frozenset(["Cast", "ExpandDims", "Identity", "Reshape", "Squeeze", "StopGradient", "StridedSlice", "Switch"])
_CHANGES_RANK = frozenset(["CTCLoss", "OneHot", "SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits",
                           "DiagPart", "MatrixDiagPart", "Where"])
# What computes each row of its output of the same rows of its inputs.
_OF_ROWS = frozenset([
    "Abs", "Add", "AddN", "AddV2", "ConcatV2", "Exp", "Log", "Log1p", "Maximum", "Minimum", "Mul", "Neg", "OneHot", "OnesLike",
    "Pow", "RealDiv", "Relu", "Select", "SelectV2", "Sigmoid", "SoftmaxCrossEntropyWithLogits", "Softplus",
    "SparseSoftmaxCrossEntropyWithLogits", "Sqrt", "Square", "SquaredDifference", "Sub", "Tanh"])


def chooser(tensor, end_at, axes=(0,), without=None):
    """Returns the op, of `COUNTS` or TopKV2, that chose which rows of other rows a tensor is made of; None where none did.

    Args:
      tensor: a tensor.
      end_at: function of a tensor that tells whether nothing is to be looked for behind it.
      axes: list of int, the axes of the tensor along which such rows may lie.
      without: set of (op, axis) that are known to be of no such rows; filled.
    """
    without = set() if without is None else without
    seen, stack = set(), [(tensor, axis) for axis in axes]
    while stack:
        tensor, axis = stack.pop()
        op = tensor.op
        if (op, axis) in seen or (op, axis) in without or end_at(tensor):
            continue
        seen.add((op, axis))
        if op.type in ("Gather", "GatherV2", "GatherNd") and axis == 0:
            found = _unmoved(op.inputs[1])
            if _is_by_mask(found.op) or found.op.type == "TopKV2" and found.op.inputs[0].shape.rank == 1:
                return found.op
        if axis == 0 and (op.type == "DynamicPartition" or op.type == "TopKV2" and op.inputs[0].shape.rank == 1):
            return op
        stack.extend(_rows_behind(tensor, axis))
    without.update(seen)
    return None


def _rows_behind(tensor, axis):
    """Returns those of which the rows along an axis are made one of one, or some of some: a list of (tensor, its axis)."""
    op = tensor.op
    if axis == 0 and op.type in SAME_ROWS:
        return [(op.inputs[0], 0)]
    if axis == 0 and op.type in _OF_ROWS:
        return [(source, 0) for source in op.inputs if source.shape.rank == tensor.shape.rank or op.type in _CHANGES_RANK]
    if not tensor.shape.rank or tf.dimension_value(tensor.shape[axis]) is not None or OTHER_ROWS.match(op.type):
        return []  # how many are chosen is not known
    if op.type in LISTS:
        return axes_in_lists(op, axis)
    found = [(source, its) for source, its, _ in axes_behind(tensor, axis)]
    if op.type in ("Gather", "GatherV2", "GatherNd", "ResourceGather"):  # not what is looked up
        found = [(source, its) for source, its in found if source is op.inputs[1]] or found
    return found


def is_one_hot(tensor):
    """Tells whether a tensor has a one for each label, and zeros."""
    return _unmoved(tensor).op.type == "OneHot"


def _unmoved(tensor):
    while tensor.op.type in SAME_ROWS:
        tensor = tensor.op.inputs[0]
    return tensor


def are_counted(tensor, end_at, without=None):
    """Tells whether how many rows a tensor has is told by the data; for arguments see `chooser`."""
    rows = _unmoved(tensor)
    is_unique = rows.op.type in UNIQUE and rows.value_index != 1
    return is_unique or _is_by_mask(rows.op) or chooser(tensor, end_at, without=without) is not None


def _is_by_mask(op):
    """Tells whether an op chooses as many rows as the data say, not one for each label, by a mask that is one-hot."""
    return op.type == "Where" and not is_one_hot(op.inputs[0])
