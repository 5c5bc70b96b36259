"""How ops that take rows by their numbers, place them, or divide and count them, move axes: rules as `axis_rules` has them."""
import tensorflow.compat.v1 as tf

from tf_syncbn.conversion.factors import Factor, Known, along_first, level, plain, sizes_of

__all__ = ["RULES"]


def _gather(op, inputs):
    (axes, sizes), indices, output = inputs[0], inputs[1].axes, op.outputs[0]
    axis = tf.get_static_value(op.inputs[2]) if len(inputs) > 2 else 0
    if op.type == "ResourceGather":
        axes = indices and plain(output)[len(indices) - 1:]
    if not axes or indices is None or axis is None:
        return None
    axis = int(axis) % len(axes)
    # Where indices are of examples, each takes from its own: rows that an offset an example points to, say.
    of_chosen = 0 if any(map(level, indices)) else level(axes[axis])
    batch_dims = op.get_attr("batch_dims") if op.type != "Gather" else 0
    chosen = tuple(factors if level(factors) else _positions(output, axis + i, of_chosen)
                   for i, factors in enumerate(indices[batch_dims:]))
    positions = tf.get_static_value(op.inputs[1])
    if sizes is not None and positions is not None:
        sizes = tuple(sizes[int(i)] for i in positions.reshape([-1]))
    return [Known(axes[:axis] + chosen + axes[axis + 1:], None if positions is None else sizes)]


def _positions(tensor, axis, of_examples):
    """Returns an axis of a tensor along which what was taken stands."""
    size = tf.dimension_value(tensor.shape[axis]) if tensor.shape.rank else None
    return Factor((tensor.name, axis) if size is None else size, of_examples),


def _gather_nd(op, inputs):
    """What indices of examples take is their own; what others take along an axis of examples may be of any."""
    indices, output = inputs[1].axes, op.outputs[0]
    axes = inputs[0].axes if op.type == "GatherNd" else indices and ((),) * len(indices)
    depth = tf.dimension_value(op.inputs[1].shape[-1]) if indices else None
    if axes is None or depth is None:
        return None
    of_chosen = 0 if any(map(level, indices[:-1])) else max(map(level, axes[:depth]), default=0)
    chosen = tuple(factors if level(factors) else _positions(output, i, of_chosen) for i, factors in enumerate(indices[:-1]))
    if op.type == "ResourceGatherNd":
        return [Known(chosen + (plain(output) or ())[len(chosen):])]
    return [Known(chosen + axes[depth:])]


def _scatter_nd(op, inputs):
    """Of the first axes, which indices count, that of examples is as the shape says or as long as these are, or is the first."""
    updates, output, depth = inputs[1].axes, op.outputs[0], tf.dimension_value((op.inputs[0].shape or [None])[-1])
    if updates is None or output.shape.rank is None or depth is None:
        return None
    placed, kept = updates[:len(updates) + depth - output.shape.rank], updates[len(updates) + depth - output.shape.rank:]
    surest, first = max(map(level, placed), default=0), list(plain(output)[:depth])
    if surest:
        sizes = sizes_of(op.inputs[2], inputs[2]) or [None] * depth
        of_examples = [factor.size for axis in placed for factor in axis if factor.of_examples]
        said = [i for i in range(depth) if sizes[i] and level(sizes[i])]
        said += [i for i in range(depth) if first[i][0].size in of_examples] + [0]
        first[said[0]] = (first[said[0]][0]._replace(of_examples=surest),)
    return [Known(tuple(first) + kept)]


def _dynamic_partition(op, inputs):
    axes, count = inputs[0].axes, op.inputs[1].shape.rank
    if axes is None or not count:
        return None
    of_rows = max(map(level, axes[:count]))
    return [Known((along_first(tensor, of_rows) or ())[:1] + axes[count:]) for tensor in op.outputs]


def _where(op, inputs):
    return [Known(along_first(op.outputs[0], max(map(level, inputs[0].axes or ()), default=0)))]


def _counts(op, inputs):
    """How often each value occurs among all examples, or among those of each row."""
    return None if op.outputs[0].shape.rank != 1 else [Known(plain(op.outputs[0]))]


def _unique(op, inputs):
    """Values, where each example's is among them, and how often each occurs."""
    values, which, *counts = op.outputs
    return [Known(plain(values)), inputs[0]] + [Known(plain(tensor)) for tensor in counts]


RULES = {
    "Gather": _gather, "GatherV2": _gather, "ResourceGather": _gather, "GatherNd": _gather_nd, "ResourceGatherNd": _gather_nd,
    "ScatterNd": _scatter_nd, "DynamicPartition": _dynamic_partition, "Where": _where, "Bincount": _counts,
    "DenseBincount": _counts, "HistogramFixedWidth": _counts, "UniqueWithCounts": _unique, "UniqueWithCountsV2": _unique}
