"""What is said of a whole-batch model: where its towers meet."""
import warnings

import tensorflow.compat.v1 as tf

from towers.api.wording import TowersWarning
from towers.graph.op_types import READS, VARIABLES
from towers.graph.walk import end_of
from towers.meeting.turns import without_numbers
from towers.sharding.nodes import Replicated
from towers.sharding.placements import Blocks, Partial, PartialMean, RowNumbers, Shard, Size

__all__ = ["described", "drawn", "log_meetings", "warn_of_large_gathers"]

_UNSEEN = VARIABLES | READS | {"Const"}
_LARGE = 64 << 20  # bytes
_MET = (Shard, Blocks, RowNumbers, Partial, PartialMean)


def described(plan, tower, turns=None):
    """Returns where a plan lets its tower meet the others and what for, a list of str, the same in towers that are alike.

    Args:
      plan: `towers.sharding.plan.propagation.Plan`.
      tower: `TowerContext`.
      turns: see `towers.sharding.plan.twin.Twin`. Of what each turn takes whole, the first says it for all.
    """
    found, turns = [], turns or {}
    for op in plan.order:
        decision, name = plan.decisions.get(op), without_numbers(tower.relative(op.name))
        wants = {} if decision is None else decision.wants
        found.extend("%s %r takes its input %d whole" % (op.type, name, k) for k, want in sorted(wants.items())
                     if isinstance(want, Replicated) and isinstance(plan.placements.get(end_of(op.inputs[k])), _MET)
                     and not (turns.get(op) and turns.get(op.inputs[k].op) is None))
        if decision is not None and decision.instead is not None and decision.meets:
            found.append("%s %r is computed by a %s" % (op.type, name, decision.meets))
        found.extend("%s %r is met" % (op.type, name) for number in range(len(op.outputs)) if (op, number) in plan.at_source)
    return found


def warn_of_large_gathers(meetings, tower):
    """Warns of what is gathered in more than 64 MB a step, by its scopes."""
    total = sum(each.bytes or 0 for each in meetings if each.conversion == "gather") * tower.num_towers
    if tower.is_first and total > _LARGE:
        largest = sorted((each for each in meetings if each.conversion == "gather" and each.bytes), key=lambda each: -each.bytes)
        warnings.warn("towers.whole_batch: every tower gathers %d MB of the whole batch in each step, most of it for %s. Where "
                      "each example is computed by itself there, say so: `with towers.each_example():`, "
                      "@towers.placement_rule."
                      % (total >> 20, ", ".join("%r (%s, %d MB)" % (each.scope, each.op, each.bytes * tower.num_towers >> 20)
                                                for each in largest[:3])), TowersWarning, stacklevel=4)


def drawn(plan, tower):
    """Returns what became of each op of a whole-batch model: a str of a line for each, with its placement and where towers meet.

    Left out are constants, variables and reads of them, and what is computed of sizes alone.
    """
    rows = []
    for op in plan.order:
        if op.type in _UNSEEN or not op.outputs:
            continue
        decision, placement = plan.decisions.get(op), plan.placements.get((op, 0))
        if isinstance(placement, Size) or op.inputs and all(
                isinstance(plan.placements.get(end_of(source)), Size) for source in op.inputs):
            continue
        notes = ["takes %s whole" % tower.relative(op.inputs[k].op.name) for k, want in sorted(
            ({} if decision is None else decision.wants).items()) if isinstance(want, Replicated) and isinstance(
                plan.placements.get(end_of(op.inputs[k])), _MET)]
        if decision is not None and decision.instead is not None and decision.meets:
            notes.append("computed by a " + decision.meets)
        if (op, 0) in plan.at_source:
            placement = plan.at_source[op, 0]
            notes.append("met here")
        rows.append((tower.relative(op.name), op.type, str(placement), ", ".join(notes)))
    return _table(rows)


def _table(rows):
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "".join("\n  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def log_meetings(meetings):
    """Logs where towers meet, once, as a table."""
    if not meetings:
        tf.logging.info("towers.whole_batch: the towers need not meet.")
        return
    rows = [(each.scope, each.op, each.conversion, str(each.shape), "?" if each.bytes is None else str(each.bytes))
            for each in meetings]
    tf.logging.info("towers.whole_batch: the towers meet %d times a step, forward:%s", len(rows), _table(rows))
