"""Rules of their own for plain towers, where nothing is changed and only what is sure is said."""
import dataclasses
from typing import Any, NamedTuple

import numpy as np

from towers.graph.op_types import BODIES, BRANCHES, ENTERS, SWITCHES
from towers.graph.private import loop_of
from towers.graph.static_values import static_value
from towers.graph.walk import compares
from towers.sharding.nodes import Numbered, Unfit
from towers.sharding.placements import BATCH, Additive, Replicate, RowNumbers, Rows, Shard, Size
from towers.sharding.rules.gathers import where
from towers.sharding.rules.movement import known_product
from towers.sharding.rules.pointwise import along_rows
from towers.sharding.rules.segments import SORTED
from towers.sharding.rules.sizes import SAMPLERS
from towers.sharding.rules.table import ANY, RULES, Rule

__all__ = ["ASKED_RULES", "UNKNOWN_RULE"]

_OF_CONDITIONS = ENTERS.union("Identity LogicalAnd LogicalNot LogicalOr LoopCond".split())
_OF_NUMBERS = ENTERS.union("Cast Identity".split())
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


def _take_for_numbers(node):
    """Lets constants that count the tower's examples, 0, 1, 2 or 0, 6, 12, be numbers of rows where they lie beside rows."""
    rows = [value for value in node.inputs if type(value.placement) is Shard]
    if not rows or rows[0].placement.rows != BATCH or rows[0].placement.times != 1 or not rows[0].dtype.is_integer:
        return
    behind = rows[0].rank - rows[0].placement.axis
    for value in node.inputs:
        known = value.const()
        if known is None or known.dtype.kind != "i" or known.ndim < behind or known.shape[-behind] != node.context.num_rows:
            continue
        axis = known.ndim - behind
        counted = np.moveaxis(known, axis, -1)
        step = counted.ravel()[1] if known.shape[axis] > 1 else 0
        if step > 0 and np.array_equal(counted, np.broadcast_to(np.arange(known.shape[axis]) * step, counted.shape)):
            value.placement = RowNumbers(axis, BATCH, 1, Additive(int(step), BATCH), None)


def _columns(node):
    """Numbers of rows beside other columns, all of them a constant perhaps."""
    _take_for_numbers(node)
    return RULES[node.type].function(node)


def _of_own_rows(node):
    """What is added to numbers of rows numbers rows of the same example: `range(n) * length + place`."""
    _take_for_numbers(node)
    numbers = node.of(RowNumbers)
    if len(numbers) != 1 or not node.outputs[0].dtype.is_integer or node.type == "Sub" and numbers[0] or not node.all(
            RowNumbers, Shard, Replicate):
        return RULES[node.type].function(node)
    placement, other = node.inputs[numbers[0]].placement, node.inputs[1 - numbers[0]]
    (wants, found), added = along_rows(node), other.const()
    if added is not None and placement.offset is not None:
        added = placement.offset + (-added if node.type == "Sub" else added)
        is_own = not placement.of.times or np.min(added) >= 0 and np.max(added) < placement.spacing
    else:
        is_own = isinstance(other.placement, Shard) or placement.offset is None or not placement.of.times
    if placement.column is not None or wants != {numbers[0]: Numbered()} or not is_own:
        return RULES[node.type].function(node)
    return node.decide(dataclasses.replace(placement, axis=found.axis, times=found.times, offset=None))


def _times_of_numbers(node):
    """Numbers of rows times how many an example has, though nobody knows how many these are."""
    k = next(iter(node.of(RowNumbers)), None)
    if k is None or not node.outputs[0].dtype.is_integer:
        return RULES[node.type].function(node)
    numbers, factor = node.inputs[k].placement, node.inputs[1 - k]
    if factor.tensor.op.type == "Fill" and static_value(factor.tensor.op.inputs[1]) == 1:  # as tf.meshgrid has it
        wants, found = along_rows(node)
        return node.decide(dataclasses.replace(numbers, axis=found.axis, times=found.times)) if wants.get(
            k) == Numbered() else RULES[node.type].function(node)
    if not isinstance(factor.placement, Replicate) or factor.rank or factor.const() is not None:
        return RULES[node.type].function(node)
    return node.decide(dataclasses.replace(numbers, of=numbers.of._replace(times=None)))


def _counted(node):
    """Numbers of as many rows as there are, though nobody knows how many an example has."""
    start, limit, step = node.inputs
    of = limit.elements()[()] if isinstance(limit.placement, Size) else None
    if isinstance(of, Additive) and of.times is None and start.const() == 0 and step.const() == 1:
        return node.decide(RowNumbers(0, of.rows, None, of, (limit.tensor, None)))
    return RULES["Range"].function(node)


def _by_numbers(node):
    """Rows taken by numbers of a tower's own, where it is not known how many an example has."""
    rows, numbers = (value.placement for value in node.inputs[:2])
    if isinstance(numbers, RowNumbers) and isinstance(rows, Shard) and numbers.of.rows == rows.rows and (
            None in (numbers.of.times, rows.times)):
        node.inputs[0].placement = dataclasses.replace(rows, times=rows.times or numbers.of.times or 1)
        node.inputs[1].placement = dataclasses.replace(
            numbers, of=numbers.of._replace(times=node.inputs[0].placement.times))
    return RULES[node.type].function(node)


def _segments(node):
    """Rows added up by the numbers of their examples."""
    rows, numbers = (value.placement for value in node.inputs[:2])
    if type(rows) is Shard and isinstance(numbers, RowNumbers) and numbers.column is None and rows.axis == numbers.axis == 0 and (
            numbers.rows == numbers.of.rows):
        return node.decide(Shard(0, numbers.of.rows, numbers.of.times))
    return RULES[node.type].function(node)


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


def _ctc(node):
    """Each sequence's loss, [batch], and its gradient, [time, batch, classes]; labels are a SparseTensor's, row by row."""
    rows, numbers = (value.placement for value in node.inputs[:2])
    if type(rows) is Shard and rows.axis == 1 and isinstance(numbers, RowNumbers) and not numbers.column:
        return node.decide([Shard(0, rows.rows, rows.times), rows])
    return node.replicated()


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
        return _columns(node)
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
                   **{name: Rule(_until_the_last, RULES[name].knows) for name in ("All", "Any", "Max", "Min")},
                   **dict.fromkeys(("CTCLoss", "CTCLossV2"), Rule(_ctc, frozenset([Shard, RowNumbers]))),
                   Pack=Rule(_columns, RULES["Pack"].knows), Range=Rule(_counted, RULES["Range"].knows),
                   Reshape=Rule(_groups, RULES["Reshape"].knows),
                   ComputeAccidentalHits=Rule(_hits, frozenset([Shard])),
                   Where=Rule(_one_of_each, RULES["Where"].knows), Mul=Rule(_times_of_numbers, RULES["Mul"].knows),
                   **{name: Rule(_of_own_rows, RULES[name].knows) for name in ("Add", "AddV2", "Sub")},
                   **{name: Rule(_by_numbers, RULES[name].knows) for name in ("Gather", "GatherV2")},
                   **{name: Rule(_segments, RULES[name].knows | {RowNumbers}) for name in SORTED if name.startswith("Segment")},
                   **dict.fromkeys(SAMPLERS.split(), UNKNOWN_RULE))
