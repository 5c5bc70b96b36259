"""Batch norms of one tower replaced by synced ones, in a graph that a model function has finished.

Whoever read a batch norm's output, or the moments of its batch, reads those of the whole batch instead. What nobody reads
any more is never run. Updates of moving averages, which all towers would now make alike, are made by tower 0 alone.
"""
import functools

import tensorflow.compat.v1 as tf

from towers.exchange import branch_of, control_flow_now, control_flow_of, rewire, run_after
from towers.graph_walk import ancestors, written_variable
from tf_syncbn.detection import is_fused
from tf_syncbn.moments import unpack
from tf_syncbn.moving_averages import AveragedLayer, remember_layer
from tf_syncbn.whole_batch import Normalization, moments_over_towers, normalize_over_towers

__all__ = ["Added", "Replacement", "relative", "remember_unreplaced"]


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
        reached = ancestors([item for item in items if _is_in(item, self.graph)])
        return [op for op in self.ops() if op in reached]


def _is_in(item, graph):
    op = getattr(item, "op", item)
    return isinstance(op, tf.Operation) and op.graph is graph


def relative(name, tower):
    """Returns a name without its tower."""
    return name[len(tower.name_scope):] if name.startswith(tower.name_scope) else name


def _remember(batch_norm, scope, averages, moments, tower):
    """Notes which moving averages take a batch norm's moments, given by a function that returns them."""
    if averages:
        epsilon = batch_norm.op.get_attr("epsilon") if is_fused(batch_norm.op) else 0.0
        remember_layer(AveragedLayer(scope, averages, is_fused(batch_norm.op), epsilon, moments), tower)


def remember_unreplaced(batch_norm, scope, tower):
    """Notes the moving averages of a batch norm that stays as it is, in one tower."""
    moments = functools.partial(moments_over_towers, _outside(batch_norm.x), batch_norm.axis, None)
    _remember(batch_norm, scope, _averages(batch_norm), moments, tower)


def _averages(batch_norm):
    """Returns a dict from names of variables to what they average of a batch norm, "unknown" where several might."""
    op = batch_norm.op
    tensors = op.outputs[1:3] if is_fused(op) else [batch_norm.mean.outputs[0], op.outputs[0]]
    means, variances = ({written_variable(op).name for op in _reached_by_vectors(tensor) if written_variable(op) is not None}
                        for tensor in tensors)
    if len(means) != 1 or len(variances) != 1 or means == variances:
        return dict.fromkeys(means | variances, "unknown")
    return {means.pop(): "mean", variances.pop(): "variance"}


class Replacement:
    """Replaces one tower's batch norms, one after the other.

    Args:
      added: `Added`, what the tower's model function made.
      tower: `TowerContext`.
      writers: dict from names of variables to the ops of tower 0 that update them, filled there and used in later towers.
    """

    def __init__(self, added, tower, writers):
        self._added, self._tower, self._writers = added, tower, writers
        self._made = added.ops()
        self._replaced = {}  # name of a tensor -> the tensor that stands for it now
        self._statistics = set()  # ops that whole-batch moments reach by vectors alone: moving averages' updates

    def replace(self, batch_norm, scope):
        """Replaces one `BatchNorm`, by ops in its scope and on its device."""
        op, averages = batch_norm.op, _averages(batch_norm) if self._tower.is_first else None
        replace = {"fused": self._fused, "fused in tf.cond": self._fused_in_cond, "moments": self._moments}[batch_norm.kind]
        graph = op.graph
        with graph.colocate_with(None, ignore_existing=True), tf.device(op.device), tf.control_dependencies(
                [] if control_flow_of(op) is not None else op.control_inputs):
            with tf.name_scope(self._tower.name_scope + scope + "/"), tf.name_scope("sync_batch_norm"):
                whole = replace(batch_norm)
                _remember(batch_norm, scope, averages, lambda: whole, self._tower)

    def _fused(self, batch_norm):
        op = batch_norm.op
        y, whole = self._normalize(batch_norm, *op.inputs[:3])
        self._replace(op.outputs[0], y)
        self._replace_moments(op.outputs[1:3], *_batch_moments(op, whole))
        return whole

    def _fused_in_cond(self, batch_norm):
        op, frozen = batch_norm.op, batch_norm.frozen
        predicate, branch = branch_of(op)
        training = predicate if branch else tf.logical_not(predicate)
        x, gamma, beta = (_outside(tensor) for tensor in op.inputs[:3])
        averages = [_outside(tensor) for tensor in frozen.inputs[3:5]]
        y, whole = self._normalize(batch_norm, x, gamma, beta, training, averages)
        moments = [tf.where_v2(training, new, old) for new, old in zip(_batch_moments(op, whole), averages)]
        merged = [[c.outputs[0] for c in tensor.consumers()] for tensor in op.outputs[:3]]
        for tensor in merged[0]:
            self._replace(tensor, y)
        for tensors, new in zip(merged[1:], moments):
            self._replace_moments(tensors, *[new] * len(tensors))
        return whole

    def _normalize(self, batch_norm, x, gamma, beta, training=None, frozen=None):
        x = _with_channels(x, batch_norm.axis, gamma)
        how = Normalization(batch_norm.axis, batch_norm.op.get_attr("epsilon"))
        y, whole = normalize_over_towers(x, gamma, beta, how, self._tower, None, training, frozen)
        return tf.identity(y, name="output"), whole

    def _moments(self, batch_norm):
        x = batch_norm.x
        whole = moments_over_towers(x, batch_norm.axis, self._tower)
        _, *moments = (tf.cast(m, x.dtype) for m in unpack(whole))
        old = [batch_norm.mean.outputs[0], batch_norm.op.outputs[0]]
        shapes = [[-1 if i == batch_norm.axis else 1 for i in range(x.shape.rank)] if op.get_attr("keep_dims") else [-1]
                  for op in (batch_norm.mean, batch_norm.op)]
        self._replace_moments(old, *[tf.reshape(m, shape) for m, shape in zip(moments, shapes)])
        return whole

    def _replace(self, old, new):
        """Makes all that reads `old` read `new`."""
        new.set_shape(old.shape)
        for consumer in old.consumers():
            for index, tensor in enumerate(consumer.inputs):
                if tensor is old:
                    rewire(consumer, index, new)
        self._replaced[old.name] = new

    def _replace_moments(self, old, *new):
        for old_tensor, new_tensor in zip(old, new):
            self._replace(old_tensor, new_tensor)
            self._statistics |= _reached_by_vectors(new_tensor)

    def finish(self, outputs):
        """Lets moving averages be updated once a step, and returns the model's outputs, with what stands for them now."""
        graph, tower = self._added.graph, self._tower
        for key in graph.collections:
            self._added.replace(key, [self._now(item) for item in self._added.items(key)])
        updates = self._added.items(tf.GraphKeys.UPDATE_OPS)
        shared = [update for update in updates if self._is_of_statistics(getattr(update, "op", update))]
        if tower.is_first:
            tower.shared_updates.extend(shared)
            for op in self._statistics:
                variable = written_variable(op)
                if variable is not None:
                    self._writers.setdefault(variable.name, []).append(op)
        else:
            self._added.replace(tf.GraphKeys.UPDATE_OPS, [u for u in updates if not any(u is s for s in shared)])
            self._drop_inline_updates(outputs)
            for key in graph.collections:
                self._added.replace(key, [self._now(item) for item in self._added.items(key)])
            self._read_before_updates(outputs)
        return tf.nest.map_structure(self._now, outputs)

    def _now(self, item):
        while isinstance(item, tf.Tensor) and item.name in self._replaced:
            item = self._replaced[item.name]
        return item

    def _is_of_statistics(self, op):
        if op in self._statistics:
            return True
        return bool(op.type == "NoOp" and op.control_inputs) and all(map(self._is_of_statistics, op.control_inputs))

    def _read_before_updates(self, outputs):
        """Lets tower 0's updates wait until this tower has read the averages too, as batch renormalization does."""
        for op in self._added.needed(tf.nest.map_structure(self._now, outputs)):
            for tensor in op.inputs:
                source = tensor.op.inputs[0].op if tensor.op.type == "Identity" and tensor.op.inputs else tensor.op
                if source.name in self._writers and op.type != "Identity":
                    for writer in self._writers[source.name]:
                        run_after(writer, [op])

    def _updates(self):
        """Returns the ops that write a moving average, and what is computed of that."""
        updates, left = set(), [op for op in self._statistics if written_variable(op) is not None]
        while left:
            op = left.pop()
            if op not in updates:
                updates.add(op)
                left.extend(c for t in op.outputs for c in t.consumers() if c in self._statistics)
        return updates

    def _drop_inline_updates(self, outputs):
        """Frees what waits for an inline update of a moving average, which runs in tower 0, from waiting."""
        needed = set(self._added.needed(tf.nest.map_structure(self._now, outputs)))
        updates = self._updates()
        freed = {}  # op -> the op that stands for it and does not wait
        for op in self._made:
            if op not in needed or op in updates or not any(c in updates or c in freed for c in op.control_inputs):
                continue
            if control_flow_of(op) is not control_flow_now(op.graph):
                raise ValueError(
                    "convert_model: the batch norm at %r updates its moving averages inline, inside a tf.cond. Give it "
                    "`training` as a bool, or another `updates_collections`." % relative(op.name, self._tower))
            others = [freed.get(c, c) for c in op.control_inputs if c not in updates]
            with tf.control_dependencies(others), tf.device(op.device), tf.name_scope(None):
                made = op.graph.create_op(op.type, list(op.inputs), [t.dtype for t in op.outputs], name=op.name,
                                          attrs=op.node_def.attr, op_def=op.op_def)
            freed[op] = made
            for old, new in zip(op.outputs, made.outputs):
                self._replace(old, new)


def _batch_moments(op, whole):
    """Returns the batch mean and variance that a fused op hands out: with Bessel's correction, part by part if it averages."""
    count, mean, variance = unpack(tf.stop_gradient(whole))
    moments = [mean, variance * (count / tf.maximum(count - 1, 1))]
    try:
        factor = op.get_attr("exponential_avg_factor")
    except ValueError:  # before TensorFlow 2.2
        factor = 1.0
    return moments if factor == 1.0 else [old + factor * (new - old) for old, new in zip(op.inputs[3:5], moments)]


def _with_channels(x, axis, gamma):
    """Returns `x` with a known number of channels, that of `gamma`."""
    if x.shape.rank is not None and tf.dimension_value(x.shape[axis]) is not None:
        return x
    rank = x.shape.rank or 4
    known = tf.identity(x)
    known.set_shape([tf.dimension_value(gamma.shape[0]) if i == axis else None for i in range(rank)])
    return known


def _outside(tensor):
    """Returns what a tensor inside a branch of tf.cond is made of, outside of it."""
    op = tensor.op
    if branch_of(op) is None:
        return tensor
    if op.type in ("Switch", "RefSwitch"):
        return op.inputs[0]
    inputs = [_outside(t) for t in op.inputs]
    with tf.control_dependencies(None):
        made = op.graph.create_op(op.type, inputs, [t.dtype for t in op.outputs], attrs=op.node_def.attr, op_def=op.op_def)
    return made.outputs[tensor.value_index]


def _reached_by_vectors(tensor):
    """Returns the ops that a vector reaches through nothing but such vectors."""
    size = tensor.shape.num_elements()

    def is_vector(shape):
        return shape.num_elements() == size if shape.is_fully_defined() else shape.rank in (None, 1)

    seen, stack = set(), tensor.consumers()
    while stack:
        op = stack.pop()
        outputs = [t for t in op.outputs if t.dtype.is_floating]  # not the index of the branch that tf.cond took
        if op not in seen and all(is_vector(t.shape) for t in outputs):
            seen.add(op)
            stack.extend(consumer for t in outputs for consumer in t.consumers())
            if written_variable(op) is not None:
                # What reads a resource variable anew after it was written.
                stack.extend(reader for reader in op.inputs[0].consumers() if op in reader.control_inputs)
    return seen
