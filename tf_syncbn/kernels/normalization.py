"""The kernels of batch norm besides its moments: normalize with given ones, and the sums and products of its gradient.

Differences from the mean come first: `x * a + (beta - mean * a)` would cancel where the mean is large.

Which of TensorFlow's ops compute them was chosen of some forty combinations, two towers on CPU, shapes of 0.3 to 8 MB, by
the time over the fused op's:

- Products with vectors: the fused op in inference mode reads and writes once; `mul` and `bias_add` do so twice, and
  broadcasting products are slow (1.15.5: a third of a millisecond for half a megabyte in a ResNet-20).
- The gradient's sums: on 1.15.5 products and sums by products with ones (0.71 of the fused gradient, 0.82 with the next);
  on TensorFlow 2 with oneDNN the fused gradient op in inference mode, which gives both sums and `a dy` in one (1.4 of the
  fused gradient, products 1.65), and products without (0.8, the op 0.9).
- Short rows: on TensorFlow 2 without oneDNN the fused op starts anew in each row. Ten layers of 1 to 17 MB with 16 to 256
  channels, those of up to 32 taken as rows of 256 numbers, were 0.88 of the unsynchronized ones, all as rows of 256 0.84, as
  rows of 512 0.82. Elsewhere it gains nothing. For `mul` and `bias_add` see `tf_syncbn.kernels.moments.join_rows`.
- Small tensors: a fused op takes 0.1 ms to start, so up to half a megabyte three plain ops are faster on TensorFlow 2 without
  oneDNN: layers of 0.25 and 0.5 MB 0.6 and 0.8 of the unsynchronized one, by the fused op 1.4 and 1.2. With oneDNN such layers
  gain alone and not in a training step, where they would lose the ReLU that becomes part of the fused op.
- The fused op's own moments, its output thrown away, are no way out: it adds row to row, with and without oneDNN. Where the
  mean is 1e4 standard deviations, 16,000 rows gave a mean off by 0.02 of one, a million rows a variance off by 1e4 times.
- Kernels compiled by XLA were no faster within a training step: 1.23 of the unsynchronized step, these 1.19 (2.21.0). Its sums
  over rows are slow: those of the gradient took 1.3 ms on two towers of 4 MB, by the fused op, `a dy` included, 0.8 ms.
- With oneDNN the fused op runs at the speed of memory, and nothing that meets between its halves was faster. Differences from
  near the mean written over the input, and the gradient's last products in place, saved a tenth of the kernels' time and 0 to 2
  % of a ResNet-50's step: not worth a second form of the layer. The towers' batches themselves joined on one device, and
  the fused op over them: 1.09 of a ResNet-20's unsynchronized step, these 1.18, and a converted ResNet-50's as fast.
- float16 and bfloat16 on CPU: TensorFlow 2's fused ops (1.15's in bfloat16) take them as they are, compute in float32 and round
  once; in float16 before 2.21 they take twice as long. Layers of 2 to 6 MB that were cast to float32 and back took 2.1 of the
  unsynchronized ones, 2.15.1 in float16 1.1; normalized as they are and with the gradient's sums by the fused gradient op 1.3,
  2.15.1 in float16, with casts to float32 for that, 0.9 (AVX2). With `a dy` by that op too, rounded, and the rest of the
  gradient added to it in their own dtype, they took 0.94. But then what is smaller than half a unit in the last place of `a dy`
  is lost, always to the same side: the gradient kept a tenth of `sum dy`, which it should be rid of, where there were 100,000
  rows of bfloat16, and four tenths where there were 800,000. oneDNN has kernels of its own for bfloat16: rows are not joined
  there, as in float32, which was not measured.
- On a GPU (H100, 2.21.0, 51 million numbers, microseconds) the fused op normalizes in 510, channels first in 225, and float16 as
  it is in 390 and 180; plain ops in 680, 890, 970 and 1,180. The gradient by the fused gradient op and one product takes 1,700,
  by products and sums 1,880. Moments of a sample's mean, differences, and sums of blocks take 430, the fused op's own 670, sums
  of all rows at once 920. What is rounded to float16 last loses less: gradients are computed in float32. Small layers wait for
  the host to start their ops: the merge of four towers takes 0.2 ms.
"""
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from tf_syncbn.kernels.moments import add_along, along, channel_sums, join_rows, multiply_along, unpack

__all__ = ["Ops", "data_format", "fused_statistics", "gradient_sums", "has_few_images", "input_gradient", "normalize",
           "normalize_by", "normalize_by_one_op"]


class Ops(NamedTuple):
    """Which ops the kernels use. The default are those that TensorFlow differentiates to any order, for any axis and dtype.

    Fields:
      fused: whether the fused op computes products with vectors; float32, channels last, on a GPU also first.
      joins: whether vectors meet several short rows at a time, see `tf_syncbn.kernels.moments.join_rows`; channels last.
      sums_gradient: whether the fused gradient op computes the gradient's sums; with `fused`, channels last, no mask.
      narrow: whether float16 and bfloat16 are normalized by the fused op as they are, not cast to float32 and back.
      narrow_gradient: whether they reach the fused gradient op as they are too, for its sums alone; with `sums_gradient`.
    """
    fused: bool = False
    joins: bool = False
    sums_gradient: bool = False
    narrow: bool = False
    narrow_gradient: bool = False


_EPSILON = 1.001e-5  # the least that cuDNN takes
_MOST_IMAGES = 65535  # that cuDNN takes in inference mode: one of 65,536 is a "cuDNN launch failure"


def normalize(x, mean, variance, gamma, beta, epsilon, axis):
    """Computes `gamma (x - mean) / sqrt(variance + epsilon) + beta`; `mean` and `variance` are constants to its gradient.

    Args:
      x: floating point tensor, C channels along `axis`.
      mean, variance: tensors [C] of the accumulator's dtype.
      gamma, beta: tensors [C] of the same dtype, or None.
      epsilon: float.
      axis: int, not negative.

    Returns:
      A tensor of the shape and dtype of `x`.
    """
    ops = Ops(fused=mean.dtype == tf.float32 and axis == x.shape.rank - 1 and has_few_images(x))
    variance = _variance_for(ops, variance, epsilon)
    return tf.cast(_normalize(tf.cast(x, mean.dtype), mean, variance, gamma, beta, epsilon, axis, ops), x.dtype)


def _normalize(x, mean, variance, scale, offset, epsilon, axis, ops):
    """Computes `scale (x - mean) / sqrt(variance + epsilon) + offset`; a scale of None is 1, an offset of None 0.

    `variance` is what `_variance_for` these ops returned.
    """
    if not ops.fused:
        inverse = tf.rsqrt(variance + epsilon)
        scale = inverse if scale is None else scale * inverse
        y = multiply_along(add_along(x, -mean, axis, ops.joins), scale, axis, ops.joins)
        return y if offset is None else add_along(y, offset, axis, ops.joins)
    images, vectors = x, (mean, variance, *_or_ones_and_zeros(scale, offset, mean))
    if ops.joins:
        rows, vectors = join_rows(x, vectors)
        images = x if rows.shape[1] == x.shape[-1] else rows
    return _shaped_as(normalize_by_one_op(_as_images(images), *vectors, epsilon, data_format(x, axis)), x)


def data_format(x, axis):
    """Returns the fused op's name for where the channels of `x` are."""
    return "NHWC" if axis == x.shape.rank - 1 else "NCHW"


def has_few_images(x):
    """Tells whether cuDNN takes the fused op of `x`; a batch of unknown size does not count as large, unless of vectors."""
    size = tf.dimension_value(x.shape[0])
    return x.shape.rank > 2 if size is None else size <= _MOST_IMAGES


def _or_ones_and_zeros(scale, offset, mean):
    return tf.ones_like(mean) if scale is None else scale, tf.zeros_like(mean) if offset is None else offset


def _as_images(x):
    """Returns `x` in the rank that fused ops take, as many images as it has."""
    if x.shape.rank == 4:
        return x
    channels, inner = tf.dimension_value(x.shape[-1]), x.shape[1:-1].num_elements()
    if inner:
        return tf.reshape(x, [-1, inner, 1, channels])
    sizes = tf.shape(x)
    return tf.reshape(x, tf.stack([sizes[0], tf.reduce_prod(sizes[1:-1]), 1, channels]))


def _shaped_as(images, x):
    if x.shape.rank == 4 and tf.dimension_value(images.shape[-1]) == tf.dimension_value(x.shape[-1]):
        return images
    return tf.reshape(images, x.shape.as_list() if x.shape.is_fully_defined() else tf.shape(x))


def normalize_by(x, moments, gamma, beta, axis, epsilon, ops):
    """Computes what `normalize` does by moments packed in one tensor, see `tf_syncbn.kernels.moments.merge`.

    From `x` again, not from the differences that its moments were computed of: to keep these until the towers have met
    would save no time, and take as much memory as the output.
    """
    _, mean, variance = unpack(moments)
    variance = _variance_for(ops, variance, epsilon)
    with tf.control_dependencies([moments]):  # not before the towers have met
        taken = x if ops.narrow else tf.cast(x, mean.dtype)
    return tf.cast(_normalize(taken, mean, variance, gamma, beta, epsilon, axis, ops), x.dtype)


def fused_statistics(moments, *, epsilon):
    """Returns the mean and the variance that `normalize_by_one_op` is to be given, two tensors [C]."""
    _, mean, variance = unpack(moments)
    return mean, _variance_for(Ops(fused=True), variance, epsilon)


def normalize_by_one_op(images, mean, variance, scale, offset, epsilon, layout):
    """Normalizes tensors of rank 4 by the fused op in inference mode.

    Args:
      images: float32 tensor [B, H, W, C], on a GPU float16 or [B, C, H, W] as well.
      mean, variance: tensors [C], from `fused_statistics`.
      scale, offset: tensors [C], or None for 1 and 0.
      epsilon: float.
      layout: "NHWC" or "NCHW".

    Returns:
      Tensor of the shape and dtype of `images`.
    """
    y, _, _ = tf.nn.fused_batch_norm(images, *_or_ones_and_zeros(scale, offset, mean), mean, variance,
                                     epsilon=max(epsilon, _EPSILON), data_format=layout, is_training=False)
    return y


def _variance_for(ops, variance, epsilon):
    """Returns the variance, raised for the fused op by as much as `epsilon` is below the least that it takes."""
    return variance if not ops.fused or epsilon >= _EPSILON else variance + (epsilon - _EPSILON)


def gradient_sums(dy, x, moments, gamma, masked, axis, epsilon, sums_by, ops, scales):
    """Computes `S = sum dy`, `T = sum dy r (x - mean)` and `a = gamma r`, `r = 1 / sqrt(var + epsilon)`, and if asked `a dy`.

    `a` lies in one tensor with the sums so that the gradient of `gamma`, which is T, can't be there before `gamma` has been
    read for the last time: an optimizer may write it at once. TensorFlow's gating says so by control dependencies, and
    Grappler loses those where it moves a constant factor through the kernel's last product: one gradient in twenty was
    then taken of a `gamma` already updated (1.15.5).

    Args:
      dy, x: tensors of one shape and dtype, C channels along `axis`.
      moments: tensor [2C + 1], see `tf_syncbn.kernels.moments.merge`.
      gamma: tensor [C] of the accumulator's dtype, or None.
      masked: whether positions may be masked, so that `x` may be NaN where `dy` is 0.
      axis: int, not negative.
      epsilon: float.
      sums_by: see `tf_syncbn.kernels.moments.channel_sums`.
      ops: `Ops`.
      scales: whether to return `a dy`.

    Returns:
      A tuple of a tensor [3, C] of the accumulator's dtype, the rows S, T and a, and perhaps of `a dy`, of the same dtype.
    """
    _, mean, variance = unpack(moments)
    inverse = tf.rsqrt(variance + epsilon)
    scale = inverse if gamma is None else gamma * inverse
    # TensorFlow runs an op as soon as it can: what needs x alone would run in the forward pass and be kept for this one.
    with tf.control_dependencies([dy]):
        dy, x = (t if ops.narrow_gradient else tf.cast(t, mean.dtype) for t in (dy, x))
        if ops.sums_gradient:
            scaled, d_scale, d_offset, _, _ = tf.raw_ops.FusedBatchNormGradV2(
                y_backprop=_as_images(dy), x=_as_images(x), scale=tf.ones_like(mean) if gamma is None else gamma,
                reserve_space_1=mean, reserve_space_2=variance, epsilon=epsilon, is_training=False)
            sums = tf.stack([d_offset, d_scale, scale])
            return (sums, _shaped_as(scaled, x)) if scales else (sums,)
        centred = add_along(x, -mean, axis, sums_by != "reduce")
        products = tf.math.multiply_no_nan(centred, dy) if masked else centred * dy
        sums = tf.stack([channel_sums(dy, axis, sums_by), channel_sums(products, axis, sums_by) * inverse, scale])
        return (sums, dy * along(scale, x, axis)) if scales else (sums,)


def input_gradient(dy, x, moments, scale, totals, scaled, training, mask, axis, epsilon, ops):
    """Computes one tower's part of the gradient by `x`, from sums over all towers.

        dx = a (dy - w (S + r T (x - mean)) / n) + w (G_mean + 2 G_var (x - mean)) / n

    with `r = 1 / sqrt(var + epsilon)`, the mask `w`, and `G`, what else pulls at the moments.

    Args:
      dy, x: tensors of one shape and dtype, C channels along `axis`; `dy` may be None where there is `scaled`.
      moments: tensor [2C + 1], see `tf_syncbn.kernels.moments.merge`.
      scale: tensor [C], a from `gradient_sums`.
      totals: tensor [3, C] or [5, C], over all towers the sums of what `gradient_sums` returned, and of G_mean and G_var
        where these are not zeros.
      scaled: tensor `a dy`, if `gradient_sums` gave it, or None.
      training: scalar bool tensor; where it is False the moments are constants. None stands for True.
      mask: weights of the positions, of a shape that broadcasts to `x`, or None.
      axis: int, not negative.
      epsilon: float.
      ops: `Ops`.

    Returns:
      A tuple of one tensor of the shape and dtype of `x`.
    """
    dtype = x.dtype
    count, mean, variance = unpack(moments)
    share = tf.div_no_nan(tf.constant(-1, mean.dtype), count)
    if training is not None:
        share = tf.where_v2(training, share, tf.zeros_like(share))
    deviation, factor = tf.sqrt(variance + epsilon), share if scaled is None else scale * share
    if ops.narrow:
        ops = ops._replace(fused=False)  # `x` is cast here and nobody else reads that, so plain ops write over it
    variance = _variance_for(ops, variance, epsilon)
    with tf.control_dependencies([totals]):  # as in `gradient_sums`
        x = tf.cast(x, mean.dtype)

        def pull(offset, slope):
            pulled = _normalize(x, mean, variance, slope, offset, epsilon, axis, ops)
            return pulled if mask is None else tf.where_v2(mask > 0, pulled * mask, tf.zeros_like(pulled))

        dx = pull(*tf.unstack(totals[:3] * factor)[:2])
        if scaled is None:
            dx = multiply_along(dx + tf.cast(dy, x.dtype), scale, axis, ops.joins)
        else:
            dx = tf.add_n([scaled, dx])
        if totals.shape[0] == 5:
            d_mean, d_variance = tf.unstack(totals[3:] * -share)
            dx += pull(d_mean, 2 * d_variance * deviation)
        return tf.cast(dx, dtype),
