"""The numbers of steps in which workers meet: the first worker draws a sequence's first one before another can ask for it.

A collective meets its like of a step with the same number. TensorFlow has a sequence of numbers for each key of a graph. The
first worker looks for a key, finds none and draws; the others ask it. Where one asks between its look and its draw, that one has
a number which is thrown away, and all wait forever: two workers of TensorFlow 2.21 did in one of some 2,000 short runs, and 1.15
has the same code. Here each set of collectives has a key, and of a new one the first worker draws before the others begin.
"""
import zlib

import tensorflow.compat.v1 as tf

from towers.graph.walk import ancestors, op_of
from towers.workers.collectives import instances_of, kept

__all__ = ["StepNumbers"]

_TOLD = 1  # the key of what workers tell each other
_STARTED = "towers_workers_started"  # of a queue of the first worker's server, and of an op
_KEYS = "_towers_step_keys"  # attribute of a graph, a dict from the names of fetches and of what is fed to a key


class StepNumbers:
    """The keys of one worker's steps.

    Args:
      rank: int, this worker's.
      size: int, how many workers there are.
      target: str, of this worker's sessions.
      config: `tf.ConfigProto`, of this worker's sessions.
      first: str, the target of sessions on the first worker's server.
    """

    def __init__(self, rank, size, target, config, first):
        self._is_first, self._size, self._target, self._config = rank == 0, size, target, config
        self._on_first = target if rank == 0 else first
        self._drawn = set()
        self.told = _with_key(_TOLD)  # tf.RunOptions

    def begin(self):
        """Draws the first number of what workers tell each other; the others wait for it."""
        if self._is_first:
            self._draw(_TOLD)
        config = tf.ConfigProto(device_filters=["/job:worker/task:0"])  # the session shares its queues with the other workers'
        with tf.Graph().as_default() as graph, tf.device("/job:worker/task:0/cpu:0"):
            queue = tf.FIFOQueue(self._size, tf.bool, [[]], shared_name=_STARTED)
            step = queue.enqueue_many([[True] * (self._size - 1)]) if self._is_first else queue.dequeue()
            with tf.Session(self._on_first, graph, config) as session:
                session.run(step)

    def options(self, graph, fetches, feed_dict, options, wait):
        """Returns the `tf.RunOptions` of a run, those given where it holds no collective.

        Args:
          graph: `tf.Graph`, the session's.
          fetches, feed_dict, options: as `tf.Session.run` takes them.
          wait: a function of a key that returns when every worker has called it.
        """
        key = self.key(graph, fetches, feed_dict)
        if key is None or options is not None and options.experimental.collective_graph_key:
            return options
        if key not in self._drawn:
            self._drawn.add(key)
            if self._is_first:
                self._draw(key)
            wait(key)
        return _with_key(key, options)

    def _draw(self, key):
        with tf.Graph().as_default() as graph:
            step = tf.no_op()
            with tf.Session(self._target, graph, self._config) as session:
                session.run(step, options=_with_key(key))

    @staticmethod
    def key(graph, fetches, feed_dict):
        """Returns the key of the collectives that a run takes, an int; None where there is none."""
        keys = kept(graph, _KEYS)
        try:
            of_fetches, of_feeds = [{op_of(graph.as_graph_element(leaf)) for leaf in _leaves(items)}
                                    for items in (fetches, list(feed_dict or ()))]
        except (KeyError, TypeError, ValueError):  # the run will say what is wrong
            return None
        names = frozenset(op.name for op in of_fetches), frozenset(op.name for op in of_feeds)
        if names not in keys:
            instances = instances_of(ancestors(of_fetches, stop=of_feeds))
            keys[names] = zlib.crc32(repr(sorted(instances)).encode()) + _TOLD + 1 if instances else None
        return keys[names]


def _leaves(items):
    """Returns the tensors, ops, variables and names of what a run fetches, a list: keys of a dict may be of any kind."""
    if isinstance(items, dict):
        items = list(items.values())
    if isinstance(items, (list, tuple)):
        return [leaf for item in items for leaf in _leaves(item)]
    return tf.nest.flatten(items, expand_composites=True)


def _with_key(key, options=None):
    result = tf.RunOptions()
    if options is not None:
        result.CopyFrom(options)
    result.experimental.collective_graph_key = key
    return result
