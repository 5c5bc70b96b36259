"""What is known of a tower besides its graph, and what its constants are in the whole batch's model."""
import dataclasses
from typing import Optional

import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph.static_values import step_along
from towers.graph.walk import end_of
from towers.sharding.bodies import Bodies
from towers.sharding.nodes import Decision
from towers.sharding.placements import (BATCH, COMPUTED, Additive, OneRow, Replicate, RowNumbers, Rows, Shard, Size, elements_of,
                                        size_of)
from towers.sharding.rules.table import RULES, Rule

__all__ = ["Facts"]


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
      follows_turns: whether loops over the examples stay each tower's own, see `towers.sharding.rules.loops.turns`.

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

    def within(self, op, body, placements, is_whole, is_turn=False):
        """Returns the `Facts` of a `Body` that an op calls.

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
        return inner

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
        """A constant with an entry for each example: its number, the same for each, or else the whole batch's in every tower."""
        differs = [axis for axis in range(whole.ndim) if own.ndim == whole.ndim and own.shape[axis] != whole.shape[axis]]
        axis, total = (differs or [None])[0], self._whole.num_rows
        step = 0 if len(differs) != 1 or is_whole or whole.shape[axis] != total else step_along(whole, axis)
        if step and np.array_equal(own, whole.take(range(self.num_rows or 0), axis)):
            return Decision([RowNumbers(axis, BATCH, 1, Additive(step, BATCH), (op.outputs[0], axis))])
        if axis is not None and not is_whole and np.array_equal(whole, np.broadcast_to(whole.take([0], axis), whole.shape)) and (
                whole.shape[axis] % total == 0 and own.shape[axis] == whole.shape[axis] // total * (self.num_rows or 0)):
            placement = Shard(axis, BATCH, whole.shape[axis] // total)
            if len(differs) == 1:
                return Decision([placement])
            rows = np.repeat(whole.take([0], axis), own.shape[axis], axis)
            return Decision([placement], instead=lambda *_: [tf.constant(rows, op.outputs[0].dtype)])
        return Decision([Replicate()], instead=lambda *_: [tf.constant(whole, op.outputs[0].dtype)])
