"""Moving averages of moments: how far they move, the ops that move them once a step, and which layer has which.

What a layer averages is not known here: a kernel says how far each variable moves, the ops subtract it.
"""
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from tf_syncbn.kernels.graph_function import call
from tf_syncbn.kernels.moments import bessel, parts
from towers.graph.private import control_flow_now, control_flow_of, run_after
from towers.graph.walk import ancestors, written_variable

__all__ = ["AveragedLayer", "averaged_layers", "collect_updates", "moving_average_steps", "remember_layer", "share_of_new",
           "steps_where_counted", "update_after", "update_ops"]

_LAYERS = "_tf_syncbn_averaged_layers"  # attribute of a graph, a list of (meetings of a build or None, AveragedLayer)
_UPDATES = "_tf_syncbn_updates"  # attribute of a graph, a list of (meetings of a build or None, (op, whether it is inline))


class AveragedLayer(NamedTuple):
    """A layer in training mode that has moving averages.

    Attributes:
      scope: str, the layer's scope.
      variables: dict from names of variables to what they average: "mean", "variance", or "stddev", the root of the variance
        and `epsilon`.
      unbiased: whether what averages the variance takes `variance n / max(n - 1, 1)`.
      epsilon: float.
      moments: a function without arguments that returns the tensor [2C + 1] of the moments of all towers, see
        `tf_syncbn.kernels.merge.merge`.
    """
    scope: str
    variables: dict
    unbiased: bool
    epsilon: float
    moments: Any


def remember_layer(layer, tower):
    """Notes an `AveragedLayer` of the graph with the build of `tower`; None stands for 'outside of towers'."""
    _remember(_LAYERS, layer, tower)


def averaged_layers(graph, tower):
    """Returns the `AveragedLayer`s of the build that `tower` is of, in the order in which they were made."""
    return _remembered(_LAYERS, graph, tower)


def _remember(attribute, item, tower):
    graph = tf.get_default_graph()
    if not hasattr(graph, attribute):
        setattr(graph, attribute, [])
    getattr(graph, attribute).append((None if tower is None else tower.meetings, item))


def _remembered(attribute, graph, tower):
    build = None if tower is None else tower.meetings
    return [item for of_build, item in getattr(graph, attribute, []) if of_build is build]


def moving_average_steps(
        count, mean, variance, momentum, training, moving_mean, moving_variance, *, keep, unbiased, counted, known=None):
    """Computes what to subtract from a moving mean and a moving variance: `(moving - new) (1 - momentum)`.

    Args:
      count, mean, variance: moments, see `tf_syncbn.kernels.moments`.
      momentum: scalar tensor, or None where `keep` is it.
      training: scalar bool tensor; nothing moves where it is False. None stands for True.
      moving_mean, moving_variance: tensors [C], the present values.
      keep: float, the momentum where it is no tensor.
      unbiased: whether the moving variance takes `variance n / max(n - 1, 1)`.
      counted: whether anything is counted for certain.
      known: int, the moments' count where that is known while the graph is built.

    Returns:
      Two tensors [C]; zeros where nothing was counted.
    """
    count, mean, variance = parts(count, mean, variance)
    if unbiased:
        variance *= known / max(known - 1, 1) if known else bessel(count)
    rate = share_of_new(momentum, keep, mean.dtype)
    if training is None:  # then all moments are zeros where nothing counts
        rate, count = rate if counted else tf.where_v2(count > 0, rate, tf.zeros_like(rate)), None
    return steps_where_counted(count, training, [(moving_mean, mean, rate), (moving_variance, variance, rate)])


def share_of_new(momentum, keep, dtype):
    """Returns `1 - momentum` in `dtype`."""
    # Not tf.cast of a Python float: that rounds it to float32 on the way to float64.
    return tf.constant(1 - keep, dtype) if momentum is None else tf.cast(1 - momentum, dtype)


def steps_where_counted(count, training, moves):
    """Returns `(old - new) rate` for each (old, new, rate), in the dtype of `old`, and zeros where nothing counts."""
    steps = [tf.cast((tf.cast(old, new.dtype) - new) * rate, old.dtype) for old, new, rate in moves]
    if count is None:
        return tuple(steps)
    counts = count > 0 if training is None else tf.logical_and(count > 0, training)
    # Not a product with 0: the moments of what does not count may be infinite.
    return tuple(tf.where_v2(counts, step, tf.zeros_like(step)) for step in steps)


def update_ops(variables, kernel, tensors, collections, tower, **static):
    """Returns the ops that subtract from each variable what `kernel(*tensors, *values, **static)` gives for it.

    A layer that is applied more than once in a step moves its averages once for each, one after the other: each reads what
    the earlier ones wrote, which are found in `collections`, see `collect_updates`, and among those that ran inline.
    """
    earlier = _earlier_updates(collections, tower)
    with tf.control_dependencies([op for op in earlier if written_variable(op) in [v.op for v in variables]]):
        values = [variable.read_value() for variable in variables]
    # What was read of a ref variable may be its own memory: no variable moves before all steps are computed. The identities
    # are there to be waited for; see `call`.
    steps = [tf.identity(step) for step in call(kernel, *tensors, *values, **static)]
    with tf.control_dependencies(steps):
        updates = [tf.assign_sub(variable, step, name="update_" + variable.op.name.split("/")[-1]).op
                   for variable, step in zip(variables, steps)]
    for update in updates:
        _remember(_UPDATES, (update, collections is None), tower)
    return updates


def update_after(reads, variables, tower):
    """Makes updates of variables that a layer, applied again, reads now wait for the reads, unless the reads wait for them."""
    graph, names = tf.get_default_graph(), [variable.op.name for variable in variables]
    updates = [op for op, _ in _remembered(_UPDATES, graph, tower)
               if written_variable(op).name in names and control_flow_of(op) is control_flow_now(graph)]
    before = ancestors(reads) if updates else ()
    for op in updates:
        if op not in before:
            run_after(op, [read.op for read in reads])


def _earlier_updates(collections, tower):
    """Returns the update ops collected or inline so far, among them those of this layer if it was applied before."""
    graph = tf.get_default_graph()
    items = [op for op, is_inline in _remembered(_UPDATES, graph, tower)
             if is_inline and control_flow_of(op) is control_flow_now(graph)]
    items += tower.shared_updates if tower is not None else []
    for collection in [collections] if isinstance(collections, str) else collections or ():
        items += tf.get_collection(collection)
    return [item for item in items if isinstance(item, tf.Operation)]


def collect_updates(updates, collections, tower):
    """Adds updates to a collection or to several; in towers, UPDATE_OPS gets them as shared by all towers."""
    for update in updates:
        for collection in [collections] if isinstance(collections, str) else collections:
            if tower is not None and collection == tf.GraphKeys.UPDATE_OPS:
                tower.add_update(update, shared=True)
            else:
                tf.add_to_collection(collection, update)
