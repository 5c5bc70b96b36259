"""Metrics that a model function updates in each tower, made to count every example of the batch once.

The variables of a metric are shared by all towers, and each tower adds what its own examples come to. Numbers of examples that
TensorFlow knows while the graph is built look the same in all towers, as though they were to be added once: here they are tied
to the tower's batch.
"""
import tensorflow.compat.v1 as tf

from towers.graph.private import rewire
from towers.graph.static_values import static_value
from towers.graph.walk import ancestors, op_of, writes_of
from towers.state.own_data import of_own_data

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
    made, of_own = set(ops), of_own_data(context)
    for name, (_, update) in sorted(metrics.items()):
        writes = writes_of(ancestors([update], within=made))
        own = writes.keys() & of_own
        if own or all(_is_of_constants(op) for op in writes):
            for op in sorted(writes.keys() - own, key=lambda op: op.name):
                _tie_to_batch(op, name, context, bool(own))


def _added(write):
    """Returns the number that a write adds to a variable, an array, where it is known while the graph is built; else None."""
    if "Add" not in write.type or len(write.inputs) < 2:
        return None
    number = write.inputs[1]
    while number.op.type == "Cast" and tf.get_static_value(number) is None:
        number = number.op.inputs[0]
    return static_value(number)


def _is_of_constants(write):
    """Tells whether what a write takes besides its variable is made of constants alone."""
    found = ancestors([tensor for tensor in write.inputs[1:]])
    return bool(found) and all(op.inputs or op.type == "Const" for op in found)


def _tie_to_batch(write, name, context, has_own):
    """Makes what a tower adds to a metric's variable follow its number of examples, where it counts these.

    `has_own` says whether other variables of the metric take data of the tower.
    """
    leaf = next((leaf for leaf in tf.nest.flatten(context.batch) if isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0), None)
    size, added = tf.dimension_value(leaf.shape[0]) if leaf is not None and leaf.shape.rank else None, _added(write)
    counts = bool(size) and "Add" in write.type and (has_own if added is None else not (added % size).any())
    if not counts and not has_own and added is not None:
        return  # one for each batch: it runs once
    if not counts or size == 1 and not has_own:
        raise ValueError(
            "The metric %r of a model function adds %s to %r for each tower's part of a batch, whatever its number of examples: "
            "it would count towers, not examples. Hand it values of each example (tf.metrics.mean of the losses of all examples, "
            "not of their mean); or make them the same in all towers by towers.all_reduce."
            % (name, "a number" if added is None else added, write.inputs[0].op.name))
    number = write.inputs[1]
    with tf.name_scope(context.name_scope + "examples/"):
        counted = tf.cast(tf.raw_ops.Shape(input=leaf)[0], number.dtype)  # tf.shape would be a constant
        whole = tf.constant(size, number.dtype)
        rewire(write, 1, number * counted / whole if number.dtype.is_floating else number // whole * counted)


def merged_metrics(replicas):
    """Returns the metrics of all towers, a dict from names to (value, update), of what the towers' outputs hold as "metrics"."""
    merged = {}
    for name, (value, _) in replicas[0].outputs["metrics"].items():
        updates = [tower.outputs["metrics"][name][1] for tower in replicas]
        with tf.control_dependencies([op_of(update) for update in updates]):
            last = updates[-1]
            merged[name] = value, tf.identity(last) if isinstance(last, tf.Tensor) else tf.group(*updates)
    return merged
