"""Rules of their own for plain towers, where nothing is changed and only what is sure is said."""
import dataclasses
from typing import Any, NamedTuple

from towers.sharding.placements import BATCH, Additive, Replicate, RowNumbers, Rows, Shard
from towers.sharding.rules.gathers import where
from towers.sharding.rules.sizes import SAMPLERS
from towers.sharding.rules.table import ANY, RULES, Rule

__all__ = ["ASKED_RULES", "UNKNOWN_RULE"]

_OF_CONDITIONS = frozenset(["Identity", "LogicalAnd", "LogicalNot", "LogicalOr", "LoopCond"])
_BESIDE_ONE_HOT = frozenset(["Cast", "Identity", "Reshape"])


def _each_by_itself(node):
    """Of an op that nobody knows, nothing is said: what has as many rows as the tower has examples is theirs."""
    is_of_rows = any(isinstance(value.placement, Shard) and value.placement.axis == 0 for value in node.inputs)
    return node.decide([Shard(0, BATCH, 1) if is_of_rows and value.dims and value.dims[0] in (None, node.context.num_rows)
                        else Replicate() for value in node.outputs])


UNKNOWN_RULE = Rule(_each_by_itself, frozenset(ANY))


def _unique(node):
    """Numbers that are looked up once: each example gets back what it would have looked up by itself."""
    value = node.inputs[0]
    rows = Rows("what is unique in " + value.tensor.name)
    if value.placement.axis or value.rank != 1:
        return node.replicated()
    numbers = RowNumbers(0, value.placement.rows, value.placement.times, Additive(1, rows), (node.op.outputs[0], 0))
    return node.decide([Shard(0, rows, 1), numbers])


def _one_of_each(node):
    """Where a one-hot vector is not 0 is one place for each example."""
    decision, source = where(node), node.inputs[0].tensor
    while source.op.type in _BESIDE_ONE_HOT:
        source = source.op.inputs[0]
    if source.op.type == "OneHot":
        decision.outputs = [dataclasses.replace(decision.outputs[0], rows=BATCH)]
    return decision


def _until_the_last(node):
    """A loop that goes on until the last example is done does nothing to those that are."""
    stack = list(node.op.outputs)
    while stack:
        tensor = stack.pop()
        consumers = tensor.consumers()
        is_condition = not consumers and hasattr(node.op.graph, "captures")
        if not (is_condition or consumers) or any(each.type not in _OF_CONDITIONS for each in consumers):
            return RULES[node.type].function(node)
        stack.extend(output for each in consumers if each.type != "LoopCond" for output in each.outputs)
    return node.decide(Replicate())


class _Beside(NamedTuple):
    """Rows of the tower's own, and behind them some that all towers have alike: classes that are drawn, say.

    Attributes:
      name: str.
      first: `Placement` of the tower's own.
    """
    name: str
    first: Any


def _put_beside(node):
    first, *others = node.inputs[:-1]
    if node.inputs[-1].const() != 0 or type(first.placement) is not Shard or first.placement.axis or not others or not all(
            isinstance(value.placement, Replicate) for value in others):
        return RULES["ConcatV2"].function(node)
    return node.decide(Shard(0, _Beside(node.op.name, first.placement), 1))


def _taken_from_beside(node):
    rows, begin = getattr(node.inputs[0].placement, "rows", None), node.inputs[1].elements()
    if not isinstance(rows, _Beside) or begin is None:
        return RULES["Slice"].function(node)
    return node.decide(rows.first if begin[0] == 0 and isinstance(begin[0], int) else Replicate())


def _hits(node):
    """Which examples' classes were drawn: a row for each hit, with the number of the example."""
    value, rows = node.inputs[0], Rows(node.op.name)
    of = Additive(value.placement.times, value.placement.rows)
    return node.decide([RowNumbers(0, rows, 1, of, (value.tensor, 0)), Shard(0, rows, 1), Shard(0, rows, 1)])


ASKED_RULES = dict(RULES, Unique=Rule(_unique, frozenset([Shard])), UniqueV2=Rule(_unique, frozenset([Shard])),
                   ConcatV2=Rule(_put_beside, RULES["ConcatV2"].knows), Slice=Rule(_taken_from_beside, RULES["Slice"].knows),
                   All=Rule(_until_the_last, RULES["All"].knows), Any=Rule(_until_the_last, RULES["Any"].knows),
                   ComputeAccidentalHits=Rule(_hits, frozenset([Shard])),
                   Where=Rule(_one_of_each, RULES["Where"].knows),
                   **dict.fromkeys(SAMPLERS.split(), UNKNOWN_RULE))
