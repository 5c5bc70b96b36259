"""A second copy of what tensors are computed by, made in the body of a loop, say.

What holds state stays the one that it is, and so does what is fed: variables, iterators, queues, tables and placeholders are
taken in from outside. All else is made again as it is, with its attributes, seeds and device, so that the copy computes the very
bits that the original would.
"""
import tensorflow.compat.v1 as tf

from towers.graph.op_types import CALLS, EXITS
from towers.graph.private import take_in
from towers.graph.walk import ancestors, is_ref, op_of

__all__ = ["GraphCopy"]

_LARGE = 1 << 20  # bytes of a constant that is not worth another copy
# Stateful ops whose result lives for one run, or stands for what lives elsewhere.
_OF_ONE_RUN = ("Stack", "TemporaryVariable", "TensorArray", "IteratorFromStringHandle", "MultiDeviceIteratorFromStringHandle")
# TensorFlow takes the result of a copied loop of control flow v1 for one from outside, and drops what waits for it.
_BEHIND = "/behind_the_loop"


class GraphCopy:
    """What tensors and operations depend on, to be made again elsewhere in their graph, or in a graph within it.

    Args:
      ends: list of tensors and operations of one graph, outside of any tf.cond, tf.while_loop and tf.function.
      elsewhere: set of operations that another copy holds.

    Attributes:
      graph: `tf.Graph`.
      ops: list of operations, those that are copied.

    Raises:
      ValueError: for a `tf.placeholder_with_default` whose default changes from run to run.
    """

    def __init__(self, ends, elsewhere=()):
        self._ends, self.graph, self._elsewhere = ends, ends[0].graph, set(elsewhere)
        self._outside = {op for op in ancestors(ends) if _stays(op)} | self._elsewhere
        copied = ancestors(ends, stop=self._outside)
        self.ops = [op for op in self.graph.get_operations() if op in copied]

    def make(self, name, given=None):
        """Copies the ops to where ops are made now.

        Args:
          name: str, the name scope of the copies.
          given: dict from the names of tensors that another copy holds to those of that copy, whose ops have run.

        Returns:
          A list, what stands for each of the ends; an operation that does nothing for one that another copy holds.

        Raises:
          ValueError: if that is a graph of its own, as loops of control flow 2 are, and a ref variable would have to be taken in.
        """
        scope, graph_def = tf.get_default_graph().unique_name(name, mark_as_used=False), self._definition_without_nodes()
        for op in self.ops:
            node = graph_def.node.add()
            self._define_copy(node, op, scope)
            if op.type in EXITS:
                behind = graph_def.node.add(name=op.name + _BEHIND, op="Identity", input=[op.name], device=op.device)
                behind.attr["T"].CopyFrom(node.attr["T"])
        given = given or {}
        taken = {tensor.name: _taken_in(given.get(tensor.name, tensor))
                 for op in self.ops for tensor in op.inputs if tensor.op in self._outside}
        there = [end for end in self._ends if op_of(end) not in self._elsewhere]
        ends = [_when_done(end) if isinstance(end, tf.Operation) else "%s:%d" % (_when_done(end.op), end.value_index)
                for end in there]
        with tf.device(None):  # each has its own
            made = iter(tf.import_graph_def(graph_def, taken, ends, name=name))
        return [next(made) if op_of(end) not in self._elsewhere else tf.no_op() if isinstance(end, tf.Operation)
                else tf.identity(_taken_in(given[end.name])) for end in self._ends]

    def _definition_without_nodes(self):
        whole, found = self.graph.as_graph_def(from_version=self.graph.version), tf.GraphDef()
        found.versions.CopyFrom(whole.versions)
        found.library.CopyFrom(whole.library)
        return found

    def _define_copy(self, node, op, scope):
        node.CopyFrom(op.node_def)
        node.device = op.device
        node.attr.pop("_class", None)  # names the originals; the device says as much
        del node.input[:]
        node.input.extend(tensor.name for tensor in op.inputs)
        node.input.extend("^" + _when_done(earlier) for earlier in op.control_inputs if earlier not in self._outside)
        if "frame_name" in node.attr:  # two loops of one name can't run together
            node.attr["frame_name"].s = scope.encode() + b"/" + node.attr["frame_name"].s


def _stays(op):
    """Tells whether an op is the same one for every copy: it is fed, or holds state, or is large and constant."""
    if op.type == "Placeholder":
        return True
    if op.type == "PlaceholderWithDefault":
        _check_default(op)
        return True
    if op.type == "Const":
        return (op.outputs[0].shape.num_elements() or 0) * op.outputs[0].dtype.size > _LARGE
    holds = any(is_ref(out) or out.dtype == tf.resource for out in op.outputs)
    return holds and _is_stateful(op) and op.type not in CALLS and not op.type.startswith(_OF_ONE_RUN)


def _check_default(op):
    for other in ancestors([op]):
        if _is_stateful(other):
            raise ValueError(
                "The default of tf.placeholder_with_default %r changes from step to step, as %r does, and what is fed stands for "
                "all steps. Take the default itself, or choose by a placeholder and tf.where." % (op.name, other.name))


def _is_stateful(op):
    return op.op_def is None or op.op_def.is_stateful  # what is not known may be


def _when_done(op):
    """Returns the name of the copy that other copies may wait for, in the copy's name scope."""
    return op.name + _BEHIND if op.type in EXITS else op.name


def _taken_in(tensor):
    if is_ref(tensor) and tf.get_default_graph() is not tensor.graph:
        raise ValueError("The ref variable %r can't be taken into a tf.while_loop of control flow v2. When the program starts, "
                         "call tf.disable_control_flow_v2() or tf.enable_resource_variables()." % tensor.op.name)
    return take_in(tensor)
