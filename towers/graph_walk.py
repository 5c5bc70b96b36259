"""What an op depends on, and which variable it writes: questions asked of a finished graph."""

import tensorflow.compat.v1 as tf

from towers.exchange import waiting_for

__all__ = ["VARIABLES", "ancestors", "calls_of", "descendants", "is_ref", "is_variable", "reads_of", "writes_of",
           "written_variable", "written_variables"]

VARIABLES = frozenset(["Variable", "VariableV2", "VarHandleOp"])
_RESOURCE_READERS = frozenset(["ReadVariableOp", "VariableShape", "ResourceGather", "ResourceGatherNd",
                               "VarIsInitializedOp", "DestroyResourceOp"])
# What a variable goes through on its way into a tf.cond or tf.while_loop of control flow 1.
_PASSED_ON = frozenset(["Identity", "RefIdentity", "Switch", "RefSwitch", "Enter", "RefEnter"])
_CALLS = frozenset(["If", "Case", "While", "StatefulPartitionedCall"])  # those that may write
_NO_READERS = frozenset(["VariableShape", "VarIsInitializedOp", "IsVariableInitialized", "DestroyResourceOp"])
_REF_READERS = frozenset(["RefMerge", "RefSelect", "RefExit", "RefNextIteration", "IsVariableInitialized"])


def is_variable(item):
    """Tells whether `item` is a variable, of whatever kind, not what an assignment to one returned."""
    # tf.compat.v1.Variable knows no resource variables on TensorFlow 2.
    op = getattr(item, "op", None)
    return hasattr(item, "initializer") and hasattr(item, "assign") and getattr(op, "type", "") in VARIABLES


def is_ref(tensor):
    """Tells whether a tensor is a ref variable itself."""
    return tensor.dtype != tensor.dtype.base_dtype


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


def descendants(ops, most=None):
    """Returns the set of operations that depend on `ops`, by data or control, these included; None where it is over `most`."""
    seen, stack = set(), list(ops)
    while stack:
        if most is not None and len(seen) > most:
            return None
        op = stack.pop()
        if op not in seen:
            seen.add(op)
            stack.extend(consumer for tensor in op.outputs for consumer in tensor.consumers())
            stack.extend(waiting_for(op))
    return seen


def written_variable(op):
    """Returns the op of the variable that `op` assigns to or scatters into, or None where it writes none."""
    if not op.inputs or op.type in _PASSED_ON:
        return None
    source = op.inputs[0].op
    while source.type in _PASSED_ON:
        source = source.inputs[0].op
    if op.op_def is not None and op.op_def.input_arg and op.op_def.input_arg[0].is_ref:
        return None if op.type in _REF_READERS else source
    if source.type == "VarHandleOp" and op.type not in _RESOURCE_READERS:
        return source
    return None


def written_variables(op):
    """Returns the ops of the variables that `op` writes, a list; for a call that writes any, of all that it is given.

    A tf.cond or tf.while_loop of control flow 2 is such a call.
    """
    variable = written_variable(op)
    if variable is not None or op.type not in _CALLS:
        return [variable] if variable is not None else []
    handles = _handles(op)
    return handles if handles and calls_of([op], _assigns) else []


def _handles(op):
    return [tensor.op for tensor in op.inputs if tensor.op.type == "VarHandleOp"]


def _assigns(nodes):
    return any(node.op.startswith(("Assign", "ResourceScatter")) for node in nodes)


def writes_of(ops):
    """Returns which of `ops` write variables, a dict from them to the list of the variables' ops; see `written_variables`."""
    types = {}  # type of an op -> whether it may write, by what its inputs are
    found, calls = {}, []
    for op in ops:
        kind = op.type
        if kind not in types:
            types[kind] = kind in _CALLS or op.op_def is not None and any(
                argument.is_ref or argument.type == tf.resource.as_datatype_enum for argument in op.op_def.input_arg)
        if types[kind]:
            variable = written_variable(op)
            if variable is not None:
                found[op] = [variable]
            elif kind in _CALLS:
                calls.append(op)
    for op in calls_of([op for op in calls if _handles(op)], _assigns):
        found[op] = _handles(op)
    return {op: found[op] for op in ops if op in found} if calls else found


def reads_of(variable):
    """Returns the ops that read a resource variable, or the reads of a ref variable, a list; inside a tf.cond or loop too."""
    stack, found = [variable.outputs[0]], []
    while stack:
        for op in stack.pop().consumers():
            if op.type in _PASSED_ON and op.outputs[0].dtype in (tf.resource, op.inputs[0].dtype) and (
                    op.outputs[0].dtype == tf.resource or op.type.startswith("Ref")):
                stack.extend(op.outputs)
            elif written_variable(op) is None and op.type not in _NO_READERS:
                found.append(op)
    return found


def calls_of(ops, has_it):
    """Returns those of `ops` that call a function of whose nodes, or whose callees' nodes, `has_it` is true."""
    calls = [(op, names) for op in ops for names in [_function_names(op.node_def)] if names]
    if not calls:
        return []
    graph = calls[0][0].graph
    library = {function.signature.name: function.node_def
               for function in graph.as_graph_def(from_version=graph.version).library.function}

    def hides(name, seen):
        if name in seen or name not in library:
            return False
        seen.add(name)
        nodes = library[name]
        return has_it(nodes) or any(hides(callee, seen) for node in nodes for callee in _function_names(node))

    return [op for op, names in calls if any(hides(name, set()) for name in names)]


def _function_names(node):
    return [function.name for attribute in node.attr.values()
            for function in [attribute.func] + list(attribute.list.func) if function.name]
