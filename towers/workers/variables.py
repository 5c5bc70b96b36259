"""Variables that every worker has a copy of, made equal to one worker's."""
import tensorflow.compat.v1 as tf

__all__ = ["broadcast", "check_equal_at_start", "copied"]

_EQUAL = "_towers_workers_variables_are_equal"  # attribute of a graph, the variable that exists once a broadcast has run


def broadcast(collectives, variables, purpose):
    """Returns an op that gives every worker the chief's values of variables."""
    assignments = [tf.assign(variable, value) for variable, value in zip(
        variables, copied(collectives, [variable.read_value() for variable in variables], purpose))]
    equal = _equal_of(tf.get_default_graph())
    with tf.control_dependencies(assignments):
        return tf.assign(equal, True, name="variables_are_equal").op


def copied(collectives, values, purpose, source=0):
    """Returns one worker's values of tensors of known shapes, a list; those of a dtype cross together."""
    of_dtype = {}
    for number, value in enumerate(values):
        of_dtype.setdefault(value.dtype.base_dtype, []).append(number)
    found = [None] * len(values)
    for dtype, numbers in of_dtype.items():
        packed = tf.concat([tf.reshape(values[number], [-1]) for number in numbers], 0)
        parts = tf.split(collectives.copy(packed, purpose + (dtype.name,), source), [
            values[number].shape.num_elements() for number in numbers])
        for number, part in zip(numbers, parts):
            found[number] = tf.reshape(part, values[number].shape)
    return found


def check_equal_at_start(graph):
    """Returns an op that fails when it is run before the variables of all workers were made equal."""
    equal = _equal_of(graph)
    with tf.device("/cpu:0"):
        return tf.raw_ops.Assert(condition=tf.is_variable_initialized(equal), data=[
            "Every worker began with variables of its own: after initializing or restoring them, and in every worker, run "
            "the op that workers.broadcast_variables() returns, or give the session workers.hook()."])


def _equal_of(graph):
    """Returns the graph's flag, a variable in no collection: nothing saves, restores or initializes it but `broadcast`."""
    if not hasattr(graph, _EQUAL):
        with graph.as_default(), tf.name_scope(None), tf.control_dependencies(None), tf.device("/cpu:0"):
            setattr(graph, _EQUAL, tf.Variable(False, trainable=False, collections=[], name="towers_workers_variables_are_equal"))
    return getattr(graph, _EQUAL)
