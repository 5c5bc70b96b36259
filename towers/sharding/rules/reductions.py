"""Ops that take the entries of some axes together."""
import numpy as np
import tensorflow.compat.v1 as tf

from towers.sharding.nodes import OwnRows, Unfit
from towers.sharding.placements import (BATCH, Additive, Blocks, Partial, PartialMean, Replicate, RowNumbers, Shard, Size, moved,
                                        size_of)
from towers.sharding.rules.arithmetic import SIZES
from towers.sharding.rules.table import SUMS, rule

__all__ = ["axes_of_gradient"]

ROWS = (Shard, Blocks)


def axes_of(node, k=1):
    """Returns the axes that an op reduces, a list of int."""
    axes = node.inputs[k].const()
    if axes is None:
        axes = axes_of_gradient(node, node.inputs[k].tensor)
    rank = node.inputs[0].rank
    return [int(axis) % rank for axis in np.reshape(axes, [-1])]


def axes_of_gradient(node, tensor):
    """Returns the axes over which the gradient of a broadcast is summed, where these follow from what is known of the shapes."""
    if tensor.op.type != "BroadcastGradientArgs":
        raise Unfit()
    shapes = [node.context.elements(shape) for shape in tensor.op.inputs]
    if any(shape is None for shape in shapes):
        raise Unfit()
    rank = max(map(len, shapes))
    padded = [[1] * (rank - len(shape)) + list(shape) for shape in shapes]
    found = []
    for axis, (mine, other) in enumerate(zip(padded[tensor.value_index], padded[1 - tensor.value_index])):
        if mine == 1 and other != 1 or axis < rank - len(shapes[tensor.value_index]):
            found.append(axis)
        elif not _is_kept(mine, other):
            raise Unfit()
    return np.array(found, int)


def _is_kept(mine, other):
    """Tells whether an axis is not summed, or has one entry, where a size and the other tensor's are known as `Size` has them."""
    return isinstance(mine, (int, Additive)) or mine == other or other == 1


def left_of(node, axes, k=0):
    """Returns the number of an input's sharded axis behind a reduction over other axes."""
    placement = node.inputs[k].placement
    keeps = node.type in KEEPING and node.attr(KEEPING[node.type])
    return placement.axis - (0 if keeps else sum(axis < placement.axis for axis in axes))


KEEPING = dict.fromkeys("All Any EuclideanNorm Max Mean Min Prod Sum".split(), "keep_dims")


@rule("Sum Mean", (Shard, Blocks, RowNumbers, Size) + SUMS)
def total(node):
    if isinstance(node.inputs[0].placement, SUMS):
        return node.decide(node.inputs[0].placement, node.wanted([1]))
    if not isinstance(node.inputs[0].placement, ROWS):
        return reduction(node)
    axes, placement = axes_of(node), node.inputs[0].placement
    if placement.axis not in axes:
        return node.decide(moved(placement, left_of(node, axes)), node.wanted([1]))
    if node.type == "Sum":
        return node.decide(Partial(), node.wanted([1]))
    if not (node.inputs[0].dtype.is_floating or node.inputs[0].dtype.is_complex) or placement.rows != BATCH and node.is_repeated:
        raise Unfit()
    return node.decide(PartialMean(placement.rows, (node.inputs[0].tensor, placement.axis)), node.wanted([1]))


@rule("EuclideanNorm Max Min Prod", (Shard, Blocks, RowNumbers, Size))
def reduction(node):
    placement = node.inputs[0].placement
    if isinstance(placement, Size):
        return _of_sizes(node)
    if isinstance(placement, RowNumbers) or not isinstance(placement, ROWS):
        raise Unfit()
    axes = axes_of(node)
    if placement.axis in axes:
        raise Unfit()
    return node.decide(moved(placement, left_of(node, axes)), node.wanted([1]))


def _of_sizes(node):
    elements = node.inputs[0].elements()
    of_pair = {"Prod": "Mul", "Sum": "Add", "Max": "Maximum", "Min": "Minimum"}.get(node.type)
    axes = node.inputs[1].const()
    if axes is None or elements.ndim != 1 or len(np.ravel(axes)) != 1 or of_pair is None or not len(elements):
        raise Unfit()
    found = elements[0]
    for element in elements[1:]:
        found = SIZES[of_pair](found, element)
    shape = (1,) if node.attr("keep_dims") else ()
    return node.decide(size_of(np.array([found], object).reshape(shape) if not isinstance(found, Additive) else _one(found,
                                                                                                                     shape)))


def _one(element, shape):
    found = np.empty((1,), object)
    found[0] = element
    return found.reshape(shape)


@rule("All Any", ROWS)
def logical(node):
    placement, axes = node.inputs[0].placement, axes_of(node)
    if placement.axis not in axes:
        return node.decide(moved(placement, left_of(node, axes)), node.wanted([1]))
    is_any = node.type == "Any"

    def of_all(conversions, op, inputs):
        found = conversions.made(op, inputs)[0]
        number = conversions.summed(tf.cast(found if is_any else tf.logical_not(found), tf.int32))
        return [number > 0 if is_any else tf.equal(number, 0)]
    return node.decide(Replicate(), node.wanted([1]), instead=of_all, meets="sum")


@rule("ArgMax ArgMin", ROWS)
def place_of_largest(node):
    axes, placement = axes_of(node), node.inputs[0].placement
    if placement.axis in axes:
        raise Unfit()
    return node.decide(moved(placement, left_of(node, axes)), node.wanted([1]))


@rule("L2Loss", ROWS)
def l2_loss(node):
    return node.decide(Partial())


@rule("BiasAddGrad", ROWS + SUMS)
def bias_gradient(node):
    placement = node.inputs[0].placement
    if isinstance(placement, SUMS):
        return node.decide(placement)
    is_first = node.attr("data_format") in (b"NCHW", "NCHW")
    if placement.axis == (1 if is_first else node.inputs[0].rank - 1):
        return node.decide(moved(placement, 0))
    return node.decide(Partial())


# Along the last axis alone: type of the op -> how many of the last axes it takes together.
LAST_AXES = "Softmax LogSoftmax"


@rule(LAST_AXES, ROWS)
def along_last_axis(node):
    placement, last = node.inputs[0].placement, node.inputs[0].rank - 1
    if placement.axis != last:
        return node.decide(placement)
    return own_rows_of(node, placement, 0)


def own_rows_of(node, placement, k, outputs=None):
    """Returns the `Decision` of an op that takes all examples together, and gives each of them something back.

    Args:
      node: `Node`.
      placement: `Shard` or `Blocks` of outputs that hold the examples.
      k: int, the input whose examples they are.
      outputs: dict from numbers of outputs to the axis along which examples lie there; None is all, as in the input.
    """
    source = node.inputs[k].placement
    outputs = dict.fromkeys(range(len(node.op.outputs)), placement.axis) if outputs is None else outputs
    like = (node.inputs[k].tensor, source.axis)
    own = {number: OwnRows(axis, like, getattr(source, "outer", 1)) for number, axis in outputs.items()}
    placements = [moved(placement,
                        outputs[number]) if number in outputs else Replicate() for number in range(len(node.op.outputs))]
    return node.decide(placements, node.wanted(range(len(node.inputs))), own=own)


@rule("Cumsum Cumprod CumulativeLogsumexp", ROWS)
def running(node):
    axes, placement = axes_of(node), node.inputs[0].placement
    if placement.axis not in axes:
        return node.decide(placement, node.wanted([1]))
    return own_rows_of(node, placement, 0)


@rule("ReverseV2 Roll", ROWS + SUMS)
def turned(node):
    placement = node.inputs[0].placement
    if isinstance(placement, SUMS):
        return node.decide(placement, node.wanted(range(1, len(node.inputs))))
    if isinstance(placement, Replicate):
        raise Unfit()
    if placement.axis not in axes_of(node, 1 if node.type == "ReverseV2" else 2):
        return node.decide(placement, node.wanted(range(1, len(node.inputs))))
    return own_rows_of(node, placement, 0)


@rule("TopK TopKV2 NthElement", ROWS)
def largest(node):
    placement = node.inputs[0].placement
    if placement.axis == node.inputs[0].rank - 1:
        raise Unfit()
    return node.decide(placement, node.wanted([1]) if len(node.inputs) > 1 else {})


@rule("Unique UniqueV2 UniqueWithCounts UniqueWithCountsV2", ROWS)
def unique(node):
    placement = node.inputs[0].placement
    if isinstance(placement, Replicate) or placement.axis != 0 or node.inputs[0].rank != 1:
        raise Unfit()
    return own_rows_of(node, placement, 0, {1: 0})
