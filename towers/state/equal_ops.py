"""Which ops of a later tower compute the very values that ops of tower 0 do.

The twin of an op has its type, attributes and inputs: the same tensors from outside of the towers, the aggregates of exchanges
among them, or twins. So what depends on a tower's own data, or draws at random, has none. Of reads of one variable the first
in one tower is the twin of the first in the other, and so with writes. What an op waits for is not compared.
"""
from towers.graph.op_types import ENTERS, HANDS_ON, LOOKS_UP, LOOPS_BACK, VARIABLES
from towers.graph.private import control_flow_of, taken_from_outside
from towers.graph.walk import is_ref
from towers.sharding.rules.pointwise import HANDED_ON

__all__ = ["find_twins"]

_SAME_VALUE = HANDS_ON.union(HANDED_ON.split()) | {"IdentityN"}
_STATE = VARIABLES | {"ReadVariableOp"} | {op_type for op_type in LOOKS_UP if op_type.startswith("Resource")}


def find_twins(first, other, functions, writes, steps_before):
    """Finds the twins of a later tower's ops.

    Args:
      first, other: lists of operations of tower 0 and of the later tower, in the order in which they were made, with all that
        they depend on of their tower.
      functions: `towers.graph.functions.Functions`.
      writes: set of operations of both towers that write variables, or that stand for such a write outside of its tf.cond.
      steps_before: a function of an op that tells behind which training steps it runs: a read behind one is no read before it.

    Returns:
      A dict from ops of the later tower to ops of tower 0.
    """
    of_first = {}  # what an op is -> the ops of tower 0 that are
    of_both = {tensor.op for op in other for tensor in op.inputs}  # a ref variable's own read, no other's twin

    def own_name(op, what, _):
        if op in of_both:
            return op
        known = of_first.setdefault(what, [])
        if not known or _has_its_time(op, writes):
            known.append(op)
            return op
        return known[0]

    def name_of_twin(op, what, turn):
        known = of_first.get(what)
        return known and known[min(turn, len(known) - 1)]

    _name(first, own_name, functions, writes, steps_before)
    return _name(other, name_of_twin, functions, writes, steps_before)


def _name(ops, choose, functions, writes, steps_before):
    """Names ops by ops of tower 0 that compute the same, those that can be: a dict."""
    own, names, turns, found_more = set(ops), {}, {}, True
    while found_more:  # once more for loops, whose ops are made in a circle
        found_more = False
        for op in ops:
            what = None if op in names else _what(op, own, names, functions, writes, ops)
            if what is not None:
                has_its_time = _has_its_time(op, writes)
                what += (has_its_time, has_its_time and op not in writes and steps_before(op))
                turn = turns[what] = turns.get(what, -1) + 1
                name = choose(op, what, turn)
                if name is not None:
                    names[op] = name
                    found_more = True
    return names


def _has_its_time(op, writes):
    """Tells whether two ops of one kind, of the same inputs, may compute different things."""
    return op in writes or op.type in _STATE or any(is_ref(tensor) for tensor in op.inputs)


def _what(op, own, names, functions, writes, ops):
    """Returns what an op is, a hashable in terms of tower 0 and of what stands outside; None where that is not known."""
    if op.type == "Placeholder":  # which stands for something outside, or is fed who knows what
        return (op.type, op) if taken_from_outside(op) is not None else None
    if op not in writes and op.op_def.is_stateful and op.type not in _STATE:
        return None
    inputs = []
    for tensor in op.inputs:
        if tensor.op.type in LOOPS_BACK:  # the loop's body is made of what enters it
            inputs.extend((enter, 0) for enter in ops if enter.type in ENTERS and control_flow_of(enter) is control_flow_of(op))
        else:
            inputs.append(_source(tensor))
    if any(source in own and source not in names for source, _ in inputs):
        return None
    return op.type, functions.attributes(op.node_def), tuple((names.get(source, source), i) for source, i in inputs)


def _source(tensor):
    """Goes back through ops that hand on a value; not through the reads of a variable, of which each has its time."""
    while tensor.op.type in _SAME_VALUE and not is_ref(tensor.op.inputs[tensor.value_index]):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor.op, tensor.value_index
