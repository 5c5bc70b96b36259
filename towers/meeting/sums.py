"""Reductions over towers: sums in an order that never changes, so that the same towers give the same bits in every run."""
import tensorflow.compat.v1 as tf

__all__ = ["EXTREMES", "check_reduction", "gradient_of_extreme", "mean_in_order", "sum_in_order"]

EXTREMES = {"max": tf.reduce_max, "min": tf.reduce_min}
_REDUCTIONS = ("sum", "mean") + tuple(EXTREMES)


def check_reduction(reduction):
    """Raises `ValueError` for what is no reduction of `all_reduce`."""
    if reduction not in _REDUCTIONS:
        raise ValueError("all_reduce knows the reductions %s, not %r." % (", ".join(map(repr, _REDUCTIONS)), reduction))


def gradient_of_extreme(dy, extreme, tensor, add):
    """Returns what of the gradient of an extreme goes to `tensor`, all to those that have it, in equal parts.

    Args:
      dy: tensor, the gradient that reaches the extreme here.
      extreme, tensor: tensors of its shape and dtype.
      add: a function of a tensor that returns its sum over all who took part.
    """
    has_it = tf.cast(tf.equal(tensor, extreme), tensor.dtype)
    total, number = tf.unstack(add(tf.stack([dy, has_it])))
    return has_it / number * total


def sum_in_order(tensors):
    """Adds up tensors of one shape and dtype; of one tensor it returns that.

    `tf.add_n` begins with whichever tensor's memory it may write over, which is another one from run to run, and Grappler
    makes one of any chain of additions. What is stacked first is added up in its order.

    Args:
      tensors: list of tensors, not empty.

    Returns:
      A tensor of the same shape and dtype.
    """
    return tf.add_n(tensors) if len(tensors) < 3 else tf.reduce_sum(tf.stack(tensors), 0)


def mean_in_order(tensors, axis=0):
    """Averages two or more floating point tensors of one shape and dtype, see `sum_in_order`.

    Args:
      tensors: list of tensors.
      axis: 0, or a tensor of that, which several calls may share: each would make one of its own.
    """
    return sum_in_order(tensors) * 0.5 if len(tensors) == 2 else tf.reduce_mean(tf.stack(tensors), axis)
