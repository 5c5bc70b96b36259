"""What the towers of a whole-batch model hand out: losses that are averaged by the towers' shares, and placements of all else."""
import tensorflow.compat.v1 as tf

from towers.batches.shares import by_name
from towers.context import may_differ
from towers.graph.walk import end_of
from towers.sharding.nodes import AsPartial, Numbered, Refused, Replicated
from towers.sharding.placements import (BATCH, Blocks, Listed, OneRow, Own, Partial, PartialMean, Replicate, RowNumbers, RowSum,
                                        Shard, Size)

__all__ = ["Outputs"]


class Outputs:
    """What a tower hands out: losses that are averaged by the towers' shares, and the placements of all else."""

    def __init__(self, rewriting, plan, batch, tower):
        self._rewriting, self._plan, self._batch, self._tower = rewriting, plan, batch, tower

    def of(self, outputs):
        """Returns the model function's outputs."""
        graph = tf.get_default_graph()
        is_weighted = "weight" in by_name(outputs)
        found = tf.nest.map_structure(lambda leaf: self._leaf(leaf) if isinstance(
            leaf, tf.Tensor) and leaf.graph is graph else leaf, outputs, expand_composites=True)
        if is_weighted:
            if self._tower.is_first:
                tf.logging.warning("towers.whole_batch: the model function returns a \"weight\", which is not needed and not "
                                   "looked at: its loss is that of the whole batch as it stands.")
            weight = self._weight()
            found = found._replace(weight=weight) if hasattr(found, "_replace") else dict(found, weight=weight)
            self._tower.placements[end_of(weight)] = Partial() if self._batch.like is not None else Replicate()
        return found

    def _weight(self):
        with may_differ():
            if self._batch.like is None:
                return tf.constant(1.0, tf.float64)
            if self._batch.own is not None:
                return tf.constant(self._batch.own)
            if not self._batch.leaves:
                return tf.cast(self._batch.like[0], tf.int32)
            sizes = tf.stack([tf.shape(leaf)[0] for leaf in self._batch.leaves])
            check = tf.raw_ops.Assert(condition=tf.reduce_all(tf.equal(sizes, sizes[0])), data=[
                "The tensors in the batch of tower %d disagree in size along axis 0. Their sizes are" % self._tower.index, sizes])
            with tf.control_dependencies([check]):
                return tf.identity(sizes[0])

    def _leaf(self, tensor):
        placement = self._plan.placements.get(end_of(tensor), Replicate())
        conversions, now = self._rewriting.conversions, self._rewriting.now(tensor)
        if isinstance(placement, Listed):
            raise Refused("the model function returns a list, %r: stack it." % tensor.name)
        is_of_some_blocks = isinstance(placement, Blocks) and placement.outer is None
        if isinstance(placement, (OneRow, RowSum, Size)) or is_of_some_blocks:
            now, placement = conversions.converted(tensor, Replicated()), Replicate()
        elif isinstance(placement, RowNumbers):
            now, placement = conversions.converted(tensor, Numbered()), Shard(placement.axis, placement.rows, placement.times)
        elif isinstance(placement, PartialMean) and placement.rows != BATCH:
            now, placement = conversions.converted(tensor, AsPartial()), Partial()
        if isinstance(placement, Partial) and now.shape.rank == 0 and now.dtype.is_floating:
            now, placement = self._over_share(now), PartialMean()
        if not isinstance(placement, Own):  # which `only` left to each tower
            self._tower.placements[end_of(now)] = placement
        return now

    def _over_share(self, loss):
        """Returns a sum's part as the towers' shares average it."""
        own, total = self._batch.own, self._batch.total
        with tf.name_scope(self._tower.name_scope + "whole_batch/"), may_differ():
            if self._batch.like is None:
                return tf.multiply(loss, tf.constant(self._tower.num_towers, loss.dtype), name="loss")
            if own is None:
                own, total, _ = self._rewriting.conversions.batch_count()
                own, total = tf.cast(own, tf.float64), tf.cast(total, tf.float64)
                return tf.multiply(loss, tf.cast(tf.math.divide_no_nan(total, own), loss.dtype), name="loss")
            return tf.multiply(loss, tf.constant(total / own if own else 0.0, loss.dtype), name="loss")
