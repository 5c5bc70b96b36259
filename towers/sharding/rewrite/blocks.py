"""Rows and blocks of a tensor's axis."""
import tensorflow.compat.v1 as tf

__all__ = ["blocks_apart", "blocks_together", "some_rows"]


def some_rows(value, axis, outer, own, first):
    """Returns some rows of each block along an axis, from the first on."""
    is_in_blocks = not (isinstance(outer, int) and outer == 1)
    if is_in_blocks:
        value = blocks_apart(value, axis, outer)
        axis += 1
    if tf.dimension_value(value.shape[axis]) is None:
        is_one = tf.equal(tf.shape(value)[axis], 1)  # broadcast
        first, own = tf.where_v2(is_one, 0, first), tf.where_v2(is_one, 1, own)
    begin, length = [0] * value.shape.rank, [-1] * value.shape.rank
    begin[axis], length[axis] = first, own
    part, static = tf.slice(value, _stacked(begin), _stacked(length)), value.shape.as_list()
    static[axis] = own if isinstance(own, int) else None
    part.set_shape(static)
    return blocks_together(part, axis - 1) if is_in_blocks else part


def blocks_apart(value, axis, outer):
    """Takes an axis of `outer` blocks apart, an int or scalar: [.., outer n, ..] to [.., outer, n, ..]."""
    static, shape = value.shape.as_list(), tf.shape(value)
    is_known = isinstance(outer, int)
    inner = None if static[axis] is None or not is_known else static[axis] // outer
    value = tf.reshape(value, tf.concat([shape[:axis], [outer, shape[axis] // outer], shape[axis + 1:]], 0))
    value.set_shape(static[:axis] + [outer if is_known else None, inner] + static[axis + 1:])
    return value


def blocks_together(value, axis):
    """Puts blocks that were taken apart together again: [.., outer, n, ..] to [.., outer n, ..]."""
    static, shape = value.shape.as_list(), tf.shape(value)
    value = tf.reshape(value, tf.concat([shape[:axis], [shape[axis] * shape[axis + 1]], shape[axis + 2:]], 0))
    length = None if None in static[axis:axis + 2] else static[axis] * static[axis + 1]
    value.set_shape(static[:axis] + [length] + static[axis + 2:])
    return value


def _stacked(numbers):
    return tf.constant(numbers) if all(isinstance(number, int) for number in numbers) else tf.stack(numbers)
