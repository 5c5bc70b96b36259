"""Losses of what a model hands out, whichever form it hands it out in.

Models that end in a softmax return probabilities, and the cross-entropy of these by their logarithm overflows where TensorFlow's
own op of the logits does not. What was given is found out in the graph, and said; where it can't be, that is an error.
"""
import warnings
from typing import Optional

import tensorflow.compat.v1 as tf

from towers.api.annotations import Tensor, TensorLike
from towers.api.arguments import FLAG, TEXT, WHOLE, as_tensor, check, optional
from towers.api.wording import TowersWarning
from towers.context import current_tower
from towers.training.logits import find_logits, looks_like

__all__ = ["softmax_cross_entropy"]

_SMALLEST = 1e-7  # as in Keras


def softmax_cross_entropy(outputs: TensorLike, labels: TensorLike, from_logits: Optional[bool] = None, axis: int = -1,
                          reduction: str = "mean", name: Optional[str] = None) -> Tensor:
    """Computes the cross-entropy of a classifier's outputs and labels, by logits wherever there are any.

        -log(softmax(logits)[label])    or    -sum_c labels[c] log(softmax(logits)[c])

    If `outputs` are the softmax of something, through identities, reshapes that keep the classes together, transpositions and
    casts to a wider type, the loss is taken of that by TensorFlow's fused op: finite and with its exact gradient however far
    apart the logits are. Probabilities made otherwise, by sigmoids or a division by their sum, are taken by their logarithm,
    after those under 1e-7 were raised to that, and count as if divided by their sum over the classes, as in Keras; a number
    below 0 makes the loss NaN. What was found is logged by `tf.logging.info`; probabilities without a softmax, unless
    `from_logits` says so, are a TowersWarning.

    Args:
      outputs: floating point tensor [batch, ..., classes], logits or probabilities. Half precision is computed in float32.
      labels: integers [batch, ...], the numbers of the classes; or numbers of the shape of `outputs`, a one-hot vector or
        distribution over the classes in each position. These get a gradient: stop it where they are computed.
      from_logits: True for logits, False for probabilities, None to find out. Taken as logits, without a softmax, is what
        ends in a layer with a variable kernel or bias; as probabilities what ends in a sigmoid or a division by its sum, or
        resizes or averages a softmax. Anything else is an error.
      axis: int, along which the classes lie, not the first one. A softmax has to have been taken along it.
      reduction: "mean", over all examples and positions, as a tower's loss is; or "none".
      name: str, optional name scope.

    Returns:
      A scalar, or with "none" a tensor of the shape of `outputs` without `axis`; float64 for float64 outputs, else float32.

    Raises:
      TypeError: for outputs that are no floating point numbers, or class numbers that are no integers.
      ValueError: if ranks are unknown or the shapes do not fit; for another axis than the softmax's; if it can't be told what
        `outputs` are, or they are a softmax and `from_logits` is True.

    Example:

        def model_fn(images, labels):
            return towers.softmax_cross_entropy(network(images), labels)
    """
    if reduction not in ("mean", "none"):
        raise ValueError("softmax_cross_entropy knows the reductions 'mean' and 'none', not %r." % (reduction,))
    check(optional(TEXT), name=name)
    check(optional(FLAG), from_logits=from_logits)
    check(WHOLE, axis=axis)
    with tf.name_scope(name, "softmax_cross_entropy"):
        outputs, labels = as_tensor(outputs, "outputs"), as_tensor(labels, "labels")
        axis = _checked_axis(outputs, axis)
        is_dense = _is_dense(labels, outputs, axis)
        logits = _logits_of(outputs, from_logits, axis)
        if logits.dtype != tf.float64:
            logits = tf.cast(logits, tf.float32)
        if is_dense:
            losses = tf.nn.softmax_cross_entropy_with_logits_v2(labels=tf.cast(labels, logits.dtype), logits=logits, axis=axis)
        else:
            if axis != outputs.shape.rank - 1:
                logits = tf.transpose(logits, [i for i in range(outputs.shape.rank) if i != axis] + [axis])
            labels = labels if labels.dtype in (tf.int32, tf.int64) else tf.cast(labels, tf.int64)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        return tf.reduce_mean(losses) if reduction == "mean" else losses


def _checked_axis(outputs, axis):
    if not outputs.dtype.is_floating:
        raise TypeError("softmax_cross_entropy takes logits or probabilities in floating point, and %r is of %s. Are the "
                        "outputs and the labels in their places?" % (outputs.name, outputs.dtype.name))
    rank = outputs.shape.rank
    if rank is None or rank < 2 or not -rank <= axis < rank or axis % rank == 0:
        raise ValueError("softmax_cross_entropy takes outputs of a known rank of 2 or more, examples along axis 0 and classes "
                         "along another one; %r has shape %s, and axis is %d." % (outputs.name, outputs.shape, axis))
    return axis % rank


def _is_dense(labels, outputs, axis):
    """Tells whether labels are a number for each class, not of a class; raises where they are neither."""
    each = outputs.shape[:axis].concatenate(outputs.shape[axis + 1:])
    for is_dense, shape in ((True, outputs.shape), (False, each)):
        if labels.shape.rank == shape.rank and labels.shape.is_compatible_with(shape):
            if not is_dense and not labels.dtype.is_integer:
                raise TypeError("softmax_cross_entropy: the labels %r, of shape %s, are the numbers of classes, and have to be "
                                "integers, not %s." % (labels.name, labels.shape, labels.dtype.name))
            return is_dense
    raise ValueError("softmax_cross_entropy: outputs of shape %s, classes along axis %d, take integer labels of shape %s or "
                     "labels of shape %s, and %r has shape %s.%s"
                     % (outputs.shape, axis, each, outputs.shape, labels.name, labels.shape, _mend(labels.shape, axis)))


def _mend(shape, axis):
    if shape.rank is not None and shape.rank > axis and tf.dimension_value(shape[axis]) == 1:
        return " Take the axis of size 1 away by tf.squeeze(labels, %d)." % axis
    return ""


def _logits_of(outputs, from_logits, axis):
    found = find_logits(outputs, axis)
    if found is not None:
        if from_logits:
            raise ValueError("softmax_cross_entropy: from_logits is True, and %r is the result of a softmax, which would be "
                             "taken twice. Hand in what the softmax is of, or leave out from_logits." % outputs.name)
        _say("%r is a softmax: the loss is taken of its logits %r.", outputs.name, found.name)
        return found
    kind = looks_like(outputs, axis) if from_logits is None else "logits" if from_logits else "probabilities"
    if kind is None:
        raise ValueError("softmax_cross_entropy can't tell whether %r, of type %s, holds logits or probabilities: it is no "
                         "softmax, and ends neither in a layer nor in a division. Give from_logits=True or from_logits=False."
                         % (outputs.name, outputs.op.type))
    if kind == "logits":
        _say("%r is taken as logits.", outputs.name)
        return outputs
    message = ("%r is taken as probabilities, and no softmax is behind it: the loss is taken of their logarithm, at least "
               "log(1e-7).")
    if from_logits is None and _is_first():
        warnings.warn("softmax_cross_entropy: %s Hand in the logits, or say from_logits=False." % (message % outputs.name),
                      TowersWarning, stacklevel=3)
    _say(message, outputs.name)
    wide = outputs if outputs.dtype == tf.float64 else tf.cast(outputs, tf.float32)
    # Not a maximum: what is below 0 or NaN is no probability, and shall not be hidden.
    return tf.log(tf.where_v2(tf.logical_and(wide >= 0, wide < _SMALLEST), tf.constant(_SMALLEST, wide.dtype), wide))


def _is_first():
    return current_tower() is None or current_tower().is_first


def _say(message, *values):
    if _is_first():
        tf.logging.info("softmax_cross_entropy: " + message, *values)
