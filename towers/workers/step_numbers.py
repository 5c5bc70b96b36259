"""Step numbers that all workers agree on.

A collective meets those of the same step number. TensorFlow keeps a sequence of numbers for each key. Worker 0 looks a key up,
and draws a number if there is none; the others ask worker 0. If one asks between the look and the draw, it gets a number that
worker 0 then replaces, and both wait forever. Two workers did on TensorFlow 2.21, in about one of 2,000 short runs; 1.15 has the
same code. So each set of collectives has a key of its own, and worker 0 draws its first number before the others begin.
"""
import zlib

import tensorflow.compat.v1 as tf

from towers.graph.walk import ancestors, op_of
from towers.workers.collectives import instances_of, kept

__all__ = ["StepNumbers"]

_TOLD = 1  # the key of what workers tell each other
_KEYS = "_towers_step_keys"  # attribute of a graph, a dict from (names of fetched ops, names of fed ops) to a key


class StepNumbers:
    """The keys of one worker's steps.

    Args:
      rank: int, this worker's. Worker 0 must not serve the others yet.
      target: str, of this worker's sessions.
      config: `tf.ConfigProto`, of this worker's sessions.

    Attributes:
      told: `tf.RunOptions`, of what workers tell each other.
    """

    def __init__(self, rank, target, config):
        self._is_first, self._target, self._config = rank == 0, target, config
        self._begun = set()
        self.told = _with_key(_TOLD)
        self._draw(_TOLD)

    def options(self, graph, fetches, feed_dict, options, meet):
        """Returns the `tf.RunOptions` of a run: those given if no collective is sure to run, or if they have a key.

        The first run of a key waits for all workers.

        Args:
          graph: `tf.Graph`, the session's.
          fetches, options: as `tf.Session.run` takes them.
          feed_dict: a dict as `tf.Session.run` takes it, or a list of its keys; or None.
          meet: a function of a key that returns when every worker has called it.
        """
        key = self.key(graph, fetches, feed_dict)
        if key is None or options is not None and options.experimental.collective_graph_key:
            return options
        if key not in self._begun:
            self._begun.add(key)
            self._draw(key)
            meet(key)
        return _with_key(key, options)

    def _draw(self, key):
        if self._is_first:
            with tf.Graph().as_default() as graph:
                step = tf.no_op()
                with tf.Session(self._target, graph, self._config) as session:
                    session.run(step, options=_with_key(key))

    @staticmethod
    def key(graph, fetches, feed_dict):
        """Returns the key of the collectives that a run is sure to take, an int; None if there are none."""
        keys = kept(graph, _KEYS)
        try:
            of_fetches, of_feeds = [{op_of(graph.as_graph_element(leaf)) for leaf in _leaves(items)}
                                    for items in (fetches, list(feed_dict or ()))]
        except (KeyError, TypeError, ValueError):  # the run will say what is wrong
            return None
        names = frozenset(op.name for op in of_fetches), frozenset(op.name for op in of_feeds)
        if names not in keys:
            instances = instances_of(ancestors(of_fetches, stop=of_feeds))
            keys[names] = _TOLD + 1 + zlib.crc32(repr(sorted(instances)).encode()) if instances else None
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
