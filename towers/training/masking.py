"""Gradients under masks: slices of weights that do not train."""
from typing import Any, Dict

import numpy as np
import tensorflow.compat.v1 as tf

from towers.api.annotations import TensorLike
from towers.training.transforms import Transform

__all__ = ["mask_gradients"]


def mask_gradients(masks: Dict[Any, TensorLike]) -> Transform:
    """Returns a transform that freezes parts of variables: they stay what they are, to the bit.

        g_v <- g_v where mask_v, else 0;    v <- v as the optimizer leaves it where mask_v, else v as it was

    The second holds whatever the optimizer does without a gradient: weight decay, and the momentum of steps without a mask. What
    is frozen is a second copy of the variable while the step runs.

    Args:
      masks: dict from variables, or their names, to masks: arrays or tensors of a shape that broadcasts to the variable's, True
        or 1 for what trains, False or 0 for what is frozen.

    Returns:
      A `Transform` for `towers.minimize`'s `transforms`.

    Raises:
      TypeError: for masks that are no dict, or of another kind than numbers and booleans.
      ValueError: for an array with other numbers than 0 and 1; in `towers.minimize` for a mask of another shape than its
        variable's, and for a variable that the step does not train.

    Example:

        is_kept = np.abs(pruned_kernel) > 0
        train_op = towers.minimize(replicas, optimizer, transforms=[towers.mask_gradients({"conv/kernel": is_kept})])
    """
    if not isinstance(masks, dict):
        raise TypeError("mask_gradients takes a dict from variables, or their names, to masks, not %r." % (masks,))
    masks = {_name(key): _checked(_name(key), mask) for key, mask in masks.items()}

    def link(grads, rest):
        missing = sorted(set(masks) - {variable.op.name for _, variable in grads})
        if missing:
            raise ValueError("mask_gradients: this step trains no variable %s; it trains %s."
                             % (", ".join(map(repr, missing)), ", ".join(repr(variable.op.name) for _, variable in grads)))
        with tf.name_scope("mask_gradients"):
            frozen = [(variable, _mask_of(variable, masks[variable.op.name])) for _, variable in grads
                      if variable.op.name in masks]
            of_variable = {variable.op.name: mask for variable, mask in frozen}
            kept = [_taken(tf.logical_not(mask), variable) for variable, mask in frozen]
            masked = [_masked(gradient, of_variable.get(variable.op.name)) for gradient, variable in grads]
            # By data, since a tf.cond around what follows loses control dependencies from outside.
            waiting = tf.tuple(masked, control_inputs=[value.op for value in kept])
        done = rest([(gradient, variable) for gradient, (_, variable) in zip(waiting, grads)])
        with tf.name_scope("restore_frozen"), tf.control_dependencies([done]):
            return tf.group(*[tf.assign(variable, tf.where_v2(mask, variable.read_value(), value)).op
                              for (variable, mask), value in zip(frozen, kept)])

    return Transform("mask_gradients", lambda step: (None, link))


def _name(key):
    key = key.deref() if hasattr(key, "deref") else key  # of variable.ref()
    name = key if isinstance(key, str) else getattr(getattr(key, "op", None), "name", None)
    if name is None:
        raise TypeError("mask_gradients: %r is neither a variable nor a name of one." % (key,))
    return name[:-2] if name.endswith(":0") else name


def _checked(name, mask):
    if tf.is_tensor(mask) or isinstance(mask, tf.Variable):
        kind = mask.dtype.base_dtype
        if not (kind.is_bool or kind.is_floating or kind.is_integer):
            raise TypeError("mask_gradients: the mask of %r has to be of booleans or numbers, not of %s." % (name, kind.name))
        return mask
    array = np.asarray(mask)
    if array.dtype.kind not in "biuf":
        raise TypeError("mask_gradients: the mask of %r has to be of booleans or numbers, not of %s." % (name, array.dtype))
    if not np.isin(array, (0, 1)).all():
        raise ValueError("mask_gradients: the mask of %r has to hold 1 for what trains and 0 for what is frozen." % name)
    return array.astype(bool)


def _mask_of(variable, mask):
    """Returns a bool tensor of the variable's shape."""
    mask = tf.cast(tf.convert_to_tensor(mask), tf.bool)
    try:
        fits = tf.broadcast_static_shape(mask.shape, variable.shape).as_list() == variable.shape.as_list()
    except ValueError:
        fits = False
    if not fits:
        raise ValueError("mask_gradients: the mask of %r has shape %s, which does not broadcast to the variable's, %s."
                         % (variable.op.name, mask.shape, variable.shape))
    return tf.logical_and(mask, tf.ones(variable.shape, tf.bool))


def _taken(mask, variable):
    """Returns what a variable holds where the mask is true, else 0, in memory of its own."""
    value = variable.read_value()
    return tf.where_v2(mask, value, tf.zeros_like(value))


def _masked(gradient, mask):
    if mask is None or gradient is None:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_masked(gradient.values, tf.gather(mask, gradient.indices)), gradient.indices,
                                gradient.dense_shape)
    return tf.where_v2(mask, gradient, tf.zeros_like(gradient))
