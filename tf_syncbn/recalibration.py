"""`recalibrate`: moving averages estimated anew, as exact averages over batches.

A moving average lags behind the weights that it is of, and after few steps, or with a momentum near 1, is still near its
initial value. Wu and Johnson ("Rethinking 'Batch' in BatchNorm", 2021, section 3) average over batches instead, with the
weights at rest ("precise batch norm").
"""
from typing import Any, Callable, Dict, Optional, Union

import numpy as np
import tensorflow.compat.v1 as tf

from tf_syncbn.moving_averages import averaged_layers
from towers.api.annotations import Session
from towers.graph.assignment import assign
from towers.graph.walk import ancestors, written_variables
from towers.replicas import Towers

__all__ = ["recalibrate"]


def recalibrate(session: Session, replicas: Optional[Towers], num_batches: int,
                feed_dict: Union[Dict[Any, Any], Callable[[int], Dict[Any, Any]], None] = None) -> Dict[str, np.ndarray]:
    """Replaces moving averages by the exact moments of batches.

    Runs the forward pass of all towers `num_batches` times, each layer normalizing by the moments of its batch, and gives
    the moving averages of each `sync_batch_norm` and each batch norm that `convert_model` found the mean and the variance of
    all values together that the layer saw: counts, means and centred squares of the batches, merged in float64. The
    variance is unbiased where the layer stores an unbiased one. Every other variable stays as it is, and if anything
    fails, these do too. Adds ops to the graph only for a converted model in one tower.

    Args:
      session: `tf.Session` of the towers' graph, with its variables restored or initialized.
      replicas: `Towers`, built with `training=True`; their own input says what the batches are. Or None for layers built
        outside of towers.
      num_batches: int, 1 or more.
      feed_dict: what each run is fed, or a function of the batch's number, from 0, that returns it.

    Returns:
      A dict from the names of the variables that were set to their values, float64 arrays [C].

    Raises:
      TypeError: if `session` is no session or `replicas` no `Towers`.
      ValueError: if there are no such layers; if the towers were built in another graph than the session's; if the input ends
        before `num_batches`; if a layer's moments are not finite; for a converted layer whose moments feed more than a moving
        mean and a moving variance.

    Example:

        tf.train.Saver().restore(session, checkpoint)
        tf_syncbn.recalibrate(session, replicas, num_batches=200)
    """
    if not isinstance(num_batches, (int, np.integer)) or num_batches < 1:
        raise ValueError("recalibrate averages over 1 batch or more, not %r." % (num_batches,))
    if not hasattr(session, "run") or not (replicas is None or isinstance(replicas, Towers)):
        raise TypeError("recalibrate takes a session and the towers, or None, not %r and %r." % (session, replicas))
    if replicas is not None and session.graph is not replicas[0].context.meetings.graph:
        raise ValueError("recalibrate: the towers were built in another graph than the session's, which knows none of their "
                         "layers. Make the session within `with graph.as_default():` of the towers' graph, or hand it `graph=`.")
    layers = averaged_layers(session.graph, None if replicas is None else replicas[0].context)
    _check(layers, replicas)
    with session.graph.as_default():
        moments = [layer.moments() for layer in layers]
        found = {variable.op.name: variable for variable in tf.global_variables() + tf.local_variables()}
    # The forward pass itself may write some, inline updates of averages among them.
    written = {variable.name for op in ancestors(moments) for variable in written_variables(op)}
    variables = {name: found[name] for name in found
                 if name in written or any(name in layer.variables for layer in layers)}
    before = session.run(variables)
    try:
        values = _values(layers, _run(session, moments, num_batches, feed_dict))
    except Exception:
        assign(session, [(variables[name], value) for name, value in before.items()])
        raise
    assign(session, [(variables[name], value) for name, value in dict(before, **values).items()])
    return values


def _check(layers, replicas):
    if not layers:
        raise ValueError("recalibrate finds no layers with moving averages in %s: build them with training=True, of "
                         "sync_batch_norm, or by a model function of convert_model."
                         % ("the graph outside of towers" if replicas is None else "these towers"))
    for layer in layers:
        if "unknown" in layer.variables.values():
            raise ValueError("recalibrate: the moments of the converted layer %r feed %s, and which of them averages what is "
                             "unknown." % (layer.scope, ", ".join(sorted(layer.variables))))


def _run(session, moments, num_batches, feed_dict):
    """Returns, for each layer, an array [num_batches, 2C + 1] in float64."""
    batches = []
    for number in range(num_batches):
        try:
            batches.append(session.run(moments, feed_dict(number) if callable(feed_dict) else feed_dict))
        except tf.errors.OutOfRangeError as error:
            raise ValueError("recalibrate: the input ended after %d of %d batches; no moving average was changed."
                             % (number, num_batches)) from error
    return [np.array(of_layer, np.float64) for of_layer in zip(*batches)]


def _values(layers, batches):
    """Returns a dict from names of variables to values; those of layers that counted nothing are not in it."""
    of_variables = {}  # a layer that is applied several times has one set of variables
    for layer, moments in zip(layers, batches):
        if not np.isfinite(moments).all():
            raise ValueError("recalibrate: the moments of %r are not finite; no moving average was changed." % layer.scope)
        for name in layer.variables:
            of_variables.setdefault(name, (layer, []))[1].append(moments)
    values = {}
    for name, (layer, moments) in of_variables.items():
        count, mean, variance = _merge(np.concatenate(moments))
        if count:
            unbiased = variance * count / max(count - 1, 1) if layer.unbiased else variance
            values[name] = {"mean": mean, "variance": unbiased, "stddev": np.sqrt(variance + layer.epsilon)}[
                layer.variables[name]]
    return values


def _merge(moments):
    """Merges counts, means and variances, [K, 2C + 1], over batches; see `tf_syncbn.kernels.merge.merge`."""
    channels = moments.shape[1] // 2
    counts, means, variances = moments[:, :1], moments[:, 1:channels + 1], moments[:, channels + 1:]
    count = counts.sum()
    share = counts / max(count, 1e-300)
    mean = (share * means).sum(0)
    return count, mean, (share * (variances + np.square(means - mean))).sum(0)
