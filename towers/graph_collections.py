"""What each tower sees of the graph's collections, and what they hold in the end.

While a tower is built, the losses and update ops of earlier towers are out of its sight, so that `get_total_loss()` in a
model function sums its own tower's. What a variable's regularizer added stays in sight: TensorFlow adds it where the
variable is made, in tower 0 alone. Afterwards the collections hold every tower's items, and tower 0's summaries, whose
tags have no tower in them: they are those of the model built without towers.
"""
import contextlib

import tensorflow.compat.v1 as tf

from towers.exchange import rewire

__all__ = ["TowerCollections"]

_KEYS = tf.GraphKeys


_OWNED = "_towers_collection_items"  # attribute of a graph: what towers, of any build, added to its collections


class TowerCollections:
    """Keeps apart what towers add to the graph's collections; to be made before the first tower is built."""

    def __init__(self):
        self._graph = tf.get_default_graph()
        self._before = {key: self._graph.get_collection(key)
                        for key in (_KEYS.LOSSES, _KEYS.UPDATE_OPS, _KEYS.REGULARIZATION_LOSSES, _KEYS.SUMMARIES)}
        self._added = {key: [] for key in self._before}  # what finished towers added
        if not hasattr(self._graph, _OWNED):
            setattr(self._graph, _OWNED, [])

    @contextlib.contextmanager
    def tower(self, index, name_scope):
        """Shows one tower its own items and yields a dict that afterwards maps each collection to what it added."""
        sight = {key: [item for item in items + self._added[key] if self._is_in_sight(key, item)]
                 for key, items in self._before.items()}
        for key, items in sight.items():
            self._graph.get_collection_ref(key)[:] = items
        added = {}
        try:
            yield added
            for key, items in sight.items():
                added[key] = self._graph.get_collection(key)[len(items):]
                getattr(self._graph, _OWNED).extend(added[key])
                if key != _KEYS.SUMMARIES or index == 0:
                    self._added[key].extend(added[key])
            if index == 0:
                _strip_tags(added[_KEYS.SUMMARIES], name_scope, self._before[_KEYS.SUMMARIES])
        finally:
            for key, items in self._before.items():
                self._graph.get_collection_ref(key)[:] = items + self._added[key]

    def _is_in_sight(self, key, item):
        if not any(item is owned for owned in getattr(self._graph, _OWNED)):
            return True  # made outside of towers
        # TensorFlow's own scope for what a variable's regularizer makes, in tf.get_variable and tf.layers alike. A term
        # that the model function adds by hand is added anew by each tower, and so hidden from the others.
        return key == _KEYS.REGULARIZATION_LOSSES and "/Regularizer/" in getattr(item, "name", "")


def _strip_tags(summaries, name_scope, others):
    """Takes the tower out of the tags, the first inputs of summary ops, and keeps each tag the only one of its name."""
    taken = {_tag_of(summary) for summary in others}
    for summary in summaries:
        tag = _tag_of(summary)
        if tag and tag.startswith(name_scope):
            outer = name_scope[:name_scope.rstrip("/").rfind("/") + 1]
            plain = free = outer + tag[len(name_scope):]
            number = 0
            while free in taken:
                number += 1
                free = "%s_%d" % (plain, number)
            taken.add(free)
            with tf.name_scope(None):
                rewire(summary.op, 0, tf.constant(free, name=summary.op.name + "/tag"))


def _tag_of(summary):
    op = getattr(summary, "op", None)
    tag = op.inputs[0] if op is not None and op.inputs else None
    if tag is None or tag.dtype != tf.string or tag.op.type != "Const":
        return None
    return tag.op.get_attr("value").string_val[0].decode()
