"""Rows that are chosen of others: how many there are is then told by the data, or a part of them is taken for all."""
from towers.axes import SUMS, reduces_first_axis

__all__ = ["COUNTS", "SAME_ROWS", "UNIQUE", "are_counted", "chooser", "is_one_hot"]

COUNTS = frozenset(["DynamicPartition", "Where"])  # which choose as many rows as the data say
UNIQUE = frozenset(["Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"])
SAME_ROWS = frozenset(["Cast", "ExpandDims", "Identity", "Reshape", "Squeeze", "StopGradient", "StridedSlice", "Switch"])
_CHANGES_RANK = frozenset(["CTCLoss", "OneHot", "SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits",
                           "DiagPart", "MatrixDiagPart", "Where"])
# What computes each row of its output of the same rows of its inputs.
_OF_ROWS = frozenset([
    "Abs", "Add", "AddN", "AddV2", "ConcatV2", "Exp", "Log", "Log1p", "Maximum", "Minimum", "Mul", "Neg", "OneHot", "OnesLike",
    "Pow", "RealDiv", "Relu", "Select", "SelectV2", "Sigmoid", "SoftmaxCrossEntropyWithLogits", "Softplus",
    "SparseSoftmaxCrossEntropyWithLogits", "Sqrt", "Square", "SquaredDifference", "Sub", "Tanh"])


def chooser(tensor):
    """Returns the op, of `COUNTS` or TopKV2, that chose which rows of other rows a tensor is made of; None where none did."""
    seen, stack = set(), [tensor]
    while stack:
        tensor = stack.pop()
        op = tensor.op
        if op in seen:
            continue
        seen.add(op)
        if op.type in ("Gather", "GatherV2", "GatherNd"):
            found = _unmoved(op.inputs[1])
            if _is_by_mask(found.op) or found.op.type == "TopKV2" and found.op.inputs[0].shape.rank == 1:
                return found.op
        elif op.type == "DynamicPartition" or op.type == "TopKV2" and op.inputs[0].shape.rank == 1:
            return op
        elif op.type in SAME_ROWS or op.type in SUMS and reduces_first_axis(op) is False:
            stack.append(op.inputs[0])
        elif op.type in _OF_ROWS:
            stack.extend(source for source in op.inputs if source.shape.rank == tensor.shape.rank or op.type in _CHANGES_RANK)
    return None


def is_one_hot(tensor):
    """Tells whether a tensor has a one for each label, and zeros."""
    return _unmoved(tensor).op.type == "OneHot"


def _unmoved(tensor):
    while tensor.op.type in SAME_ROWS:
        tensor = tensor.op.inputs[0]
    return tensor


def are_counted(tensor):
    """Tells whether how many rows a tensor has is told by the data."""
    rows = _unmoved(tensor)
    return chooser(tensor) is not None or _is_by_mask(rows.op) or rows.op.type in UNIQUE and rows.value_index != 1


def _is_by_mask(op):
    """Tells whether an op chooses as many rows as the data say, not one for each label, by a mask that is one-hot."""
    return op.type == "Where" and not is_one_hot(op.inputs[0])
