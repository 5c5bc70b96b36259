"""`sync_batch_norm`: the layer, its variables and its moving averages."""
import functools
from typing import Any, Dict, Optional, Sequence, Union

import tensorflow.compat.v1 as tf

from tf_syncbn.arguments import check_inputs, check_kinds, check_mask, check_numbers, check_training
from tf_syncbn.kernels.inference import normalize_by_averages
from tf_syncbn.kernels.moments import packed
from tf_syncbn.moving_averages import AveragedLayer, collect_updates, moving_average_steps, remember_layer, update_ops
from tf_syncbn.renormalization import check_clipping, renorm_steps, square_root_of, with_corrections
from tf_syncbn.whole_batch import Normalization, normalize_over_towers
from towers.api.annotations import Tensor, TensorFn, TensorLike, VariableScope
from towers.meeting.exchanges import tower_here

__all__ = ["sync_batch_norm"]

# What the layer's variables average: moving_mean, moving_variance, and with renorm moving_stddev, renorm_mean, renorm_stddev.
_AVERAGED = ("mean", "variance", "stddev", "mean", "stddev")


def sync_batch_norm(
        inputs: TensorLike, axis: int = -1, momentum: Union[float, Tensor] = 0.99, epsilon: float = 1e-3, center: bool = True,
        scale: bool = True, beta_initializer: Any = tf.zeros_initializer(), gamma_initializer: Any = tf.ones_initializer(),
        moving_mean_initializer: Any = tf.zeros_initializer(), moving_variance_initializer: Any = tf.ones_initializer(),
        beta_regularizer: Optional[TensorFn] = None, gamma_regularizer: Optional[TensorFn] = None,
        beta_constraint: Optional[TensorFn] = None, gamma_constraint: Optional[TensorFn] = None,
        training: Union[bool, Tensor, None] = None, trainable: bool = True, name: Union[str, VariableScope, None] = None,
        reuse: Optional[bool] = None, mask: Optional[TensorLike] = None, group_size: Optional[int] = None,
        updates_collections: Union[str, Sequence[str], None] = tf.GraphKeys.UPDATE_OPS, renorm: bool = False,
        renorm_clipping: Optional[Dict[str, TensorLike]] = None, renorm_momentum: Union[float, Tensor] = 0.99,
        unbiased: Optional[bool] = None, fused: Optional[bool] = None) -> Tensor:
    """Normalizes a batch by the moments of all towers' batches together.

        y = gamma (x - mean) / sqrt(var + epsilon) + beta

    Method: Ioffe and Szegedy, "Batch Normalization" (2015). What `mean` and `var` are:

    - `training=True`: those of the whole batch (`var` biased), merged exactly from the towers' counts, means and centred squares
      (Chan, Golub and LeVeque 1979), so uneven and empty towers are exact too.
    - `training=False`: the moving averages.
    - a boolean tensor: the moments are always computed, towers always meet, and the value chooses what is used.
    - `training=None`: what the tower says, that is, `TowerBuilder.build(training=...)`.
    - outside of towers, and with one tower: plain batch norm, so one model function serves training, evaluation and export.

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
      beta_initializer: initializer of `beta`.
      gamma_initializer: initializer of `gamma`.
      moving_mean_initializer: initializer of `moving_mean`.
      moving_variance_initializer: initializer of `moving_variance`.
      beta_regularizer: function of `beta` that returns a loss, or None.
      gamma_regularizer: the same of `gamma`.
      beta_constraint: function of the value of `beta` after an optimizer's step, or None.
      gamma_constraint: the same of `gamma`.
      training: bool, scalar bool tensor, or None, see above.
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
      fused: as `tf.layers.batch_normalization` has it: False keeps the moving variance biased, as its layer that is not fused
        does. The kernels follow the input, not this argument.

    Returns:
      A tensor of the shape and dtype of `inputs`.

    Raises:
      TypeError: for inputs or a mask of another dtype, or a `training` that is no boolean.
      ValueError: for an unknown rank or number of channels, an axis that does not exist, `training=None` outside of
        towers, a mask that does not broadcast, a group size that does not divide the towers; in training, inside a tf.cond
        or tf.while_loop of a tower.
      TowerMismatchError: (a ValueError) where a tower lacks this layer or has another in its place.

    Example:

        x = tf.nn.relu(tf_syncbn.sync_batch_norm(x, momentum=0.9))     # in a model function that `TowerBuilder.build` builds
    """
    if tf.executing_eagerly():
        raise RuntimeError("sync_batch_norm builds TensorFlow 1 graphs, and eager execution is on: call "
                           "tf.compat.v1.disable_eager_execution() when the program starts.")
    check_kinds(locals())
    tower = tower_here("sync_batch_norm")
    is_open = isinstance(name, tf.VariableScope)
    with tf.variable_scope(name, "batch_normalization", [inputs], reuse=reuse, auxiliary_name_scope=not is_open) as scope:
        scope.set_partitioner(None)
        momentum, renorm_momentum = (
            tf.convert_to_tensor(m) if isinstance(m, tf.Variable) else m for m in (momentum, renorm_momentum))
        inputs, layer = check_inputs(inputs, axis, scope.name)
        training = check_training(training, tower, scope.name)
        check_numbers((momentum, renorm_momentum), epsilon, group_size, tower, scope.name)
        limits = check_clipping(renorm_clipping, scope.name)

        def variable(wanted, variable_name, initializer, is_trainable=False, regularizer=None, constraint=None):
            if not wanted:
                return None
            collections = [tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.MODEL_VARIABLES]
            return tf.get_variable(variable_name, [layer.channels], layer.accumulator, initializer, regularizer, is_trainable,
                                   collections, constraint=constraint)

        gamma = variable(scale, "gamma", gamma_initializer, trainable, gamma_regularizer, gamma_constraint)
        beta = variable(center, "beta", beta_initializer, trainable, beta_regularizer, beta_constraint)
        moving = [variable(True, "moving_mean", moving_mean_initializer),
                  variable(True, "moving_variance", moving_variance_initializer)]
        if renorm:
            stddev_initializer = square_root_of(moving_variance_initializer)
            moving += [variable(True, "moving_stddev", stddev_initializer),
                       variable(True, "renorm_mean", moving_mean_initializer),
                       variable(True, "renorm_stddev", stddev_initializer)]
        gamma, beta, mean, variance = (  # a custom getter may hand out float16
            v if v is None else tf.cast(tf.convert_to_tensor(v), layer.accumulator) for v in [gamma, beta] + moving[:2])
        if training is False:
            return tf.identity(normalize_by_averages(inputs, mean, variance, gamma, beta, epsilon, layer), name="output")

        mask = check_mask(mask, layer, scope.name)
        when = None if training is True else training
        correct = functools.partial(with_corrections, training=when, mean=moving[3], stddev=moving[4], limits=limits,
                                    epsilon=epsilon, tower=tower) if renorm else None
        arguments = dict(momentum=momentum, updates_collections=updates_collections, unbiased=unbiased, fused=fused,
                         renorm=renorm, **({"renorm_momentum": renorm_momentum} if renorm else {}),
                         **{"renorm_clipping " + key: limits[key] for key in sorted(limits)})
        how = Normalization(layer, epsilon, group_size)
        y, whole = normalize_over_towers(inputs, gamma, beta, how, tower, mask, when, (mean, variance), correct, arguments)
        if updates_collections != () and (tower is None or tower.is_first):
            unbiased = fused is not False and _stores_unbiased(layer) if unbiased is None else bool(unbiased)
            updates = _updates(moving, whole, momentum, renorm_momentum, when, epsilon, unbiased, updates_collections, tower,
                               layer.count if mask is None else None)
            averages = dict(zip([v.op.name for v in moving], _AVERAGED))
            of_all = packed(*whole)  # now: the graph may be finalized when it is asked for
            remember_layer(AveragedLayer(scope.name, averages, unbiased and not renorm, epsilon, lambda: of_all), tower)
            if updates_collections is None:
                with tf.control_dependencies(updates):
                    y = tf.identity(y)
            else:
                collect_updates(updates, updates_collections, tower)
        return tf.identity(y, name="output")


def _updates(moving, moments, momentum, renorm_momentum, training, epsilon, unbiased, collections, tower, known):
    """Returns the ops that move the layer's moving averages to the moments of all towers; the tower's own count may be known."""
    (rate, keep), (renorm_rate, renorm_keep) = (
        (m, None) if tf.is_tensor(m) else (None, float(m)) for m in (momentum, renorm_momentum))
    if len(moving) == 2:
        return update_ops(moving, moving_average_steps, [*moments, rate, training], collections, tower, keep=keep,
                          unbiased=unbiased, counted=bool(known),
                          known=known if tower is None or tower.num_towers == 1 else None)
    return update_ops(moving, renorm_steps, [*moments, rate, renorm_rate, training], collections, tower, keep=keep,
                      renorm_keep=renorm_keep, epsilon=epsilon)


def _stores_unbiased(layer):
    """Tells whether `tf.layers` of this TensorFlow would store the unbiased variance: its fused kernel does."""
    fused_axes = {4: (1, 3)} if tf.__version__.startswith("1.") else {4: (1, 3), 5: (1, 4)}
    return layer.dtype != tf.float64 and layer.axis in fused_axes.get(layer.shape.rank, ())
