"""Gradients of several batches, applied as those of one."""
import operator
import warnings

import tensorflow.compat.v1 as tf

from towers.api.wording import TowersWarning, some_of
from towers.graph.walk import ancestors, op_of, tensors_of
from towers.sharding.rules.normalization import is_batch_norm
from towers.training.transforms import Transform, when

__all__ = ["accumulate"]


def accumulate(num_batches: int) -> Transform:
    """Returns a transform that trains once in so many steps, by the gradients of all their batches.

        g_v = sum_i w_i g_iv / sum_i w_i,    i = 1 ... num_batches

    `w_i` is what all towers counted in the i-th batch: its examples, or the sum of their "weight"s. So batches of other sizes are
    as exact as towers are: it is the step of one batch that holds them all. What comes after in the chain of transforms, the
    optimizer and `global_step` come to pass in the last step alone. In between gradients stand in variables of their own, which
    are saved with a checkpoint: `tf.IndexedSlices` become dense.

    Args:
      num_batches: int, how many, 1 or more.

    Returns:
      A `Transform` for `towers.minimize`'s `transforms`.

    Raises:
      TypeError, ValueError: for a number that is none, or less than 1.

    Warns:
      TowersWarning: in `towers.minimize`, names layers that take the examples of a batch together, as batch norms do: the moments
        are those of each batch, not of all, and moving averages move with every batch.

    Example:

        train_op = towers.minimize(replicas, optimizer, transforms=[towers.accumulate(4), towers.clip_by_global_norm(5.0)])
    """
    if isinstance(num_batches, bool) or not hasattr(num_batches, "__index__"):
        raise TypeError("accumulate: the number of batches has to be an integer, not %r." % (num_batches,))
    if num_batches < 1:
        raise ValueError("accumulate: the number of batches has to be 1 or more, not %d." % num_batches)
    num_batches = operator.index(num_batches)

    def begin(step):
        layers = _layers_of_batches(step.replicas)
        if num_batches > 1 and layers:
            warnings.warn("accumulate(%d): %s take the examples of one batch together, by their moments say, not those of all %d "
                          "batches of a step: it is not the step of one batch that holds them all."
                          % (num_batches, some_of(layers), num_batches), TowersWarning, stacklevel=4)
        return None, lambda grads, rest: _accumulate(grads, rest, step.replicas.weight, num_batches)

    return Transform("accumulate", begin)


def _accumulate(grads, rest, weight, num_batches):
    grads = [(gradient, variable) for gradient, variable in grads if gradient is not None]
    sums = [_variable(variable.shape, _wide(variable.dtype.base_dtype), variable.op.name + "/accumulated_gradient",
                      variable.device) for _, variable in grads]
    count = _variable([], tf.int64, "accumulated_batches")
    total = _variable([], tf.float64, "accumulated_weight")
    with tf.name_scope("accumulate"):
        weight = tf.constant(1.0, tf.float64) if weight is None else tf.cast(weight, tf.float64)
        added = [_add(accumulated, gradient, weight).op for accumulated, (gradient, _) in zip(sums, grads)]
        added.append(tf.assign_add(total, weight).op)
        with tf.control_dependencies(added):
            is_last = tf.assign_add(count, 1) >= num_batches

    def apply():
        inverse = tf.div_no_nan(tf.ones([], tf.float64), total.read_value())
        means = [tf.cast(accumulated.read_value() * tf.cast(inverse, accumulated.dtype.base_dtype), variable.dtype.base_dtype)
                 for accumulated, (_, variable) in zip(sums, grads)]
        done = rest([(mean, variable) for mean, (_, variable) in zip(tf.tuple(means), grads)])
        with tf.control_dependencies([done]):
            return [tf.assign(variable, tf.zeros(variable.shape, variable.dtype.base_dtype)).op
                    for variable in sums + [total, count]]

    return when(is_last, apply)


def _variable(shape, dtype, name, device=None):
    # No name scope, so that a checkpoint knows it wherever the step is built.
    with tf.init_scope(), tf.name_scope(None), tf.device(device or None):
        return tf.Variable(tf.zeros(shape, dtype), trainable=False, name=name)


def _wide(dtype):
    return tf.float32 if dtype.size < 4 else dtype


def _add(accumulated, gradient, weight):
    dtype = accumulated.dtype.base_dtype
    weight = tf.cast(weight, dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.scatter_add(accumulated, gradient.indices, tf.cast(gradient.values, dtype) * weight)
    return tf.assign_add(accumulated, tf.cast(gradient, dtype) * weight)


def _layers_of_batches(replicas):
    """Returns the names of layers in which the examples of a batch depend on each other, as far as a look tells.

    They meet the other towers, update state by what came of the batch, or are the fused batch norm in training mode.
    """
    tower = replicas[0]
    found = [op for op in tower.ops if is_batch_norm(op) and op.get_attr("is_training")]
    batch = {leaf.op for leaf in tensors_of(tower.context.batch)}
    within = batch.union(tower.ops)
    found += [op for op in map(op_of, tower.update_ops) if batch & ancestors([op], within)]
    names = {tower.context.relative(op.name).rpartition("/")[0] for op in found}
    names.update(exchange.name for exchange in tower.context.meetings.turns)
    return sorted(name for name in names if not any(other != name and (name + "/").startswith(other + "/") for other in names))
