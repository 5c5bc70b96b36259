"""What ops of a model function depend on: data, variables, or the moments of batches and nothing else of the data.

What is computed of the whole batch's moments alone is the same in every tower, so its update of a variable is one that all
towers share. A loop of control flow 1 is a circle in the graph, so each question is asked by `settle`.
"""
from towers.graph_walk import LOOPS_BACK, variable_of, written_variables

__all__ = ["depend_on_data", "depend_on_variables", "find_statistics", "find_updates", "is_of_variables", "settle"]

_PASSED_ON = ("Identity", "RefIdentity", "ReadVariableOp", "Enter", "RefEnter", "Switch", "RefSwitch", "Cast")


def settle(ops, rule):
    """Asks every op what is answered by the answers of the ops that it depends on.

    Args:
      ops: list of operations.
      rule: a function of an op and of the answers so far, a dict from ops, that returns the op's answer. The start of a loop
        is asked before its end, and again when that has answered: no answer counts as the least one, and a rule gives no less
        for more.

    Returns:
      A dict from `ops` to their answers.
    """
    order, answers = _sorted(ops), {}
    num_loops = sum(op.type in LOOPS_BACK for op in ops)
    for _ in range(1 + num_loops):  # on its way to any op an answer comes once at most to each end of a loop
        before = dict(answers)
        for op in order:
            answers[op] = rule(op, answers)
        if answers == before:
            break
    return answers


def depend_on_data(ops, batch):
    """Returns those of `ops` that depend on data, a set.

    Data are the tensors of `batch`, placeholders, random draws, and what was made before `ops` and is no variable.
    """
    made, given = set(ops), {tensor.op for tensor in batch}

    def is_of_data(op, known):
        sources = [tensor.op for tensor in op.inputs]
        is_source = "Random" in op.type or op.type == "TruncatedNormal" or not sources and not _is_constant(op)
        return is_source or op in given or any(
            known.get(s, False) if s in made else s in given or not is_of_variables(s) for s in sources)

    return _chosen(settle(ops, is_of_data)) | given


def depend_on_variables(ops):
    """Returns those of `ops` that depend on variables, a set."""
    made = set(ops)

    def depends(op, known):
        return variable_of(op) is not None or any(
            known.get(tensor.op, False) if tensor.op in made else variable_of(_source(tensor.op)) is not None
            for tensor in op.inputs)

    return _chosen(settle(ops, depends))


def _chosen(answers):
    return {op for op, answer in answers.items() if answer}


def is_of_variables(op):
    """Tells whether an op hands on a constant or a variable, or what was read of it."""
    return _is_constant(_source(op))


def _is_constant(op):
    return op.type == "Const" or variable_of(op) is not None


def _source(op):
    while op.type in _PASSED_ON and op.inputs:
        op = op.inputs[0].op
    return op


def find_statistics(ops, batch, batch_norms):
    """Finds what is computed of the moments of batch norms, or of variables, and of no other data.

    Numbers that are no floats, counts and predicates, are not asked where they come from.

    Args:
      ops: list of operations.
      batch: list of tensors, the data.
      batch_norms: list of `tf_syncbn.conversion.detection.BatchNorm`.

    Returns:
      A dict from operations to the frozenset of pairs (index of the batch norm, "mean" or "variance") that they depend on,
      empty for those that depend on variables alone.
    """
    moments = {tensor.name: (index, kind) for index, batch_norm in enumerate(batch_norms)
               for kind, tensors in zip(("mean", "variance"), batch_norm.moments) for tensor in tensors}
    made, of_data = set(ops), depend_on_data(ops, batch)
    counts = {place for batch_norm in batch_norms for place in batch_norm.counts}  # whole ones: alike in all towers

    def sources_of(op, found):
        """Returns what an op depends on, and whether on data too."""
        tensors = [tensor for i, tensor in enumerate(op.inputs)
                   if tensor.dtype.base_dtype.is_floating and (op, i) not in counts]
        known = [({moments[t.name]}, False) if t.name in moments
                 else found.get(t.op, ((), False)) if t.op in made else ((), not is_of_variables(t.op)) for t in tensors]
        if op.type == "NoOp":
            waits = [found[c] for c in op.control_inputs if c in found]
            known += waits + [((), True) for sources, _ in waits if not sources]  # a group of these and of others is no one's
        elif op.type == "ReadVariableOp":  # what was written before
            known += [(found[c][0], False) for c in op.control_inputs if c in found]
        sources = frozenset(source for of_input, _ in known for source in of_input)
        has_data = any(is_data for _, is_data in known) if tensors or op.type == "NoOp" else (
            op in of_data and not is_of_variables(op))
        return sources, has_data

    return {op: sources for op, (sources, has_data) in settle(ops, sources_of).items() if not has_data}


def find_updates(ops, statistics):
    """Returns those ops that write what is computed of moments into a variable, or are computed of what was written; a set.

    Args:
      ops: list of operations.
      statistics: what `find_statistics` returned.
    """

    def is_update(op, known):
        if not statistics.get(op):
            return False
        sources = [tensor.op for tensor in op.inputs]
        sources += op.control_inputs if op.type in ("NoOp", "ReadVariableOp") else []
        return bool(written_variables(op)) or any(known.get(source, False) for source in sources)

    return _chosen(settle(ops, is_update))


def _sorted(ops):
    """Returns ops after those that they depend on, but a loop's start before its end.

    tf.cond of control flow 1 makes what feeds an op after the op.
    """
    made, done, order, stack = set(ops), set(), [], [(op, False) for op in reversed(ops)]
    while stack:
        op, is_ready = stack.pop()
        if is_ready:
            order.append(op)
        elif op not in done:
            done.add(op)
            stack.append((op, True))
            stack.extend((source, False) for source in [t.op for t in op.inputs] + op.control_inputs
                         if source in made and source not in done and source.type not in LOOPS_BACK)
    return order
