"""Rows that are added up by numbers: segments, and counts."""
from towers.sharding.nodes import Numbered, Unfit
from towers.sharding.placements import Blocks, Partial, Replicate, RowNumbers, Shard, Size, moved
from towers.sharding.rules.movement.gathers import aligned
from towers.sharding.rules.table import SUMS, rule

ROWS = (Shard, RowNumbers)


@rule("UnsortedSegmentSum", ROWS + (Size,) + SUMS)
def segment_sum(node):
    data, ids, number = node.inputs
    if isinstance(ids.placement, Replicate):
        if isinstance(data.placement, SUMS):
            return node.decide(data.placement, node.wanted([2]))
        if isinstance(data.placement, Shard) and data.placement.axis >= ids.rank:
            return node.decide(moved(data.placement, data.placement.axis - ids.rank + 1), node.wanted([2]))
        raise Unfit()
    if not isinstance(ids.placement, ROWS) or isinstance(data.placement, SUMS):
        raise Unfit()
    taken = ids.placement
    wants = aligned(node, 0, taken, (ids.tensor, taken.axis))
    if _are_rows(taken, number):
        return node.decide(Shard(0, taken.of.rows, taken.of.times), wants)
    wants.update(node.wanted([2]))
    if isinstance(taken, RowNumbers):
        wants[1] = Numbered()
    return node.decide(Partial(), wants)


def _are_rows(numbers, number):
    """Tells whether numbers of segments number rows, as many as there are to be segments."""
    element = number.elements() if isinstance(numbers, RowNumbers) and numbers.column is None else None
    return element is not None and element[()] == numbers.of and bool(numbers.of.times)


@rule("Bincount DenseBincount", (Shard,))
def bincount(node):
    values, size, weights = node.inputs
    if isinstance(values.placement, Shard) and values.placement.axis == 0 and values.rank == 1 and not node.op.node_def.attr[
            "binary_output"].b and (weights.whole == [0] or isinstance(weights.placement, Shard)):
        return node.decide(Partial(), node.wanted([1]))
    raise Unfit()


@rule("HistogramFixedWidth", (Shard,))
def histogram(node):
    return node.decide(Partial(), node.wanted([1, 2]))


@rule("UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd", ROWS + (Size,))
def segment_largest(node):
    data, ids, number = node.inputs
    if _are_rows(ids.placement, number):
        return node.decide(Shard(0, ids.placement.of.rows, ids.placement.of.times), aligned(
            node, 0, ids.placement, (ids.tensor, ids.placement.axis)))
    if not isinstance(ids.placement, Replicate) or not isinstance(data.placement, Shard) or data.placement.axis < ids.rank:
        raise Unfit()
    return node.decide(moved(data.placement, data.placement.axis - ids.rank + 1), node.wanted([2]))


# Segments whose numbers are in order -> whether they are linear in what is added up. Their gradients are too.
SORTED = dict.fromkeys("SegmentMax SegmentMin SegmentProd".split(), False)
SORTED.update(dict.fromkeys("""SegmentMean SegmentSum SparseSegmentMean SparseSegmentMeanGrad SparseSegmentMeanWithNumSegments
SparseSegmentSqrtN SparseSegmentSqrtNGrad SparseSegmentSqrtNWithNumSegments SparseSegmentSum SparseSegmentSumGrad
SparseSegmentSumWithNumSegments""".split(), True))


@rule(" ".join(SORTED), (Shard, Blocks, RowNumbers) + SUMS)
def sorted_segments(node):
    placement, numbers = (value.placement for value in node.inputs[:2])
    is_of_rows = len(node.inputs) == 2 and type(placement) is Shard and isinstance(numbers, RowNumbers)
    if is_of_rows and placement.axis == 0 and numbers.rows == numbers.of.rows and numbers.times and (
            (numbers.of.times, numbers.offset, numbers.column) == (1, 0, None)):
        return node.decide(Shard(0, numbers.of.rows, 1))  # each example has some rows, and the numbers are theirs
    if isinstance(numbers, RowNumbers):
        raise Unfit()
    if SORTED[node.type] and isinstance(placement, SUMS) or isinstance(placement, (Shard, Blocks)) and placement.axis:
        return node.decide(placement, node.wanted(range(1, len(node.inputs))))
    raise Unfit()
