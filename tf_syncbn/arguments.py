"""What `sync_batch_norm` may be given: each argument checked while the graph is built, with the layer's name in the message."""
import tensorflow.compat.v1 as tf

from tf_syncbn.kernels.layer import Layer
from towers.api.arguments import FLAG, FUNCTION, INITIALIZER, NUMBER, SCALAR, Kind, as_tensor, check, optional

__all__ = ["check_inputs", "check_kinds", "check_mask", "check_numbers", "check_training"]

_KINDS = {
    FLAG: "center scale trainable renorm", optional(FLAG): "unbiased fused",
    NUMBER: "epsilon", SCALAR: "momentum renorm_momentum",
    optional(FUNCTION): "beta_regularizer gamma_regularizer beta_constraint gamma_constraint",
    optional(INITIALIZER): "beta_initializer gamma_initializer moving_mean_initializer moving_variance_initializer",
    optional(Kind("a str or a tf.VariableScope", lambda value: isinstance(value, (str, tf.VariableScope)))): "name",
    optional(Kind("True, False or tf.AUTO_REUSE", lambda value: FLAG.holds(value) or isinstance(
        value, type(tf.AUTO_REUSE)))): "reuse",
    optional(Kind("a dict", lambda value: isinstance(value, dict))): "renorm_clipping",
    optional(Kind("the name of a collection or a list of such", lambda value: isinstance(
        value, (str, list, tuple)))): "updates_collections"}


def check_kinds(arguments):
    """Raises TypeError for an argument, in a dict from names, that is of another kind than it has to be."""
    for kind, names in _KINDS.items():
        check(kind, **{name: arguments[name] for name in names.split()})


def check_inputs(inputs, axis, name):
    """Returns a layer's inputs, a floating point tensor of known rank and number of channels, and the `Layer`."""
    inputs = as_tensor(inputs, "inputs")
    if not inputs.dtype.is_floating:
        raise TypeError("sync_batch_norm %r normalizes floating point tensors; %r is %s: cast it first."
                        % (name, inputs.name, inputs.dtype.name))
    rank = inputs.shape.rank
    if rank is None or rank < 2:
        raise ValueError("sync_batch_norm %r needs inputs of known rank, 2 or more; %r has shape %s."
                         % (name, inputs.name, inputs.shape))
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise ValueError("sync_batch_norm %r: axis is an int from %d to %d for inputs of rank %d, not %r."
                         % (name, -rank, rank - 1, rank, axis))
    if tf.dimension_value(inputs.shape[axis]) is None:
        raise ValueError("sync_batch_norm %r needs a known number of channels; %r has shape %s, and axis is %d."
                         % (name, inputs.name, inputs.shape, axis))
    return inputs, Layer(inputs.shape, inputs.dtype, axis % rank)


def check_training(training, tower, name):
    """Returns the tower's `training` for None; a bool, or a scalar bool tensor."""
    if training is None:
        if tower is None:
            raise ValueError("sync_batch_norm %r stands outside of towers, so nothing says whether it trains: give it "
                             "training=True, training=False, or a boolean tensor." % name)
        training = tower.training
    if tf.is_tensor(training):
        if training.dtype.base_dtype != tf.bool or training.shape.rank not in (0, None):
            raise TypeError("sync_batch_norm %r: training is a scalar bool; %r is %s of shape %s."
                            % (name, training.name, training.dtype.name, training.shape))
        return training
    if training not in (True, False):
        raise TypeError("sync_batch_norm %r: training is a bool or a scalar bool tensor, not %r." % (name, training))
    return bool(training)


def check_numbers(momenta, epsilon, group_size, tower, name):
    """Raises for momenta and an epsilon out of range, and for groups that do not divide the towers."""
    for momentum in momenta:
        if not tf.is_tensor(momentum) and not 0 <= momentum <= 1:
            raise ValueError("sync_batch_norm %r: momentum is between 0 and 1, not %r." % (name, momentum))
    if epsilon < 0:
        raise ValueError("sync_batch_norm %r: epsilon is 0 or more, not %r." % (name, epsilon))
    num_towers = 1 if tower is None else tower.num_towers
    if group_size is not None and (not isinstance(group_size, int) or group_size < 1 or (
            tower is not None and num_towers % group_size)):
        raise ValueError("sync_batch_norm %r: group_size has to be an int that divides the number of towers, %d; it is %r."
                         % (name, num_towers, group_size))


def check_mask(mask, layer, name):
    """Returns the mask with an axis of size 1 for the channels and the dtype of the layer's statistics, or None."""
    if mask is None:
        return None
    mask = as_tensor(mask, "mask")
    if mask.dtype != tf.bool and not mask.dtype.is_floating and not mask.dtype.is_integer:
        raise TypeError("sync_batch_norm %r: a mask is bool or weights; %r is %s." % (name, mask.name, mask.dtype.name))
    positions = layer.positions
    try:
        known = mask.shape.rank is not None and tf.broadcast_static_shape(mask.shape, positions)
        fits = bool(known) and known.rank == positions.rank and known.is_compatible_with(positions)
    except ValueError:
        fits = False
    if not fits:
        raise ValueError("sync_batch_norm %r: a mask has to broadcast to the inputs without their channels, %s; %r has "
                         "shape %s." % (name, positions, mask.name, mask.shape))
    for _ in range(positions.rank - mask.shape.rank):
        mask = tf.expand_dims(mask, 0)
    return tf.stop_gradient(tf.cast(tf.expand_dims(mask, layer.axis), layer.accumulator))
