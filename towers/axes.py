"""Which axes of an op's inputs an axis of its output is made of: steps by which one axis is followed back through a model.

A place is (tensor, axis, part). Reshapes join axes and take them apart again, so a place may be a part of an axis: (outer,
inner), how many times as much stands around it along the axis and how much within it, None where that is not known. (1, 1) is
all of the axis. What a transposed batch, [time, batch], comes to as [time * batch] and back is told by these.
"""
import numpy as np
import tensorflow.compat.v1 as tf

from towers.static_values import static_value

__all__ = ["EXTREMES", "FILTERS", "REDUCTIONS", "SUMS", "WHOLE", "axes_behind", "product_axes", "reduced_axes",
           "reduces_first_axis"]

WHOLE = (1, 1)
SUMS = frozenset(["Mean", "Sum"])
EXTREMES = frozenset(["EuclideanNorm", "Max", "Min", "Prod"])
FILTERS = frozenset(["Conv2D", "Conv2DBackpropInput", "Conv3D", "Conv3DBackpropInput", "Conv3DBackpropInputV2",
                     "DepthwiseConv2dNative", "Dilation2D"])
REDUCTIONS = SUMS | EXTREMES | {"All", "Any", "ArgMax", "ArgMin"}
_BROADCASTS = frozenset([
    "Add", "AddV2", "BroadcastTo", "Div", "DivNoNan", "Equal", "FloorDiv", "FloorMod", "Greater", "GreaterEqual", "Less",
    "LessEqual", "LogicalAnd", "LogicalOr", "Maximum", "Minimum", "Mul", "MulNoNan", "NotEqual", "Pow", "RealDiv", "SelectV2",
    "SquaredDifference", "Sub", "Xdivy", "Xlogy"])
_MATRICES = frozenset(["BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "MatMul"])
_OF_ROWS = frozenset(["SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"])


def axes_behind(tensor, axis, part=WHOLE):
    """Returns the places that an axis of a tensor is made of, a list of (input, its axis, part of it).

    Where nothing is known of an op it is taken to keep the axes of inputs that have as many.
    """
    op, rank = tensor.op, tensor.shape.rank
    if not rank or not op.inputs:
        return []
    if op.type == "Reshape":
        return _reshaped(op.inputs[0], tensor, axis, part)
    if op.type in REDUCTIONS or op.type in _ONE_INPUT:
        kept = _kept_by_reduction(op) if op.type in REDUCTIONS else _ONE_INPUT[op.type](op, tensor)
        found = [(op.inputs[0], kept[axis])] if kept is not None and axis < len(kept) and kept[axis] is not None else []
    elif op.type in _BROADCASTS:
        found = [(source, axis - rank + source.shape.rank) for source in op.inputs
                 if source.shape.rank is not None and axis >= rank - source.shape.rank]
        found = [(source, its) for source, its in found if _size(source, its) != 1 or _size(tensor, axis) == 1]
    elif op.type in _MATRICES or op.type == "Einsum":
        found = [(op.inputs[i], its) for i, axes in enumerate(product_axes(op)[:-1])
                 for its, label in enumerate(axes) if label == product_axes(op)[-1][axis:axis + 1][0]]
    elif op.type in ("Pack", "Unpack"):
        at = op.get_attr("axis") % (rank if op.type == "Pack" else rank + 1)
        its = axis + (axis >= at) if op.type == "Unpack" else axis - (axis > at)
        found = [] if op.type == "Pack" and axis == at else [(source, its) for source in op.inputs]
    elif op.type in ("Gather", "GatherV2", "GatherNd", "ResourceGather"):
        found = _gathered(op, axis)
    elif op.type in ("IdentityN", "Switch"):
        found = [(op.inputs[tensor.value_index if op.type == "IdentityN" else 0], axis)]
    elif op.type in _OF_ROWS or op.type == "CTCLoss":
        found = [(source, axis) for source in op.inputs if source.shape.rank and axis < source.shape.rank]
    elif op.type.startswith("UnsortedSegment"):
        its = axis and axis + (op.inputs[1].shape.rank or 1) - 1
        found = [(source, its) for source in list(op.inputs)[:2] if source.shape.rank and its < source.shape.rank]
    elif op.type == "Where":
        found = [(op.inputs[0], each) for each in range(op.inputs[0].shape.rank or 0) if axis == 0]
    elif op.type in FILTERS:  # whose filters have axes of another kind
        found = [(op.inputs[2 if "BackpropInput" in op.type else 0], axis)]
    elif op.type == "Tile":
        return _tiled(op, axis, part)
    elif op.type in ("DiagPart", "MatrixDiagPart", "MatrixDiagPartV2", "MatrixDiagPartV3"):
        found = [(op.inputs[0], axis)]
    else:
        found = [(source, axis) for source in op.inputs if source.shape.rank == rank]
    return [(source, its, part) for source, its in found]


def reduced_axes(op):
    """Returns which axes of its input a reduction, `tf.reduce_sum` say, takes away, a list; None where that is not known."""
    axes, rank = static_value(op.inputs[1]), op.inputs[0].shape.rank
    return None if axes is None or rank is None else [int(axis) % max(rank, 1) for axis in np.reshape(axes, -1)]


def reduces_first_axis(op):
    """Tells whether a reduction, `tf.reduce_sum` say, takes the first axis of its input away; None where that is not known."""
    axes = reduced_axes(op)
    return None if axes is None else 0 in axes


def product_axes(op):
    """Returns how the axes of a product of matrices, or of an einsum, belong together.

    Returns:
      A list over the inputs, and at last the output, of lists of labels, one for each axis; None for an axis like no other, and
      empty lists where nothing is known.
    """
    if op.type == "Einsum":
        equation = op.get_attr("equation").decode()
        if "." in equation:
            return [[] for _ in op.inputs] + [[None] * (op.outputs[0].shape.rank or 0)]
        inputs, output = equation.split("->")
        return [list(labels) for labels in inputs.split(",")] + [list(output)]
    ranks = [tensor.shape.rank for tensor in list(op.inputs) + list(op.outputs)]
    if None in ranks:
        return [[], [], [None] * (ranks[-1] or 0)]
    turned = [bool(op.get_attr(name)) for name in (("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y"))]
    outer = [list(range(ranks[2] - 2)) for _ in ranks]
    ends = [["sum", "row"] if turned[0] else ["row", "sum"], ["column", "sum"] if turned[1] else ["sum", "column"],
            ["row", "column"]]
    return [labels[len(labels) + 2 - rank:] + end for labels, rank, end in zip(outer, ranks, ends)]


def _size(tensor, axis):
    return tf.dimension_value(tensor.shape[axis])


def _kept_by_reduction(op):
    """Returns the axes of its input that the axes of a reduction's output are, a list with None for those of size 1."""
    reduced, rank = reduced_axes(op), op.inputs[0].shape.rank
    if reduced is None:
        return None
    keeps = op.type not in ("ArgMax", "ArgMin") and op.get_attr("keep_dims")
    return [None if axis in reduced else axis for axis in range(rank) if keeps or axis not in reduced]


def _turned(op, tensor):
    return tf.get_static_value(op.inputs[1])


def _expanded(op, tensor):
    axis, axes = tf.get_static_value(op.inputs[1]), list(range(tensor.shape.rank - 1))
    if axis is None:
        return None
    axes.insert(int(np.reshape(axis, -1)[0]) % tensor.shape.rank, None)
    return axes


def _squeezed(op, tensor):
    shape = op.inputs[0].shape
    if shape.rank is None:
        return None
    dims = [dim % shape.rank for dim in op.get_attr("squeeze_dims")] or [i for i in range(shape.rank) if shape.as_list()[i] == 1]
    return [axis for axis in range(shape.rank) if axis not in dims]


def _one_hot(op, tensor):
    axes, at = list(range(tensor.shape.rank - 1)), op.get_attr("axis")
    axes.insert(at if at >= 0 else tensor.shape.rank - 1, None)
    return axes


def _sliced(op, tensor):
    """Returns the axes of its input that those of a slice are, a list with None for new ones."""
    count, rank = _size(op.inputs[1], 0), op.inputs[0].shape.rank
    if count is None or rank is None:
        return None
    masks = {name: op.get_attr(name + "_mask") for name in ("ellipsis", "new_axis", "shrink_axis")}
    axes, at = [], 0
    for number in range(count):
        bit = 1 << number
        if masks["ellipsis"] & bit:
            later = rank - sum(not masks["new_axis"] & (1 << after) for after in range(number + 1, count))
            axes, at = axes + list(range(at, later)), later
        elif masks["new_axis"] & bit:
            axes.append(None)
        else:
            axes, at = axes + ([] if masks["shrink_axis"] & bit else [at]), at + 1
    return axes + list(range(at, rank))


# What gives the axes of its first input others: functions of an op and its output, as `_kept_by_reduction`.
_ONE_INPUT = {"ExpandDims": _expanded, "OneHot": _one_hot, "Squeeze": _squeezed, "StridedSlice": _sliced, "Transpose": _turned}


def _gathered(op, axis):
    """Returns the (input, its axis) that an axis of what was gathered is made of: of what is taken, or of what says which."""
    params, indices = list(op.inputs)[:2]
    rank = indices.shape.rank
    if rank is None:
        return []
    if op.type == "GatherNd":
        return [(indices, axis)] + ([(params, 0)] if axis == 0 else []) if axis < rank - 1 else []
    at = tf.get_static_value(op.inputs[2]) if op.type == "GatherV2" else 0
    batch = op.get_attr("batch_dims") if op.type in ("GatherV2", "ResourceGather") else 0
    if at is None or at < 0 and params.shape.rank is None:
        return []
    at = max(int(at) if at >= 0 else int(at) + params.shape.rank, batch)
    if axis < at:
        return [(params, axis)] + ([(indices, axis)] if axis < batch else [])
    if axis < at + rank - batch:
        return [(indices, axis - at + batch)] + ([(params, at)] if axis == at and params.dtype != tf.resource else [])
    return [(params, axis - rank + batch + 1)]


def _tiled(op, axis, part):
    """Returns the places that a part of an axis of copies is made of: the copies stand around what each is of."""
    times, (outer, inner) = tf.get_static_value(op.inputs[1]), part
    if times is not None and times[axis] > 1 and part != WHOLE:
        if outer == 1:  # which of the copies, as in [copies, batch] of [copies * batch]
            return []
        part = (1, inner) if outer == times[axis] else part
    return [(op.inputs[0], axis, part)]


def _reshaped(source, tensor, axis, part):
    """Returns the places that a part of an axis of a reshaped tensor is made of.

    What stands before a place and what stands behind it are the same on both sides, in how many numbers they are: a place begins
    where an axis of the source does, or some way along one, and it ends likewise.
    """
    if not source.shape.rank:
        return []
    old, new = source.shape.as_list(), tensor.shape.as_list()
    if len(old) == len(new) and all(a is None or b is None or a == b for a, b in zip(old, new)):
        return [(source, axis, part)]
    start, end = _product(new[:axis] + [part[0]]), _product(new[axis + 1:] + [part[1]])
    places = [(i, _quotient(start, _product(old[:i])), _quotient(end, _product(old[i + 1:]))) for i in range(len(old))]
    first, last = [i for i, outer, _ in places if outer == 1], [i for i, _, inner in places if inner == 1]
    if new[axis] == 1:
        ones = [i for i in sorted(set(first) | set(last)) if old[i] == 1]
        before, count = _of_size_1(new, axis)
        if not ones:  # the outermost part of an axis, or the innermost: one example, which had been joined with others
            return [(source, i, (outer, inner)) for i, outer, inner in places if None not in (outer, inner)
                    and 1 in (outer, inner) and outer != inner]
        return [(source, i, WHOLE) for i in (ones if count < len(ones) else ones[before:before + 1])]
    if first and last:
        return [(source, i, WHOLE) for i in _joined(range(first[0], last[-1] + 1), old, new, axis, tensor.op.inputs[1])]
    if first or last:
        ends = first or last
        return [(source, i, places[i][1:]) for i in [i for i in ends if old[i] != 1] or ends]
    within = [(i, (outer, inner)) for i, outer, inner in places if outer is not None and (old[i] or outer + 1) > outer]
    return [(source, i, both) for i, both in within[-1:]]


def _joined(places, old, new, axis, shape):
    """Returns which of some axes of a tensor, each of which one of what it is reshaped to may be made of, it is made of.

    One of size 1, one example say, may be another axis of size 1, or part of the axis beside that the rest goes to.
    """
    rest = tf.get_static_value(shape)
    beside = [] if rest is None or not places else [
        i for i, other in ((places[0], axis - 1), (places[-1], axis + 1)) if 0 <= other < len(rest) and rest[other] == -1]
    if 1 in new[:axis] + new[axis + 1:]:
        beside = places
    return [i for i in places if old[i] != 1 or i not in beside] or places


def _of_size_1(shape, axis):
    """Returns how many axes of size 1 stand right before an axis of size 1, and how many stand together there."""
    first, end = axis, axis + 1
    while first and shape[first - 1] == 1:
        first -= 1
    while end < len(shape) and shape[end] == 1:
        end += 1
    return axis - first, end - first


def _product(numbers):
    return None if None in numbers or 0 in numbers else int(np.prod(numbers, dtype=np.int64))


def _quotient(number, by):
    return None if number is None or by is None or number % by else number // by
