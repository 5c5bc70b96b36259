"""Rows that are taken by numbers, or put where numbers say: gathers, scatters, segments, partitions.

Numbers of a tower's own rows (`RowNumbers`) take them where they are. Other numbers are of the whole batch's, so what they take
from is whole.
"""
import numpy as np

from towers.sharding.nodes import Numbered, OwnRows, Unfit
from towers.sharding.placements import (Additive, Blocks, InTurn, OneRow, Partial, Replicate, RowNumbers, Rows, Shard, Size,
                                        moved, size_of)
from towers.sharding.rules.arithmetic import is_of_size
from towers.sharding.rules.loops.single_rows import row_taken
from towers.sharding.rules.loops.turns import takes_its_row
from towers.sharding.rules.reductions import own_rows_of
from towers.sharding.rules.table import SUMS, rule

__all__ = ["aligned"]

ROWS = (Shard, RowNumbers)


def numbers_of(placement, rows):
    """Tells whether a placement is that of numbers of the very rows that another one counts."""
    return (isinstance(placement, RowNumbers) and isinstance(rows, Shard) and rows.times is not None
            and placement.of == Additive(rows.times, rows.rows))


@rule("Gather GatherV2 ResourceGather", ROWS + (Blocks, OneRow, Size) + SUMS)
def gather(node):
    params, indices = node.inputs[0], node.inputs[1]
    axis = node.inputs[2].const() if node.type == "GatherV2" else 0
    if axis is None:
        raise Unfit()
    if isinstance(params.placement, Size):
        known = indices.const()
        if known is None or int(axis):
            raise Unfit()
        return node.decide(size_of(np.asarray(params.placement.array()[known], object)) if np.ndim(known) else size_of(
            _one(params.placement.array()[int(known)])))
    batch_dims = node.attr("batch_dims") if node.type in ("GatherV2",
                                                          "ResourceGather") and "batch_dims" in node.op.node_def.attr else 0
    if batch_dims and node.of(Blocks):
        raise Unfit()
    if batch_dims:
        return _in_batches(node, batch_dims)
    if node.of(OneRow):
        if indices.rank or getattr(params.placement, "axis", None) != axis:
            raise Unfit()
        return row_taken(node, {1: (None, 0)})
    if not axis and takes_its_row(node, 1):
        return node.decide(InTurn())
    if node.of(InTurn):
        raise Unfit()
    others = node.wanted([2]) if len(node.inputs) > 2 else {}
    if isinstance(params.placement, SUMS):
        if not isinstance(indices.placement, Replicate):
            return node.decide(*_of_whole(node, int(axis), others))
        return node.decide(params.placement, others)
    axis = int(axis) % params.rank if params.dims else int(axis)  # a variable's handle has none
    if isinstance(params.placement, ROWS + (Blocks,)):
        if params.placement.axis == axis and numbers_of(indices.placement, params.placement) and indices.placement.column is None:
            return node.decide(Shard(
                axis + indices.placement.axis, indices.placement.rows, indices.placement.times), others)
        if params.placement.axis != axis and isinstance(params.placement, (Shard, Blocks)):
            behind = params.placement.axis + (indices.rank - 1 if params.placement.axis > axis else 0)
            return node.decide(moved(params.placement, behind), {**others, **node.wanted([1])})
    return node.decide(*_of_whole(node, axis, others))


def _one(element):
    found = np.empty((), object)
    found[()] = element
    return found


def _of_whole(node, axis, others):
    """Returns the placement of what numbers take of what is whole in every tower, and wants."""
    indices = node.inputs[1]
    wants = {**others, **node.wanted([0])}
    if isinstance(indices.placement, Blocks):
        return moved(indices.placement, axis + indices.placement.axis), wants
    if isinstance(indices.placement, ROWS):
        if isinstance(indices.placement, RowNumbers):
            wants[1] = Numbered()
        return Shard(axis + indices.placement.axis, indices.placement.rows, indices.placement.times), wants
    return Replicate(), {**wants, **node.wanted([1])}


def _in_batches(node, batch_dims):
    params, indices = node.inputs[0], node.inputs[1]
    sharded = [value for value in (params, indices) if isinstance(value.placement, ROWS)]
    axes = {value.placement.axis for value in sharded}
    if len(axes) != 1 or max(axes) >= batch_dims or any(isinstance(value.placement, RowNumbers) for value in sharded):
        raise Unfit()
    like = (sharded[0].tensor, sharded[0].placement.axis)
    wants = {k: OwnRows(like[1], like) for k in (0, 1) if not isinstance(node.inputs[k].placement, Shard)}
    return node.decide(sharded[0].placement, {**wants, **node.wanted([2])})


@rule("GatherNd ResourceGatherNd", ROWS + SUMS)
def gather_nd(node):
    params, indices = node.inputs
    depth = indices.whole[-1]
    if depth is None:
        raise Unfit()
    if isinstance(params.placement, SUMS):
        if not isinstance(indices.placement, Replicate):
            raise Unfit()
        return node.decide(params.placement)
    taken = indices.placement
    if isinstance(params.placement, Shard) and params.placement.axis < depth and numbers_of(taken, params.placement):
        if (taken.column if depth > 1 else 0) == params.placement.axis and taken.axis < indices.rank - 1:
            return node.decide(Shard(taken.axis, taken.rows, taken.times))
    if isinstance(params.placement, Shard) and params.placement.axis >= depth and isinstance(taken, Replicate):
        return node.decide(moved(params.placement, params.placement.axis - depth + indices.rank - 1))
    if isinstance(taken, ROWS) and taken.axis < indices.rank - 1:
        wants = node.wanted([0])
        if isinstance(taken, RowNumbers):
            wants[1] = Numbered()
        return node.decide(Shard(taken.axis, taken.rows, taken.times), wants)
    raise Unfit()


@rule("Where", (Shard,))
def where(node):
    value = node.inputs[0]
    placement = value.placement
    if placement.axis or placement.times is None:
        raise Unfit()
    return node.decide(RowNumbers(0, Rows(node.op.name), 1, Additive(placement.times, placement.rows), (value.tensor, 0),
                                  None if value.rank == 1 else 0))


@rule("ScatterNd", ROWS + (Size,) + SUMS)
def scatter_nd(node):
    indices, updates, target = node.inputs
    taken = indices.placement
    if isinstance(taken, Replicate) and isinstance(updates.placement, SUMS):
        return node.decide(updates.placement, node.wanted([2]))
    if not isinstance(taken, ROWS) or taken.axis >= indices.rank - 1 or isinstance(updates.placement, SUMS):
        raise Unfit()
    wants = aligned(node, 1, taken, (indices.tensor, taken.axis))
    shape = target.elements()
    if isinstance(taken, RowNumbers) and shape is not None and not taken.column and shape[0] == taken.of and taken.of.times:
        if any(map(is_of_size, shape[1:])):
            raise Unfit()
        return node.decide(Shard(0, taken.of.rows, taken.of.times), wants)
    wants.update(node.wanted([2]))
    if isinstance(taken, RowNumbers):
        wants[0] = Numbered()
    return node.decide(Partial(), wants)


@rule("TensorScatterAdd TensorScatterMax TensorScatterMin TensorScatterSub TensorScatterUpdate", (Shard,) + SUMS)
def tensor_scatter(node):
    target, indices, updates = node.inputs
    if not isinstance(indices.placement, Replicate) or indices.whole[-1] is None:
        raise Unfit()
    if isinstance(target.placement, SUMS):
        if target.placement != updates.placement or node.type.endswith(("Max", "Min")):
            raise Unfit()
        return node.decide(target.placement)
    axis = getattr(target.placement, "axis", None)
    if axis is None or axis < indices.whole[-1] or isinstance(updates.placement, SUMS):
        raise Unfit()
    behind = axis - indices.whole[-1] + indices.rank - 1
    if isinstance(updates.placement, Shard):
        if updates.placement != moved(target.placement, behind):
            raise Unfit()
        return node.decide(target.placement)
    return node.decide(target.placement, {2: OwnRows(behind, (target.tensor, axis))})


def aligned(node, k, placement, like):
    """Returns wants by which input k has its rows along the axis of a placement, a dict; `Unfit` where it can't."""
    value = node.inputs[k]
    if isinstance(value.placement, ROWS):
        if value.placement.axis != placement.axis:
            raise Unfit()
        return {k: Numbered()} if isinstance(value.placement, RowNumbers) else {}
    return {k: OwnRows(placement.axis, like)}


@rule("DynamicPartition", ROWS)
def partition(node):
    data, parts = node.inputs
    if not node.all(*ROWS) or data.placement.axis or parts.placement.axis or isinstance(parts.placement, RowNumbers):
        raise Unfit()
    rows = [Rows("%s:%d" % (node.op.name, k)) for k in range(len(node.outputs))]
    if isinstance(data.placement, RowNumbers):
        numbers = data.placement
        return node.decide([RowNumbers(0, each, 1, numbers.of, numbers.count, numbers.column) for each in rows])
    return node.decide([Shard(0, each, 1) for each in rows])


@rule("DynamicStitch ParallelDynamicStitch", ROWS + (Size,))
def stitch(node):
    half = len(node.inputs) // 2
    indices, data = node.inputs[:half], node.inputs[half:]
    if all(isinstance(value.placement, (Size, Replicate)) for value in node.inputs):
        return _stitched(node, indices, data)
    numbers = {value.placement.of for value in indices if isinstance(value.placement, RowNumbers)}
    if len(numbers) != 1 or not all(isinstance(value.placement,
                                               RowNumbers) and value.placement.column is None for value in indices):
        raise Unfit()
    if not all(isinstance(value.placement, Shard) and value.placement.axis == 0 for value in data):
        raise Unfit()
    of = numbers.pop()
    return node.decide(Shard(0, of.rows, of.times))


def _stitched(node, indices, data):
    known = [value.const() for value in indices]
    arrays = [value.elements() for value in data]
    if any(each is None for each in known) or any(array is None for array in arrays) or any(
            array.shape != np.shape(at) for array, at in zip(arrays, known)):
        raise Unfit()
    found = np.empty(max([int(np.max(at)) for at in known if np.size(at)] + [-1]) + 1, object)
    for at, array in zip(known, arrays):
        for index in np.ndindex(array.shape):
            found[int(at[index])] = array[index]
    return node.decide(size_of(found))


@rule("ListDiff", ())
def difference_of_lists(node):
    return node.replicated()


@rule("InvertPermutation", ())
def inverse(node):
    return node.replicated()


@rule("InTopK InTopKV2 LowerBound SparseSoftmaxCrossEntropyWithLogits SoftmaxCrossEntropyWithLogits UpperBound", (Shard, Blocks))
def of_logits(node):
    return node.each_row([0, 1])


@rule("RandomShuffle", (Shard,), always=True)
def shuffle(node):
    def of_first(conversions, op, inputs):
        return [conversions.of_first(conversions.made(op, inputs)[0])]
    placement = node.inputs[0].placement
    if isinstance(placement, Shard) and placement.axis == 0:
        decision = own_rows_of(node, placement, 0)
    else:
        decision = node.replicated()
    decision.instead, decision.meets = of_first, "first"
    return decision
