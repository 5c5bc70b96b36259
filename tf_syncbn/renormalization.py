"""Batch renormalization: corrections that make training normalize nearly as inference will.

    y = gamma (x_hat r + d) + beta,    r = clip(sigma_batch / sigma),    d = clip((mu_batch - mu) / sigma)

with moving `mu` and `sigma` of their own; no gradient passes `r` and `d`. Ioffe, "Batch Renormalization: Towards Reducing
Minibatch Dependence in Batch-Normalized Models" (2017), as `tf.layers.batch_normalization(renorm=True)` has it, over the
batch of all towers.
"""
import tensorflow.compat.v1 as tf

from tf_syncbn.kernels.graph_function import call
from tf_syncbn.kernels.moments import parts, split
from tf_syncbn.moving_averages import share_of_new, steps_where_counted, update_after

__all__ = ["check_clipping", "corrections", "renorm_steps", "square_root_of", "with_corrections"]


def check_clipping(clipping, name):
    """Returns a dict with the keys rmin, rmax and dmax, None where nothing is clipped; refuses others."""
    limits = dict.fromkeys(("rmin", "rmax", "dmax"))
    unknown = sorted(set(clipping or {}) - set(limits))
    if unknown:
        raise ValueError("sync_batch_norm %r: renorm_clipping takes rmin, rmax and dmax, not %s." % (name, ", ".join(unknown)))
    limits.update(clipping or {})
    return limits


def square_root_of(initializer):
    """Returns an initializer of standard deviations, from one of variances."""
    if isinstance(initializer, type):
        initializer = initializer()

    def initialize(*args, **kwargs):
        return tf.sqrt(initializer(*args, **kwargs))
    return initialize


def corrections(moments, training, mean, stddev, rmin, rmax, dmax, *, epsilon):
    """Computes `r` and `d`.

    Args:
      moments: tensor [2C + 1] of the batch, see `tf_syncbn.kernels.merge.merge`.
      training: scalar bool tensor; `r` is 1 and `d` is 0 where it is False, or nothing was counted. None stands for True.
      mean, stddev: tensors [C], the moving ones.
      rmin, rmax, dmax: scalar tensors, or None where there is no limit.
      epsilon: float.

    Returns:
      Tensor [2C]: r, d.
    """
    count, batch_mean, batch_variance = split(moments)
    mean, stddev = tf.cast(mean, batch_mean.dtype), tf.cast(stddev, batch_mean.dtype)
    stddev = tf.maximum(stddev, epsilon ** 0.5)  # 0 before the first update
    r = tf.sqrt(batch_variance + epsilon) / stddev
    d = (batch_mean - mean) / stddev
    if rmin is not None:
        r = tf.maximum(r, rmin)
    if rmax is not None:
        r = tf.minimum(r, rmax)
    if dmax is not None:
        d = tf.clip_by_value(d, -dmax, dmax)
    counts = count > 0 if training is None else tf.logical_and(count > 0, training)
    return tf.concat([tf.where_v2(counts, r, tf.ones_like(r)), tf.where_v2(counts, d, tf.zeros_like(d))], 0)


def with_corrections(aggregate, training, mean, stddev, limits, epsilon, tower):
    """Makes an aggregate of moments give each tower the corrections of its group's moments too.

    They are computed where towers meet, once a group, and all towers' moments come after them: whatever moves `mean` and
    `stddev` by those moments moves them after every correction has read them. Where a layer is applied again in a step, the
    collected updates of the earlier application wait for these corrections too; those that ran inline came before.

    `aggregate` returns, for each tower, the moments of its group and those of all towers; what is returned here returns the
    corrections behind them. `mean` and `stddev` are variables [C], `limits` is a dict of rmin, rmax and dmax, `tower` the
    `TowerContext` or None.
    """
    def corrected(per_tower):
        merged = aggregate(per_tower)
        of_group = {}
        for group, whole in merged:
            if group.name not in of_group:
                bounds = [_in_dtype(limits[key], group.dtype) for key in ("rmin", "rmax", "dmax")]
                with tf.control_dependencies([tf.identity(group)]):  # see `call`
                    values = mean.read_value(), stddev.read_value()
                of_group[group.name] = tf.identity(call(corrections, group, training, *values, *bounds, epsilon=epsilon))
        update_after(list(of_group.values()), [mean, stddev], tower)
        with tf.control_dependencies(list(of_group.values())):
            whole = tf.identity(merged[0][1])
        return [[group, whole, of_group[group.name]] for group, _ in merged]
    return corrected


def _in_dtype(limit, dtype):
    if limit is None or not (tf.is_tensor(limit) or isinstance(limit, tf.Variable)):
        return limit if limit is None else tf.constant(limit, dtype)  # tf.cast would round it to float32 first
    return tf.cast(limit, dtype)


def renorm_steps(count, mean, variance, momentum, renorm_momentum, training, moving_mean, moving_variance, moving_stddev,
                 renorm_mean, renorm_stddev, *, keep, renorm_keep, epsilon):
    """Computes what to subtract from the five moving variables of a renormalized layer.

    The moving variance is the square of the moving standard deviation, less `epsilon`, which the latter holds.

    Args:
      count, mean, variance, momentum, training, keep: see `tf_syncbn.moving_averages.moving_average_steps`.
      renorm_momentum, renorm_keep: the same for `renorm_mean` and `renorm_stddev`.
      moving_mean, moving_variance, moving_stddev, renorm_mean, renorm_stddev: tensors [C], the present values.
      epsilon: float.

    Returns:
      Five tensors [C]; zeros where nothing was counted.
    """
    count, mean, variance = parts(count, mean, variance)
    stddev = tf.sqrt(variance + epsilon)
    rate, renorm_rate = (share_of_new(*pair, mean.dtype) for pair in ((momentum, keep), (renorm_momentum, renorm_keep)))
    old = tf.cast(moving_stddev, mean.dtype)
    new_variance = tf.nn.relu(tf.square(old - (old - stddev) * rate) - epsilon)
    return steps_where_counted(count, training, [
        (moving_mean, mean, rate), (moving_variance, new_variance, tf.ones_like(rate)), (moving_stddev, stddev, rate),
        (renorm_mean, mean, renorm_rate), (renorm_stddev, stddev, renorm_rate)])
