"""Images made larger and smaller by products with matrices, one for their rows and one for their columns.

TensorFlow's `resize_bilinear` computes in float32 whatever it is given, its gradient on a GPU differs from run to run, and it has
no pooling into a number of bins. A product has none of these limits, and takes sizes that are known only when the graph runs.
"""
import tensorflow.compat.v1 as tf

__all__ = ["nearest", "pool_to", "resize_to", "size_of"]


def resize_to(x, size):
    """Interpolates bilinearly, pixels being the squares around their centers, as OpenCV and PyTorch do.

    Args:
      x: float tensor [b, h, w, c].
      size: (height, width), ints or int32 scalars.

    Returns:
      A tensor [b, height, width, c] of the dtype of `x`.
    """
    return _apply(x, [_interpolation(before, after, x.dtype) for before, after in zip(size_of(x), size)])


def pool_to(x, bins):
    """Averages over bins x bins parts that cover the image, of sizes as equal as can be; larger than the image, they overlap.

    Args:
      x: float tensor [b, h, w, c].
      bins: int.

    Returns:
      A tensor [b, bins, bins, c] of the dtype of `x`.
    """
    return _apply(x, [_averages(before, bins, x.dtype) for before in size_of(x)])


def nearest(labels, size):
    """Returns the values of [b, h, w] at the centers of the pixels of another size, [b, height, width]."""
    for axis, (before, after) in enumerate(zip(size_of(labels), size), 1):
        places = (2 * tf.range(after) + 1) * before // (2 * after)
        labels = tf.gather(labels, places, axis=axis)
    return labels


def size_of(x):
    """Returns the height and width of [b, h, w, ...], each an int where it is known and an int32 scalar where not."""
    return [static if static is not None else tf.shape(x)[axis] for axis, static in zip((1, 2), x.shape.as_list()[1:3])]


def _interpolation(before, after, dtype):
    """Returns the matrix [after, before] of linear interpolation."""
    scale = tf.cast(before, dtype) / tf.cast(after, dtype)
    places = (tf.cast(tf.range(after), dtype) + 0.5) * scale - 0.5
    places = tf.clip_by_value(places, 0, tf.cast(before, dtype) - 1)
    return tf.maximum(1 - tf.abs(places[:, None] - tf.cast(tf.range(before), dtype)), 0)


def _averages(before, bins, dtype):
    """Returns the matrix [bins, before] of averages, from the floor of each bin's beginning to the ceiling of its end."""
    begin = tf.range(bins)[:, None] * before // bins
    end = -(-(tf.range(bins)[:, None] + 1) * before // bins)
    places = tf.range(before)
    inside = tf.cast(tf.logical_and(places >= begin, places < end), dtype)
    return inside / tf.reduce_sum(inside, 1, keepdims=True)


def _apply(x, matrices):
    """Multiplies the rows and the columns of [b, h, w, c] by the matrices [height, h] and [width, w]."""
    channels, (of_rows, of_columns) = x.shape.as_list()[-1], matrices
    height, width = (matrix.shape.as_list()[0] for matrix in matrices)
    before, after = tf.shape(x), [tf.shape(matrix)[0] for matrix in matrices]
    x = tf.matmul(of_rows, tf.reshape(x, [before[0], before[1], before[2] * channels]))
    x = tf.matmul(of_columns, tf.reshape(x, [before[0] * after[0], before[2], channels]))
    x = tf.reshape(x, [before[0], after[0], after[1], channels])
    x.set_shape([None, height, width, channels])
    return x
