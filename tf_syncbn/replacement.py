"""Batch norms of one tower replaced by synced ones, in a graph that a model function has finished.

Whoever read a batch norm's output, or the moments of its batch, reads those of the whole batch instead. What nobody reads
any more is never run. Updates of moving averages, which all towers would now make alike, are made by tower 0 alone.
"""
import functools

import tensorflow.compat.v1 as tf

from towers.exchange import branch_of, rewire, wait_only_for
from towers.graph_walk import ancestors, written_variable, written_variables
from tf_syncbn.dependence import find_updates
from tf_syncbn.detection import is_fused, outside_of_branch
from tf_syncbn.moments import unpack
from tf_syncbn.moving_averages import AveragedLayer, remember_layer
from tf_syncbn.whole_batch import Normalization, moments_over_towers, normalize_over_towers

__all__ = ["Added", "Replacement", "remember_unreplaced"]


class Added:
    """What a graph gets from now on; to be made before a model function runs."""

    def __init__(self, graph):
        self.graph = graph
        self._first_op = len(graph.get_operations())
        self._first_items = {key: len(graph.get_collection_ref(key)) for key in graph.collections}

    def ops(self):
        """Returns the ops made since."""
        return self.graph.get_operations()[self._first_op:]

    def items(self, key):
        """Returns what was added to a collection since."""
        return self.graph.get_collection(key)[self._first_items.get(key, 0):]

    def replace(self, key, items):
        """Makes `items` what was added to a collection."""
        self.graph.get_collection_ref(key)[self._first_items.get(key, 0):] = items

    def needed(self, outputs):
        """Returns those of the ops made since that outputs and items of collections depend on, in order."""
        items = tf.nest.flatten(outputs) + [item for key in self.graph.collections for item in self.items(key)]
        reached = ancestors([item for item in items if _op(item) is not None and _op(item).graph is self.graph])
        return [op for op in self.ops() if op in reached]


def _op(item):
    """Returns the op of a tensor, variable or op; None for anything else that a collection may hold."""
    op = getattr(item, "op", item)
    return op if isinstance(op, tf.Operation) else None


def remember_unreplaced(batch_norms, scopes, statistics, tower):
    """Notes the moving averages of batch norms that stay as they are, in one tower."""
    for index, (batch_norm, scope) in enumerate(zip(batch_norms, scopes)):
        made = functools.partial(_moments_of, batch_norm)
        _remember(batch_norm, scope, _averages(index, statistics), functools.lru_cache()(made), tower)


def _moments_of(batch_norm):
    x = outside_of_branch(batch_norm.x)
    return moments_over_towers(_with_channels(x, batch_norm) if batch_norm.kind != "moments" else x, batch_norm.axis, None)


def _remember(batch_norm, scope, averages, moments, tower):
    """Notes which moving averages take a batch norm's moments, given by a function that returns them."""
    if averages:
        epsilon = batch_norm.op.get_attr("epsilon") if is_fused(batch_norm.op) else 0.0
        remember_layer(AveragedLayer(scope, averages, is_fused(batch_norm.op), epsilon, moments), tower)


def _averages(index, statistics):
    """Returns a dict from names of variables to what they average of a batch norm, "unknown" where several might."""
    kinds = {}
    for op, sources in statistics.items():
        if any(source[0] == index for source in sources):
            for variable in written_variables(op):
                kinds.setdefault(variable.name, set()).update(sources)
    averages = {name: next(iter(sources))[1] if len(sources) == 1 else "unknown" for name, sources in kinds.items()}
    is_known = sorted(averages.values()) == ["mean", "variance"]
    return averages if is_known else dict.fromkeys(averages, "unknown")


class Replacement:
    """Replaces one tower's batch norms, one after the other.

    Args:
      added: `Added`, what the tower's model function made.
      statistics: from `find_statistics`, of the batch norms to replace.
      tower: `TowerContext`.
    """

    def __init__(self, added, statistics, tower):
        self._added, self._statistics, self._tower = added, statistics, tower
        self._made = added.ops()
        self._updates = find_updates(self._made, statistics)
        self._replaced = {}  # name of a tensor -> the tensor that stands for it now

    def replace(self, batch_norm, index, scope):
        """Replaces the `BatchNorm` of an index in `statistics`, by ops in its scope and on its device."""
        op = batch_norm.op
        replace = {"fused": self._fused, "fused in tf.cond": self._fused_in_cond, "moments": self._moments}[batch_norm.kind]
        with op.graph.colocate_with(None, ignore_existing=True), tf.device(op.device), tf.control_dependencies(
                self._waits_for(batch_norm)):
            with tf.name_scope(self._tower.name_scope + scope + "/"), tf.name_scope("sync_batch_norm"):
                whole = replace(batch_norm)
                if self._tower.is_first:
                    _remember(batch_norm, scope, _averages(index, self._statistics), lambda: whole, self._tower)

    def _waits_for(self, batch_norm):
        if batch_norm.kind == "fused in tf.cond":
            return []
        # TensorFlow leaves a control dependency to an op's constant inputs where it has others already.
        ops = batch_norm.ops + [tensor.op for op in batch_norm.ops for tensor in op.inputs if tensor.op.type == "Const"]
        waits = {c for op in ops for c in op.control_inputs}
        return [op for op in self._made if op in waits and (self._tower.is_first or op not in self._updates)]

    def _fused(self, batch_norm):
        op = batch_norm.op
        y, whole = self._normalize(batch_norm, *op.inputs[:3])
        self._replace(op.outputs[0], y)
        for old, new in zip(op.outputs[1:3], _batch_moments(op, whole)):
            self._replace(old, new)
        return whole

    def _fused_in_cond(self, batch_norm):
        op, frozen = batch_norm.op, batch_norm.frozen
        predicate, branch = branch_of(op)
        training = predicate if branch else tf.logical_not(predicate)
        x, gamma, beta = (outside_of_branch(tensor) for tensor in op.inputs[:3])
        averages = [outside_of_branch(tensor) for tensor in frozen.inputs[3:5]]
        y, whole = self._normalize(batch_norm, x, gamma, beta, training, averages)
        moments = [tf.where_v2(training, new, old) for new, old in zip(_batch_moments(op, whole), averages)]
        for tensor, new in zip(op.outputs[:3], [y] + moments):
            for merge in tensor.consumers():
                self._replace(merge.outputs[0], new)
        return whole

    def _normalize(self, batch_norm, x, gamma, beta, training=None, frozen=None):
        x = _with_channels(x, batch_norm)
        how = Normalization(batch_norm.axis, batch_norm.op.get_attr("epsilon"))
        y, whole = normalize_over_towers(x, gamma, beta, how, self._tower, None, training, frozen)
        return tf.identity(y, name="output"), whole

    def _moments(self, batch_norm):
        x, axis = batch_norm.x, batch_norm.axis
        whole = moments_over_towers(x, axis, self._tower)
        _, mean, variance = (tf.cast(m, x.dtype) for m in unpack(whole))
        wide = [-1 if i == axis else 1 for i in range(x.shape.rank)]
        for op, new in [(batch_norm.op, variance)] + [(op, mean) for op in batch_norm.means]:
            self._replace(op.outputs[0], tf.reshape(new, wide if op.get_attr("keep_dims") else [-1]))
        return whole

    def _replace(self, old, new):
        """Makes all that reads `old` read `new`."""
        new.set_shape(old.shape)
        for consumer in old.consumers():
            for index, tensor in enumerate(consumer.inputs):
                if tensor is old:
                    rewire(consumer, index, new)
        self._replaced[old.name] = new

    def finish(self, outputs):
        """Lets moving averages be updated once a step, and returns the model's outputs, with what stands for them now."""
        for key in self._added.graph.collections:
            self._added.replace(key, [self._now(item) for item in self._added.items(key)])
        outputs = tf.nest.map_structure(self._now, outputs)
        if self._tower.is_first:
            self._share_updates()
        else:
            self._drop_updates(outputs)
        return outputs

    def _now(self, item):
        while isinstance(item, tf.Tensor) and item.name in self._replaced:
            item = self._replaced[item.name]
        return item

    def _share_updates(self):
        """Makes tower 0's updates those of all towers, also what a group holds of them beside others."""
        for item in self._added.items(tf.GraphKeys.UPDATE_OPS):
            op = _op(item)
            of_group = [c for c in op.control_inputs if c in self._updates] if op.type == "NoOp" else []
            self._tower.shared_updates.extend([item] if op in self._updates else of_group)

    def _drop_updates(self, outputs):
        """Takes this tower's updates out of collections, and lets nothing wait for them: tower 0 makes them."""
        for key in self._added.graph.collections:
            self._added.replace(key, [item for item in self._added.items(key)
                                      if _op(item) not in self._updates])
        for op in self._added.needed(outputs):
            if op in self._updates and written_variable(op) is None and written_variables(op):
                raise ValueError("convert_model: %r updates moving averages inside a tf.cond that the output waits for. Give the "
                                 "layer `training` as a bool, or call tf.disable_control_flow_v2() when the program starts."
                                 % self._tower.relative(op.name))
            if op not in self._updates and any(c in self._updates for c in op.control_inputs):
                wait_only_for(op, [c for c in op.control_inputs if c not in self._updates])


def _batch_moments(op, whole):
    """Returns the batch mean and variance that a fused op hands out: with Bessel's correction, part by part if it averages."""
    count, mean, variance = unpack(tf.stop_gradient(whole))
    moments = [mean, variance * (count / tf.maximum(count - 1, 1))]
    try:
        factor = op.get_attr("exponential_avg_factor")
    except ValueError:  # before TensorFlow 2.2
        factor = 1.0
    return moments if factor == 1.0 else [old + factor * (new - old) for old, new in zip(op.inputs[3:5], moments)]


def _with_channels(x, batch_norm):
    """Returns a fused op's input with a known rank and number of channels."""
    if x.shape.rank is not None and tf.dimension_value(x.shape[batch_norm.axis]) is not None:
        return x
    known, rank = tf.identity(x), len(batch_norm.op.get_attr("data_format"))
    channels = tf.dimension_value(batch_norm.op.inputs[1].shape[0])
    known.set_shape([channels if i == batch_norm.axis else None for i in range(rank)])
    return known
