"""`sync_batch_norm`: the layer, its variables, its moving averages and its gradient."""
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from towers.cross_tower import cross_tower_sum_at
from towers.exchange import gradient_place, meet_at, next_place, remember_place, tower_here
from towers.graph_walk import written_variable
from tf_syncbn.moments import local_moments, merge_groups, unpack
from tf_syncbn.normalization import gradient_sums, input_gradient, normalize

__all__ = ["sync_batch_norm"]


class _Detail(NamedTuple):
    """What the layer's gradient needs besides tensors."""
    axis: int
    epsilon: float
    group_size: Any
    has_gamma: bool
    has_beta: bool


def sync_batch_norm(
        inputs, axis=-1, momentum=0.99, epsilon=1e-3, center=True, scale=True, beta_initializer=tf.zeros_initializer(),
        gamma_initializer=tf.ones_initializer(), moving_mean_initializer=tf.zeros_initializer(),
        moving_variance_initializer=tf.ones_initializer(), beta_regularizer=None, gamma_regularizer=None,
        beta_constraint=None, gamma_constraint=None, training=None, trainable=True, name=None, reuse=None, mask=None,
        group_size=None, updates_collections=tf.GraphKeys.UPDATE_OPS):
    """Normalizes a batch by the moments of all towers' batches together.

        y = gamma (x - mean) / sqrt(var + epsilon) + beta

    In training, `mean` and `var` (biased) are those of the whole batch, merged exactly from counts, means and centred
    squares (Chan, Golub and LeVeque 1979), so uneven and empty towers are exact too; outside of training they are the
    moving averages. Method: Ioffe and Szegedy, "Batch Normalization" (2015). Outside of towers, and with one tower, it is
    plain batch norm, so one model function serves training, evaluation and export.

    Variables, shared by all towers: `gamma`, `beta`, `moving_mean`, `moving_variance`, of shape [C], float32 (float64 for
    float64 inputs), in GLOBAL_VARIABLES and MODEL_VARIABLES, in the variable scope `name`. Towers meet once forward and
    once in each gradient. The moving averages are updated once a step, `m <- momentum m + (1 - momentum) batch`, by
    ops that `towers.minimize` runs. The moving variance takes what `tf.layers.batch_normalization` would store: the
    unbiased variance, times `n / max(n - 1, 1)`, where its fused kernel runs (rank 4 with axis 1 or 3, on TensorFlow 2
    also rank 5 with axis 1 or 4, not float64), the biased one elsewhere. Where nothing at all was counted they stay as
    they are.

    Gradients are those of one tower on the whole batch, to any order of derivative. None reaches `mask`.

    Args:
      inputs: float16, bfloat16, float32 or float64 tensor of known rank, at least 2, and a known number of channels C.
      axis: int, the channels' axis: -1 for NHWC, 1 for NCHW.
      momentum: float between 0 and 1, or scalar tensor, of the moving averages.
      epsilon: float, added to the variance.
      center: whether to add `beta`.
      scale: whether to multiply by `gamma`.
      beta_initializer, gamma_initializer, moving_mean_initializer, moving_variance_initializer: of the variables.
      beta_regularizer, gamma_regularizer: functions of a variable that return a loss, or None.
      beta_constraint, gamma_constraint: functions of a variable's value after an optimizer's step, or None.
      training: bool or scalar bool tensor. None takes the tower's, that is, `TowerBuilder.build`'s. With a tensor the
        moments are always computed, towers always meet, and the value chooses what is used.
      trainable: whether `gamma` and `beta` are in TRAINABLE_VARIABLES.
      name: str, the variable scope; None is "batch_normalization", numbered as tf.layers does.
      reuse: whether to reuse the variables of that scope; None does as the surrounding scope.
      mask: bool tensor or weights of the positions, of a shape that broadcasts to `inputs` without its channels. Masked
        positions are normalized too, and count in no moment, nor in the moving averages.
      group_size: int, batch moments are shared by groups of so many consecutive towers; it has to divide their number.
        None is all towers. The moving averages take the whole batch's moments.
      updates_collections: the collection or collections that the updates of moving averages are added to; None runs
        them before the output, and `()` leaves the moving averages alone.

    Returns:
      A tensor of the shape and dtype of `inputs`.

    Raises:
      TypeError: for inputs or a mask of another dtype, or a `training` that is no boolean.
      ValueError: for an unknown rank or number of channels, an axis that does not exist, `training=None` outside of
        towers, a mask that does not broadcast, a group size that does not divide the towers; in training, inside a tf.cond
        or tf.while_loop of a tower.
      TowerMismatchError: (a ValueError) where a tower lacks this layer or has another in its place.
    """
    if tf.executing_eagerly():
        raise RuntimeError("sync_batch_norm builds TensorFlow 1 graphs, and eager execution is on: call "
                           "tf.compat.v1.disable_eager_execution() when the program starts.")
    tower = tower_here("sync_batch_norm")
    with tf.variable_scope(name, "batch_normalization", [inputs], reuse=reuse) as scope:
        scope.set_partitioner(None)
        inputs = tf.convert_to_tensor(inputs, name="inputs")
        momentum = tf.convert_to_tensor(momentum) if isinstance(momentum, tf.Variable) else momentum
        axis = _check_inputs(inputs, axis, scope.name)
        training = _check_training(training, tower, scope.name)
        _check_numbers(momentum, epsilon, group_size, tower, scope.name)
        dtype = tf.float64 if inputs.dtype == tf.float64 else tf.float32
        channels = tf.dimension_value(inputs.shape[axis])

        def variable(wanted, variable_name, initializer, is_trainable, regularizer=None, constraint=None):
            if not wanted:
                return None
            collections = [tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.MODEL_VARIABLES]
            return tf.get_variable(variable_name, [channels], dtype, initializer=initializer, regularizer=regularizer,
                                   constraint=constraint, trainable=is_trainable, collections=collections)

        gamma = variable(scale, "gamma", gamma_initializer, trainable, gamma_regularizer, gamma_constraint)
        beta = variable(center, "beta", beta_initializer, trainable, beta_regularizer, beta_constraint)
        moving_mean = variable(True, "moving_mean", moving_mean_initializer, False)
        moving_variance = variable(True, "moving_variance", moving_variance_initializer, False)
        affine = [v if v is None else tf.cast(v, dtype) for v in (gamma, beta)]  # a custom getter may hand out float16
        x = tf.cast(inputs, dtype)
        if training is False:
            y = normalize(x, tf.cast(moving_mean, dtype), tf.cast(moving_variance, dtype), *affine, epsilon, axis)
            return tf.cast(y, inputs.dtype)

        mask = _check_mask(mask, x, axis, scope.name)
        place, used, whole = _meet(x, axis, mask, group_size, tower)
        count, mean, variance = unpack(used, channels)
        if training is not True:
            mean = tf.where_v2(training, mean, moving_mean)
            variance = tf.where_v2(training, variance, moving_variance)
        y = normalize(x, mean, variance, *affine, epsilon, axis)
        detail = _Detail(axis, epsilon, group_size, scale, center)
        y = _with_gradient(place, detail, y, mean, variance, x, *affine, count, training, mask)
        if updates_collections != () and (tower is None or tower.is_first):
            updates = _updates(moving_mean, moving_variance, unpack(whole, channels), momentum, training,
                               _stores_unbiased(inputs, axis), _earlier_updates(updates_collections, tower))
            if updates_collections is None:
                with tf.control_dependencies(updates):
                    y = tf.identity(y)
            else:
                _collect(updates, updates_collections, tower)
        return tf.cast(y, inputs.dtype, name="output")


def _meet(x, axis, mask, group_size, tower):
    """Returns the layer's place, and the packed moments of the tower's group and of all towers."""
    packed = local_moments(x, axis, mask)
    aggregate = merge_groups(group_size)
    if tower is None:
        used, whole = aggregate([[packed]])[0]
        return None, used, whole
    with tf.name_scope("exchange"):
        place = next_place("sync_batch_norm", [packed])
        if group_size is None:
            used, = meet_at(place, [packed], lambda per_tower: [r[:1] for r in aggregate(per_tower)],
                            [(packed.dtype, packed.shape)])
            return place, used, used
        used, whole = meet_at(place, [packed], aggregate, [(packed.dtype, packed.shape)] * 2)
        return place, used, whole


def _with_gradient(place, detail, y, mean, variance, x, gamma, beta, count, training, mask):
    """Returns `y` with the layer's gradient; autodiff sees neither how `y` nor how its moments were computed."""
    tensors = [y, mean, variance, x, count, tf.cast(training, x.dtype)]
    tensors += [tensor for tensor in (gamma, beta, mask) if tensor is not None]
    with tf.get_default_graph().gradient_override_map({"IdentityN": "SyncBatchNorm"}):
        outputs = tf.identity_n(tensors, name="with_gradient")
    remember_place(outputs[0].op, place, detail)
    return outputs[0]


@tf.RegisterGradient("SyncBatchNorm")
def _sync_batch_norm_gradient(op, dy, d_mean, d_variance, *_):
    """The gradient of one tower's part; `op` passes on what it was given, moments among them.

    With `r = 1 / sqrt(var + epsilon)` and `a = gamma r`, the loss pulls at the moments by `-a sum dy` and
    `-a r^2 / 2 sum dy (x - mean)`, summed over towers, and each counted position has its share in them:
    `dx = a dy + mask (G_mean + 2 (x - mean) G_var) / n`. The moments are outputs of `op`, whose gradients arrive here as
    `d_mean` and `d_variance` when this function is itself differentiated: hence derivatives of any order.
    """
    place, detail = gradient_place(op)
    mean, variance = op.outputs[1:3]
    x, count, training = op.inputs[3:6]
    optional = list(op.inputs[6:])
    gamma = optional.pop(0) if detail.has_gamma else None
    if detail.has_beta:
        optional.pop(0)
    mask = optional[0] if optional else None
    with tf.name_scope("exchange"):
        inverse = tf.rsqrt(variance + detail.epsilon)
        scale = inverse if gamma is None else gamma * inverse
        sum_dy, sum_dy_centred = gradient_sums(dy, x, mean, detail.axis)
        packed = tf.concat([d_mean - scale * sum_dy,
                            d_variance - 0.5 * scale * tf.square(inverse) * sum_dy_centred], 0)
        if place is not None:
            packed = cross_tower_sum_at(place, packed, detail.group_size)
        share = tf.div_no_nan(training, count)
        offset, slope = tf.split(packed * share, 2)
    dx = input_gradient(dy, x, mean, scale, offset, 2 * slope, detail.axis, mask)
    affine = ([sum_dy_centred * inverse] if detail.has_gamma else []) + ([sum_dy] if detail.has_beta else [])
    return [None, None, None, dx, None, None] + affine + ([] if mask is None else [None])


def _stores_unbiased(inputs, axis):
    """Tells whether `tf.layers` of this TensorFlow would store the unbiased variance: its fused kernel does."""
    fused_axes = {4: (1, 3)} if tf.__version__.startswith("1.") else {4: (1, 3), 5: (1, 4)}
    return inputs.dtype != tf.float64 and axis in fused_axes.get(inputs.shape.rank, ())


def _updates(moving_mean, moving_variance, moments, momentum, training, unbiased, earlier):
    """Returns the two ops that move the moving averages to the batch's moments; they do nothing where n = 0."""
    count, mean, variance = moments
    if unbiased:
        variance *= count / tf.maximum(count - 1, 1)
    # Not tf.cast of a Python float: that rounds it to float32 on the way to float64.
    rate = tf.cast(1 - momentum, mean.dtype) if tf.is_tensor(momentum) else tf.constant(1 - momentum, mean.dtype)
    counts = count > 0 if training is True else tf.logical_and(count > 0, training)
    return [_move(moving_mean, mean, rate, counts, earlier, "update_moving_mean"),
            _move(moving_variance, variance, rate, counts, earlier, "update_moving_variance")]


def _move(variable, value, rate, counts, earlier, name):
    """Returns the op that moves one moving average, after the updates of a layer that is applied more than once."""
    with tf.control_dependencies([op for op in earlier if written_variable(op) is variable.op]):
        difference = variable.read_value() - tf.cast(value, variable.dtype.base_dtype)
        # Not a product with 0: the moments of what does not count may be infinite.
        step = tf.where_v2(counts, difference * tf.cast(rate, difference.dtype), tf.zeros_like(difference))
        return tf.assign_sub(variable, step, name=name).op


def _earlier_updates(collections, tower):
    """Returns the update ops collected so far, among them those of this layer if it was applied before."""
    items = list(tower.shared_updates) if tower is not None else []
    for collection in [collections] if isinstance(collections, str) else collections or ():
        items += tf.get_collection(collection)
    return [item for item in items if isinstance(item, tf.Operation)]


def _collect(updates, collections, tower):
    collections = [collections] if isinstance(collections, str) else list(collections)
    for update in updates:
        for collection in collections:
            if tower is not None and collection == tf.GraphKeys.UPDATE_OPS:
                tower.add_update(update, shared=True)
            else:
                tf.add_to_collection(collection, update)


def _check_inputs(inputs, axis, name):
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
    return axis % rank


def _check_training(training, tower, name):
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


def _check_numbers(momentum, epsilon, group_size, tower, name):
    if not tf.is_tensor(momentum) and not 0 <= momentum <= 1:
        raise ValueError("sync_batch_norm %r: momentum is between 0 and 1, not %r." % (name, momentum))
    if epsilon < 0:
        raise ValueError("sync_batch_norm %r: epsilon is 0 or more, not %r." % (name, epsilon))
    num_towers = 1 if tower is None else tower.num_towers
    if group_size is not None and (not isinstance(group_size, int) or group_size < 1 or (
            tower is not None and num_towers % group_size)):
        raise ValueError("sync_batch_norm %r: group_size has to be an int that divides the number of towers, %d; it is %r."
                         % (name, num_towers, group_size))


def _check_mask(mask, x, axis, name):
    """Returns the mask with an axis of size 1 for the channels and the dtype of `x`, or None."""
    if mask is None:
        return None
    mask = tf.convert_to_tensor(mask)
    if mask.dtype != tf.bool and not mask.dtype.is_floating and not mask.dtype.is_integer:
        raise TypeError("sync_batch_norm %r: a mask is bool or weights; %r is %s." % (name, mask.name, mask.dtype.name))
    positions = [size for i, size in enumerate(x.shape.as_list()) if i != axis]
    try:
        known = mask.shape.rank is not None and tf.broadcast_static_shape(mask.shape, tf.TensorShape(positions))
        fits = bool(known) and known.rank == len(positions) and known.is_compatible_with(positions)
    except ValueError:
        fits = False
    if not fits:
        raise ValueError("sync_batch_norm %r: a mask has to broadcast to the inputs without their channels, %s; %r has "
                         "shape %s." % (name, tf.TensorShape(positions), mask.name, mask.shape))
    for _ in range(len(positions) - mask.shape.rank):
        mask = tf.expand_dims(mask, 0)
    return tf.stop_gradient(tf.cast(tf.expand_dims(mask, axis), x.dtype))
