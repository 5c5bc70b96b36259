"""The table of rules: an op's type, the rule, and which kinds of placements the rule knows.

A rule is a pure function of a `Node` that returns a `Decision`. What it does not know, it never sees: an input of another kind
is made whole in every tower before. So a kind that is new to a rule costs speed, and is never dropped. A rule that raises `Unfit`
gets all inputs whole. What an op computes of whole inputs is whole, so that much is exact for every op that is deterministic.
"""
from typing import Any, Callable, Dict, FrozenSet, NamedTuple, Optional

from towers.graph.op_types import BODIES, MERGES
from towers.sharding.nodes import Decision, Refused, Replicated, Unfit
from towers.sharding.placements import (Blocks, InTurn, Listed, OneRow, Partial, PartialMean, Replicate, RowNumbers, RowSum,
                                        Running, Shard, Size, Turn)
from towers.sharding.rules.loops.in_turn import is_drawn_in_turn, of_number, of_turns
from towers.sharding.rules.loops.single_rows import drawn_in_a_turn, of_single_rows

__all__ = ["ANY", "LAYER", "MOVES", "RULES", "Rule", "SUMS", "decide", "placement_rule", "rule"]

SUMS = (Partial, PartialMean)
ANY = (Replicate, Shard, Blocks, RowNumbers, Partial, PartialMean, Size, Listed)
MOVES, LAYER = "moves values", "may be a layer"  # where it takes a variable


class Rule(NamedTuple):
    """A rule of the table.

    Attributes:
      function: of a `Node`, returns a `Decision`.
      knows: the kinds of placements that it knows, besides Replicate.
      always: whether it is asked also where all inputs are replicated.
      does: `MOVES`, `LAYER`, or "".
    """
    function: Callable[[Any], Any]
    knows: FrozenSet[type]
    always: bool = False
    does: str = ""


RULES: Dict[str, Rule] = {}  # type of an op -> its rule


def rule(types, knows=(), always=False, does=""):
    """Returns a decorator that puts a rule into the table.

    Args:
      types: str, the types of ops, separated by blanks.
      knows: kinds of placements that the rule knows, besides Replicate.
      always: whether it is asked also where all inputs are replicated.
      does: `MOVES`, `LAYER`, or "".
    """
    def register(function):
        for name in types.split():
            assert name not in RULES, name
            RULES[name] = Rule(function, frozenset(knows) | {Replicate}, always, does)
        return function
    return register


def placement_rule(op_type: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Returns a decorator that gives ops of one type a rule: how what they compute in towers comes to the whole batch's.

    The rule is a function of a `towers.sharding.Node`. It returns `node.each_row()` where the op computes each example, along
    axis 0, by itself; `node.replicated()` where it has to have the whole batch; or a `towers.sharding.Decision`.

    Args:
      op_type: str, the op's type, "MyOp".

    Example:

        @towers.placement_rule("MyOp")
        def my_op(node):
            return node.each_row()
    """
    def register(function):
        def checked(node):
            decision = function(node)
            if not isinstance(decision, Decision) or len(decision.outputs) != len(node.op.outputs):
                raise TypeError("The placement rule of %r has to return node.each_row(), node.replicated(), or a Decision with a "
                                "placement for each of %d outputs; for %r it returned %r."
                                % (op_type, len(node.op.outputs), node.op.name, decision))
            return decision

        RULES[op_type] = Rule(checked, frozenset([Replicate, Shard]))
        return function
    return register


def decide(node: Any) -> Optional[Any]:
    """Returns the `Decision` for a `Node`; None where the op is as it is in every tower, and what it returns is replicated.

    Raises:
      Refused: for an op without a rule that has state or draws, and inputs that are not replicated.
    """
    found = node.context.rules.get(node.type, node.context.of_unknown)
    if node.of(OneRow, RowSum) or node.context.join_of(node.op) is not None:
        return of_single_rows(node, found)
    if node.of(Turn) and node.type not in MERGES and node.type not in BODIES:
        return of_number(node, decide)
    if is_drawn_in_turn(node):
        return node.decide(InTurn(), node.wanted(k for k, value in enumerate(node.inputs) if type(value.placement) is not InTurn))
    if node.of(InTurn, Running) and node.type not in MERGES:
        return of_turns(node, found)
    if all(type(value.placement) is Replicate for value in node.inputs) and not (found and found.always):
        return None
    if found is None:
        return _without_rule(node)
    unknown = [k for k, value in enumerate(node.inputs) if value.placement is not None and type(
        value.placement) not in found.knows]
    kept = [node.inputs[k].placement for k in unknown]
    for k in unknown:
        node.inputs[k].make_whole()
    is_whole = all(type(value.placement) is Replicate for value in node.inputs) and not found.always
    try:
        decision = node.replicated() if is_whole else found.function(node)
    except Unfit:
        decision = node.replicated()
    for k, placement in zip(unknown, kept):
        node.inputs[k].placement = placement
        decision.wants.setdefault(k, Replicated())
    row = node.context.row_of(node.op)
    return drawn_in_a_turn(node, row, decision) if row is not None and found.always else decision


def _without_rule(node):
    if node.op.op_def is None or node.op.op_def.is_stateful:
        raise Refused(
            "the op %r is a %s, for which there is no rule, and it computes of the tower's own examples "
            "(%s). If it computes each example by itself, make it under `with towers.each_example():`; otherwise give it a rule, "
            "@towers.placement_rule(%r)." % (node.op.name, node.type, ", ".join(
                str(value.placement) for value in node.inputs if type(value.placement) is not Replicate), node.type))
    return node.replicated()
