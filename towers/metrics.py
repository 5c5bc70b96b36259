"""Metrics that a model function updates in each tower, made to count every example of the batch once.

The variables of a metric are shared by all towers, and each tower adds what its own examples come to. Numbers of examples that
TensorFlow knows while the graph is built look the same in all towers, as though they were to be added once: here they are tied
to the tower's batch.
"""
import tensorflow.compat.v1 as tf

from towers.graph_walk import ancestors, op_of, writes_of
from towers.own_data import takes_own_data
from towers.private import rewire

__all__ = ["count_all_examples", "merged_metrics"]


def count_all_examples(metrics, ops, context):
    """Makes the metrics of one tower add what its own examples come to.

    Args:
      metrics: dict from names to (value, update).
      ops: list of the tower's operations.
      context: the tower's `TowerContext`.

    Raises:
      ValueError: for a metric that counts a batch as one: the mean of a loss, say, which is a mean over the batch already.
    """
    made = set(ops)
    for name, (_, update) in sorted(metrics.items()):
        writes = writes_of(ancestors([update], within=made))
        own = {op for op in writes if takes_own_data([op], context)}
        if not own:
            continue  # the same in all towers: it runs once
        for op in sorted(set(writes) - own, key=lambda op: op.name):
            _tie_to_batch(op, name, context)


def _tie_to_batch(write, name, context):
    leaf = next(leaf for leaf in tf.nest.flatten(context.batch) if isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0)
    size = tf.dimension_value(leaf.shape[0]) if leaf.shape.rank else None
    added = write.inputs[1] if len(write.inputs) > 1 else None
    known = None if added is None else tf.get_static_value(added)
    if added is None or not size or not added.dtype.is_floating and known is None or (known is not None and (known % size).any()):
        raise ValueError(
            "The metric %r of a model function adds %s to %r for each tower's part of a batch, whatever its number of examples: it "
            "would count towers, not examples. Hand it values of each example (tf.metrics.mean of the losses of all examples, not "
            "of their mean); or make them the same in all towers by towers.all_reduce."
            % (name, "a number" if known is None else known, write.inputs[0].op.name))
    with tf.device(write.device), tf.name_scope(context.name_scope + "examples/"):
        counted = tf.raw_ops.Shape(input=leaf)[0]  # tf.shape would be a constant
        rewire(write, 1, added * tf.cast(counted, added.dtype) / tf.cast(size, added.dtype) if added.dtype.is_floating
               else added // size * tf.cast(counted, added.dtype))


def merged_metrics(replicas):
    """Returns the metrics of all towers, a dict from names to (value, update), of what the towers' outputs hold as "metrics"."""
    merged = {}
    for name, (value, _) in replicas[0].outputs["metrics"].items():
        updates = [tower.outputs["metrics"][name][1] for tower in replicas]
        with tf.control_dependencies([op_of(update) for update in updates]):
            last = updates[-1]
            merged[name] = value, tf.identity(last) if isinstance(last, tf.Tensor) else tf.group(*updates)
    return merged
