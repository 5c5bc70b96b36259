"""A copy of every trainable variable on each tower's device, for the placement "replicated".

A copy lives for a step: the tower reads the variable once, and all its ops take that. So copies are equal when a step begins, the
averaged gradients are applied once, and there is nothing to initialize, to restore or to save beside the variable itself. Copies
that outlive the step would cross between devices as often, once a step, and be stale after a checkpoint was restored.
"""
import tensorflow.compat.v1 as tf

from towers.graph.op_types import READS
from towers.graph.ordering import take_instead
from towers.graph.private import control_flow_now, control_flow_of
from towers.graph.walk import ancestors, is_ref, op_of, reads_of, writes_of

__all__ = ["read_once"]


def read_once(towers):
    """Lets each tower that stands elsewhere than a trainable variable read it once a step, into a copy on its device.

    Variables that the towers themselves write are left as they are, and so are all within a loop of control flow 1, whose ops
    take what stands outside of it as TensorFlow says.

    Args:
      towers: list of `towers.Tower`, all built and settled.
    """
    if control_flow_now(tf.get_default_graph()) is not None:
        return
    made = [set(tower.ops) for tower in towers]
    written = {variable for tower, ops in zip(towers, made) for variables in writes_of(_needed(tower, ops)).values()
               for variable in variables}
    for variable in tf.trainable_variables():
        if variable.op in written:
            continue
        reads = [op for op in reads_of(variable.op) if op.type in READS and control_flow_of(op) is control_flow_now(op.graph)]
        for tower, ops in zip(towers, made):
            taken = [(op, consumer) for op in reads for consumer in op.outputs[0].consumers() if consumer in ops]
            if taken and not _is_same(tower.context.device, variable.device):
                _copy(variable, taken, tower.context)


def _needed(tower, ops):
    """Returns those ops of a tower that its outputs and update ops wait for, so no initializers."""
    ends = [leaf for leaf in tf.nest.flatten(tower.outputs, expand_composites=True) if op_of(leaf) is not None]
    return ancestors(ends + tower.update_ops, ops)


def _copy(variable, taken, tower):
    """Makes a tower's copy of a variable the input of all ops that take a read of it, pairs of such a read and such an op."""
    with tf.name_scope(tower.name_scope + "replicated/"), tf.control_dependencies(None):
        with tf.device(variable.device):
            tensor = variable.op.outputs[0]
            value = tf.identity(tensor) if is_ref(tensor) else tf.raw_ops.ReadVariableOp(
                resource=tensor, dtype=variable.dtype.base_dtype)
        value.set_shape(variable.shape)
        with tf.device(tower.device):
            copy = tf.identity(value, name=variable.op.name)
    for read, consumer in taken:
        take_instead([consumer], read.outputs[0], copy)


def _is_same(device, other):
    first, second = (tf.DeviceSpec.from_string(name) for name in (device, other))
    return (first.job, first.task, first.device_type, first.device_index or 0) == (
        second.job, second.task, second.device_type, second.device_index or 0)
