"""Rules of their own for plain towers, where nothing is changed and only what is sure is said."""
import dataclasses
from typing import Any, NamedTuple

from towers.sharding.nodes import Unfit
from towers.sharding.placements import BATCH, Additive, Blocks, Replicate, RowNumbers, Rows, Shard
from towers.sharding.rules.movement.axes import known_product
from towers.sharding.rules.plain.loops import until_the_last
from towers.sharding.rules.plain.numbers import by_numbers, chosen, columns, counted, of_own_rows, times_of_numbers
from towers.sharding.rules.sizes import SAMPLERS
from towers.sharding.rules.table import ANY, RULES, Rule

__all__ = ["PLAIN_RULES", "UNKNOWN_RULE"]

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
    decision, source = chosen(node), node.inputs[0].tensor
    while source.op.type in _BESIDE_ONE_HOT:
        source = source.op.inputs[0]
    if source.op.type == "OneHot":
        decision.outputs = [dataclasses.replace(decision.outputs[0], rows=BATCH)]
    return decision


def _groups(node):
    """Rows that are put together by threes, say: a tower whose number these don't divide can't run."""
    rows, out, elements = node.inputs[0].placement, node.outputs[0], node.inputs[1].elements()
    try:
        return RULES["Reshape"].function(node)
    except Unfit:
        if type(rows) is not Shard or rows.axis or not rows.times or elements is None or not len(elements) or elements[0] != -1:
            raise
        (after, some_after), (behind, some_behind) = (known_product(dims[1:]) for dims in (node.inputs[0].whole, out.whole))
        if some_after or some_behind or not after or behind % (rows.times * after) or (
                behind // (rows.times * after) == node.context.num_rows):  # one group of all
            raise
    return node.decide(Shard(0, rows.rows, None))


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
        return columns(node)
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


PLAIN_RULES = dict(RULES, Unique=Rule(_unique, frozenset([Shard])), UniqueV2=Rule(_unique, frozenset([Shard])),
                   ConcatV2=Rule(_put_beside, RULES["ConcatV2"].knows), Slice=Rule(_taken_from_beside, RULES["Slice"].knows),
                   **{name: Rule(until_the_last, RULES[name].knows) for name in ("All", "Any", "Max", "Min")},
                   Pack=Rule(columns, RULES["Pack"].knows), Range=Rule(counted, RULES["Range"].knows),
                   Reshape=Rule(_groups, RULES["Reshape"].knows),
                   ComputeAccidentalHits=Rule(_hits, frozenset([Shard])),
                   Where=Rule(_one_of_each, RULES["Where"].knows | {Blocks}), Mul=Rule(times_of_numbers, RULES["Mul"].knows),
                   **{name: Rule(of_own_rows, RULES[name].knows) for name in ("Add", "AddV2", "Sub")},
                   **{name: Rule(by_numbers, RULES[name].knows) for name in ("Gather", "GatherV2")},
                   **dict.fromkeys(SAMPLERS.split(), UNKNOWN_RULE))
