"""The `EstimatorSpec` of all towers, of those of each."""
import tensorflow.compat.v1 as tf

from towers.batches.shares import weighted_sum
from towers.state.own_data import takes_own_data

__all__ = ["joined", "joined_exports", "tensors_of_export"]


def joined(replicas, key):
    """Joins what the towers' outputs hold by a key, a structure of tensors.

    Tensors of rank 1 or more are joined along axis 0, in the order of the towers; scalars are averaged by the towers' shares.
    What takes nothing of a tower's own batch is tower 0's.

    Raises:
      ValueError: for a scalar of a tower's own data that is no floating point number.
    """
    leaves = [tf.nest.flatten(tower.outputs[key]) for tower in replicas]
    with tf.name_scope(key), tf.device(replicas.aggregation_device):
        return tf.nest.pack_sequence_as(replicas[0].outputs[key], [_joined(list(leaf), replicas) for leaf in zip(*leaves)])


def _joined(tensors, replicas):
    first, context = tensors[0], replicas[0].context
    if not takes_own_data(first, context) and not _has_a_row_for_each_example(first, context):
        return first
    if first.shape.rank != 0:
        return tf.concat(tensors, 0)
    if not first.dtype.is_floating:
        raise ValueError("The prediction %r is one %s for a whole batch, which can't be told of the towers' parts: return a "
                         "tensor with a row for each example." % (first.name, first.dtype.name))
    return weighted_sum(tensors, [tower.weight for tower in replicas])


def _has_a_row_for_each_example(tensor, context):
    """Tells whether a tensor has as many rows as the tower has examples, where both are known."""
    sizes = [tf.dimension_value(leaf.shape[0]) for leaf in tf.nest.flatten(context.batch)
             if isinstance(leaf, tf.Tensor) and leaf.shape.rank]
    return bool(tensor.shape.rank) and tf.dimension_value(tensor.shape[0]) in set(sizes) - {None}


def tensors_of_export(output):
    """Returns the tensors of an `ExportOutput`, a dict by the arguments that make one."""
    kinds = tf.estimator.export
    if isinstance(output, kinds.ClassificationOutput):
        found = {"scores": output.scores, "classes": output.classes}
    elif isinstance(output, kinds.RegressionOutput):
        found = {"value": output.value}
    elif isinstance(output, kinds.PredictOutput):
        found = {"outputs": dict(output.outputs)}
    else:
        raise TypeError("export_outputs hold %r: towers join tf.estimator.export's ClassificationOutput, RegressionOutput and "
                        "PredictOutput." % (output,))
    return {key: value for key, value in found.items() if value is not None}


def joined_exports(replicas, export_outputs):
    """Returns the export outputs of all towers, of tower 0's and what the towers' outputs hold as "exports"."""
    whole = joined(replicas, "exports")
    return {name: type(output)(**whole[name]) for name, output in export_outputs.items()}
