"""What ops of a model function depend on: data, variables, or the moments of batches and nothing else of the data.

What is computed of the whole batch's moments alone is the same in every tower, so its update of a variable is one that all
towers share.
"""
from towers.graph_walk import written_variables

__all__ = ["depend_on_data", "depend_on_variables", "find_statistics", "find_updates"]

_VARIABLES = ("VariableV2", "Variable", "VarHandleOp")
_READS = ("Identity", "ReadVariableOp", "Enter", "Switch", "RefSwitch", "Cast")


def depend_on_data(ops, batch):
    """Returns those of `ops` that depend on data, a set.

    Data are the tensors of `batch`, placeholders, random draws, and what was made before `ops` and is no variable.
    """
    made, of_data = set(ops), {tensor.op for tensor in batch}
    for op in _sorted(ops):
        sources = [tensor.op for tensor in op.inputs]
        is_source = "Random" in op.type or op.type == "TruncatedNormal" or not sources and op.type not in _VARIABLES + ("Const",)
        if is_source or any(s in of_data or s not in made and not _is_of_variables(s) for s in sources):
            of_data.add(op)
    return of_data


def depend_on_variables(ops):
    """Returns those of `ops` that depend on variables, a set."""
    made, of_variables = set(ops), set()
    for op in _sorted(ops):
        if op.type in _VARIABLES or any(
                tensor.op in of_variables or tensor.op not in made and _source(tensor.op).type in _VARIABLES
                for tensor in op.inputs):
            of_variables.add(op)
    return of_variables


def _is_of_variables(op):
    return _source(op).type in _VARIABLES + ("Const",)


def _source(op):
    while op.type in _READS and op.inputs:
        op = op.inputs[0].op
    return op


def find_statistics(ops, batch, batch_norms):
    """Finds what is computed of the moments of batch norms, or of variables, and of no other data.

    Numbers that are no floats, counts and predicates, are not asked where they come from.

    Args:
      ops: list of operations.
      batch: list of tensors, the data.
      batch_norms: list of `tf_syncbn.detection.BatchNorm`.

    Returns:
      A dict from operations to the frozenset of pairs (index of the batch norm, "mean" or "variance") that they depend on,
      empty for those that depend on variables alone.
    """
    moments = {tensor.name: (index, kind) for index, batch_norm in enumerate(batch_norms)
               for kind, tensors in zip(("mean", "variance"), batch_norm.moments) for tensor in tensors}
    made, of_data = set(ops), depend_on_data(ops, batch)
    found = {}  # op -> (what it depends on, whether on data too)
    for op in _sorted(ops):
        tensors = [tensor for tensor in op.inputs if tensor.dtype.base_dtype.is_floating]
        known = [({moments[t.name]}, False) if t.name in moments else found[t.op] if t.op in found
                 else ((), t.op in made or not _is_of_variables(t.op)) for t in tensors]
        if op.type == "NoOp":
            waits = [found[c] for c in op.control_inputs if c in found]
            known += waits + [((), True) for sources, _ in waits if not sources]  # a group of these and of others is no one's
        elif op.type == "ReadVariableOp":  # what was written before
            known += [(found[c][0], False) for c in op.control_inputs if c in found]
        sources = frozenset(source for of_input, _ in known for source in of_input)
        has_data = any(is_data for _, is_data in known) if tensors or op.type == "NoOp" else (
            op in of_data and not _is_of_variables(op))
        found[op] = sources, has_data
    return {op: sources for op, (sources, has_data) in found.items() if not has_data}


def find_updates(ops, statistics):
    """Returns those ops that write what is computed of moments into a variable, or are computed of what was written; a set.

    Args:
      ops: list of operations.
      statistics: what `find_statistics` returned.
    """
    updates = set()
    for op in _sorted(ops):
        if statistics.get(op):
            sources = [tensor.op for tensor in op.inputs]
            sources += op.control_inputs if op.type in ("NoOp", "ReadVariableOp") else []
            if written_variables(op) or any(source in updates for source in sources):
                updates.add(op)
    return updates


def _sorted(ops):
    """Returns ops after those that they depend on. tf.cond of control flow 1 makes what feeds an op after the op."""
    made, done, order, stack = set(ops), set(), [], [(op, False) for op in reversed(ops)]
    while stack:
        op, is_ready = stack.pop()
        if is_ready:
            order.append(op)
        elif op not in done:
            done.add(op)
            stack.append((op, True))
            stack.extend((source, False) for source in [t.op for t in op.inputs] + op.control_inputs
                         if source in made and source not in done)
    return order
