"""A second copy of what tensors are computed by, made in the body of a loop, say.

What holds state stays the one that it is, and so does what is fed: variables, iterators, queues, tables and placeholders are
taken in from outside. All else is made again as it is, with its attributes, seeds and device, so that the copy computes the very
bits that the original would.
"""
import tensorflow.compat.v1 as tf

from towers.graph_walk import CALLS, ancestors, is_ref
from towers.private import take_in

__all__ = ["GraphCopy"]

_LARGE = 1 << 20  # bytes of a constant that is not worth another copy
# Stateful ops whose result lives for one run, or stands for what lives elsewhere.
_OF_ONE_RUN = ("Stack", "TemporaryVariable", "TensorArray", "IteratorFromStringHandle", "MultiDeviceIteratorFromStringHandle")


class GraphCopy:
    """What tensors and operations depend on, to be made again elsewhere in their graph, or in a graph within it.

    Args:
      ends: list of tensors and operations of one graph, outside of any tf.cond, tf.while_loop and tf.function.

    Attributes:
      ops: list of operations, those that are copied.

    Raises:
      ValueError: for a `tf.placeholder_with_default` whose default changes from run to run.
    """

    def __init__(self, ends):
        self._ends, self._graph = ends, ends[0].graph
        needed = ancestors(ends)
        self._outside = {op for op in needed if _stays(op)}
        copied = ancestors(ends, stop=self._outside)
        self.ops = [op for op in self._graph.get_operations() if op in copied]

    def make(self, name):
        """Copies the ops to where ops are made now.

        Args:
          name: str, the name scope of the copies.

        Returns:
          A list, what stands for each of the ends.

        Raises:
          ValueError: if that is a graph of its own, as loops of control flow 2 are, and a ref variable would have to be taken in.
        """
        graph_def, taken = self._definition_without_nodes(), {}
        # Two loops of one name can't run together.
        frame = (tf.get_default_graph().unique_name(name, mark_as_used=False) + "/").encode()
        for op in self.ops:
            node = graph_def.node.add()
            node.CopyFrom(op.node_def)
            node.device = op.device
            node.attr.pop("_class", None)  # it names the originals, and the device says as much
            del node.input[:]
            node.input.extend(tensor.name for tensor in op.inputs)
            node.input.extend("^" + earlier.name for earlier in op.control_inputs if earlier not in self._outside)
            if "frame_name" in node.attr:
                node.attr["frame_name"].s = frame + node.attr["frame_name"].s
            taken.update((tensor.name, _taken_in(tensor)) for tensor in op.inputs if tensor.op in self._outside)
        names = [end.name for end in self._ends]
        with tf.device(None):
            return tf.import_graph_def(graph_def, taken, names, name=name)

    def _definition_without_nodes(self):
        whole, found = self._graph.as_graph_def(from_version=self._graph.version), tf.GraphDef()
        found.versions.CopyFrom(whole.versions)
        found.library.CopyFrom(whole.library)
        return found


def _stays(op):
    """Tells whether an op is what it is in every copy: it holds state, or is fed, or is large and constant."""
    if op.type == "Placeholder":
        return True
    if op.type == "PlaceholderWithDefault":
        changing = next((other for other in ancestors([op]) if _is_stateful(other)), None)
        if changing is not None:
            raise ValueError(
                "The default of tf.placeholder_with_default %r changes from step to step, as %r does, and what is fed stands for all "
                "steps. Take the default itself, or choose by a placeholder and tf.where." % (op.name, changing.name))
        return True
    if op.type == "Const":
        return (op.outputs[0].shape.num_elements() or 0) * op.outputs[0].dtype.size > _LARGE
    holds = any(is_ref(out) or out.dtype == tf.resource for out in op.outputs)
    return holds and _is_stateful(op) and op.type not in CALLS and not op.type.startswith(_OF_ONE_RUN)


def _is_stateful(op):
    return op.op_def is None or op.op_def.is_stateful  # what is not known may be


def _taken_in(tensor):
    if is_ref(tensor) and tf.get_default_graph() is not tensor.graph:
        raise ValueError("The ref variable %r can't be taken into a tf.while_loop of control flow v2. When the program starts, call "
                         "tf.disable_control_flow_v2() or tf.enable_resource_variables()." % tensor.op.name)
    return take_in(tensor)
