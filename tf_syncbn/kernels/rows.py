"""Tensors as rows of channels, and products and sums with a vector of channels."""
import tensorflow.compat.v1 as tf

__all__ = ["accumulator", "add_along", "along", "count_of", "is_small", "join_rows", "known_count", "masked", "multiply_along",
           "rows_of", "shape_of", "size_of"]

_SMALL = 1 << 17  # numbers of a tensor that ops read faster than some of TensorFlow's kernels start


def accumulator(dtype):
    """Returns the dtype that statistics of inputs of `dtype` are computed in: float64 for float64, else float32."""
    return tf.float64 if dtype == tf.float64 else tf.float32


def along(vector, x, axis):
    """Returns a vector [C] in a shape that broadcasts to `x` along `axis`."""
    return vector if axis == x.shape.rank - 1 else tf.reshape(vector, [-1] + [1] * (x.shape.rank - 1 - axis))


def is_small(x, numbers=_SMALL):
    """Tells whether a tensor is known to be so small that what an op costs to start counts more than what it reads."""
    return x.shape.is_fully_defined() and x.shape.num_elements() <= numbers


def join_rows(x, vectors, longest):
    """Takes several rows of channels as one, as many as divide their number and fit, and repeats vectors as often.

    On CPU, TensorFlow 2 is slow to apply a vector to short rows.

    Args:
      x: tensor, channels last.
      vectors: list of tensors [C].
      longest: int, numbers of a joined row at most; 0 joins none.

    Returns:
      `x` as a tensor [R, joined C], and a list of tensors [joined C].
    """
    channels, size, joined = tf.dimension_value(x.shape[-1]), x.shape.num_elements(), 1
    while size and 2 * joined * channels <= longest and size % (2 * joined * channels) == 0:
        joined *= 2
    return tf.reshape(x, [-1, joined * channels]), [tf.tile(v, [joined]) if joined > 1 else v for v in vectors]


def add_along(x, vector, axis, row=0):
    """Adds a vector [C] to `x` along `axis`, to rows joined up to `row` numbers; see `join_rows`."""
    if axis != x.shape.rank - 1:
        return x + along(vector, x, axis)
    # On CPU faster than the broadcasting sum, elsewhere as fast.
    rows, (vector,) = join_rows(x, [vector], row)
    return tf.reshape(tf.nn.bias_add(rows, vector), shape_of(x))


def multiply_along(x, vector, axis, row=0):
    """Multiplies `x` by a vector [C] along `axis`; see `add_along`."""
    if axis != x.shape.rank - 1 or not row:
        return x * along(vector, x, axis)
    rows, (vector,) = join_rows(x, [vector], row)
    return tf.reshape(rows * vector, shape_of(x))


def masked(x, mask):
    """Returns `x` times its mask, 0 where that is 0: padding may hold NaN."""
    return tf.where_v2(mask > 0, x * mask, tf.zeros_like(x))


def rows_of(x):
    """Returns a tensor with channels last as rows [R, C]."""
    return tf.reshape(x, [-1, tf.dimension_value(x.shape[-1])])


def shape_of(x):
    """Returns a shape for `tf.reshape`: a list where it is known, else a tensor."""
    return x.shape.as_list() if x.shape.is_fully_defined() else tf.shape(x)


def size_of(x):
    """Returns the size along axis 0: an int where it is known, else a tensor."""
    size = tf.dimension_value(x.shape[0])
    return tf.shape(x)[0] if size is None else size


def known_count(x, axis, mask=None):
    """Returns how many values a channel has if that is known while the graph is built, an int, else None."""
    sizes = [size for i, size in enumerate(x.shape.as_list()) if i != axis]
    return tf.TensorShape(sizes).num_elements() if mask is None else None


def count_of(x, axis, mask=None):
    """Returns how many values a channel has, or the sum of their mask; a scalar tensor of the dtype of `x`."""
    if mask is None:
        count = known_count(x, axis)
        if count is not None:
            return tf.constant(count, x.dtype)
        sizes = tf.shape(x, out_type=tf.int64)
        return tf.cast(tf.reduce_prod(tf.gather(sizes, [i for i in range(x.shape.rank) if i != axis])), x.dtype)
    sizes = [1 if i == axis else size for i, size in enumerate(tf.unstack(tf.shape(x)))]
    return tf.reduce_sum(tf.broadcast_to(mask, sizes))
