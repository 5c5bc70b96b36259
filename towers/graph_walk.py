"""What an op depends on, and which variable it writes: questions asked of a finished graph."""

__all__ = ["ancestors", "written_variable"]

_RESOURCE_READERS = frozenset(["ReadVariableOp", "VariableShape", "ResourceGather", "ResourceGatherNd",
                               "VarIsInitializedOp", "DestroyResourceOp"])
# What a variable goes through on its way into a tf.cond or tf.while_loop of control flow 1.
_PASSED_ON = frozenset(["Identity", "RefIdentity", "Switch", "RefSwitch", "Enter", "RefEnter"])
_REF_READERS = frozenset(["RefMerge", "RefSelect", "RefExit", "RefNextIteration", "IsVariableInitialized"])


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
