"""Loops of plain towers that go on until the last example is done."""
from towers.graph.op_types import BODIES, BRANCHES, ENTERS, SWITCHES
from towers.graph.private import loop_of
from towers.graph.static_values import static_value
from towers.graph.walk import compares
from towers.sharding.placements import Replicate
from towers.sharding.rules.table import RULES

__all__ = ["until_the_last"]

_OF_CONDITIONS = ENTERS.union("Identity LogicalAnd LogicalNot LogicalOr LoopCond".split())
_OF_NUMBERS = ENTERS.union("Cast Identity".split())


def until_the_last(node):
    """A loop that goes on until the last example is done does nothing to those that are.

    It asks whether all are done, or counts to the largest of their lengths, and compares each one's with the same number.
    """
    context, outputs = node.context, node.op.outputs
    if node.type in ("Max", "Min"):
        source = node.inputs[0].tensor
        while source.op.type in _OF_NUMBERS and source.op.inputs:
            source = source.op.inputs[0]
        takers = list(_takers(context, outputs, _OF_NUMBERS | {"Maximum", "Minimum"}))
        of_each = {_counter(*taker) for taker in _takers(context, [source], _OF_NUMBERS) if taker[0].outputs and (
            taker[0].outputs[0].shape.rank != 0) and compares(taker[0])}
        is_length = source.dtype.is_integer and not node.outputs[0].rank and all(
            compares(taker[0]) and _counter(*taker) in of_each for taker in takers)
        outputs = [op.outputs[0] for op, _, _ in takers] if is_length else []
    takers = list(_takers(context, outputs, _OF_CONDITIONS)) if outputs else [(node.op, None, None)]
    if all(op.type in SWITCHES and k == 1 or op.type in BRANCHES and k == 0 for op, k, _ in takers):
        return node.decide(Replicate())
    return RULES[node.type].function(node)


def _counter(op, k, loop):
    """Returns what an op compares its input k with: the loop that counts, or a number that is known."""
    loop = loop_of(op) or loop
    return ("known", str(static_value(op.inputs[1 - k]))) if loop is None else loop


def _takers(context, tensors, through):
    """Yields what takes tensors, or what ops of some types make of them, in functions too.

    Args:
      context: `Facts`.
      tensors: list of tensors.
      through: types of ops.

    Yields:
      An op, the number of its input, and the loop of control flow 2 that it stands in, an op; None outside of such.
    """
    stack, seen = [(tensor, None) for tensor in tensors], set()
    while stack:
        tensor, loop = stack.pop()
        for op in tensor.consumers():
            for k, source in enumerate(op.inputs):
                if source is not tensor or (op, k) in seen:
                    continue
                seen.add((op, k))
                bodies = context.bodies.of(op) if op.type in BODIES else []
                first, is_loop = len(op.inputs) - len(bodies[0].inputs) if bodies else 0, "cond" in BODIES.get(op.type, ())
                if op.type in through or op.type in SWITCHES and not k:
                    stack.extend((output, loop) for output in op.outputs)
                elif bodies and k >= first:
                    stack.extend((body.inputs[k - first], op if is_loop and loop is None else loop) for body in bodies)
                    stack.extend((output, loop) for output in (op.outputs[k:k + 1] if is_loop else ()))
                else:
                    yield op, k, loop
