"""TensorFlow's private functions, each called here alone; `tests/test_canaries.py` watches every one.

What they do has no public way, or one that imports a hundred megabytes. Nothing of towers is known here.
"""
import contextlib
import os

import tensorflow.compat.v1 as tf
from tensorflow.core.protobuf import device_properties_pb2
from tensorflow.python.framework import config, ops, test_util
from tensorflow.python.grappler import cluster, tf_optimizer

try:
    from tensorflow.python.eager import record
except ImportError:  # before TensorFlow 2.11
    from tensorflow.python.eager import tape as record

__all__ = ["branches_of", "control_flow_now", "control_flow_of", "differentiate_op", "forward_op_of", "inline_functions",
           "is_deterministic", "is_differentiable", "is_in_loop", "is_recorded", "new_loop", "not_recorded",
           "outer_control_flow", "put_in_loop", "record_for_tapes", "rewire", "run_after", "runs_onednn", "take_in",
           "taken_from_outside", "tell_forward_op", "wait_only_for", "waiting_for", "within_control_flow"]


def control_flow_now(graph):
    """Returns the tf.cond or tf.while_loop (of control flow v1) that ops are being added to, or None."""
    return graph._get_control_flow_context()  # pylint: disable=protected-access


def control_flow_of(op):
    """Returns the tf.cond or tf.while_loop (of control flow v1) that an op belongs to, or None.

    The op that hands out a loop's result belongs to what the loop stands in.
    """
    flow = op._get_control_flow_context()  # pylint: disable=protected-access
    if flow is not None and flow.IsWhileContext() and any(result.op is op for result in flow.loop_exits):
        return flow.outer_context
    return flow


def is_in_loop(op):
    """Tells whether an op belongs to a tf.while_loop (of control flow v1)."""
    flow = control_flow_of(op)
    return flow is not None and flow.IsWhileContext()


def outer_control_flow(flow):
    """Returns the tf.cond or tf.while_loop (of control flow v1) that another one stands in, or None."""
    return flow.outer_context


@contextlib.contextmanager
def within_control_flow(flow):
    """Adds ops to a tf.cond or tf.while_loop (of control flow v1) that is being built, or to none, whatever the caller is in."""
    with tf.control_dependencies(None):
        if flow is None:
            yield
            return
        flow.Enter()
        try:
            yield
        finally:
            flow.Exit()


def branches_of(op):
    """Returns (predicate, number of the branch) of each tf.cond of control flow v1 that an op stands in, the inner ones first.

    Returns an empty list for an op outside of a tf.cond, and in a tf.while_loop.
    """
    found, flow, now = [], control_flow_of(op), control_flow_now(op.graph)
    while flow is not now:
        if flow is None or not flow.IsCondContext():
            return []
        found.append((flow.pred, flow.branch))
        flow = flow.outer_context
    return found


class _Loop:
    """A loop that ops of a graph belong to that was imported, which has none of TensorFlow's own."""

    def __init__(self, outer):
        self.outer_context, self.loop_exits = outer, []

    def IsWhileContext(self):
        return True

    def IsCondContext(self):
        return False


def new_loop(outer):
    """Returns a loop, within another one or None, for `put_in_loop`: what `control_flow_of` returns of its ops."""
    return _Loop(outer)


def put_in_loop(op, loop):
    """Tells an op of a graph that was imported, and will not be added to, which loop it belongs to, None for none."""
    op._set_control_flow_context(loop)  # pylint: disable=protected-access


def inline_functions(graph_def, fetches):
    """Returns a GraphDef with the ops of functions in the place of their calls, and control flow 1 in that of control flow 2.

    Ops that hand on the arguments and results of functions are called "Func/...".

    Args:
      graph_def: `tf.GraphDef`, of one device.
      fetches: list of the names of ops.
    """
    for function in graph_def.library.function:
        for attribute in ("api_implements", "_noinline"):  # as Keras' recurrent layers have
            function.attr.pop(attribute, None)
    meta_graph, options = tf.MetaGraphDef(graph_def=graph_def), tf.ConfigProto()
    meta_graph.collection_def["train_op"].node_list.value.extend(fetches)
    options.graph_options.rewrite_options.min_graph_nodes = -1  # also of few ops
    options.graph_options.rewrite_options.optimizers.append("function")
    device = device_properties_pb2.NamedDevice(name="/CPU:0", properties=device_properties_pb2.DeviceProperties(type="CPU"))
    machine = cluster.Cluster(devices=[device])  # not this one, whose GPUs would be taken
    return tf_optimizer.OptimizeGraph(options, meta_graph, verbose=False, cluster=machine)


def rewire(op, index, tensor):
    """Makes `tensor` the input number `index` of an op that exists already."""
    op._update_input(index, tensor)  # pylint: disable=protected-access


def run_after(op, earlier):
    """Makes an op that exists already run after the ops `earlier`."""
    if op.type in ("StatelessWhile", "While"):  # to which tf.gradients adds inputs, as it can't behind what the op waits for
        with op.graph.as_default(), tf.device(op.device), tf.control_dependencies(list(earlier)):
            rewire(op, 0, tf.identity(op.inputs[0]))
    else:
        op._add_control_inputs(list(earlier))  # pylint: disable=protected-access


def waiting_for(op):
    """Returns the ops that wait for an op by a control dependency."""
    return op._control_outputs  # pylint: disable=protected-access


def wait_only_for(op, others):
    """Makes an op that exists already wait for no ops but `others`, besides those that its inputs come from."""
    op._remove_all_control_inputs()  # pylint: disable=protected-access
    op._add_control_inputs(list(others))  # pylint: disable=protected-access


def taken_from_outside(op):
    """Returns the tensor that an op stands for in the body of a loop, branch or function that took it in; None of other ops.

    Only of control flow 2 and tf.function, whose bodies are graphs of their own.
    """
    graph, tensor = op.graph, None
    while op.type == "Placeholder" and hasattr(graph, "captures"):
        taken = next((outside for outside, inside in graph.captures if inside.op is op), None)
        if taken is None or not isinstance(taken, tf.Tensor):
            break
        op, graph, tensor = taken.op, taken.graph, taken
    return tensor


def take_in(tensor):
    """Returns what stands for a tensor of an outer graph where ops are made now, or the tensor itself."""
    graph = tf.get_default_graph()
    return tensor if tensor.graph is graph or not hasattr(graph, "capture") else graph.capture(tensor)


def is_deterministic():
    """Tells whether TensorFlow refuses ops that give other bits from run to run, as TF_DETERMINISTIC_OPS asks."""
    if hasattr(config, "is_op_determinism_enabled"):
        return bool(config.is_op_determinism_enabled())
    return os.environ.get("TF_DETERMINISTIC_OPS", "").lower() in ("1", "true")


def runs_onednn():
    """Tells whether TensorFlow puts oneDNN's kernels in the place of its own on CPUs."""
    return bool(test_util.IsMklEnabled())


def forward_op_of(op):
    """Returns the op whose gradient function made `op`, or None."""
    return op._original_op  # pylint: disable=protected-access


def tell_forward_op(op, forward):
    """Lets `forward_op_of` return `forward` of an op."""
    op._original_op = forward  # pylint: disable=protected-access


def differentiate_op(op, *d_outputs):
    """Returns the gradients by an op's inputs, from the gradient function that `tf.gradients` would call."""
    return ops.get_gradient_function(op)(op, *d_outputs)


def is_differentiable(op):
    """Tells whether `tf.gradients` goes through an op: False where its type is registered to have no gradient."""
    try:
        return ops.get_gradient_function(op) is not None
    except LookupError:  # of a function, or of an op where tf.gradients will say so itself
        return True


def record_for_tapes(name, outputs, inputs, backward):
    """Tells every `tf.GradientTape` how to differentiate tensors, by a function of the gradients of `outputs`."""
    record.record_operation(name, outputs, inputs, backward)


def not_recorded():
    """Keeps every `tf.GradientTape` from recording ops for the duration of a `with` block."""
    return record.stop_recording()


def is_recorded():
    """Tells whether a `tf.GradientTape` is recording ops."""
    return record.could_possibly_record()
