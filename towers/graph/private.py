"""TensorFlow's private functions, each called here alone; `tests/graph/test_canaries.py` watches every one.

What they do has no public way, or one that imports a hundred megabytes. Nothing of towers is known here.
"""
import contextlib
import os

import tensorflow.compat.v1 as tf
from tensorflow.python.framework import config, func_graph, function_def_to_graph, ops, test_util
from tensorflow.python.ops import control_flow_util_v2, variable_scope

try:
    from tensorflow.python.eager import record
except ImportError:  # before TensorFlow 2.11
    from tensorflow.python.eager import tape as record

__all__ = ["branches_of", "called_graph", "captured", "choose_by", "chooses_by", "chosen_by", "condition_of",
           "control_flow_now", "control_flow_of", "counting_scopes_from", "differentiate_op", "flows_around",
           "forward_op_of", "is_deterministic", "is_differentiable", "is_in_loop", "is_recorded", "loop_of",
           "new_function_graph", "not_recorded", "outer_control_flow", "position_of", "put_in_flow",
           "record_for_tapes", "rewire", "run_after", "runs_onednn", "scope_counts", "set_shape_attribute",
           "take_in", "take_into_flow", "taken_from_outside", "wait_only_for", "waiting_for",
           "waits_for_branch_alone", "within_control_flow", "without_intermediates"]


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


def flows_around(op):
    """Returns the tf.conds and tf.while_loops (of control flow v1) that an op stands in, the inner ones first, a list."""
    found, flow = [], control_flow_of(op)
    while flow is not None:
        found.append(flow)
        flow = outer_control_flow(flow)
    return found


def loop_of(op):
    """Returns the loop of control flow 1 that an op belongs to, the outermost one; None outside of loops."""
    return next(filter(is_loop, reversed(flows_around(op))), None)


def is_in_loop(op):
    """Tells whether an op belongs to a tf.while_loop (of control flow v1)."""
    flow = control_flow_of(op)
    return flow is not None and flow.IsWhileContext()


def is_loop(flow):
    """Tells whether what `control_flow_of` returned is a tf.while_loop (of control flow v1)."""
    return flow.IsWhileContext()


def condition_of(flow):
    """Returns what decides whether a tf.while_loop (of control flow v1) takes another turn, a tensor of it."""
    return flow.pivot.op.inputs[0]


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


def chosen_by(merge):
    """Returns the predicate of the tf.cond (of control flow v1) that a Merge ends, a tensor; None for a loop's."""
    if any(tensor.op.type.endswith("NextIteration") for tensor in merge.inputs):
        return None
    flows = [control_flow_of(tensor.op) for tensor in merge.inputs]
    return next((flow.pred for flow in flows if flow is not None and flow.IsCondContext()), None)


def chooses_by(flow, switch):
    """Tells whether a branch of a tf.cond (of control flow v1) chooses by the predicate of a Switch; a loop does not."""
    return flow.IsCondContext() and (flow.pred is switch.inputs[1] or flow.pivot.op.inputs[0].op is switch)


def choose_by(flow, predicate):
    """Lets what is made in a branch of a tf.cond (of control flow v1), or by its gradient, choose by another predicate."""
    flow._pred = predicate


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


def waits_for_branch_alone(op):
    """Tells whether an op of a tf.cond of control flow v1 waits for nothing but the choice of its branch."""
    pivot = control_flow_of(op).pivot
    return all(pivot is not None and earlier is pivot.op for earlier in op.control_inputs)


def take_into_flow(tensor, flow):
    """Returns what stands for a tensor from outside in a tf.cond or tf.while_loop (of control flow v1)."""
    return flow.AddValue(tensor)


def put_in_flow(op, flow):
    """Puts an op that was made outside into a tf.cond or tf.while_loop (of control flow v1), whose values its inputs are."""
    op._set_control_flow_context(flow)  # pylint: disable=protected-access
    while flow is not None:
        flow._values.update(output.name for output in op.outputs)  # pylint: disable=protected-access
        flow = flow.outer_context


def rewire(op, index, tensor):
    """Makes `tensor` the input number `index` of an op that exists already."""
    op._update_input(index, tensor)  # pylint: disable=protected-access


def position_of(op):
    """Returns a number by which the ops of a graph are in the order in which they were made."""
    return op._id  # pylint: disable=protected-access


def run_after(op, earlier):
    """Makes an op that exists already run after the ops `earlier`."""
    if op.type.endswith("While"):  # to which tf.gradients adds inputs, as it can't behind what the op waits for
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


class _FunctionGraph(func_graph.FuncGraph):
    """A graph that takes in what its ops need of the default one, the variables that ops write too."""

    def __init__(self, name):
        super().__init__(name)
        self.taken_refs = {}  # name of a ref variable -> what stands for it
        if not tf.control_flow_v2_enabled():
            self._captured = ()  # by which TensorFlow knows graphs whose control flow is of version 1

    def capture(self, tensor, *args, **kwargs):
        if tensor.graph is self or tensor.dtype == tensor.dtype.base_dtype:
            return super().capture(tensor, *args, **kwargs)
        if tensor.name not in self.taken_refs:
            with self.as_default(), tf.control_dependencies(None):
                self.taken_refs[tensor.name] = tensor, tf.raw_ops.VariableV2(shape=tensor.shape, dtype=tensor.dtype.base_dtype)
        return self.taken_refs[tensor.name][1]


def new_function_graph(name):
    """Returns a graph that takes in what its ops need of the default one, and has that one's kind of control flow."""
    return _FunctionGraph(name)


def scope_counts():
    """Returns how often variable scopes of each name were opened, by which TensorFlow numbers names that layers do not have."""
    return dict(variable_scope.get_variable_scope_store().variable_scopes_count)


@contextlib.contextmanager
def counting_scopes_from(counts):
    """Numbers the names of variable scopes from earlier counts on for the duration of a `with` block."""
    store = variable_scope.get_variable_scope_store()
    now, store.variable_scopes_count = store.variable_scopes_count, dict(counts)
    try:
        yield
    finally:
        store.variable_scopes_count = now


def captured(graph):
    """Returns what a graph of `new_function_graph` took in, a dict from ops of it to the tensors that they stand for."""
    taken = graph.captures
    pairs = list(taken.values()) if isinstance(taken, dict) else list(taken)
    return {inside.op: outside for outside, inside in pairs + list(graph.taken_refs.values())}


def called_graph(op, name, anew=False):
    """Returns the graph of a function that an op calls by its name, with attributes `inputs` and `outputs`.

    Args:
      op: an operation.
      name: str, of the function.
      anew: whether to make a graph of its own, which nobody else holds.
    """
    graph, function = op.graph, None
    while function is None and graph is not None:
        function = graph._get_function(name)  # pylint: disable=protected-access
        graph = getattr(graph, "outer_graph", None)
    if function is None:
        raise KeyError(name)
    found = getattr(function, "graph", None)
    if found is None or anew:
        definition = function.cached_definition if hasattr(function, "cached_definition") else function.definition
        with op.graph.as_default():
            found = function_def_to_graph.function_def_to_graph(definition)
    return found


@contextlib.contextmanager
def without_intermediates():
    """Keeps branches and loops of Keras' layers from handing out what gradients might want; tf.gradients asks for it itself."""
    name = "_EXPERIMENTAL_OUTPUT_ALL_INTERMEDIATES_OVERRIDE"
    before = getattr(control_flow_util_v2, name)
    setattr(control_flow_util_v2, name, False)
    try:
        yield
    finally:
        setattr(control_flow_util_v2, name, before)


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


def gradient_of(op):
    """Returns the name of the gradient that was put on an op in the place of its type's, or None."""
    return op.node_def.attr["_gradient_op_type"].s.decode() if "_gradient_op_type" in op.node_def.attr else None


def set_shape_attribute(op, name, dims):
    """Sets an attribute of an op that has not run yet to a shape, a list of int."""
    op._set_attr(name, tf.AttrValue(shape=tf.TensorShape(dims).as_proto()))  # pylint: disable=protected-access


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
