"""Rules of their own for plain towers, where nothing is changed and only what is sure is said."""
import dataclasses
from typing import Any, NamedTuple, Optional

from towers.sharding.nodes import Unfit
from towers.sharding.placements import BATCH, Additive, Blocks, Replicate, RowNumbers, Rows, Shard
from towers.sharding.rules.movement.axes import known_product
from towers.sharding.rules.plain.loops import until_the_last
from towers.sharding.rules.plain.numbers import by_numbers, chosen, columns, counted, of_own_rows, times_of_numbers
from towers.sharding.rules.sizes import SAMPLERS
from towers.sharding.rules.table import ANY, RULES, Rule

__all__ = ["OtherRows", "PLAIN_RULES", "UNKNOWN_RULE"]


class OtherRows(NamedTuple):
    """Rows that are no examples, though of a tower's own: those of two towers are not the whole batch's.

    They are what is looked up once for all examples, or examples and behind them what all towers have alike: classes that are
    drawn, say.

    Attributes:
      name: str.
      first: `Placement` of the examples, where they come first; else None.
      size: int, how many of these there are; None where that is not known.
    """
    name: str
    first: Any = None
    size: Optional[int] = None


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
    rows = OtherRows("what is unique in " + value.tensor.name)
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


def _put_beside(node):
    first, *others = node.inputs[:-1]
    if node.inputs[-1].const() != 0 or type(first.placement) is not Shard or first.placement.axis or not others or not all(
            isinstance(value.placement, Replicate) for value in others):
        return columns(node)
    return node.decide(Shard(0, OtherRows(node.op.name, first.placement, first.dims and first.dims[0]), 1))


def _taken_from_beside(node):
    rows, begin, size = getattr(node.inputs[0].placement, "rows", None), node.inputs[1].elements(), node.inputs[2].elements()
    if not isinstance(rows, OtherRows) or rows.first is None or begin is None or size is None:
        return RULES["Slice"].function(node)
    number = begin[0] if begin[0] else size[0]
    is_number = isinstance(number, int) and number == rows.size or number == Additive(rows.first.times, rows.first.rows)
    if not is_number:
        raise Unfit()
    return node.decide(Replicate() if begin[0] else rows.first)


def _hits(node):
    """Which examples' classes were drawn: a row for each hit, with the number of the example."""
    value, rows = node.inputs[0], Rows(node.op.name)
    if isinstance(value.placement, Replicate):
        raise Unfit()
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
