"""Transforms of averaged gradients: functions of a list of (gradient, variable) that return such a list."""
import tensorflow.compat.v1 as tf

__all__ = ["clip_by_global_norm"]


def clip_by_global_norm(clip_norm):
    """Returns a transform that scales the gradients of the global batch down together where their norm is too large.

        g_v <- g_v c / max(c, ||g||),    ||g|| = sqrt(sum_v sum g_v^2)

    Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks" (2013), by `tf.clip_by_global_norm`:
    `tf.IndexedSlices` stay sparse, and where the norm is not finite every gradient is NaN.

    Args:
      clip_norm: float or scalar tensor, c, more than 0.

    Returns:
      A function for `towers.minimize`'s `transforms`.

    Raises:
      ValueError: for a number that is not more than 0.

    Example:

        train_op = towers.minimize(replicas, optimizer, transforms=[towers.clip_by_global_norm(5.0)])
    """
    if not tf.is_tensor(clip_norm) and not isinstance(clip_norm, tf.Variable) and not clip_norm > 0:
        raise ValueError("clip_by_global_norm: clip_norm has to be more than 0, not %r." % (clip_norm,))

    def clip(grads):
        gradients, variables = zip(*grads)
        with tf.name_scope("clip_by_global_norm"):
            clipped, _ = tf.clip_by_global_norm(gradients, clip_norm)
        return list(zip(clipped, variables))
    return clip
