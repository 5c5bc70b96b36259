"""Batch norms among the ops of a tower: what they are, and the rules by which the kernels of `sync_batch_norm` compute them.

Found are fused ops in training mode, and moments as `tf.nn.moments` takes them, whatever wrote them. What is written otherwise is
left to the rules of placements, which are as exact, and no slower but for an exchange.
"""
import functools

import tensorflow.compat.v1 as tf

from tf_syncbn.conversion.peephole import ROOTS, Moments, find_moments
from tf_syncbn.kernels.layer import Layer
from tf_syncbn.kernels.moments import bessel, packed, parts, split
from tf_syncbn.whole_batch import Normalization, moments_over_towers, normalize_over_towers
from towers.graph.ordering import take_instead
from towers.graph.private import loop_of
from towers.graph.walk import end_of
from towers.sharding.nodes import Decision
from towers.sharding.placements import Blocks, Partial, PartialMean, Replicate, Shard
from towers.sharding.rules.normalization import FUSED, channels_axis, is_batch_norm
from towers.sharding.rules.table import RULES, Rule
from towers.sharding.whole_batch import Kernels

__all__ = ["BatchNorms"]

_OF_ALL = (Replicate, Partial, PartialMean)  # of all examples together, or of none


class BatchNorms(Kernels):
    """The batch norms of a tower; see `Kernels`.

    Attributes:
      found: list of `Moments`, in the order of the ops, what `only` leaves out among them.
      chosen: list of `Moments`, those that are computed of the whole batch.
    """

    def __init__(self, tower, ops):
        super().__init__(tower, ops)
        self.rules = dict(RULES, Mean=Rule(self._of_mean, RULES["Mean"].knows))
        self.rules.update((name, Rule(self._of_fused, RULES[name].knows)) for name in FUSED.split())
        self.found, self.chosen, self.plan, self._tower = [], [], None, tower
        for op in ops:
            if is_batch_norm(op) and not op.get_attr("is_training"):
                _hand_out_averages(op)
        self._moments, self._squares = find_moments(ops)
        self._whole, self._parts, self._asked = {}, {}, {}

    # Rules.

    def _of_fused(self, node):
        decision = RULES[node.type].function(node)
        if decision.instead is None or node.is_repeated:
            return decision
        self._asked[node.op] = _fused_batch_norm(node.op)
        # Its gradient that the model takes itself is another op, which is computed of plain moments.
        is_differentiated = any(output.consumers() for output in node.op.outputs[3:5])
        instead = functools.partial(self._plainly, decision.instead) if is_differentiated else self._normalized
        return Decision(decision.outputs, decision.wants, instead=instead, meets="batch norm")

    def _of_mean(self, node):
        decision = RULES["Mean"].function(node)
        moments = self._moments.get(node.op)
        is_of_batch = moments is not None and isinstance(decision.outputs[0], PartialMean)
        if not is_of_batch or node.is_repeated or loop_of(node.op) is not None or None in [
                tf.dimension_value(moments.x.shape[axis]) for axis in moments.kept]:
            return decision
        self._asked[moments.op] = moments
        return Decision([Replicate()], decision.wants, instead=self._shared, meets="batch norm")

    # What stands for ops.

    def _normalized(self, conversions, op, inputs):
        batch_norm = self._asked[op]
        axis, = batch_norm.kept
        x = _with_channels(inputs[0], op, axis)
        conversions.meets_by_itself(op.outputs[0], "moments", inputs[1].dtype, [2 * tf.dimension_value(x.shape[axis]) + 1])
        how = Normalization(Layer(x.shape, x.dtype, axis), op.get_attr("epsilon"))
        y, whole = normalize_over_towers(x, *inputs[1:3], how, self._tower)
        self._whole[op] = whole
        return [y] + _batch_moments(op, whole, inputs) + [None] * (len(op.outputs) - 3)

    def _plainly(self, normalized, conversions, op, inputs):
        found = normalized(conversions, op, inputs)
        axes = [axis for axis in range(inputs[0].shape.rank) if axis not in self._asked[op].kept]
        count = conversions.total_count(op.inputs[0], axes, found[3].dtype)
        self._whole[op] = tf.concat([tf.reshape(count, [1]), *found[3:5]], 0)
        return found

    def _shared(self, conversions, op, inputs):
        moments, old = self._moments[op], op.outputs[0]
        key = end_of(moments.x), moments.kept
        if key not in self._whole:
            self._whole[key] = whole = moments_over_towers(*along_one_axis(conversions.now(moments.x), moments.kept), self._tower)
            self._parts[key] = split(whole)
            conversions.meets_by_itself(old, "moments", whole.dtype, whole.shape)
        _, mean, variance = self._parts[key]
        new = tf.cast(variance if op is moments.op else mean, old.dtype)
        rank, keeps = moments.x.shape.rank, op.get_attr("keep_dims")
        return [tf.reshape(new, [tf.dimension_value(moments.x.shape[i]) if i in moments.kept else 1
                                 for i in range(rank) if i in moments.kept or keeps])]

    # What was found.

    def planned(self, plan):
        self.plan, self._within = plan, set(plan.order)
        found = {op: each for op, each in self._asked.items() if each.kind == "fused"}
        for root in plan.order:
            if root.type in ROOTS and isinstance(plan.placements.get((root, 0)), _OF_ALL) and self._scaled_by(
                    root) is not None or is_batch_norm(root) and not root.get_attr("is_training"):
                for each in self._behind(root):
                    found.setdefault(each.op, each)
        place = {op: number for number, op in enumerate(plan.order)}
        self.found = sorted(found.values(), key=lambda each: place[each.op])
        self.chosen = [each for each in self.found if self._is_chosen(each)]

    def _is_chosen(self, batch_norm):
        if batch_norm.kind in ("fused", "moments"):
            return batch_norm.op in self.plan.decisions and self.plan.decisions[batch_norm.op].meets == "batch norm"
        return isinstance(self.plan.placements.get((batch_norm.root, 0)), Replicate)

    def _behind(self, root):
        """Returns the batch norms whose variances a root is taken of, a list of `Moments`: of none, of one, or of sums."""
        placements, seen, stack, sums = self.plan.placements, set(), [root], []
        while stack:
            op = stack.pop()
            for tensor in op.inputs:
                source = tensor.op
                if source in seen or source not in self._within or not isinstance(placements.get(end_of(tensor)), _OF_ALL):
                    continue
                seen.add(source)
                moments = self._squares.get(source) or self._asked.get(source)
                if moments is not None:
                    return [] if moments.kind == "fused" else [moments._replace(root=root)]
                if any(isinstance(placements.get(end_of(each)), (Shard, Blocks)) for each in source.inputs):
                    sums.append(source)
                else:
                    stack.append(source)
        return [Moments("sums", root, self._scaled_by(root), (), [], [(op, 0) for op in sums], root)] if sums else []

    def _scaled_by(self, root):
        """Returns what is multiplied by what is computed of a root and of no examples, a tensor; None where nothing is."""
        seen, stack = set(), [root]
        while stack:
            op = stack.pop()
            for consumer in (consumer for output in op.outputs for consumer in output.consumers()):
                placement = self.plan.placements.get((consumer, 0))
                if consumer in seen or consumer not in self._within:
                    continue
                seen.add(consumer)
                if isinstance(placement, (Shard, Blocks)):
                    return consumer.outputs[0]
                if isinstance(placement, _OF_ALL):
                    stack.append(consumer)
        return None

    def moments_of(self, batch_norm):
        """Returns the moments of all towers of a batch norm, [2C + 1], see `tf_syncbn.kernels.merge.merge`."""
        whole = self._whole.get(batch_norm.op if batch_norm.kind == "fused" else (end_of(batch_norm.x), batch_norm.kept))
        if whole is None:  # of the only tower, or by squares
            x, axis = along_one_axis(batch_norm.x, batch_norm.kept)
            return moments_over_towers(x, axis, None)
        return packed(*whole) if isinstance(whole, tuple) else whole


def _hand_out_averages(op):
    """Lets what takes the moments of a fused op that does not train take the averages that it was given.

    TensorFlow 1's kernel writes no variance then: a layer averages what its memory held, with weight 0, which may be NaN.
    """
    for given, output in zip(op.inputs[3:5], op.outputs[1:3]):
        take_instead(output.consumers(), output, given)


def _fused_batch_norm(op):
    """Returns the `Moments` of a fused op, whose kind is "fused"."""
    return Moments("fused", op, op.inputs[0], (channels_axis(op),), [(op, 1)], [(op, 2)])


def _batch_moments(op, whole, inputs):
    """Returns the batch mean and variance that a fused op hands out: with Bessel's correction, part by part if it averages."""
    count, mean, variance = (tf.stop_gradient(moment) for moment in parts(*whole))
    moments = [mean, variance * bessel(count)]
    factor = op.get_attr("exponential_avg_factor") if "exponential_avg_factor" in op.node_def.attr else 1.0
    return moments if factor == 1.0 else [old + factor * (new - old) for old, new in zip(inputs[3:5], moments)]


def along_one_axis(x, kept):
    """Returns a tensor with all axes that keep their moments made one, and that axis."""
    kept = list(kept)
    if len(kept) == 1:
        return x, kept[0]
    order = [axis for axis in range(x.shape.rank) if axis not in kept] + kept
    channels = tf.TensorShape([tf.dimension_value(x.shape[axis]) for axis in kept]).num_elements()
    if order != sorted(order):
        x = tf.transpose(x, order)
    return tf.reshape(x, [-1, channels]), 1


def _with_channels(x, op, axis):
    """Returns a fused op's input with a known rank and number of channels."""
    if x.shape.rank is not None and tf.dimension_value(x.shape[axis]) is not None:
        return x
    known, rank = tf.identity(x), len(op.get_attr("data_format"))
    channels = tf.dimension_value(op.inputs[1].shape[0])
    known.set_shape([channels if i == axis else None for i in range(rank)])
    return known
