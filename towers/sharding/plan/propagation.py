"""Placements carried through a tower's ops, one rule an op: what is found out, before anything is changed.

What has not been found out yet is None, and no rule is asked before it is known what an op computes of, in whatever order the
ops were made. In loops placements are joined until they stay; where the turns of a loop would have to meet, what the loop reads
is made whole before it.
"""
import dataclasses
import heapq
from typing import NamedTuple, Optional

import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph.op_types import ENTERS, LOOPS_BACK, MERGES, SAME_NUMBERS
from towers.graph.private import flows_around, is_loop, position_of
from towers.graph.walk import end_of
from towers.sharding.bodies import Bodies
from towers.sharding.nodes import AsPartial, Decision, Node, Numbered, OwnRows, Refused, Replicated
from towers.sharding.placements import (BATCH, COMPUTED, Additive, Blocks, InTurn, Listed, OneRow, Own, Partial, PartialMean,
                                        Replicate, RowNumbers, Rows, RowSum, Shard, Size, elements_of, size_of)
from towers.sharding.plan.own_gradients import OwnGradients
from towers.sharding.rules.in_turn import refuse_other_states
from towers.sharding.rules.pointwise import LINEAR
from towers.sharding.rules.single_rows import constant_of_a_turn
from towers.sharding.rules.table import RULES, Rule, decide

__all__ = ["Facts", "Plan", "loop_of", "meets_for", "propagate", "propagate_with_turns"]

# Of one input, each as large as it: where a sum's parts meet, they meet in front of these, once for all readers.
_HANDING_ON = SAME_NUMBERS.union(LINEAR.split()) | {"Transpose"}


class Facts:
    """What is known of a tower besides its graph.

    Args:
      given: dict from (op, number of its output) to the `Placement` of what the model function was given.
      whole: `towers.sharding.plan.twin.Twin`; None where the sizes of batches are not known.
      num_rows: int, this tower's examples, or None.
      layers: dict from the ops of layers that meet by themselves to these layers' inputs.
      of_each: set of the ops that the model function says compute each example by itself.
      is_chosen: a function of an op that tells whether it is to be the whole batch's; None is all. Elsewhere towers do not meet.
      outer: `Facts` of what calls a function, where these are of the function.
      is_whole: whether all that a function takes is the whole batch's.
      rules: dict from types of ops to `towers.sharding.rules.table.Rule`.
      follows_turns: whether loops over the examples stay each tower's own, see `towers.sharding.rules.turns`.

    Attributes:
      bodies: `towers.sharding.bodies.Bodies`.
      whole_lists: set of the ops that put into lists what loops of control flow 2 take whole.
      scope: str, which tells the names of ops of one function from those of another.
    """

    is_only_asked = False  # whether nothing is to be changed, see `towers.sharding.plan.guesses`
    handed_on: dict = {}
    of_unknown: Optional[Rule] = None

    def __init__(self, given, whole=None, num_rows=None, layers=None, outer=None, is_whole=False, of_each=(),
                 is_chosen=None, rules=RULES, follows_turns=False):
        self.rules, self.follows_turns = rules, follows_turns
        self.given, self._whole, self.num_rows = given, whole, num_rows
        self.of_each, self.is_chosen = of_each, is_chosen
        self.placements, self.layers = {}, layers or {}  # (op, number) -> Placement, while they are found out
        self.is_inner, self.is_whole, self.is_in_turn, self.scope = outer is not None, is_whole, False, ""
        self.bodies, self.whole_lists, self.counters = (Bodies() if whole is None else whole.bodies, set(), set()) if (
            outer is None) else (outer.bodies, outer.whole_lists, outer.counters)

    def through(self, op, body, placements, is_whole, is_turn=False):
        """Returns the `Plan` of a `Body` that an op calls.

        Args:
          op: the operation.
          body: `Body`.
          placements: list of `Placement`, of the body's inputs.
          is_whole: whether these are all the whole batch's.
          is_turn: whether the body is the turn of a loop over the tower's examples.
        """
        given = {end_of(tensor): placement for tensor, placement in zip(body.inputs, placements)}
        inner = type(self)(given, self._whole, self.num_rows, outer=self, is_whole=is_whole or self.is_whole)
        inner.follows_turns, inner.is_in_turn = self.follows_turns, self.is_in_turn or is_turn
        inner.scope = self.scope + op.name + "/"
        return _Pass(_in_order(body.ops), inner, set(), set(), {}, OwnGradients([])).run()

    def whole_dims(self, tensor):
        """Returns the shape of a tensor in one tower on the whole batch, a list of int and None; None where it is not known."""
        return None if self._whole is None else self._whole.dims(tensor)

    def known(self, tensor):
        """Returns the value that a constant has in one tower on the whole batch, None where that is not known."""
        return None if self._whole is None else self._whole.value(tensor)

    @property
    def carries_turns(self):
        """Tells whether loops over the examples stay the tower's own, and all that they compute has to be of their turns."""
        return self.follows_turns and not self.is_only_asked

    @property
    def first(self):
        """int, the number of the tower's first example, or None."""
        return None if self._whole is None else self._whole.first

    def row_of(self, op):
        """Returns the `OneRow` that an op of a turn of Python's own loop over the examples computes of; None elsewhere."""
        number = None if self._whole is None else self._whole.turns.get(op)
        return None if number is None else OneRow(number, self.num_rows)

    def varies(self, op):
        """Tells whether a constant is not the same in all turns of such a loop."""
        return op in self._whole.varying

    def is_sum(self, op):
        """Tells whether an op of a tower's only turn stands for the sum of all turns."""
        return self._whole is not None and op in self._whole.sums

    def differs(self, op):
        """Tells whether an op is a constant that is another one in the whole batch's model."""
        return op.type == "Const" and self.of_constant(op) is not None

    def join_of(self, op):
        """Returns the `towers.sharding.plan.row_loops.Join` that an op belongs to, or None."""
        return None if self._whole is None else self._whole.joins.get(op)

    def counts_rows(self, tensor):
        """Tells whether a number is that of the tower's examples, so that a loop of as many turns is one over these."""
        placement = self.placements.get(end_of(tensor))
        if placement is None and tensor.op.type == "Const":  # of a function that is not looked at yet
            decision = self.of_constant(tensor.op)
            placement = decision and decision.outputs[0]
        return isinstance(placement, Size) and placement.shape == () and placement.elements[0] == Additive(1, BATCH)

    def takes_apart(self, op, count, axis):
        """Tells whether the outputs of an op, so many equal parts of the batch along an axis, are its examples, one in each."""
        whole = self.whole_dims(op.outputs[0])
        # Parts of the batch may be one example each in this tower alone.
        return count == self.num_rows and (op.type != "Split" or whole is not None and whole[axis] == 1)

    def elements(self, tensor):
        """Returns the elements of a tensor of integers as `Size` has them, a list, or None."""
        placement = self.placements.get(end_of(tensor))
        if not isinstance(placement, (Size, Replicate)):
            return None
        shape = None if tensor.shape.rank is None else tensor.shape.as_list()
        known = tf.get_static_value(tensor) if isinstance(placement, Replicate) else None
        found = elements_of(placement, shape, known)
        return None if found is None else list(found.ravel())

    def named(self, op, placement):
        """Returns an op's placement, with a name of its own for rows that the op made in a function."""
        rows = getattr(placement, "rows", None)
        if not self.scope or rows is None or rows.name.partition(":")[0] != op.name:
            return placement
        return dataclasses.replace(placement, rows=Rows(self.scope + rows.name))

    def rows_of(self, tensor):
        """Returns the `Rows` of data that a model function takes from outside."""
        return Rows(tensor.op.name)

    def of_constant(self, op, is_whole=False):
        """Returns the `Decision` for a constant, None where it is as for the whole batch, which `is_whole` wants it to be."""
        whole = None if self._whole is None else self._whole.constant(op)
        if whole is None:
            return None
        own = tf.get_static_value(op.outputs[0])
        if own.shape == whole.shape:
            if own.dtype == object or np.array_equal(own, whole) or own.dtype.kind in "fc" and np.array_equal(
                    np.isnan(own), np.isnan(whole)) and np.array_equal(own[~np.isnan(own)], whole[~np.isnan(whole)]):
                return None
            if is_whole:
                return Decision([Replicate()], instead=lambda *_: [tf.constant(whole, op.outputs[0].dtype)])
            found = np.empty(own.shape, object)
            for index in np.ndindex(own.shape):
                found[index] = self._element(own[index].item(), whole[index].item())
            return Decision([size_of(found)])
        return self._of_long_constant(op, own, whole, is_whole)

    def _element(self, own, whole):
        if own == whole or own != own and whole != whole:
            return own
        total = self._whole.num_rows
        is_number = isinstance(own, int) and isinstance(whole, int) and not isinstance(own, bool)
        if is_number and total and whole % total == 0 and own == whole // total * (self.num_rows or 0):
            return Additive(whole // total, BATCH)
        return COMPUTED

    def _of_long_constant(self, op, own, whole, is_whole):
        """A constant with an entry for each example: the same one for each, or else the whole batch's in every tower."""
        differs = [axis for axis in range(whole.ndim) if own.ndim == whole.ndim and own.shape[axis] != whole.shape[axis]]
        axis, total = (differs or [None])[0], self._whole.num_rows
        if axis is not None and not is_whole and np.array_equal(whole, np.broadcast_to(whole.take([0], axis), whole.shape)) and (
                whole.shape[axis] % total == 0 and own.shape[axis] == whole.shape[axis] // total * (self.num_rows or 0)):
            placement = Shard(axis, BATCH, whole.shape[axis] // total)
            if len(differs) == 1:
                return Decision([placement])
            rows = np.repeat(whole.take([0], axis), own.shape[axis], axis)
            return Decision([placement], instead=lambda *_: [tf.constant(rows, op.outputs[0].dtype)])
        return Decision([Replicate()], instead=lambda *_: [tf.constant(whole, op.outputs[0].dtype)])


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
        more = _met_at_source(plan) - at_source  # what meets there counts as replicated
        if facts.is_chosen is not None:
            more = {(op, number) for op, number in more if facts.is_chosen(op)}
        meeting = _meeting_loops(plan, facts.is_only_asked)
        if meeting and facts.carries_turns:
            raise Refused("towers would have to meet in the turns of a tf.while_loop")
        loops = (set(meeting) | _writers_of(plan, meeting)) - whole_loops
        enters = {op: wanted for op, wanted in _wanted_at_entry(plan).items() if op not in entering}
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
            changed = changed or self._placements.get((op, number)) != placement
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
            return None
        return decide(Node(op, placements, self._facts))


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


def loop_of(op):
    """Returns the loop of control flow 1 that an op belongs to, the outermost one; None outside of loops."""
    return next(filter(is_loop, reversed(flows_around(op))), None)


def meets_for(want, placement):
    """Tells whether towers meet for a want."""
    if isinstance(want, Replicated):
        return not isinstance(placement, Replicate)
    return isinstance(want, (OwnRows, Numbered)) or isinstance(want, AsPartial) and not isinstance(
        placement, (Replicate, PartialMean, Partial))


def _meeting_loops(plan, is_only_asked):
    """Returns the loops of control flow 1 in whose turns towers would meet, a dict to an op that they would meet for.

    Args:
      plan: `Plan`.
      is_only_asked: whether the plan is not to be carried out, so that own rows need not be taken.
    """
    found = {}
    for op, decision in plan.decisions.items():
        loop = None if op.type in ENTERS else loop_of(op)
        if loop is None:
            continue
        for k, want in decision.wants.items():
            placement = plan.placements.get(end_of(op.inputs[k]), Replicate())
            if is_only_asked and isinstance(want, OwnRows):
                continue
            if meets_for(want, placement) and not _is_from_outside(op.inputs[k], placement):
                found[loop] = op
        if decision.instead and decision.meets or decision.own:
            found[loop] = op
    return found


def _looking_at_all(plan, own):
    """Returns the ends of functions with gradients of their own that do not compute each example by itself, a set."""
    def meets(op, taken):
        decision = plan.decisions.get(op)
        return decision is not None and (decision.instead is not None or bool(decision.own) or any(
            end_of(op.inputs[k]) not in taken or isinstance(plan.placements.get(end_of(op.inputs[k])), Shard)
            for k in decision.wants))
    return own.that_look_at_all(plan, meets)


def _writers_of(plan, loops):
    """Returns the ops that write the lists which loops read, outside of these, a set."""
    found = set()
    stack = [op.inputs[0].op for op in plan.order if op.type in ENTERS and loop_of(op) in loops and isinstance(
        plan.placements.get((op, 0)), Listed)]
    while stack:
        op = stack.pop()
        if op.type.startswith("TensorArray") and len(op.inputs) == 4 and op not in found and loop_of(op) is None:
            found.add(op)
            stack.append(op.inputs[3].op)
        elif op.type == "Identity":
            stack.append(op.inputs[0].op)
    return found


def _is_from_outside(tensor, placement):
    """Tells whether what a loop reads is the same in all its turns, so that it can be made whole before the loop."""
    if isinstance(placement, Size):
        return True  # computed of whole sizes within
    stack, seen = [tensor.op], set()
    while stack:
        op = stack.pop()
        if op in seen:
            continue
        seen.add(op)
        if op.type in ENTERS:
            if not op.get_attr("is_constant"):
                return False
        elif op.type in MERGES or op.type in LOOPS_BACK or op.op_def is None or op.op_def.is_stateful:
            return False
        else:
            stack.extend(source.op for source in op.inputs)
    return True


def _wanted_at_entry(plan):
    """Returns what a loop's first state is wanted as, where its turns hand on something else: a dict from Enters to pairs."""
    found = {}
    for op, decision in plan.decisions.items():
        for k, want in decision.wants.items() if op.type in MERGES else ():
            if op.inputs[k].op.type in ENTERS:
                found[op.inputs[k].op] = want, decision.outputs[0]
    return found


def _met_at_source(plan):
    """Returns the sums' parts that meet behind ops that hand them on, or at several places, a set of (op, number)."""
    found, meeting = set(), {}
    for op, decision in plan.decisions.items():
        for k, want in decision.wants.items():
            tensor = op.inputs[k]
            placement = plan.placements.get(end_of(tensor))
            if not isinstance(want, Replicated) or not isinstance(placement, (Partial, PartialMean)):
                continue
            meeting[end_of(tensor)] = tensor
            source = tensor
            while source.op.type in _HANDING_ON and source.op not in plan.decisions and (
                    source.dtype.is_complex == source.op.inputs[0].dtype.is_complex) and isinstance(
                        plan.placements.get(end_of(source.op.inputs[0])), (Partial, PartialMean)):
                source = source.op.inputs[0]
            if source is not tensor and loop_of(source.op) is None:
                found.add(end_of(source))
    return found | _met_several_times(plan, meeting)


def _met_several_times(plan, meeting):
    """Returns the sums' parts of which several tensors are computed that meet, and are together no smaller, a set."""
    if len(meeting) < 2:
        return set()
    sources, readers = {}, {}  # of the parts of sums: the one that they are computed of, None for several; the tensors that meet
    for op in plan.order:
        for number in range(len(op.outputs)):
            if isinstance(plan.placements.get((op, number)), (Partial, PartialMean)):
                of_inputs = {sources[end] for end in map(end_of, op.inputs) if end in sources}
                sources[op, number] = (op, number) if not of_inputs else of_inputs.pop() if len(of_inputs) == 1 else None
    for end, tensor in meeting.items():
        readers.setdefault(sources.get(end), []).append(tensor)
    readers.pop(None, None)
    return {(op, number) for (op, number), tensors in readers.items() if len(tensors) > 1 and loop_of(op) is None
            and _size(op.outputs[number]) <= sum(map(_size, tensors))}


def _size(tensor):
    """Returns how many elements a tensor has, those along axes of unknown size counted once."""
    dims = [] if tensor.shape.rank is None else tensor.shape.as_list()
    return int(np.prod([1 if size is None else size for size in dims], dtype=np.int64))
