"""Transforms: what becomes of averaged gradients on their way to the optimizer.

A transform is a function of a list of (gradient, variable) that returns such a list. One that has to do more is a `Transform`: it
multiplies losses before they are differentiated, holds the rest of the step back, or comes after it.
"""
import functools
from typing import Callable, List, NamedTuple, Optional, Tuple, Union

import tensorflow.compat.v1 as tf

from towers.api.annotations import GradsAndVars, Operation, Tensor, TransformFn
from towers.api.arguments import LIST, SCALAR, check
from towers.meeting.slices import with_numbers
from towers.replicas import Towers

__all__ = ["Step", "Transform", "begin", "check_finite", "check_transforms", "clip_by_global_norm", "clip_by_value", "mapped",
           "when"]

_Rest = Callable[[GradsAndVars], Operation]
_Link = Callable[[GradsAndVars, _Rest], Operation]


class Step(NamedTuple):
    """The training step that a transform is part of.

    Attributes:
      replicas: `towers.Towers`.
      update_ops: list of operations and tensors that run before gradients are averaged.
    """
    replicas: Towers
    update_ops: List[Operation]


class Transform(NamedTuple):
    """A transform that does more than to map gradients.

    Attributes:
      name: str, for messages.
      begin: a function of a `Step`, called before any loss is differentiated. It returns

        - what every tower's loss is multiplied by, a number or a scalar tensor; None is 1;
        - a function of a list of averaged (gradient, variable) and of `rest`, that returns an operation. `rest` is a function of
          such a list that builds what comes after, later transforms and the optimizer, and returns its operation.
    """
    name: str
    begin: Callable[[Step], Tuple[Optional[Tensor], _Link]]


def check_transforms(transforms):
    """Raises TypeError for what is no transform."""
    check(LIST, transforms=transforms)
    for transform in transforms:
        if getattr(transform, "__annotations__", {}).get("return") in (Transform, TransformFn):
            raise TypeError("towers.%s makes a transform: hand in what it returns, transforms=[towers.%s(...)]."
                            % (transform.__name__, transform.__name__))
        if not isinstance(transform, Transform) and not callable(transform):
            raise TypeError("A transform is a function of a list of (gradient, variable), not %r." % (transform,))


def begin(transforms, step):
    """Begins a step with a chain of transforms.

    Args:
      transforms: list of functions and `Transform`s, in the order in which they are applied.
      step: `Step`.

    Returns:
      - A list of what losses are multiplied by, numbers and scalar tensors.
      - A function of a list of (gradient, variable), and of one that applies such a list, that returns the step's operation.
    """
    begun = [transform.begin(step) if isinstance(transform, Transform) else (None, _mapped_by(transform))
             for transform in transforms]

    def finish(grads, apply):
        rest = apply
        for _, link in reversed(begun):
            rest = _followed(link, rest)
        return rest(grads)

    return [factor for factor, _ in begun if factor is not None], finish


def mapped(functions, grads):
    """Returns a list of (gradient, variable) as functions of such lists leave it, one after the other."""
    for function in functions:
        grads = _checked(function(grads), function)
    return grads


def _followed(link, rest):
    return lambda grads: link(grads, rest)


def _mapped_by(transform):
    def link(grads, rest):
        return rest(mapped([transform], grads))
    return link


def _checked(grads, transform):
    try:
        pairs = [(gradient, variable) for gradient, variable in grads]
    except (TypeError, ValueError) as error:
        raise TypeError("The transform %s has to return a list of (gradient, variable); it returned %r."
                        % (getattr(transform, "__name__", transform), grads)) from error
    if all(gradient is None for gradient, _ in pairs):
        raise ValueError("The transform %s left no gradient." % getattr(transform, "__name__", transform))
    return pairs


def when(condition, build, otherwise=None):
    """Builds ops that run where a condition is true, in a `tf.cond`; returns an operation.

    Args:
      condition: scalar bool tensor.
      build, otherwise: functions without arguments that build them, and return a list of operations and tensors.
    """
    def branch(build):
        with tf.control_dependencies(build() if build is not None else []):
            return tf.constant(True)
    return tf.cond(condition, lambda: branch(build), lambda: branch(otherwise)).op


def clip_by_global_norm(clip_norm: Union[float, Tensor]) -> TransformFn:
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
    check(SCALAR, clip_norm=clip_norm)
    if not tf.is_tensor(clip_norm) and not isinstance(clip_norm, tf.Variable) and not clip_norm > 0:
        raise ValueError("clip_by_global_norm: clip_norm has to be more than 0, not %r." % (clip_norm,))

    def clip(grads):
        gradients, variables = zip(*grads)
        with tf.name_scope("clip_by_global_norm"):
            clipped, _ = tf.clip_by_global_norm(gradients, clip_norm)
        return list(zip(clipped, variables))
    return clip


def clip_by_value(least: Union[float, Tensor], most: Union[float, Tensor]) -> TransformFn:
    """Returns a transform that moves every number of a gradient of the global batch into an interval.

        g_v <- min(max(g_v, least), most)

    `tf.IndexedSlices` stay sparse: slices of one row are added up first, since their sum is the gradient; rows without a slice
    stay 0.

    Args:
      least: float or scalar tensor, the least value that is left.
      most: float or scalar tensor, the greatest.

    Returns:
      A function for `towers.minimize`'s `transforms`.

    Raises:
      ValueError: for numbers of which the second is not more than the first.

    Example:

        train_op = towers.minimize(replicas, optimizer, transforms=[towers.clip_by_value(-1.0, 1.0)])
    """
    check(SCALAR, least=least, most=most)
    if not any(map(tf.is_tensor, (least, most))) and not least < most:
        raise ValueError("clip_by_value: the second number has to be more than the first; they are %r and %r." % (least, most))

    def clip(grads):
        with tf.name_scope("clip_by_value"):
            return [(_clipped(gradient, least, most), variable) for gradient, variable in grads]
    return clip


def _clipped(gradient, least, most):
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        indices, numbers = tf.unique(gradient.indices)
        values = tf.math.unsorted_segment_sum(gradient.values, numbers, tf.shape(indices)[0])
        return tf.IndexedSlices(_clipped(values, least, most), indices, gradient.dense_shape)
    least, most = (tf.cast(bound, gradient.dtype) for bound in (least, most))
    return tf.minimum(tf.maximum(gradient, least), most)


def check_finite() -> TransformFn:
    """Returns a transform that fails, before anything is applied, where a gradient of the global batch is not finite.

    The error is TensorFlow's `InvalidArgumentError`, and names the variable. Update ops of the step have run by then.

    Returns:
      A function for `towers.minimize`'s `transforms`.

    Example:

        train_op = towers.minimize(replicas, optimizer, transforms=[towers.check_finite()])
    """
    def check(grads):
        with tf.name_scope("check_finite"):
            checked = [with_numbers(gradient, functools.partial(
                tf.debugging.check_numerics, message="The gradient of the variable %r is not finite" % variable.op.name))
                       for gradient, variable in grads]
            return [(gradient, variable) for gradient, (_, variable) in zip(tf.tuple(checked), grads)]
    return check
