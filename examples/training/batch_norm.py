"""The batch norms that examples compare: synced over towers, each tower's own, and that of tf.layers.

All have variables of the same names and shapes, and normalize by moving averages where the tower does not train.
"""
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers

__all__ = ["of_layers", "per_tower", "synced"]

_MOMENTUM, _EPSILON = 0.9, 1e-5


def synced(x, name, mask=None):
    """Batch norm over all towers.

    Args:
      x: float tensor [b, h, w, c].
      name: str, its variable scope.
      mask: optional bool tensor [b, h, w], whether a position counts.

    Returns:
      A tensor like `x`.
    """
    return tf_syncbn.sync_batch_norm(x, momentum=_MOMENTUM, epsilon=_EPSILON, mask=mask, name=name)


def per_tower(x, name, mask=None):
    """Ordinary batch norm, of each tower alone, moving averages in UPDATE_OPS; arguments as for `synced`."""
    with tf.variable_scope(name):
        def variable(variable_name, initializer, trainable):
            return tf.get_variable(variable_name, [x.shape.as_list()[-1]], initializer=initializer, trainable=trainable)
        gamma, beta = variable("gamma", tf.ones_initializer(), True), variable("beta", tf.zeros_initializer(), True)
        moving_mean = variable("moving_mean", tf.zeros_initializer(), False)
        moving_variance = variable("moving_variance", tf.ones_initializer(), False)
        if not towers.current_tower().training:
            return _normalize(x, gamma, beta, moving_mean, moving_variance)[0]
        moments = (None, None) if mask is None else tf.nn.weighted_moments(x, [0, 1, 2], tf.cast(mask, x.dtype)[..., None])
        y, mean, variance = _normalize(x, gamma, beta, *moments)
        for moving, batch in ((moving_mean, mean), (moving_variance, variance)):
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_sub(moving, (moving - batch) * (1 - _MOMENTUM)))
        return y


def _normalize(x, gamma, beta, mean=None, variance=None):
    """Returns the normalized `x` and the moments, by default its own: by the fused op, which has no kernel for float64."""
    if x.dtype != tf.float64:
        return tf.nn.fused_batch_norm(x, gamma, beta, mean, variance, _EPSILON, is_training=mean is None)
    if mean is None:
        mean, variance = tf.nn.moments(x, [0, 1, 2])
    return tf.nn.batch_normalization(x, mean, variance, beta, gamma, _EPSILON), mean, variance


def of_layers(x, name, mask=None):
    """That of tf.layers, as a model has it before it meets towers; arguments as for `synced`.

    Raises:
      ValueError: for a mask, which tf.layers does not know.
    """
    if mask is not None:
        raise ValueError("tf.layers.batch_normalization takes no mask.")
    fused = False if x.dtype == tf.float64 else None  # TensorFlow 1 does not choose by itself
    return tf.layers.batch_normalization(
        x, momentum=_MOMENTUM, epsilon=_EPSILON, training=towers.current_tower().training, fused=fused, name=name)
