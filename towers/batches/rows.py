"""Rows of sparse and ragged tensors: how many there are, and a batch of them divided along axis 0.

What `tf.split` does for dense tensors, exactly and by the same sizes. `tf.sparse.split` would refuse more parts than rows.
"""
import numpy as np
import tensorflow.compat.v1 as tf

__all__ = ["is_ragged", "is_sparse", "num_rows", "split_rows"]


def is_ragged(leaf):
    """Tells whether `leaf` is a `tf.RaggedTensor`, which TensorFlow 1.15 does not count among tensors."""
    return type(leaf).__name__ == "RaggedTensor"


def is_sparse(leaf):
    """Tells whether `leaf` is a `tf.SparseTensor`."""
    return isinstance(leaf, tf.SparseTensor)


def num_rows(leaf):
    """Returns the size of a tensor along axis 0, dense, sparse or ragged, as an int32 scalar tensor."""
    if is_ragged(leaf):
        return tf.cast(leaf.nrows(), tf.int32)
    return tf.cast(leaf.dense_shape[0], tf.int32) if is_sparse(leaf) else tf.shape(leaf)[0]


def split_rows(leaf, sizes, num):
    """Divides a sparse or ragged tensor along axis 0.

    Args:
      leaf: `tf.SparseTensor` or `tf.RaggedTensor`.
      sizes: list of int, or an int32 vector, that sums to the number of rows.
      num: int, how many sizes there are.

    Returns:
      A list of tensors like `leaf`, of `sizes` rows each.
    """
    if isinstance(sizes, list):
        starts = [0] + np.cumsum(sizes).tolist()
    else:
        starts = [0] + tf.unstack(tf.cumsum(sizes), num)
        sizes = tf.unstack(sizes, num)
    return [_ragged_rows(leaf, *part) if is_ragged(leaf) else _sparse_rows(leaf, *part) for part in zip(starts, sizes)]


def _ragged_rows(ragged, start, size):
    return ragged[start:start + size]


def _sparse_rows(sparse, start, size):
    start, size = (tf.constant([number], tf.int64) if isinstance(number, int) else tf.cast(number, tf.int64)[None]
                   for number in (start, size))
    others = sparse.dense_shape[1:]
    part = tf.sparse.slice(sparse, tf.concat([start, tf.zeros_like(others)], 0), tf.concat([size, others], 0))
    # Not the slice's own shape, of which nothing is known while the graph is built.
    return tf.SparseTensor(part.indices, part.values, tf.concat([size, others], 0))
