"""What an op depends on, and which variable it writes: questions asked of a finished graph."""

__all__ = ["VARIABLES", "ancestors", "calls_of", "is_variable", "written_variable", "written_variables"]

VARIABLES = frozenset(["Variable", "VariableV2", "VarHandleOp"])
_RESOURCE_READERS = frozenset(["ReadVariableOp", "VariableShape", "ResourceGather", "ResourceGatherNd",
                               "VarIsInitializedOp", "DestroyResourceOp"])
# What a variable goes through on its way into a tf.cond or tf.while_loop of control flow 1.
_PASSED_ON = frozenset(["Identity", "RefIdentity", "Switch", "RefSwitch", "Enter", "RefEnter"])
_CALLS = frozenset(["If", "Case", "While", "StatefulPartitionedCall"])  # those that may write
_REF_READERS = frozenset(["RefMerge", "RefSelect", "RefExit", "RefNextIteration", "IsVariableInitialized"])


def is_variable(item):
    """Tells whether `item` is a variable, of whatever kind: tf.compat.v1.Variable knows no resource variables on TensorFlow 2."""
    return hasattr(item, "initializer") and hasattr(item, "assign") and hasattr(item, "op")


def ancestors(items):
    """Returns the set of operations that `items` depend on, by data or control, those of `items` included.

    Args:
      items: tensors, operations, or variables.
    """
    seen, stack = set(), [getattr(item, "op", item) for item in items]
    while stack:
        op = stack.pop()
        if op not in seen:
            seen.add(op)
            stack.extend(tensor.op for tensor in op.inputs)
            stack.extend(op.control_inputs)
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
    handles = [tensor.op for tensor in op.inputs if tensor.op.type == "VarHandleOp"]
    return handles if handles and calls_of([op], lambda nodes: any(node.op.startswith("Assign") for node in nodes)) else []


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
