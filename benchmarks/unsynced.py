"""Batch norm of each tower alone, as `tf.layers.batch_normalization` computes it: what a synchronized one is measured against.

`tf.layers` itself is not in every lane, so its two ways are written out: the fused op with its moving averages in
`tf.GraphKeys.UPDATE_OPS`, and `tf.nn.moments` with `tf.nn.batch_normalization` where the fused op has no kernel.
"""
import numpy as np
import tensorflow.compat.v1 as tf

__all__ = ["EPSILON", "MOMENTUM", "fused_batch_norm", "fused_kernel_runs", "norm_variables", "plain_batch_norm",
           "update_moving_averages"]

MOMENTUM, EPSILON = 0.9, 1e-5


def fused_batch_norm(x, name, axis=3):
    """Normalizes by `tf.nn.fused_batch_norm`.

    Makes the variables of `norm_variables`, and adds their updates to UPDATE_OPS.

    Args:
      x: float16, bfloat16 or float32 tensor of rank 4.
      name: str, the variable scope.
      axis: int, 3 (NHWC) or 1 (NCHW).

    Returns:
      A tensor like `x`.
    """
    with tf.variable_scope(name):
        gamma, beta, moving_mean, moving_variance = norm_variables(x, axis)
        y, mean, variance = tf.nn.fused_batch_norm(x, gamma, beta, epsilon=EPSILON, is_training=True,
                                                   data_format="NHWC" if axis == 3 else "NCHW")
        update_moving_averages((moving_mean, mean), (moving_variance, variance))
        return y


def plain_batch_norm(x, name, axis=3):
    """Normalizes by `tf.nn.moments` and `tf.nn.batch_normalization`, like `fused_batch_norm` for every dtype."""
    with tf.variable_scope(name):
        gamma, beta, moving_mean, moving_variance = norm_variables(x, axis)
        mean, variance = tf.nn.moments(tf.cast(x, gamma.dtype.base_dtype), [i for i in range(4) if i != axis])
        update_moving_averages((moving_mean, mean), (moving_variance, variance))
        shape = [-1 if i == axis else 1 for i in range(4)]
        vectors = [tf.cast(vector, x.dtype) for vector in (mean, variance, beta, gamma)]
        if axis != 3:
            vectors = [tf.reshape(vector, shape) for vector in vectors]
        return tf.nn.batch_normalization(x, *vectors, variance_epsilon=EPSILON)


def norm_variables(x, axis=3):
    """Returns the variables gamma, beta, moving_mean and moving_variance of the present variable scope.

    They are of shape [C], float64 for a float64 `x` and float32 otherwise; the first two are trainable.
    """
    def variable(name, initializer, trainable):
        dtype = tf.float64 if x.dtype == tf.float64 else tf.float32
        return tf.get_variable(name, [x.shape.as_list()[axis]], dtype, initializer=initializer, trainable=trainable)
    return (variable("gamma", tf.ones_initializer(), True), variable("beta", tf.zeros_initializer(), True),
            variable("moving_mean", tf.zeros_initializer(), False),
            variable("moving_variance", tf.ones_initializer(), False))


def update_moving_averages(*pairs):
    """Adds to UPDATE_OPS the op that moves `moving` towards `batch`, for each pair of (moving, batch)."""
    for moving, batch in pairs:
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_sub(moving, (moving - batch) * (1 - MOMENTUM)))


def fused_kernel_runs(dtype, axis):
    """Tells whether this TensorFlow runs the fused op and its gradient on a CPU, by running them."""
    if dtype == tf.float64:
        return False  # the op does not take it
    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.placeholder(dtype, [2, 4, 4, 4])
        y = fused_batch_norm(x, "probe", axis)
        session.run(tf.global_variables_initializer())
        try:
            session.run([y, tf.gradients(y, x)[0]], {x: np.ones([2, 4, 4, 4])})
        except tf.errors.OpError:
            return False
    return True
