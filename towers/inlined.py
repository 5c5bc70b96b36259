"""A tower's graph with what its functions compute in their place: tf.function's, and branches and loops of control flow 2.

To what looks at a graph a call is an op like another. So it gets a copy of what a loss is computed of, in a graph that never
runs, into which TensorFlow itself has put the functions' ops: branches and loops are then those of control flow 1.
"""
import copy
from types import SimpleNamespace

import tensorflow.compat.v1 as tf

from towers.exchanges import stands_at_exchange
from towers.graph_walk import end_of, writes_of
from towers.own_data import own_leaves
from towers.private import forward_op_of, inline_functions, new_loop, put_in_loop, tell_forward_op

__all__ = ["with_functions_inlined"]

_LOWERED = frozenset(["Case", "If", "StatelessCase", "StatelessIf", "StatelessWhile", "While"])
_CALLS = _LOWERED | {"PartitionedCall", "StatefulPartitionedCall", "SymbolicGradient"}
_SHAPES = "_output_shapes"  # the attribute by which TensorFlow takes shapes that it does not find by itself
_ARGUMENT = "_of_known_shape"  # how the ops end that hand on a function's arguments


def with_functions_inlined(losses, towers):
    """Returns losses and towers as they are, or those of the first tower as copies in which no function is called.

    Args:
      losses: list over towers of scalar tensors.
      towers: list of `Tower`.
    """
    graph, tower = losses[0].graph, towers[0]
    ends = [losses[0]] + [leaf for leaf in tf.nest.flatten(tower.outputs, expand_composites=True)
                          if isinstance(leaf, tf.Tensor) and leaf.graph is graph]
    library = graph.as_graph_def(from_version=graph.version).library
    names = {function.signature.name for function in library.function}
    part = _Part(ends, list(writes_of(tower.ops)), tower.context)
    calls = {op for op in part.ops if names and (op.type in _CALLS or op.type in names)}
    if not calls:
        return losses, towers
    try:
        inlined, source_of = _import(inline_functions(part.graph_def(calls, library), part.fetches),
                                     {op.name: op in calls for op in part.ops})
        copies = {end: inlined.get_tensor_by_name(source_of(name)) for end, name in part.names.items()}
    except (tf.errors.OpError, LookupError, ValueError):  # what TensorFlow can't inline is looked at as it stands
        return losses, towers
    ops, of_real = inlined.get_operations(), {op.name: op for op in part.ops}
    _tell_of_gradients(ops, of_real, calls)
    contexts = [_context_of(each, copies) for each in towers]
    contexts[0].meetings = SimpleNamespace(stand_ins={copies[end].op for end in part.met})
    contexts[0].examined = {op for op in ops if of_real.get(op.name) in tower.context.examined}
    copied = [each._replace(context=context) for each, context in zip(towers, contexts)]
    copied[0] = copied[0]._replace(outputs=_mapped(tower.outputs, copies), ops=ops)
    return [copies[end_of(losses[0])]] + list(losses[1:]), copied


class _Part:
    """What some ends of a tower's graph are computed of, up to the tower's batch and where towers meet.

    Attributes:
      ops: list of operations.
      names: dict from (op, number of its output), the ends and what is taken as given, to the names of their copies.
      met: set of those of them where towers meet.
      fetches: list of the names of ops, the ends.
    """

    def __init__(self, ends, writes, context):
        stand_ins = context.meetings.stand_ins
        self.ops, self.met, self._given = list(writes), set(), dict.fromkeys(own_leaves(context))
        seen, stack = set(writes), list(map(end_of, ends)) + [end_of(source) for op in writes for source in op.inputs]
        while stack:
            op, number = stack.pop()
            if (op, number) in self._given or op in seen:
                continue
            if op in stand_ins or stands_at_exchange(op):
                self._given[op, number] = None
                self.met.add((op, number))
            else:
                seen.add(op)
                self.ops.append(op)
                stack.extend(map(end_of, op.inputs))
        self._given = {end: "%s/given_%d" % (end[0].name, number) for number, end in enumerate(self._given)}
        self.names = {end_of(tensor): tensor.name for tensor in ends}
        self.names.update((end, name + ":0") for end, name in self._given.items())
        self.fetches = [op.name for op in writes] + [name.split(":")[0] for name in self.names.values()]

    def graph_def(self, calls, library):
        """Returns the ops as a GraphDef with an op for each of what is taken as given, which is none that users feed."""
        made = tf.GraphDef(library=library)
        for (op, number), name in self._given.items():
            tensor = op.outputs[number]
            source = made.node.add(name=name + "/source", op="Placeholder")
            source.attr["dtype"].type = tensor.dtype.base_dtype.as_datatype_enum
            source.attr["shape"].shape.CopyFrom(tensor.shape.as_proto())
            node = made.node.add(name=name, op="StopGradient", input=[source.name])
            node.attr["T"].type = source.attr["dtype"].type
        for op in self.ops:
            node = made.node.add()
            node.CopyFrom(op.node_def)
            node.device = ""
            del node.input[:]
            node.input.extend(self._given.get(end_of(source), source.name) for source in op.inputs)
            if op.type in _LOWERED:
                node.attr["_lower_using_switch_merge"].b = True
            elif op not in calls:
                node.attr[_SHAPES].list.shape.extend(tensor.shape.as_proto() for tensor in op.outputs)
        for function in made.library.function:
            _hand_on_shapes(function)
        return made


def _hand_on_shapes(function):
    """Lets a function hand on each of its arguments, whose shape is known in it alone, by an op that tells the shape."""
    handed_on = {}
    for number, argument in enumerate(function.signature.input_arg):
        shapes = function.arg_attr[number].attr[_SHAPES].list.shape if number in function.arg_attr else []
        if len(shapes) and argument.type not in (tf.resource.as_datatype_enum, tf.variant.as_datatype_enum):
            handed_on[argument.name] = "%s%s:output:0" % (argument.name, _ARGUMENT)
    for node in function.node_def:
        taken = [handed_on.get(source, source) for source in node.input]
        del node.input[:]
        node.input.extend(taken)
    for name, source in list(function.ret.items()):
        function.ret[name] = handed_on.get(source, source)
    for number, argument in enumerate(function.signature.input_arg):
        if argument.name in handed_on:
            node = function.node_def.add(name=argument.name + _ARGUMENT, op="Identity", input=[argument.name])
            node.attr["T"].type = argument.type
            node.attr[_SHAPES].list.shape.extend(function.arg_attr[number].attr[_SHAPES].list.shape[:1])


def _import(graph_def, real):
    """Imports a GraphDef without the ops that handed arguments and results of functions on, or handed something into a loop.

    Args:
      graph_def: `tf.GraphDef`, see `inline_functions`.
      real: dict from the names of the ops that there were before that to whether they were calls.

    Returns:
      The graph, and a function of the name of a tensor that returns that of the one in it.
    """
    sources = _Sources(graph_def, real)
    sources.tell_shapes()
    made = tf.GraphDef(versions=graph_def.versions, library=graph_def.library)
    for node in graph_def.node:
        if not sources.is_handed_on(node):
            made.node.add().CopyFrom(node)
            made.node[-1].attr.pop("_class", None)  # beside what it is to be placed, which may be gone
            del made.node[-1].input[:]
            made.node[-1].input.extend(sources.behind(name) for name in node.input if not name.startswith("^"))
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(made, name="")
    _put_in_loops(graph)
    return graph, sources.behind


class _Sources:
    """What stands behind the ops by which arguments and results were handed on, in a GraphDef."""

    def __init__(self, graph_def, real):
        self._nodes, self._real = {node.name: node for node in graph_def.node}, real

    def is_handed_on(self, node):
        """Tells whether an op hands on what a function was given or returned."""
        if node.op == "Identity":
            return node.name.startswith("Func/") or node.name.endswith(_ARGUMENT) or self._is_call(node.name) or (
                self._node_of(node.input[0]).op == "Exit")
        return node.op == "IdentityN" and self._is_call(node.name)

    def behind(self, name):
        """Returns the name of the tensor that stands behind one, of what a loop does not change that outside of the loop."""
        name, following = self._handed(name), name
        while following is not None and self._node_of(name).name not in self._real:
            following = self._unchanging(self._node_of(name))
            name = name if following is None else self._handed(following)
        return name if ":" in name else name + ":0"

    def tell_shapes(self):
        """Gives the states of loops the shapes that the loops' bodies know: TensorFlow finds none."""
        for node in self._nodes.values():
            if node.name.endswith(_ARGUMENT):
                switch = self._node_of(self._handed(node.name))
                merge = self._node_of(switch.input[0]) if switch.op == "Switch" else switch
                if merge.op == "Merge" and _SHAPES not in merge.attr:
                    merge.attr[_SHAPES].list.shape.extend([node.attr[_SHAPES].list.shape[0], tf.TensorShape([]).as_proto()])

    def _node_of(self, name):
        return self._nodes[name.split(":")[0]]

    def _is_call(self, name):
        return self._real.get(name, False)

    def _handed(self, name):
        while self.is_handed_on(self._node_of(name)):
            name = self._node_of(name).input[int(name.partition(":")[2] or 0)]
        return name

    def _unchanging(self, node):
        """Returns what a loop was given, where an op stands for that in all of its rounds, else None."""
        if node.op == "Enter" and node.attr["is_constant"].b:
            return node.input[0]
        if node.op == "Exit":
            node = self._node_of(node.input[0])
        merge = self._node_of(node.input[0]) if node.op == "Switch" else node
        if merge.op != "Merge" or self._node_of(merge.input[1]).op != "NextIteration":
            return None
        following = self._node_of(self._handed(self._node_of(merge.input[1]).input[0]))
        is_same = following.op == "Switch" and self._node_of(following.input[0]) is merge
        return self._node_of(merge.input[0]).input[0] if is_same else None


def _put_in_loops(graph):
    """Tells each op of a graph that was imported which loop it belongs to."""
    names, loops = {}, {(): None}  # op -> the names of the loops that it stands in, the outer ones first; such names -> the loop
    for op in graph.get_operations():
        within = max((names.get(source.op, ()) for source in op.inputs), key=len, default=())
        if op.type == "Enter":
            within += op.get_attr("frame_name"),
        elif op.type == "Exit":
            within = within[:-1]
        if within not in loops:
            loops[within] = new_loop(loops.get(within[:-1]))
        names[op] = within
        put_in_loop(op, loops[within])


def _tell_of_gradients(ops, real, calls):
    """Tells ops that they belong to gradients, where what they are copies of does, or a call that they stand in the place of."""
    places = tuple(call.name + "/" for call in calls if forward_op_of(call) is not None)
    for op in ops:
        is_of_gradient = forward_op_of(real[op.name]) is not None if op.name in real else op.name.startswith(places)
        if is_of_gradient:
            tell_forward_op(op, op)


def _context_of(tower, copies):
    context = copy.copy(tower.context)
    context.batch = _mapped(context.batch, copies)
    return context


def _mapped(structure, copies):
    """Returns a nested structure with the copies of those of its tensors that have one, all those of a composite or none."""
    def copy_of(leaf):
        parts = [leaf] if isinstance(leaf, tf.Tensor) else tf.nest.flatten(leaf, expand_composites=True)
        found = [copies.get(end_of(part)) for part in parts]
        return leaf if None in found else tf.nest.pack_sequence_as(leaf, found, expand_composites=True)
    return tf.nest.map_structure(copy_of, structure)
