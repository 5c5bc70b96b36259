"""`sync_batch_norm` with the arguments of `tf.contrib.layers.batch_norm`, to stand as `normalizer_fn` in slim models.

    with slim.arg_scope([slim.conv2d], normalizer_fn=tf_syncbn.slim.batch_norm, normalizer_params={"is_training": True}):

Nothing of `tf.contrib` is imported. Where `arg_scope` is to set the arguments of the function itself, register it once:
`batch_norm = slim.add_arg_scope(tf_syncbn.slim.batch_norm)`.
"""
from typing import Any, Dict, Optional, Sequence, Union

import tensorflow.compat.v1 as tf

from tf_syncbn.batch_norm import sync_batch_norm
from towers.api.annotations import Tensor, TensorFn, TensorLike, VariableScope

__all__ = ["batch_norm"]

_PARAMETERS = ("beta", "gamma", "moving_mean", "moving_variance")


def batch_norm(
        inputs: TensorLike, decay: Union[float, Tensor] = 0.999, center: bool = True, scale: bool = False, epsilon: float = 0.001,
        activation_fn: Optional[TensorFn] = None, param_initializers: Optional[Dict[str, Any]] = None,
        param_regularizers: Optional[Dict[str, Any]] = None,
        updates_collections: Union[str, Sequence[str], None] = tf.GraphKeys.UPDATE_OPS,
        is_training: Union[bool, Tensor, None] = True, reuse: Optional[bool] = None,
        variables_collections: Union[str, Sequence[str], Dict[str, Any], None] = None,
        outputs_collections: Union[str, Sequence[str], None] = None, trainable: bool = True,
        batch_weights: Optional[TensorLike] = None, fused: Optional[bool] = None, data_format: str = "NHWC",
        zero_debias_moving_mean: bool = False, scope: Union[str, VariableScope, None] = None, renorm: bool = False,
        renorm_clipping: Optional[Dict[str, TensorLike]] = None, renorm_decay: Union[float, Tensor] = 0.99,
        adjustment: Any = None, group_size: Optional[int] = None) -> Tensor:
    """Normalizes a batch by the moments of all towers' batches together, called as `tf.contrib.layers.batch_norm` is.

    Variables, their names and their collections are contrib's, so a slim model's checkpoints load. As there, the moving
    variance takes the unbiased variance for inputs of rank 2 and 4, unless `fused=False`, `batch_weights` or `renorm` keeps
    contrib from its fused kernel.

    Args:
      inputs: see `sync_batch_norm`.
      decay: the momentum of the moving averages, float or scalar tensor.
      center: whether to add `beta`.
      scale: whether to multiply by `gamma`; contrib's default is not to.
      epsilon: float, added to the variance.
      activation_fn: function of the output, or None.
      param_initializers: dict of initializers by "beta", "gamma", "moving_mean", "moving_variance".
      param_regularizers: dict of functions of a variable by "beta", "gamma".
      updates_collections: see `sync_batch_norm`.
      is_training: bool or scalar bool tensor; None takes the tower's.
      reuse: whether to reuse the variables of `scope`.
      variables_collections: collections that get the variables as well, or a dict of them by the names above.
      outputs_collections: collection or collections that get the output, with the scope's name among its `aliases`.
      trainable: whether `gamma` and `beta` are in TRAINABLE_VARIABLES.
      batch_weights: tensor [b], the weight of each example in the moments.
      fused: False keeps the moving variance biased; the kernels are the same.
      data_format: "NHWC", channels along the last axis, or "NCHW", along axis 1; for any rank.
      zero_debias_moving_mean: not supported.
      scope: str, the variable scope; None is "BatchNorm", numbered.
      renorm: see `sync_batch_norm`.
      renorm_clipping: see `sync_batch_norm`.
      renorm_decay: the momentum of the variables of renorm.
      adjustment: not supported.
      group_size: see `sync_batch_norm`; not an argument of contrib's.

    Returns:
      A tensor of the shape and dtype of `inputs`, through `activation_fn`.

    Raises:
      ValueError: for `zero_debias_moving_mean` or `adjustment`, another data format, unknown keys of the dicts,
        `batch_weights` of another rank, and as `sync_batch_norm`.
    """
    _refuse(zero_debias_moving_mean, adjustment, data_format, param_initializers, param_regularizers)
    initializers = {key + "_initializer": value for key, value in (param_initializers or {}).items()}
    regularizers = {key + "_regularizer": value for key, value in (param_regularizers or {}).items()}
    with tf.variable_scope(scope, "BatchNorm", [inputs], reuse=reuse) as opened:
        inputs = tf.convert_to_tensor(inputs)
        axis = 1 if data_format == "NCHW" else -1
        unbiased = (inputs.shape.rank in (2, 4) and inputs.dtype != tf.float64 and fused is not False and not renorm
                    and batch_weights is None)
        outputs = sync_batch_norm(
            inputs, axis, decay, epsilon, center, scale, training=is_training, trainable=trainable, name=opened,
            mask=_mask(batch_weights, inputs), group_size=group_size, updates_collections=updates_collections,
            renorm=renorm, renorm_clipping=renorm_clipping, renorm_momentum=renorm_decay, unbiased=unbiased,
            **initializers, **regularizers)
        present = [name for name, wanted in zip(_PARAMETERS, (center, scale, True, True)) if wanted]
        _collect_variables(present, variables_collections, opened)
    if activation_fn is not None:
        outputs = activation_fn(outputs)
    return _collect_outputs(outputs, outputs_collections, opened.name)


def _refuse(zero_debias_moving_mean, adjustment, data_format, initializers, regularizers):
    if zero_debias_moving_mean:
        raise ValueError("tf_syncbn.slim.batch_norm does not support zero_debias_moving_mean: its variables would be missing "
                         "from checkpoints made without it.")
    if adjustment is not None:
        raise ValueError("tf_syncbn.slim.batch_norm does not support adjustment: it draws anew in each tower, so towers "
                         "would no longer equal one on the whole batch.")
    if data_format not in ("NHWC", "NCHW"):
        raise ValueError("tf_syncbn.slim.batch_norm: data_format is 'NHWC' or 'NCHW', not %r." % (data_format,))
    for argument, given, known in (("param_initializers", initializers, _PARAMETERS),
                                   ("param_regularizers", regularizers, _PARAMETERS[:2])):
        unknown = sorted(set(given or {}) - set(known))
        if unknown:
            raise ValueError("tf_syncbn.slim.batch_norm: %s has the keys %s, not %s."
                             % (argument, ", ".join(known), ", ".join(map(str, unknown))))


def _mask(batch_weights, inputs):
    """Returns weights of examples as a mask of positions."""
    if batch_weights is None:
        return None
    batch_weights = tf.convert_to_tensor(batch_weights)
    if batch_weights.shape.rank != 1 or inputs.shape.rank is None:
        raise ValueError("tf_syncbn.slim.batch_norm: batch_weights has a weight for each example, shape [b]; %r has shape "
                         "%s." % (batch_weights.name, batch_weights.shape))
    return tf.reshape(batch_weights, [-1] + [1] * (inputs.shape.rank - 2))


def _collect_variables(names, collections, scope):
    """Adds the layer's variables to further collections, each once."""
    with tf.variable_scope(scope, reuse=True, auxiliary_name_scope=False):
        by_name = {name: tf.get_variable(name, dtype=None) for name in names} if collections else {}
    for name, variable in by_name.items():
        wanted = collections.get(name) if isinstance(collections, dict) else collections
        for collection in _as_list(wanted):
            if not any(variable is other for other in tf.get_collection(collection)):
                tf.add_to_collection(collection, variable)


def _collect_outputs(outputs, collections, alias):
    if collections:
        outputs.aliases = getattr(outputs, "aliases", []) + [alias]
        for collection in _as_list(collections):
            tf.add_to_collection(collection, outputs)
    return outputs


def _as_list(collections):
    return [collections] if isinstance(collections, str) else list(collections or ())
