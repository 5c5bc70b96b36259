"""`sync_batch_norm`: the layer, its variables, its moving averages and its gradient."""
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from towers.cross_tower import cross_tower_sum_at
from towers.exchange import gradient_place, meet_at, next_place, remember_place, tower_here
from tf_syncbn.graph_function import call, call_with_gradient
from tf_syncbn.moments import accumulator, local_moments, merge_groups
from tf_syncbn.moving_averages import collect_updates, moving_average_steps, update_ops
from tf_syncbn.normalization import (
    FUSED, FUSED_GRADIENT, PLAIN, gradient_sums, input_gradient, normalize, normalize_differences)
from tf_syncbn.renormalization import check_clipping, renorm_steps, square_root_of, with_corrections

__all__ = ["sync_batch_norm"]


class _Detail(NamedTuple):
    """What the layer's gradient needs besides tensors."""
    axis: int
    epsilon: float
    group_size: Any
    sums_by: str
    ops: str
    jit_compile: bool
    optional: tuple  # which of gamma, beta, mask and training there are, as bools


def sync_batch_norm(
        inputs, axis=-1, momentum=0.99, epsilon=1e-3, center=True, scale=True, beta_initializer=tf.zeros_initializer(),
        gamma_initializer=tf.ones_initializer(), moving_mean_initializer=tf.zeros_initializer(),
        moving_variance_initializer=tf.ones_initializer(), beta_regularizer=None, gamma_regularizer=None,
        beta_constraint=None, gamma_constraint=None, training=None, trainable=True, name=None, reuse=None, mask=None,
        group_size=None, updates_collections=tf.GraphKeys.UPDATE_OPS, renorm=False, renorm_clipping=None,
        renorm_momentum=0.99, unbiased=None, jit_compile=False):
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

    With `renorm` the output in training is that of batch renormalization (Ioffe 2017), by the moments of all towers; three
    variables more, `moving_stddev`, `renorm_mean` and `renorm_stddev`, are those of `tf.layers`.

    Gradients are those of one tower on the whole batch, to any order of derivative. None reaches `mask`. The backward pass
    keeps `inputs` and vectors of [C].

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
      name: str, the variable scope, or an open `tf.VariableScope`; None is "batch_normalization", numbered as tf.layers
        does.
      reuse: whether to reuse the variables of that scope; None does as the surrounding scope.
      mask: bool tensor or weights of the positions, of a shape that broadcasts to `inputs` without its channels. Masked
        positions are normalized too, and count in no moment, nor in the moving averages.
      group_size: int, batch moments are shared by groups of so many consecutive towers; it has to divide their number.
        None is all towers. The moving averages take the whole batch's moments.
      updates_collections: the collection or collections that the updates of moving averages are added to; None runs
        them before the output, and `()` leaves the moving averages alone.
      renorm: whether to renormalize.
      renorm_clipping: dict that may hold scalars or scalar tensors "rmin", "rmax", "dmax", the limits of the corrections.
      renorm_momentum: as `momentum`, of `renorm_mean` and `renorm_stddev`.
      unbiased: whether the moving variance takes the unbiased variance, whatever `tf.layers` would store.
      jit_compile: whether XLA compiles the layer's kernels (TensorFlow 2): faster where shapes are static and seldom
        change; each new shape takes up to a second of compilation.

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
    is_open = isinstance(name, tf.VariableScope)
    with tf.variable_scope(name, "batch_normalization", [inputs], reuse=reuse, auxiliary_name_scope=not is_open) as scope:
        scope.set_partitioner(None)
        inputs = tf.convert_to_tensor(inputs, name="inputs")
        momentum, renorm_momentum = (
            tf.convert_to_tensor(m) if isinstance(m, tf.Variable) else m for m in (momentum, renorm_momentum))
        axis = _check_inputs(inputs, axis, scope.name)
        training = _check_training(training, tower, scope.name)
        _check_numbers(momentum, epsilon, group_size, tower, scope.name)
        _check_numbers(renorm_momentum, epsilon, group_size, tower, scope.name)
        limits = check_clipping(renorm_clipping, scope.name)
        _check_jit(jit_compile, scope.name)
        dtype = accumulator(inputs.dtype)
        channels = tf.dimension_value(inputs.shape[axis])

        def variable(wanted, variable_name, initializer, is_trainable=False, regularizer=None, constraint=None):
            if not wanted:
                return None
            collections = [tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.MODEL_VARIABLES]
            return tf.get_variable(variable_name, [channels], dtype, initializer=initializer, regularizer=regularizer,
                                   constraint=constraint, trainable=is_trainable, collections=collections)

        gamma = variable(scale, "gamma", gamma_initializer, trainable, gamma_regularizer, gamma_constraint)
        beta = variable(center, "beta", beta_initializer, trainable, beta_regularizer, beta_constraint)
        moving = [variable(True, "moving_mean", moving_mean_initializer),
                  variable(True, "moving_variance", moving_variance_initializer)]
        if renorm:
            stddev_initializer = square_root_of(moving_variance_initializer)
            moving += [variable(True, "moving_stddev", stddev_initializer),
                       variable(True, "renorm_mean", moving_mean_initializer),
                       variable(True, "renorm_stddev", stddev_initializer)]
        gamma, beta = (v if v is None else tf.cast(v, dtype) for v in (gamma, beta))  # a custom getter may hand out float16
        if training is False:
            mean, variance = (tf.cast(v, dtype) for v in moving[:2])
            return tf.identity(normalize(inputs, mean, variance, gamma, beta, epsilon, axis), name="output")

        mask = _check_mask(mask, inputs, axis, scope.name)
        when = None if training is True else training
        detail = _Detail(axis, epsilon, group_size, *_fastest(inputs, axis, mask, tower, jit_compile), jit_compile,
                         tuple(tensor is not None for tensor in (gamma, beta, mask, when)))
        differences, near, packed = call(
            local_moments, inputs, mask, axis=axis, sums_by=detail.sums_by, jit_compile=jit_compile)
        aggregate = _aggregate(group_size)
        if renorm:
            aggregate = with_corrections(aggregate, when, *moving[3:], limits, epsilon)
        place, used, whole, *corrections = _meet(packed, aggregate, tower, channels)
        if when is not None:
            used = tf.where_v2(when, used, tf.concat([used[:1]] + [tf.cast(v, dtype) for v in moving[:2]], 0))
        if renorm:
            r, d = tf.split(tf.stop_gradient(corrections[0]), 2)
            gamma, d = (r, d) if gamma is None else (gamma * r, gamma * d)
            beta = d if beta is None else beta + d
            detail = detail._replace(optional=(True, True) + detail.optional[2:])
        y = call(normalize_differences, differences, near, used, gamma, beta, axis=axis, epsilon=epsilon,
                 dtype=inputs.dtype, ops=detail.ops, jit_compile=jit_compile)
        y = _with_gradient(place, detail, y, used, inputs, (gamma, beta, mask, when))
        if updates_collections != () and (tower is None or tower.is_first):
            rates = [_as_tensor_or_float(m) for m in (momentum, renorm_momentum)]
            if renorm:
                updates = update_ops(moving, renorm_steps, [whole, rates[0][0], rates[1][0], when], updates_collections, tower,
                                     keep=rates[0][1], renorm_keep=rates[1][1], epsilon=epsilon)
            else:
                updates = update_ops(moving, moving_average_steps, [whole, rates[0][0], when], updates_collections, tower,
                                     keep=rates[0][1],
                                     unbiased=_stores_unbiased(inputs, axis) if unbiased is None else bool(unbiased))
            if updates_collections is None:
                with tf.control_dependencies(updates):
                    y = tf.identity(y)
            else:
                collect_updates(updates, updates_collections, tower)
        return tf.identity(y, name="output")


def _as_tensor_or_float(momentum):
    return (momentum, None) if tf.is_tensor(momentum) else (None, float(momentum))


def _fastest(inputs, axis, mask, tower, jit_compile):
    """Returns how `channel_sums` is to sum and which ops the kernels are to use; see `tf_syncbn.normalization`."""
    if jit_compile:
        return "slices", PLAIN
    on_cpu = tower is not None and "CPU" in tower.device.upper()
    sums_by = "matmul" if on_cpu else "reduce"
    if accumulator(inputs.dtype) != tf.float32 or axis != inputs.shape.rank - 1:
        return sums_by, PLAIN
    products = mask is not None or on_cpu and tf.__version__.startswith("1.")
    return sums_by, FUSED if products else FUSED_GRADIENT


def _aggregate(group_size):
    """Returns an aggregate for an exchange: for each tower, the moments of its group and of all towers."""
    def aggregate(per_tower):
        packed = [contribution for contribution, in per_tower]
        size = group_size or len(packed)
        *groups, whole = call(merge_groups, *packed, group_size=size)
        return [[groups[i // size], whole] for i in range(len(packed))]
    return aggregate


def _meet(packed, aggregate, tower, channels):
    """Returns the layer's place, and what the aggregate holds for this tower."""
    if tower is None:
        return (None, *aggregate([[packed]])[0])
    with tf.name_scope("exchange"):
        place = next_place("sync_batch_norm", [packed])
        merged = [(packed.dtype, [2 * channels + 1])] * 2
        return (place, *meet_at(place, [packed], aggregate, merged + [(packed.dtype, [2 * channels])]))


def _with_gradient(place, detail, y, moments, x, optional):
    """Returns `y` with the layer's gradient; autodiff sees neither how `y` nor how its moments were computed."""
    tensors = [y, moments, x] + [tensor for tensor in optional if tensor is not None]
    with tf.get_default_graph().gradient_override_map({"IdentityN": "SyncBatchNorm"}):
        outputs = tf.identity_n(tensors, name="with_gradient")
    remember_place(outputs[0].op, place, detail)
    return outputs[0]


@tf.RegisterGradient("SyncBatchNorm")
def _sync_batch_norm_gradient(op, dy, d_moments, *_):
    """The gradient of one tower's part; `op` passes on what it was given, moments among them.

    The moments are an output of `op`, whose gradient arrives here as `d_moments` when this function is itself
    differentiated: hence derivatives of any order. In a first derivative it is zeros, and towers exchange half as much.
    """
    place, detail = gradient_place(op)
    moments, x = op.outputs[1], op.inputs[2]
    given = iter(op.inputs[3:])
    gamma, _, mask, training = optional = [next(given) if there else None for there in detail.optional]
    options = {"axis": detail.axis, "epsilon": detail.epsilon, "ops": detail.ops, "jit_compile": detail.jit_compile,
               "plain": {"ops": PLAIN}}
    with tf.name_scope("exchange"):
        sums, *scaled = call_with_gradient(gradient_sums, dy, x, moments, gamma, masked=mask is not None,
                                           sums_by=detail.sums_by, scales=detail.ops == FUSED_GRADIENT, **options)
        totals = sums if _is_zeros(d_moments) else tf.concat([sums, d_moments[1:]], 0)
        if place is not None:
            totals = cross_tower_sum_at(place, totals, detail.group_size)
        totals, moment_totals = (totals, None) if _is_zeros(d_moments) else tf.split(totals, 2)
    dx, = call_with_gradient(input_gradient, dy, x, moments, gamma, totals, moment_totals, scaled[0] if scaled else None,
                             training, mask, **options)
    d_beta, d_gamma = tf.split(sums, 2)
    of_optional = [d for d, tensor in zip((d_gamma, d_beta, None, None), optional) if tensor is not None]
    return [None, None, dx] + of_optional


def _is_zeros(tensor):
    """Tells whether a tensor is known to be zero while the graph is built."""
    if tensor.op.type == "ZerosLike":  # what tf.gradients makes for an output that nobody uses
        return True
    value = tf.get_static_value(tensor)
    return value is not None and not value.any()


def _stores_unbiased(inputs, axis):
    """Tells whether `tf.layers` of this TensorFlow would store the unbiased variance: its fused kernel does."""
    fused_axes = {4: (1, 3)} if tf.__version__.startswith("1.") else {4: (1, 3), 5: (1, 4)}
    return inputs.dtype != tf.float64 and axis in fused_axes.get(inputs.shape.rank, ())


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


def _check_jit(jit_compile, name):
    if jit_compile and tf.__version__.startswith("1."):
        raise ValueError("sync_batch_norm %r: jit_compile=True needs TensorFlow 2; this is %s." % (name, tf.__version__))


def _check_mask(mask, x, axis, name):
    """Returns the mask with an axis of size 1 for the channels and the dtype of the statistics of `x`, or None."""
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
    return tf.stop_gradient(tf.cast(tf.expand_dims(mask, axis), accumulator(x.dtype)))
