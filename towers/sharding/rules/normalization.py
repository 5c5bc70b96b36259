"""Fused batch norms, by the moments of the whole batch, in plain ops."""
import tensorflow.compat.v1 as tf

from towers.sharding.nodes import Unfit
from towers.sharding.placements import Partial, Replicate, Shard
from towers.sharding.rules.table import rule

__all__ = ["FUSED", "channels_axis", "is_batch_norm"]

FUSED = "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3"


def is_batch_norm(op):
    """Tells whether an op is a fused batch norm."""
    return op.type in FUSED.split()


@rule(FUSED, (Shard,))
def fused_batch_norm(node):
    x = node.inputs[0].placement
    if not isinstance(x, Shard):
        raise Unfit()
    if x.axis == channels_axis(node.op):
        return _of_each_channel(node, (0,), (1, 2), [x] + [Shard(0, x.rows, x.times)] * (len(node.outputs) - 1))
    placements = [x] + [Replicate()] * (len(node.outputs) - 1)
    others = node.wanted(range(1, len(node.inputs)))
    if not node.attr("is_training"):
        return node.decide(placements, others)
    if x.axis:
        raise Unfit()
    return node.decide(placements, others, instead=_normalized, meets="sum")


def channels_axis(op):
    """Returns the number of the channels' axis."""
    data_format = tf.compat.as_str(op.get_attr("data_format"))
    return 1 if data_format.startswith("NC") else len(data_format) - 1


def _of_each_channel(node, wide, vectors, placements):
    """Decides for what normalizes each example by itself, as a channel: Keras' LayerNormalization is [1, rows, features, 1]."""
    x = node.inputs[wide[-1]].placement
    of_channel = Shard(0, x.rows, x.times)
    expected = {**dict.fromkeys(wide, x), **dict.fromkeys(vectors, of_channel)}
    if any(value.placement != expected.get(k, Replicate()) for k, value in enumerate(node.inputs)):
        raise Unfit()
    return node.decide(placements)


def _axes(op):
    """Returns the axes of an input over which moments are taken, and the shape of a vector of channels beside it."""
    rank, channels = op.inputs[0].shape.rank, channels_axis(op)
    return [axis for axis in range(rank) if axis != channels], [-1 if axis == channels else 1 for axis in range(rank)]


def _normalized(conversions, op, inputs):
    x, scale, offset, old_mean, old_variance = inputs
    axes, beside = _axes(op)
    precise = tf.cast(x, scale.dtype)
    count = conversions.total_count(op.inputs[0], axes, scale.dtype)
    mean = conversions.summed(tf.reduce_sum(precise, axes)) / count
    centred = precise - tf.reshape(mean, beside)
    variance = conversions.summed(tf.reduce_sum(tf.square(centred), axes)) / count
    factor = tf.math.rsqrt(variance + op.get_attr("epsilon")) * scale
    y = tf.cast(centred * tf.reshape(factor, beside) + tf.reshape(offset, beside), x.dtype)
    unbiased = variance * (count / tf.maximum(count - 1, 1))
    kept = 1.0 - op.get_attr("exponential_avg_factor") if "exponential_avg_factor" in op.node_def.attr else 0.0
    moved = [kept * old + (1 - kept) * new if kept else new for old, new in ((old_mean, mean), (old_variance, unbiased))]
    return [y] + moved + [mean, variance] + [None] * (len(op.outputs) - 5)


@rule("FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3", (Shard,))
def gradient(node):
    dy, x = node.inputs[0].placement, node.inputs[1].placement
    if isinstance(x, Shard) and x.axis == channels_axis(node.op):
        of_channel = Shard(0, x.rows, x.times)
        return _of_each_channel(node, (0, 1), (2, 3, 4), [x] + [of_channel] * 2 + [Replicate()] * (len(node.outputs) - 3))
    if not (isinstance(dy, Shard) and dy == x and x.axis == 0):
        raise Unfit()
    others = node.wanted(range(2, len(node.inputs)))
    placements = [x, Partial(), Partial()] + [Replicate()] * (len(node.outputs) - 3)
    if not node.attr("is_training"):
        return node.decide(placements, others)
    return node.decide(placements, others, instead=_differentiated, meets="sum")


def _differentiated(conversions, op, inputs):
    """The forward op is replaced too, so what it saved are the mean and the variance of the whole batch."""
    dy, x, scale, mean, variance = inputs[:5]
    axes, beside = _axes(op)
    inverse = tf.math.rsqrt(variance + op.get_attr("epsilon"))
    normalized = (tf.cast(x, scale.dtype) - tf.reshape(mean, beside)) * tf.reshape(inverse, beside)
    slopes = tf.cast(dy, scale.dtype)
    count = conversions.total_count(op.inputs[1], axes, scale.dtype)
    d_offset, d_scale = tf.reduce_sum(slopes, axes), tf.reduce_sum(slopes * normalized, axes)
    sums = conversions.summed(tf.stack([d_offset, d_scale])) / count
    dx = tf.reshape(inverse * scale, beside) * (
        slopes - tf.reshape(sums[0], beside) - normalized * tf.reshape(sums[1], beside))
    return [tf.cast(dx, x.dtype), d_scale, d_offset] + [None] * (len(op.outputs) - 3)
