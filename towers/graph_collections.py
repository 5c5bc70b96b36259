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


class TowerCollections:
    """Keeps apart what towers add to the graph's collections; to be made before the first tower is built."""

    def __init__(self):
        self._graph = tf.get_default_graph()
        self._before = {key: self._graph.get_collection(key)
                        for key in (_KEYS.LOSSES, _KEYS.UPDATE_OPS, _KEYS.REGULARIZATION_LOSSES, _KEYS.SUMMARIES)}
        self._added = {key: [] for key in self._before}  # what finished towers added

    @contextlib.contextmanager
    def tower(self, index, name_scope):
        """Shows one tower its own items and yields a dict that afterwards maps each collection to what it added."""
        sight = {key: items + self._in_sight(key) for key, items in self._before.items()}
        for key, items in sight.items():
            self._graph.get_collection_ref(key)[:] = items
        added = {}
        try:
            yield added
            for key, items in sight.items():
                added[key] = self._graph.get_collection(key)[len(items):]
                if key != _KEYS.SUMMARIES or index == 0:
                    self._added[key].extend(added[key])
            if index == 0:
                _strip_tags(added[_KEYS.SUMMARIES], name_scope)
        finally:
            for key, items in self._before.items():
                self._graph.get_collection_ref(key)[:] = items + self._added[key]

    def _in_sight(self, key):
        if key == _KEYS.REGULARIZATION_LOSSES:
            # TensorFlow's own scope for what a variable's regularizer makes, in tf.get_variable and tf.layers alike. A
            # term that the model function adds by hand is added anew by each tower, and so hidden from the others.
            return [loss for loss in self._added[key] if "/Regularizer/" in getattr(loss, "name", "")]
        return []


def _strip_tags(summaries, name_scope):
    """Takes the tower's name scope out of the tags, the first inputs of summary ops."""
    for summary in summaries:
        tag = summary.op.inputs[0] if summary.op.inputs else None
        if tag is None or tag.dtype != tf.string or tag.op.type != "Const":
            continue
        text = tag.op.get_attr("value").string_val[0].decode()
        if text.startswith(name_scope):
            with tf.name_scope(None):
                rewire(summary.op, 0, tf.constant(text[len(name_scope):], name=summary.op.name + "/tag"))
