"""What a tower's model function is given, and what its graph gets while that runs."""
import tensorflow.compat.v1 as tf

from towers.batches.rows import is_ragged, is_sparse
from towers.graph.walk import ancestors, end_of, op_of
from towers.sharding.nodes import Refused
from towers.sharding.placements import BATCH, Additive, RowNumbers, Rows, Shard, Size

__all__ = ["Added", "Given", "without_size"]


def without_size(leaf):
    """Returns a part of the batch whose size along axis 0 is not known while the graph is built."""
    if is_sparse(leaf):
        shape = tf.concat([tf.placeholder_with_default(leaf.dense_shape[:1], [1]), leaf.dense_shape[1:]], 0)
        return tf.SparseTensor(leaf.indices, leaf.values, shape)
    if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank or tf.dimension_value(leaf.shape[0]) is None:
        return leaf
    return tf.placeholder_with_default(leaf, [None] + leaf.shape.as_list()[1:])


class Given:
    """The batch of a tower: which of its tensors hold the examples, and how many there are.

    Attributes:
      leaves: list of tensors that hold examples along axis 0, dense ones.
      placements: dict from (op, number) to `Placement`.
      own, first, total: int, how many examples the tower has, the number of its first, and how many there are; None where sizes
        are not known while the graph is built.
      like: (tensor, axis) whose size is the number of the tower's examples, (tensor, None) that number, or None.
      whole_sizes: dict from (op, number) to the size along axis 0 in the whole batch; None where that is not known.
    """

    def __init__(self, args, tower):
        self.placements, self.leaves, self.like = {}, [], None
        for leaf in tf.nest.flatten(args):
            if is_ragged(leaf):
                raise Refused("a part of the batch is ragged, %r, and of its rows nothing is known. Hand in a "
                              "dense tensor and each row's length." % (leaf,))
            if is_sparse(leaf):
                self._add_sparse(leaf)
            elif isinstance(leaf, tf.Tensor):
                if leaf.shape.rank is None:
                    raise Refused("a part of the batch, %r, has an unknown rank: give it a shape." % leaf.name)
                if leaf.shape.rank:
                    self.leaves.append(leaf)
        own = [tf.dimension_value(leaf.shape[0]) for leaf in self.leaves]
        per_tower = [tower.sizes_of(leaf) for leaf in self.leaves]
        is_sparse_too = any(is_sparse(leaf) for leaf in tf.nest.flatten(args))
        is_known = bool(self.leaves) and None not in own + per_tower and not is_sparse_too
        # What is not known is checked when it runs.
        is_one_size = not is_known or all(sizes == per_tower[0] for sizes in per_tower)
        for number, leaf in enumerate(self.leaves):
            rows = BATCH if is_one_size else Rows("part %d of the batch" % number)
            self.placements[end_of(leaf)] = Shard(0, rows, 1)
        if self.leaves:
            self.like = (self.leaves[0], 0) if is_one_size else None
        self.own = self.first = self.total = self.whole_sizes = None
        if is_known:
            self.whole_sizes = {end_of(leaf): sum(sizes) for leaf, sizes in zip(self.leaves, per_tower)}
        if is_known and is_one_size:
            self.own, self.total, self.first = own[0], sum(per_tower[0]), sum(per_tower[0][:tower.index])

    def _add_sparse(self, leaf):
        rows = Rows(leaf.values.op.name)
        self.like = leaf.dense_shape[0], None
        self.placements[end_of(leaf.indices)] = RowNumbers(0, rows, 1, Additive(1, BATCH), self.like, 0)
        self.placements[end_of(leaf.values)] = Shard(0, rows, 1)
        rank = tf.dimension_value(leaf.dense_shape.shape[0])
        if rank is None:
            raise Refused("a sparse part of the batch, %r, has an unknown rank." % leaf.values.name)
        self.placements[end_of(leaf.dense_shape)] = Size((Additive(1, BATCH),) + (None,) * (rank - 1), (rank,))


class Added:
    """What a graph gets while a model function runs; to be made before."""

    def __init__(self, graph, tower):
        self._graph, self._tower = graph, tower
        self._first_op = len(graph.get_operations())
        self.first_items = {key: len(graph.get_collection_ref(key)) for key in graph.collections}

    def ops(self):
        """Returns the ops made since, but for those that belong to no tower."""
        of_all = self._tower.meetings.aggregated()
        return [op for op in self._graph.get_operations()[self._first_op:] if op not in of_all]

    def items(self):
        """Returns what was added to collections since, a dict of lists."""
        return {key: self._graph.get_collection_ref(key)[self.first_items.get(key, 0):] for key in self._graph.collections}

    def regularizers(self, batch):
        """Returns the ops of penalties on variables, which are made with these, in the first tower alone; a set."""
        made, found = set(self.ops()), set()
        for item in self.items().get(tf.GraphKeys.REGULARIZATION_LOSSES, ()):
            ops = ancestors([item], within=made) if op_of(item) is not None else ()
            if not any(end_of(tensor) in batch.placements for op in ops for tensor in op.inputs):
                found.update(ops)
        return found

    def needed(self, outputs):
        """Returns those of the ops that outputs and what was added to collections depend on."""
        return ancestors(self.results(outputs), within=set(self.ops()))

    def results(self, outputs):
        """Returns the ops and tensors among outputs and what was added to collections, a list."""
        items = tf.nest.flatten(outputs, expand_composites=True) + sum(self.items().values(), [])
        return [item for item in items if op_of(item) is not None and op_of(item).graph is self._graph]

    def replace(self, now):
        """Puts what stands for tensors into collections."""
        for key in self._graph.collections:
            items = self._graph.get_collection_ref(key)
            first = self.first_items.get(key, 0)
            items[first:] = [now(item) if isinstance(item, tf.Tensor) and item.graph is self._graph else item
                             for item in items[first:]]
