"""What an op depends on, and which variable it writes: questions asked of a finished graph."""
import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph.op_types import (BRANCHES, CALLS, ENTERS, EXITS, IDENTITIES, LOOKS_UP, LOOPS_BACK, MERGES, READS, SWITCHES,
                                   VARIABLES)
from towers.graph.private import taken_from_outside, waiting_for

__all__ = ["ancestors", "calls_of", "compares", "computes_the_same", "descendants", "end_of", "in_circles", "is_ref",
           "is_variable", "op_of", "reads_of", "tensors_of", "variable_of", "writes_of", "written_variable", "written_variables"]

_PASSED_ON = ENTERS | SWITCHES | IDENTITIES  # by a variable on its way in
# The first neither read a variable's value nor write one, the second write none.
_ASKS = frozenset(["VariableShape", "VarIsInitializedOp", "IsVariableInitialized", "DestroyResourceOp"])
_LOOKS_AT = _ASKS | READS | LOOKS_UP | MERGES | EXITS | LOOPS_BACK | {"RefSelect"}


def is_variable(item):
    """Tells whether `item` is a variable, of whatever kind, not what an assignment to one returned."""
    # tf.compat.v1.Variable knows no resource variables on TensorFlow 2.
    op = getattr(item, "op", None)
    return hasattr(item, "initializer") and hasattr(item, "assign") and getattr(op, "type", "") in VARIABLES


def op_of(item):
    """Returns the op of a tensor, variable or op; None for anything else."""
    op = getattr(item, "op", item)
    return op if isinstance(op, tf.Operation) else None


def tensors_of(structure):
    """Returns the tensors of a nested structure, those of sparse and ragged ones among them, a list."""
    return [leaf for leaf in tf.nest.flatten(structure, expand_composites=True) if tf.is_tensor(leaf)]


def end_of(item):
    """Returns (op, number of its output) of a tensor, variable or op; None for anything else."""
    op = op_of(item)
    return None if op is None else (op, getattr(item, "value_index", 0))


def variable_of(op):
    """Returns the op of the variable that `op` is, or stands for in the body of a loop or function; None of other ops."""
    if op.type == "Placeholder" and op.outputs[0].dtype == tf.resource:
        outside = taken_from_outside(op)
        op = op if outside is None else outside.op
    return op if op.type in VARIABLES else None


def is_ref(tensor):
    """Tells whether a tensor is a ref variable itself."""
    return tensor.dtype != tensor.dtype.base_dtype


def computes_the_same(a, b):
    """Tells whether two tensors are one, or are written twice: `tf.exp(x) / tf.reduce_sum(tf.exp(x), 1)` has two."""
    stack, seen = [(a, b)], set()
    while stack:
        a, b = stack.pop()
        one, other = a.op, b.op
        if a is b or (end_of(a), end_of(b)) in seen:
            continue
        seen.add((end_of(a), end_of(b)))
        if one.type == "Const" == other.type:
            if a.dtype != b.dtype or not np.array_equal(tf.get_static_value(a), tf.get_static_value(b)):
                return False
        elif not one.inputs or one.type != other.type or a.value_index != b.value_index or one.op_def is None or (
                one.op_def.is_stateful or len(one.inputs) != len(other.inputs)) or (
                dict(one.node_def.attr) != dict(other.node_def.attr)):
            return False
        stack.extend(zip(one.inputs, other.inputs))
    return True


def ancestors(items, within=None, stop=(), most=None):
    """Returns the set of operations that `items` depend on, by data or control, those of `items` included.

    Args:
      items: tensors, operations, or variables.
      within: set of operations that are not left; None is the whole graph.
      stop: operations that are not passed, nor returned.
      most: int; where there are more, None is returned.
    """
    seen, stack = set(), [getattr(item, "op", item) for item in items]
    while stack:
        if most is not None and len(seen) > most:
            return None
        op = stack.pop()
        if op not in seen and op not in stop and (within is None or op in within):
            seen.add(op)
            stack.extend(tensor.op for tensor in op.inputs)
            stack.extend(op.control_inputs)
    return seen


def descendants(ops, within=None, most=None):
    """Returns the set of operations that depend on `ops`, by data or control, these included; for arguments see `ancestors`."""
    seen, stack = set(), list(ops)
    while stack:
        if most is not None and len(seen) > most:
            return None
        op = stack.pop()
        if op not in seen and (within is None or op in within):
            seen.add(op)
            stack.extend(consumer for tensor in op.outputs for consumer in tensor.consumers())
            stack.extend(waiting_for(op))
    return seen


def in_circles(graph):
    """Returns the set of operations that come after themselves, or after such: not by a loop's way back."""
    sources = {op: {source for source in [tensor.op for tensor in op.inputs] + op.control_inputs
                    if source.type not in LOOPS_BACK} for op in graph.get_operations()}
    later = {}
    for op, of_op in sources.items():
        for source in of_op:
            later.setdefault(source, []).append(op)
    ready = [op for op, of_op in sources.items() if not of_op]
    while ready:
        op = ready.pop()
        del sources[op]
        for each in later.get(op, ()):
            sources[each].remove(op)
            if not sources[each]:
                ready.append(each)
    return set(sources)


def written_variable(op):
    """Returns the op of the variable that `op` assigns to or scatters into, or None where it writes none.

    In the body of a loop or function of control flow 2 that is what stands for the variable there, see `variable_of`.
    """
    if not op.inputs or op.type in _PASSED_ON:
        return None
    source = op.inputs[0].op
    while source.type in _PASSED_ON:
        source = source.inputs[0].op
    if op.op_def is not None and op.op_def.input_arg and op.op_def.input_arg[0].is_ref:
        return None if op.type in _LOOKS_AT else source
    if op.type in _LOOKS_AT or op.type in CALLS or source.outputs[0].dtype != tf.resource:
        return None
    return source if variable_of(source) is not None else None


def written_variables(op):
    """Returns the ops of the variables that `op` writes, a list; of a call those that the functions write that it calls.

    A tf.cond or tf.while_loop of control flow 2 is such a call.
    """
    return writes_of([op]).get(op, [])


def writes_of(ops):
    """Returns which of `ops` write variables, a dict from them to the list of the variables' ops; see `written_variables`."""
    types = {}  # type of an op -> whether it may write, by what its inputs are
    found, library = {}, None
    for op in ops:
        kind = op.type
        if kind not in types:
            types[kind] = kind in CALLS or op.op_def is not None and any(
                argument.is_ref or argument.type == tf.resource.as_datatype_enum for argument in op.op_def.input_arg)
        if not types[kind]:
            continue
        written = [written_variable(op)]
        if kind in CALLS and any(tensor.dtype == tf.resource for tensor in op.inputs):
            library = _Library(op.graph) if library is None else library
            handles = [op.inputs[i].op for i in sorted(library.written_inputs(op.node_def))]
            written = [handle for handle in handles if variable_of(handle) is not None]
        if written and written[0] is not None:
            found[op] = written
    return found


def reads_of(variable):
    """Returns the ops that read a resource variable, or the reads of a ref variable, a list; inside a tf.cond or loop too."""
    stack, found = [variable.outputs[0]], []
    while stack:
        for op in stack.pop().consumers():
            if op.type in _PASSED_ON and op.outputs[0].dtype in (tf.resource, op.inputs[0].dtype) and (
                    op.outputs[0].dtype == tf.resource or op.type.startswith("Ref")):
                stack.extend(op.outputs)
            elif written_variable(op) is None and op.type not in _ASKS:
                found.append(op)
    return found


def calls_of(ops, has_it, but=()):
    """Returns those of `ops` that call a function of whose nodes, or whose callees' nodes, `has_it` is true.

    Args:
      ops: list of operations.
      has_it: a function of a list of nodes.
      but: types of ops whose functions are not looked into.
    """
    calls = [(op, names) for op in ops if op.type not in but for names in [_function_names(op.node_def)] if names]
    if not calls:
        return []
    library = _Library(calls[0][0].graph)
    return [op for op, names in calls if any(library.hides(name, has_it, but, set()) for name in names)]


class _Library:
    """The functions of a graph, which the branches and loops of control flow 2 are."""

    def __init__(self, graph):
        library = graph.as_graph_def(from_version=graph.version).library
        self._functions = {function.signature.name: function for function in library.function}
        self._written = {}  # name of a function -> set of numbers of its arguments

    def hides(self, name, has_it, but, seen):
        """Tells whether `has_it` is true of the nodes of a function or of one that it calls, by no op of the types `but`."""
        if name in seen or name not in self._functions:
            return False
        seen.add(name)
        nodes = self._functions[name].node_def
        return has_it(nodes) or any(self.hides(callee, has_it, but, seen) for node in nodes if node.op not in but
                                    for callee in _function_names(node))

    def written_inputs(self, node):
        """Returns the numbers of the inputs of a node that it writes if they are variables, a set of int."""
        callees = _function_names(node)
        if not callees:
            return set() if node.op in _LOOKS_AT or node.op in _PASSED_ON else {0}
        first = 1 if node.op in BRANCHES else 0
        return {first + number for name in callees for number in self._written_arguments(name)}

    def _written_arguments(self, name):
        if name not in self._written:
            self._written[name] = set()  # of one that calls itself
            if name in self._functions:
                function = self._functions[name]
                handles = {argument.name: number for number, argument in enumerate(function.signature.input_arg)
                           if argument.type == tf.resource.as_datatype_enum}
                self._written[name] = {handles[source] for node in function.node_def if not handles.keys().isdisjoint(node.input)
                                       for source in [node.input[i] for i in self.written_inputs(node) if i < len(node.input)]
                                       if source in handles}
        return self._written[name]


def _function_names(node):
    return [function.name for attribute in node.attr.values()
            for function in [attribute.func] + list(attribute.list.func) if function.name]


def compares(op):
    """Tells whether an op compares two tensors."""
    return len(op.inputs) == 2 and op.outputs[0].dtype.base_dtype == tf.bool
