"""Losses that are scaled, so that gradients in float16 do not vanish; steps whose gradients overflowed are left out."""
from typing import Union

import tensorflow.compat.v1 as tf

from towers.api.annotations import LossScale
from towers.graph.ordering import run_after_in, value_before_writes
from towers.graph.walk import ancestors, is_ref, op_of, variable_of, writes_of
from towers.meeting.slices import numbers_of, with_numbers
from towers.training.transforms import Transform, when

__all__ = ["scale_loss"]


def scale_loss(scale: Union[str, float, LossScale] = "dynamic") -> Transform:
    """Returns a transform that differentiates losses times a scale, and divides the gradients by it again.

    Micikevicius et al., "Mixed precision training" (2018). Where a gradient of the global batch is not finite the step is left
    out: nothing that comes after in the chain of transforms is run, no variable is trained, `global_step` stays, and what the
    step's update ops wrote is as before. What the forward pass writes by itself (`updates_collections=None`) is not taken back.
    A dynamic scale is halved then, and doubled after 2,000 steps in a row that were finite.

    Transforms that come before it in the chain see gradients that are multiplied, those after it gradients as they are.

    Args:
      scale: a number, 1 or more; "dynamic"; or a `tf.train.experimental.LossScale`, a `DynamicLossScale` of other numbers say. A
        dynamic one is two variables, `current_loss_scale` and `good_steps`, which are saved with a checkpoint.

    Returns:
      A `Transform` for `towers.minimize`'s `transforms`.

    Raises:
      TypeError, ValueError: for another scale.

    Example:

        transforms = [towers.scale_loss("dynamic"), towers.clip_by_global_norm(1.0)]
        train_op = towers.minimize(replicas, optimizer, transforms=transforms)
    """
    kinds = tf.train.experimental
    if isinstance(scale, str) and scale != "dynamic":
        raise ValueError("scale_loss takes a number, \"dynamic\" or a tf.train.experimental.LossScale, not %r." % scale)
    if not isinstance(scale, (str, kinds.LossScale)):
        if isinstance(scale, bool) or not isinstance(scale, (int, float)):
            raise TypeError("scale_loss takes a number, \"dynamic\" or a tf.train.experimental.LossScale, not %r." % (scale,))
        if not 1 <= scale < float("inf"):
            raise ValueError("scale_loss: the scale has to be 1 or more, and finite, not %r." % scale)

    def begin(step):
        with tf.init_scope():
            chosen = kinds.DynamicLossScale() if scale == "dynamic" else (
                scale if isinstance(scale, kinds.LossScale) else kinds.FixedLossScale(float(scale)))
        factor, before = chosen(), _before_writes(step)
        return factor, lambda grads, rest: _unscale(grads, rest, chosen, factor, before)

    return Transform("scale_loss", begin)


def _unscale(grads, rest, scale, factor, before):
    with tf.name_scope("scale_loss"):
        grads = [(gradient, variable) for gradient, variable in grads if gradient is not None]
        are_finite = tf.reduce_all([tf.reduce_all(tf.is_finite(numbers_of(gradient))) for gradient, _ in grads])
        unscaled = tf.tuple([_divided(gradient, factor) for gradient, _ in grads])
        # After the division: what is read of the scale may be its own memory.
        with tf.control_dependencies([numbers_of(gradient) for gradient in unscaled]):
            adapted, _ = scale.update([numbers_of(gradient) for gradient, _ in grads])
    trained = when(are_finite, lambda: [rest([(gradient, variable) for gradient, (_, variable) in zip(unscaled, grads)])],
                   lambda: [_written_back(variable, value) for variable, value in before])
    return tf.group(trained, adapted)


def _divided(gradient, factor):
    return with_numbers(gradient, lambda numbers: numbers / tf.cast(factor, numbers.dtype))


def _before_writes(step):
    """Returns what the variables that the step's update ops write hold before, pairs of a variable's op and a tensor.

    The writes wait for it.
    """
    made = [op for tower in step.replicas for op in tower.ops]
    needed, copies = ancestors(map(op_of, step.update_ops), set(made)), {}
    for op, variables in writes_of([op for op in made if op in needed]).items():
        for variable in variables:
            if variable not in copies and variable_of(variable) is not None:
                copies[variable] = value_before_writes(variable)
            if variable in copies:
                run_after_in(op, [copies[variable].op], made)
    return list(copies.items())


def _written_back(variable, value):
    tensor = variable.outputs[0]
    if is_ref(tensor):
        return tf.raw_ops.Assign(ref=tensor, value=value)
    return tf.raw_ops.AssignVariableOp(resource=tensor, value=value)
