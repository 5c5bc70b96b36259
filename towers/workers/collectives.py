"""Sums, joins and copies of tensors over all workers, by TensorFlow's own collective ops, those that 1.15 has.

A collective meets its like in the other workers by a number. It is made of what the collective is for, never of the names or
the order of ops, which a process may choose otherwise. That workers' graphs hold the same ones is checked while they are built.
"""
import zlib

import tensorflow.compat.v1 as tf

from towers.graph.op_types import BODIES, BRANCHES
from towers.graph.private import flows_around, is_loop
from towers.graph.walk import calls_of

__all__ = ["Collectives", "instances_of", "kept"]

_GROUP = 1  # the number of the group that all workers form
_MADE = "_towers_collectives"  # attribute of a graph, a dict from instance numbers to signatures; of None, the graph's own
_NUMBERS = "_towers_collective_numbers"  # attribute of a graph, a dict from what is counted to its last number
# What a collective op of 1.15 takes; others cross as the dtype that holds all their values.
_TAKEN = (tf.float32, tf.float64, tf.int32, tf.int64)
_AS = {tf.float16: tf.float32, tf.bfloat16: tf.float32, tf.bool: tf.int32, tf.int8: tf.int32, tf.uint8: tf.int32,
       tf.int16: tf.int32, tf.uint16: tf.int32, tf.uint32: tf.int64}
_BITS = {tf.float32: tf.int32, tf.float64: tf.int64}


class Collectives:
    """The collective ops of one worker's graphs.

    Args:
      size: int, how many workers there are.
      rank: int, this one's number.

    Attributes:
      size, rank: as given.
      order: list of int, which row of what is joined is each worker's; set when workers connect.
    """

    def __init__(self, size, rank):
        self.size, self.rank, self.order = size, rank, list(range(size))
        self._num_graphs = 0  # of this process, in which there is a collective
        self._device = "/job:worker/task:%d/cpu:0" % rank

    def sum(self, tensor, purpose, name="sum_of_workers"):
        """Adds up a tensor over workers, in an order that never changes; each gets the same bits.

        Args:
          tensor: numeric tensor, of the same shape and dtype in every worker; its size may be another one in every step.
          purpose: tuple of str and int, what this is, alike in every worker and for no other collective of the graph.
          name: str, of the ops.
        """
        return self._sum(tensor if tensor.shape.is_fully_defined() else self._of_one_shape(tensor, purpose), purpose, name)

    def _of_one_shape(self, tensor, purpose):
        """Returns a tensor that fails in a run where workers have it in different shapes, which would add up all the same."""
        with tf.name_scope("check_shape"):
            text = tf.strings.reduce_join(tf.strings.as_string(tf.shape(tensor)), separator=" ")
            all_alike = self.join(tf.strings.to_hash_bucket_fast(text, 1 << 62), purpose + ("shape",))
            is_so = tf.debugging.assert_equal(all_alike, all_alike[:1], [
                "%s is of another shape in another worker, so they have no sum. Here its shape is" % tensor.name, text])
            with tf.control_dependencies([is_so]):
                return tf.identity(tensor)

    def _sum(self, tensor, purpose, name):
        def add(taken):
            return tf.raw_ops.CollectiveReduce(
                input=taken, merge_op="Add", final_op="Id", subdiv_offsets=[0], **self._options("sum", taken, purpose))
        return self._crossing(tensor, add, name)

    def join(self, tensor, purpose, name="join_of_workers"):
        """Stacks a tensor of a known shape over workers, [size, ...] in the order of their ranks; arguments as for `sum`."""
        def gather(taken):
            row = tf.reshape(taken, [1, taken.shape.num_elements()])
            rows = tf.raw_ops.CollectiveGather(input=row, shape=row.shape, **self._options("join", row, purpose))
            rows = rows if self.order == list(range(self.size)) else tf.gather(rows, self.order)
            return tf.reshape(rows, [self.size] + taken.shape.as_list())
        return self._crossing(tensor, gather, name)

    def join_varied(self, tensor, purpose, name="join_of_workers"):
        """Returns a list over workers of what each has of a tensor, whose shape may be another one in each, of the same rank."""
        with tf.name_scope(name):
            shapes = self.join(tf.shape(tensor, out_type=tf.int64), purpose + ("shapes",))
            ends = tf.cumsum(tf.reduce_prod(shapes, 1))
            before = ends[self.rank] - tf.size(tensor, out_type=tf.int64)
            # One tensor for all, zero where it is another worker's: a sum may have another size in every step.
            mine = tf.pad(tf.reshape(self._taken(tensor), [-1]), [[before, ends[-1] - ends[self.rank]]])
            parts = tf.split(self._sum(mine, purpose, "sum_of_workers"), tf.reduce_prod(shapes, 1), num=self.size)
            parts = [tf.reshape(part, shapes[worker]) for worker, part in enumerate(parts)]
            for part in parts:
                part.set_shape([None] * tensor.shape.rank)
            return [tf.cast(part, tensor.dtype.base_dtype) for part in parts]

    def copy(self, tensor, purpose, source=0, name="copy_of_worker"):
        """Returns what the worker `source` has of a tensor, to the bit; of the others' only shape and dtype matter."""
        # TensorFlow 1.15 broadcasts from worker 0 alone. So it is a sum of bits, zero in all others.
        taken = self._taken(tensor)
        bits = tf.bitcast(taken, _BITS[taken.dtype]) if taken.dtype in _BITS else taken
        bits = self.sum(bits if self.rank == source else tf.zeros_like(bits), purpose + ("copy", source), name)
        return tf.cast(tf.bitcast(bits, taken.dtype) if taken.dtype in _BITS else bits, tensor.dtype.base_dtype)

    @staticmethod
    def next_of_graph(what):
        """Returns how often it was asked for `what` in the default graph before: an int from 0."""
        numbers = kept(tf.get_default_graph(), _NUMBERS)
        numbers[what] = numbers.get(what, -1) + 1
        return numbers[what]

    def _crossing(self, tensor, build, name):
        # A gradient function runs colocated with its forward op, which would win over the device.
        with tf.colocate_with(None, ignore_existing=True), tf.device(self._device), tf.name_scope(name):
            return tf.cast(build(self._taken(tensor)), tensor.dtype.base_dtype)

    def _taken(self, tensor):
        dtype = tensor.dtype.base_dtype
        if dtype not in _TAKEN and dtype not in _AS:
            raise TypeError("No %s tensor crosses between workers, as %r would: numbers do." % (dtype.name, tensor.name))
        return tf.identity(tensor) if dtype in _TAKEN else tf.cast(tensor, _AS[dtype])

    def _options(self, kind, tensor, purpose):
        # A process keeps an instance's first shape, so another graph whose sizes are others needs instances of its own.
        made = kept(tf.get_default_graph(), _MADE)
        if not made:
            self._num_graphs += 1
            made[None] = "graph %d" % self._num_graphs
        signature = "%s of %s%s, %s, %s" % (kind, tensor.dtype.name, tensor.shape, " ".join(map(str, purpose)), made[None])
        number = zlib.crc32(signature.encode()) & 0x7fffffff
        other = made.setdefault(number, signature)
        if other != signature:
            raise ValueError("%r and %r got the same number by chance, and would meet each other: build one of them in another "
                             "name scope." % (signature, other))
        return {"group_size": self.size, "group_key": _GROUP, "instance_key": number, "communication_hint": "ring"}

    @staticmethod
    def name_graph(name):
        """Names the default graph, which holds no collective yet, where purposes tell its collectives from all other graphs'."""
        kept(tf.get_default_graph(), _MADE)[None] = name

    @staticmethod
    def made():
        """Returns what tells the collectives of the default graph apart, a sorted list of str."""
        return sorted(kept(tf.get_default_graph(), _MADE).values())


def instances_of(ops):
    """Returns the numbers of the collectives that are sure to run with ops, in loops and functions too, a set of int."""
    found = set()

    def look(nodes):
        found.update(node.attr["instance_key"].i for node in nodes if node.op.startswith("Collective"))

    sure = [op for op in ops if (op.type.startswith("Collective") or op.type in BODIES) and all(map(is_loop, flows_around(op)))]
    look([op.node_def for op in sure])
    calls_of(sure, look, but=BRANCHES)
    return found


def kept(graph, attribute):
    """Returns a dict that stays with the outermost graph, empty at first."""
    while getattr(graph, "outer_graph", None) is not None:  # of a tf.function, or a loop of control flow 2
        graph = graph.outer_graph
    if not hasattr(graph, attribute):
        setattr(graph, attribute, {})
    return getattr(graph, attribute)
