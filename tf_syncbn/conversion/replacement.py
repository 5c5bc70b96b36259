"""Batch norms of one tower replaced by synced ones, in a graph that a model function has finished.

Whoever read a batch norm's output, or the moments of its batch, reads those of the whole batch instead. What nobody reads
any more is never run. Updates of moving averages, which all towers would now make alike, are made by tower 0 alone.
"""
import functools

import tensorflow.compat.v1 as tf

from towers.context import current_tower
from towers.cross_tower import all_reduce
from towers.gradient_hook import detail_of, with_gradient
from towers.graph_walk import ancestors, op_of, writes_of, written_variable, written_variables
from towers.ordering import read_after, takers_of
from towers.private import (branches_of, control_flow_now, control_flow_of, forward_op_of, rewire, run_after,
                            wait_only_for, within_control_flow)
from tf_syncbn.conversion.counts import with_counts
from tf_syncbn.conversion.dependence import find_updates
from tf_syncbn.conversion.fused_batch_norms import decider, never_runs, outside_of_branch
from tf_syncbn.kernels.moments import bessel, packed, parts, split
from tf_syncbn.kernels.rows import accumulator
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
        """Returns the ops made since, but for what computes of all towers' what they exchange: that belongs to none."""
        tower, ops = current_tower(), self.graph.get_operations()[self._first_op:]
        of_all = tower.meetings.aggregated() if tower is not None else ()
        return [op for op in ops if op not in of_all]

    def items(self, key):
        """Returns what was added to a collection since."""
        return self.graph.get_collection(key)[self._first_items.get(key, 0):]

    def replace(self, key, items):
        """Makes `items` what was added to a collection."""
        self.graph.get_collection_ref(key)[self._first_items.get(key, 0):] = items

    def needed(self, outputs):
        """Returns those of the ops made since that outputs and items of collections depend on, in order."""
        items = tf.nest.flatten(outputs) + [item for key in self.graph.collections for item in self.items(key)]
        reached = ancestors([item for item in items if op_of(item) is not None and op_of(item).graph is self.graph])
        return [op for op in self.ops() if op in reached]


def remember_unreplaced(batch_norms, scopes, statistics, tower):
    """Notes the moving averages of batch norms that stay as they are, in one tower."""
    for index, (batch_norm, scope) in enumerate(zip(batch_norms, scopes)):
        made = functools.partial(_moments_of, batch_norm)
        _remember(batch_norm, scope, _averages(index, statistics), functools.lru_cache()(made), tower)


def _moments_of(batch_norm):
    if batch_norm.kind == "moments":
        return moments_over_towers(*_along_one_axis(outside_of_branch(batch_norm.x), batch_norm.kept), None)
    return moments_over_towers(_with_channels(outside_of_branch(batch_norm.x), batch_norm), batch_norm.kept[0], None)


def _remember(batch_norm, scope, averages, moments, tower):
    """Notes which moving averages take a batch norm's moments, given by a function that returns them."""
    if averages:
        is_fused = batch_norm.kind.startswith("fused")
        if len(batch_norm.kept) != 1:  # no vector of channels
            averages = dict.fromkeys(averages, "unknown")
        epsilon = batch_norm.op.get_attr("epsilon") if is_fused else 0.0
        remember_layer(AveragedLayer(scope, averages, is_fused, epsilon, moments), tower)


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
        self._updates = find_updates(self._made, statistics) | {op for op in writes_of(self._made) if never_runs(op)}
        self._replaced = {}  # name of a tensor -> it, and the tensor that stands for it now

    def replace(self, batch_norm, index, scope):
        """Replaces the `BatchNorm` of an index in `statistics`, by ops in its scope and on its device."""
        op = batch_norm.op
        replace = {"fused": self._fused, "fused in tf.cond": self._fused_in_cond, "moments": self._moments,
                   "squares": self._sums, "sums": self._sums}[batch_norm.kind]
        with op.graph.colocate_with(None, ignore_existing=True), tf.device(op.device), tf.control_dependencies(
                self._waits_for(batch_norm)):
            with tf.name_scope(self._tower.name_scope + scope + "/"), tf.name_scope("sync_batch_norm"):
                whole = replace(batch_norm)
                if self._tower.is_first:
                    _remember(batch_norm, scope, _averages(index, self._statistics), lambda: whole, self._tower)

    def _waits_for(self, batch_norm):
        if branches_of(batch_norm.op):  # outside of which its moments are taken
            return []
        # TensorFlow leaves a control dependency to an op's constant inputs where it has others already.
        ops = batch_norm.ops + [tensor.op for op in batch_norm.ops for tensor in op.inputs if tensor.op.type == "Const"]
        waits = {c for op in ops for c in op.control_inputs}
        return [op for op in self._made if op in waits and (self._tower.is_first or op not in self._updates)]

    def _fused(self, batch_norm):
        op = batch_norm.op
        y, whole = self._normalize(batch_norm, [op.outputs[0]], *op.inputs[:3])
        self._replace(op.outputs[0], y)
        for old, new in zip(op.outputs[1:3], _batch_moments(op, whole)):
            self._replace(old, new)
        self._replace_counts(batch_norm)
        return self._packed(whole)

    def _fused_in_cond(self, batch_norm):
        op, frozen = batch_norm.op, batch_norm.frozen
        chosen = {decider(predicate).name: (decider(predicate), branch) for predicate, branch in branches_of(op)}
        training = functools.reduce(tf.logical_and, [
            predicate if branch else tf.logical_not(predicate) for predicate, branch in chosen.values()])
        x, gamma, beta = (outside_of_branch(tensor) for tensor in op.inputs[:3])
        averages = [outside_of_branch(tensor) for tensor in frozen.inputs[3:5]]
        merged = [merge.outputs[0] for merge in op.outputs[0].consumers()]
        y, whole = self._normalize(batch_norm, merged, x, gamma, beta, training, averages)
        moments = [tf.where_v2(training, new, old) for new, old in zip(_batch_moments(op, whole), averages)]
        for tensor, new in zip(op.outputs[:3], [y] + moments):
            for merge in tensor.consumers():
                self._replace_within(control_flow_of(merge), merge.outputs[0], new)
        return self._packed(whole)

    def _packed(self, whole):
        return packed(*whole) if self._tower.is_first else None

    def _normalize(self, batch_norm, replaced, x, gamma, beta, training=None, frozen=None):
        x = _with_channels(x, batch_norm)
        how = Normalization(batch_norm.kept[0], batch_norm.op.get_attr("epsilon"))
        y, whole = normalize_over_towers(x, gamma, beta, how, self._tower, None, training, frozen)
        return with_gradient("ConvertedOutput", lambda: [tf.identity(y, name="output")], "Identity", replaced)[0], whole

    def _moments(self, batch_norm):
        x, kept = self._now(outside_of_branch(batch_norm.x)), batch_norm.kept
        whole = moments_over_towers(*_along_one_axis(x, kept), self._tower)
        _, mean, variance = (tf.cast(m, x.dtype) for m in split(whole))
        for op, new in [(batch_norm.op, variance)] + [(op, mean) for op in batch_norm.means]:
            keeps = op.get_attr("keep_dims")
            sizes = [size if i in kept else 1 for i, size in enumerate(x.shape.as_list()) if i in kept or keeps]
            new = tf.reshape(new, sizes)
            self._replace_within(control_flow_of(op), op.outputs[0], new)
        self._replace_counts(batch_norm)
        for op, number in batch_norm.corrected:
            count = tf.reshape(split(tf.stop_gradient(whole))[0], [])
            self._replace(op.outputs[0], op.outputs[0] * tf.cast(
                bessel(count) * ((number - 1) / number), op.outputs[0].dtype))
        return whole

    def _sums(self, batch_norm):
        for squares in batch_norm.squares:
            x = self._now(squares.x)  # the output of another batch norm perhaps
            _, mean, variance = split(moments_over_towers(*_along_one_axis(x, squares.kept), self._tower))
            for op, new in [(squares.op, variance)] + [(op, mean) for op in squares.means]:
                old = op.outputs[0]
                self._replace(old, tf.reshape(tf.cast(new, old.dtype), old.shape))
        for op in batch_norm.sums:
            self._replace(op.outputs[0], _over_towers(op), is_sum=op.type == "Sum")
        self._replace_counts(batch_norm)

    def _replace_counts(self, batch_norm):
        whole_counts = {}

        def whole(count):
            if count.name not in whole_counts:
                is_sum = count.op in batch_norm.weights
                whole_counts[count.name] = _over_towers(count.op) if is_sum else all_reduce(count, name="count")
            return whole_counts[count.name]

        for place, of_counts in batch_norm.counts.items():
            rewire(*place, with_counts(place, of_counts, whole))

    def _replace_within(self, flow, old, new):
        """Replaces a tensor of a tf.cond's branch, None for none, by one from outside."""
        if flow is not control_flow_now(old.graph):
            with within_control_flow(flow):
                new = tf.identity(new)
        self._replace(old, new)

    def _replace(self, old, new, is_sum=False):
        """Makes all that reads `old` read `new`, but for what `new` was made by, and what the model exchanges of a sum."""
        new.set_shape(old.shape)
        of_all = self._tower.meetings.aggregated() if is_sum else ()
        if not is_sum:
            self._tower.meetings.leave_instead(self._tower.local_index, old, new)
        _read_instead(old, new, [op for op in old.consumers() if op is not new.op and op not in of_all])
        self._replaced[old.name] = old, new

    def finish(self, outputs):
        """Lets moving averages be updated once a step, and returns the model's outputs, with what stands for them now."""
        for key in self._added.graph.collections:
            self._added.replace(key, [self._now(item) for item in self._added.items(key)])
        outputs = tf.nest.map_structure(self._now, outputs)
        self._tower.meetings.gradient_checks.append(self._read_by_gradients)
        self._order_updates()  # in every tower, so that tower 0's may stand for the others'
        if self._tower.is_first:
            self._share_updates()
        else:
            self._drop_updates(outputs)
        return outputs

    def _read_by_gradients(self, made):
        """Lets gradient functions of the model's own, which kept the old tensors, read what stands for them now."""
        made = set(made)
        for old, new in self._replaced.values():
            _read_instead(old, new, [op for op in old.consumers() if op in made])

    def _now(self, item):
        while isinstance(item, tf.Tensor) and item.name in self._replaced:
            _, item = self._replaced[item.name]
        return item

    def _order_updates(self):
        """Lets a layer that is applied again move its averages after it did so before: TensorFlow gives the two no order."""
        writes, outer, made = {}, control_flow_now(self._added.graph), set(self._made)
        for op in self._made:
            variable = written_variable(op) if op in self._updates else None
            if variable is not None and control_flow_of(op) is outer:
                writes.setdefault(variable, []).append(op)
        for variable, ops in writes.items():
            for earlier, op in zip(ops, ops[1:]):
                before, of_both = ancestors([op], within=made), ancestors([earlier], within=made)
                if earlier not in before and op not in of_both:
                    takers = {taker for taker in takers_of(variable) if taker in before and self._statistics.get(taker)}
                    for taker in takers - of_both:
                        read_after(taker, {variable.name: [earlier]}, takers, self._made)
                    run_after(op, [earlier])

    def _share_updates(self):
        """Makes tower 0's updates those of all towers, also what a group holds of them beside others."""
        for item in self._added.items(tf.GraphKeys.UPDATE_OPS):
            op = op_of(item)
            of_group = [c for c in op.control_inputs if c in self._updates] if op.type == "NoOp" else []
            self._tower.shared_updates.extend([item] if op in self._updates else of_group)

    def _drop_updates(self, outputs):
        """Takes this tower's updates out of collections; where outputs wait for them, tower 0's come to stand for them."""
        outer = control_flow_now(self._added.graph)
        for key in self._added.graph.collections:
            self._added.replace(key, [item for item in self._added.items(key)
                                      if op_of(item) not in self._updates])
        for op in self._added.needed(outputs):
            if op in self._updates and written_variable(op) is None and written_variables(op):
                raise ValueError("convert_model: %r updates moving averages inside a tf.cond that the output waits for. Give the "
                                 "layer `training` as a bool, or call tf.disable_control_flow_v2() when the program starts."
                                 % self._tower.relative(op.name))
            # No op of tower 0 can stand for one inside a tf.cond: nothing waits for that.
            dropped = [c for c in op.control_inputs if c in self._updates and control_flow_of(c) is not outer]
            if op not in self._updates and dropped:
                wait_only_for(op, [c for c in op.control_inputs if c not in dropped])


@tf.RegisterGradient("ConvertedOutput")
def _output_gradient(op, dy):
    # What a gradient function of the model's own, tf.nn.swish's say, made of the old output leads here. It need be no gradient
    # pass over all towers: of replicas.loss it is none.
    for old in detail_of(op) or ():
        _read_instead(old, op.outputs[0], [reader for reader in old.consumers() if forward_op_of(reader) is not None])
    return [dy]


def _read_instead(old, new, readers):
    """Makes those of the ops `readers` that read a tensor read another one."""
    for reader in readers:
        for index, tensor in enumerate(reader.inputs):
            if tensor is old:
                rewire(reader, index, new)


def _batch_moments(op, whole):
    """Returns the batch mean and variance that a fused op hands out: with Bessel's correction, part by part if it averages."""
    count, mean, variance = (tf.stop_gradient(moment) for moment in parts(*whole))
    moments = [mean, variance * bessel(count)]
    try:
        factor = op.get_attr("exponential_avg_factor")
    except ValueError:  # before TensorFlow 2.2
        factor = 1.0
    return moments if factor == 1.0 else [old + factor * (new - old) for old, new in zip(op.inputs[3:5], moments)]


def _over_towers(op):
    """Returns a sum, or a mean, over the examples of all towers."""
    x, axes, keeps = op.inputs[0], op.inputs[1], op.get_attr("keep_dims")
    dtype = accumulator(x.dtype)
    x, shape = tf.cast(x, dtype), op.outputs[0].shape
    total = tf.reduce_sum(x, axes, keepdims=keeps)
    if op.type == "Mean":
        count = tf.cast(tf.size(x, out_type=tf.int64) // max(shape.num_elements(), 1), dtype)
        packed = all_reduce(tf.concat([tf.reshape(total, [-1]), [count]], 0), name="mean")
        total = tf.reshape(tf.div_no_nan(packed[:-1], tf.fill([shape.num_elements()], packed[-1])), shape)
    else:
        total = all_reduce(total, name="sum")
    return tf.cast(total, op.outputs[0].dtype)


def _along_one_axis(x, kept):
    """Returns the input of a batch norm of moments, or of `Squares`, with all axes that keep theirs made one, and that axis."""
    kept = list(kept)
    if len(kept) == 1:
        return x, kept[0]
    order = [axis for axis in range(x.shape.rank) if axis not in kept] + kept
    channels = tf.TensorShape([tf.dimension_value(x.shape[axis]) for axis in kept]).num_elements()
    if order != sorted(order):
        x = tf.transpose(x, order)
    return tf.reshape(x, [-1, channels]), 1


def _with_channels(x, batch_norm):
    """Returns a fused op's input with a known rank and number of channels."""
    axis, = batch_norm.kept
    if x.shape.rank is not None and tf.dimension_value(x.shape[axis]) is not None:
        return x
    known, rank = tf.identity(x), len(batch_norm.op.get_attr("data_format"))
    channels = tf.dimension_value(batch_norm.op.inputs[1].shape[0])
    known.set_shape([channels if i == axis else None for i in range(rank)])
    return known
