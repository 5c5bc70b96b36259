"""Sums over all axes but the channels', in two levels.

TensorFlow's CPU kernels add row to row, and lose digits over many rows. Sums of blocks, added up in float64, do not, and are no
slower; products with ones add row to row as well, so that they are of few rows each.
"""
import tensorflow.compat.v1 as tf

from tf_syncbn.kernels.rows import is_small, rows_of, size_of

__all__ = ["add_up", "blocks_of", "channel_sums", "products_of", "square_sums", "sums_of_blocks", "sums_of_squares"]

# Rows of a block: each sum of equal numbers errs to the same side, and where the first sixteenth of the rows are all outliers,
# differences from its mean lose four bits more.
_BLOCK = 64


def channel_sums(x, axis, product=0):
    """Sums over all axes but the channels'.

    Args:
      x: floating point tensor, C channels along `axis`.
      axis: int, not negative.
      product: int, rows that a product with ones may sum, where their number is known and divides well; 0 takes blocks. On a GPU
        TF32 would round the inputs of a product.

    Returns:
      Tensor [C] of the dtype of `x`.
    """
    rank = x.shape.rank
    if axis != rank - 1:
        sums = tf.reduce_sum(x, list(range(axis + 1, rank)))
        return tf.reduce_sum(sums, list(range(axis))) if axis else sums
    rows = rows_of(x)
    sums = products_of(rows, product)
    if sums is None:
        return tf.cast(sums_of_blocks(blocks_of(rows)), x.dtype)
    return tf.reshape(sums, [-1]) if sums.shape[0] == 1 else tf.reduce_sum(sums, 0)


def products_of(rows, longest):
    """Sums rows [R, C] by products with ones, no more than `longest` each; returns sums [n, C], None if R is not divided so."""
    count, channels = (tf.dimension_value(size) for size in rows.shape)
    joined = 1
    while count and longest and count // joined > longest and count % (2 * joined) == 0:
        joined *= 2
    if not count or count // joined > longest:
        return None
    sums = tf.matmul(tf.ones([1, count // joined], rows.dtype), tf.reshape(rows, [count // joined, joined * channels]))
    return tf.reshape(sums, [joined, channels])


def square_sums(x, axis, product, sums):
    """Sums the squares over all axes but the channels', see `channel_sums`. The squares are taken after `sums`."""
    if axis != x.shape.rank - 1:
        norms = tf.math.reduce_euclidean_norm(x, list(range(axis + 1, x.shape.rank)))
        return tf.reduce_sum(tf.square(norms), list(range(axis))) if axis else tf.square(norms)
    rows = rows_of(x)
    count = tf.dimension_value(rows.shape[0])
    if count is not None and count <= 8 * _BLOCK or product and is_small(x):
        with tf.control_dependencies([sums]):  # nobody reads `x` after it, so it may be written over
            return channel_sums(tf.square(rows), 1, product)
    # A norm reads x once and writes no squares, which take as long as the sum; it is slow for few blocks.
    return tf.cast(sums_of_squares(blocks_of(rows)), x.dtype)


def blocks_of(rows):
    """Divides rows [R, C] into blocks: a list of tensors [number of blocks, rows of a block, C], with a rest two."""
    count, channels = (tf.dimension_value(size) for size in rows.shape)
    if count is not None and count < 2 * _BLOCK:
        return [tf.expand_dims(rows, 0)]
    size = _BLOCK
    if count is not None:
        size = max([rows_each for rows_each in range(_BLOCK // 4, _BLOCK + 1) if count % rows_each == 0] or [_BLOCK])
    whole = size_of(rows) // size * size
    if count == whole:
        return [tf.reshape(rows, [count // size, size, channels])]
    num_blocks = -1 if count is None else count // size
    return [tf.reshape(rows[:whole], [num_blocks, size, channels]), tf.expand_dims(rows[whole:], 0)]


def sums_of_blocks(blocks):
    """Sums a list of blocks [n, rows, C], in float64 over the blocks; returns [C]."""
    return add_up([tf.reduce_sum(block, 1) for block in blocks])


def sums_of_squares(blocks):
    """Sums the squares of a list of blocks [n, rows, C], in float64 over the blocks; returns [C]."""
    return add_up([tf.square(tf.math.reduce_euclidean_norm(block, 1)) for block in blocks])


def add_up(sums):
    """Adds up a list of tensors [n, C] in float64, and returns that."""
    return tf.add_n([tf.reduce_sum(tf.cast(of_blocks, tf.float64), 0) for of_blocks in sums])
