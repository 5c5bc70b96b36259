"""Placements carried through a tower's ops, one rule an op: what is found out, before anything is changed.

What has not been found out yet is None, and no rule is asked before it is known what an op computes of, in whatever order the
ops were made. In loops placements are joined until they stay; where the turns of a loop would have to meet, what the loop reads
is made whole before it.
"""
import dataclasses
import heapq
from typing import NamedTuple

from towers.graph.op_types import ENTERS, LOOPS_BACK, MERGES
from towers.graph.private import loop_of, position_of
from towers.graph.static_values import computed, static_value
from towers.graph.walk import end_of
from towers.sharding.nodes import AsPartial, Decision, Node, OwnRows, Refused, Replicated
from towers.sharding.placements import (BATCH, Blocks, InTurn, Listed, OneRow, Own, Partial, PartialMean, Replicate, RowNumbers,
                                        RowSum, Shard, Size)
from towers.sharding.plan.loops import meeting_loops, wanted_at_entry, writers_of
from towers.sharding.plan.own_gradients import OwnGradients
from towers.sharding.plan.sums import met_at_source
from towers.sharding.rules.loops.in_turn import refuse_other_states
from towers.sharding.rules.loops.single_rows import constant_of_a_turn
from towers.sharding.rules.table import decide

__all__ = ["Plan", "propagate", "propagate_with_turns"]


class Plan(NamedTuple):
    """What was found out of a tower.

    Attributes:
      order: list of the ops that were looked at, each behind what it computes of.
      placements: dict from (op, number of its output) to `Placement`.
      decisions: dict from ops to `Decision`, of those that are not left as they are.
      at_source: dict from (op, number of its output) to the `Partial` or `PartialMean` of what meets where it is made.
      inputs: dict from ops that compute sizes, or have a gradient of their own, to the inputs before the plan is carried out.
      own_gradients: `OwnGradients`.
    """
    order: list
    placements: dict
    decisions: dict
    at_source: dict
    inputs: dict
    own_gradients: OwnGradients


def propagate(ops, facts, own_gradients=True):
    """Finds out what has to become of a tower's ops, for it to compute what one tower computes of the whole batch.

    Args:
      ops: iterable of operations, those that the tower's results are computed of.
      facts: `Facts`.
      own_gradients: whether functions with gradients of their own take nothing that these could not use.

    Returns:
      A `Plan`.

    Raises:
      Refused: where an op has no exact form.
    """
    order = _in_order(ops)
    at_source, whole_loops, entering, own = set(), set(), {}, OwnGradients(order if own_gradients else [])
    while True:  # each turn adds to one of these
        lists = len(facts.whole_lists)
        plan = _Pass(order, facts, at_source, whole_loops, entering, own).run()
        more = met_at_source(plan) - at_source  # what meets there counts as replicated
        if facts.is_chosen is not None:
            more = {(op, number) for op, number in more if facts.is_chosen(op)}
        meeting = meeting_loops(plan, facts.is_only_asked)
        if meeting and facts.carries_turns:
            raise Refused("towers would have to meet in the turns of a tf.while_loop")
        loops = (set(meeting) | writers_of(plan, meeting)) - whole_loops
        enters = {op: wanted for op, wanted in wanted_at_entry(plan).items() if op not in entering}
        functions = _looking_at_all(plan, own) - own.whole
        if not more and not loops and not enters and not functions and lists == len(facts.whole_lists):
            if facts.carries_turns:
                refuse_other_states(plan, facts)
            if meeting:
                raise Refused("towers would have to meet about %r in the turns of a tf.while_loop, by what is known "
                              "only there." % next(iter(meeting.values())).name)
            own.refuse_other_sizes(plan, facts.whole_dims)
            return plan
        entering.update(enters)
        at_source |= more
        whole_loops |= loops
        own.whole |= functions


def propagate_with_turns(ops, facts_of):
    """Returns the `Plan` by which loops over the examples stay each tower's own, or if they can't, are the whole batch's.

    Args:
      ops: see `propagate`.
      facts_of: a function that returns `Facts` for what it is given as `follows_turns`.

    Raises:
      Refused: see `propagate`.
    """
    if any(op.type in ENTERS or op.type.endswith("While") for op in ops):
        facts = facts_of(follows_turns=True)
        try:
            if facts.is_chosen is None:
                return propagate(ops, facts)
        except Refused:
            pass
    return propagate(ops, facts_of(follows_turns=False))


def _in_order(ops):
    """Returns operations as a list, each behind what it takes, but for the way back of a loop of control flow 1."""
    within, seen, order = set(ops), set(), []
    for root in sorted(within, key=position_of):
        stack = [(root, None)]
        while stack:
            op, sources = stack.pop()
            if sources is None:
                if op in seen:
                    continue
                seen.add(op)
                sources = iter([tensor.op for tensor in op.inputs])
            for source in sources:
                if source in within and source not in seen and not (op.type in MERGES and source.type in LOOPS_BACK):
                    stack.append((op, sources))
                    stack.append((source, None))
                    break
            else:
                order.append(op)
    return order


class _Pass:
    """One pass to a fixed point."""

    def __init__(self, order, facts, at_source, whole_loops, entering, own):
        self._order, self._facts, self._entering, self._own = order, facts, entering, own
        self._at_source, self._whole_loops = at_source, whole_loops
        self._placements = facts.placements = dict(facts.given)
        self._within = set(order)
        self.decisions, self._parts = {}, {}

    def run(self):
        # In order, and what a loop hands back before what is behind the loop.
        place = {op: number for number, op in enumerate(self._order)}
        todo, waiting = list(range(len(self._order))), set(self._order)
        while todo:
            op = self._order[heapq.heappop(todo)]
            waiting.discard(op)
            if self._visit(op):
                for consumer in {consumer for out in op.outputs for consumer in out.consumers()} & self._within - waiting:
                    waiting.add(consumer)
                    heapq.heappush(todo, place[consumer])
        kept = {op for (op, _), placement in self._placements.items() if isinstance(placement, Size)}.union(self._own.ops)
        return Plan(self._order, self._placements, self.decisions, self._parts, {op: list(op.inputs) for op in kept}, self._own)

    def _visit(self, op):
        """Decides for an op; tells whether the placement of an output changed."""
        placements = [self._of(tensor) for tensor in op.inputs]
        if op in self._facts.layers:
            placements = [self._of(self._facts.layers[op])]
        elif op in self._facts.handed_on:
            placements = [self._of(self._facts.handed_on[op])]
        if op.type in MERGES:
            if all(placement is None for placement in placements):
                return False
        elif any(placement is None for placement in placements):
            return False
        whole = self._own.taken_whole(op, placements)
        placements = [Replicate() if k in whole else placement for k, placement in enumerate(placements)]
        decision = self._decide(op, placements)
        if whole:
            decision = decision or Decision([Replicate()] * len(op.outputs))
            decision = dataclasses.replace(decision, wants={**decision.wants, **dict.fromkeys(whole, Replicated())})
        if decision is not None and self._facts.is_chosen is not None and not self._facts.is_chosen(op):
            decision = _left_alone(op, decision, placements)
        if decision is None:
            self.decisions.pop(op, None)
            found = [Replicate()] * len(op.outputs)
        else:
            found = decision.outputs
            if decision.wants or decision.instead or decision.own:
                self.decisions[op] = decision
            else:
                self.decisions.pop(op, None)
        changed = False
        for number, placement in enumerate(found):
            if (op, number) in self._facts.given:
                continue
            placement = self._facts.named(op, placement)
            if self._facts.is_sum(op) and isinstance(placement, (OneRow, Replicate)):
                placement = Partial()
            if (op, number) in self._at_source and isinstance(placement, (Partial, PartialMean)):
                self._parts[op, number], placement = placement, Replicate()
            before = self._placements.get((op, number))
            changed = changed or before != placement or isinstance(placement, Replicate) and not placement.is_known_as(before)
            self._placements[op, number] = placement
        return changed

    def _of(self, tensor):
        end = end_of(tensor)
        if end in self._placements:
            return self._placements[end]
        return None if tensor.op in self._within else Replicate()

    def _decide(self, op, placements):
        if op in self._facts.layers:
            return _of_layer(op, self._facts.layers[op], placements[0])
        if op in self._facts.handed_on:
            return Decision([placements[0]])
        if op in self._facts.of_each and any(not isinstance(placement, Replicate) for placement in placements):
            is_in_turn = any(isinstance(placement, InTurn) for placement in placements)
            return Decision([InTurn() for _ in op.outputs]) if is_in_turn else _of_each_example(op, placements)
        row = self._facts.row_of(op) if op.type == "Const" else None
        if row is not None and self._facts.varies(op):
            return constant_of_a_turn(row, self._facts.known(op.outputs[0]), op.outputs[0].dtype)
        if op.type == "Const":
            is_whole = self._facts.is_whole or bool(self._whole_loops) and loop_of(op) in self._whole_loops
            return self._facts.of_constant(op, is_whole)
        if op.type in ENTERS and loop_of(op) in self._whole_loops:
            wants = {k: Replicated() for k, placement in enumerate(placements) if not isinstance(placement, (Replicate, Listed))}
            return Decision([p if isinstance(p, Listed) else Replicate() for p in placements], wants)
        if op in self._whole_loops:  # it writes a list that a loop reads
            return Decision([Listed(Replicate())], {k: Replicated() for k, placement in enumerate(placements)
                                                    if not isinstance(placement, (Replicate, Listed))})
        if op in self._entering and op.type in ENTERS:
            want, placement = self._entering[op]
            return Decision([placement], {0: want})
        rule = self._facts.rules.get(op.type)
        if all(type(placement) is Replicate for placement in placements) and not (rule and rule.always) and (
                self._facts.join_of(op) is None):
            return self._computed_of_known(op, placements)
        return decide(Node(op, placements, self._facts, self._through))

    def _computed_of_known(self, op, placements):
        """Returns the `Decision` of an op that computes of what is known by sizes; None, as it is, where nothing is known so."""
        def known(source, placement):
            found = self._facts.known(source) if placement.value is None else placement.value
            return static_value(source) if found is None and not self._facts.differs(source.op) else found
        if all(placement.value is None for placement in placements):
            return None
        value = computed(op, list(map(known, op.inputs, placements)))
        return None if value is None else Decision([Replicate(value)] + [Replicate()] * (len(op.outputs) - 1))

    def _through(self, op, body, *args):
        """Returns the `Plan` of a `Body` that an op calls; for the arguments see `Facts.within`."""
        return _Pass(_in_order(body.ops), self._facts.within(op, body, *args), set(), set(), {}, OwnGradients([])).run()


def _of_layer(op, x, placement):
    """Decides for an op of a layer that meets the other towers': what has its input's shape is normalized, else it is of all."""
    if not isinstance(placement, (Replicate, Shard, Blocks)):
        raise Refused("%r, the input of a synchronized layer, is %s, and not the tower's examples."
                      % (x.name, placement))
    return Decision([placement if out.shape.rank == x.shape.rank and out.shape.is_compatible_with(x.shape) else Replicate()
                     for out in op.outputs])


def _of_each_example(op, placements):
    """Decides for an op of which the model function says that it computes each example by itself; sums over them are whole."""
    if any(out.shape.rank == 0 for out in op.outputs):
        raise Refused("%r is a scalar, made under towers.each_example() of the tower's examples, and so of none of "
                      "them by itself. Make it behind that." % op.name)
    examples = [placement for placement in placements if isinstance(placement, (Shard, Blocks))]
    for source, placement in zip(op.inputs, placements):
        if placement in examples and (placement.axis or isinstance(placement, Blocks)):
            raise Refused("%r, made under towers.each_example(), takes %r, which is %s. Examples have to lie along axis 0 there."
                          % (op.name, source.name, placement))
    rows, times = (examples[0].rows, examples[0].times) if examples else (BATCH, 1)
    return Decision([Shard(0, rows, times) for _ in op.outputs], {
        k: Replicated() for k, placement in enumerate(placements) if isinstance(placement, (Partial, PartialMean))})


def _left_alone(op, decision, placements):
    """Returns a decision by which towers do not meet: what an op then computes of all examples is of the tower's own."""
    meeting = [k for k, want in decision.wants.items() if isinstance(want, (Replicated, OwnRows)) and not isinstance(
        placements[k], Replicate)]
    is_made_anew = decision.instead is not None and (op.type == "Const" or getattr(decision.instead, "changes", False))
    if not (meeting or decision.meets or decision.own or is_made_anew):
        return decision
    outputs = [placement if isinstance(placement, (Shard, Blocks, RowNumbers, Listed, OneRow, RowSum, Size))
               else PartialMean() if out.dtype.is_floating or out.dtype.is_complex else Own()
               for out, placement in zip(op.outputs, decision.outputs)]
    return Decision(outputs, {k: want for k, want in decision.wants.items() if k not in meeting and not isinstance(
        want, AsPartial)})


def _looking_at_all(plan, own):
    """Returns the ends of functions with gradients of their own that do not compute each example by itself, a set."""
    def meets(op, taken):
        decision = plan.decisions.get(op)
        return decision is not None and (decision.instead is not None or bool(decision.own) or any(
            end_of(op.inputs[k]) not in taken or isinstance(plan.placements.get(end_of(op.inputs[k])), Shard)
            for k in decision.wants))
    return own.that_look_at_all(plan, meets)
