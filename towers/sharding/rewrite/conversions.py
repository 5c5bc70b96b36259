"""What towers do where a rule wants another placement than a tensor has: add up, gather, take their own rows.

    a sum's parts -> replicated         all_reduce
    a mean's parts -> a sum's parts     times the tower's share; nothing where it has no rows
    sharded -> replicated               all_gather, along its axis
    a size -> replicated                the same of the whole batch's sizes
    replicated -> sharded               the tower's own rows

Each is made once a tensor, outside of all control flow, and listed as a `Meeting` where towers meet for it.
"""
import contextlib
import copy
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from towers.api.annotations import Shape
from towers.context import may_differ
from towers.graph.op_types import OF_SHAPES
from towers.graph.private import control_flow_of, within_control_flow
from towers.graph.walk import end_of, is_ref
from towers.meeting.cross_tower import all_gather, all_reduce
from towers.meeting.exchanges import exchange
from towers.sharding.nodes import AsPartial, Numbered, OwnRows, Refused, Replicated, ShapeOf
from towers.sharding.placements import (BATCH, COMPUTED, Additive, Blocks, Listed, OneRow, Own, Partial, PartialMean,
                                        Replicate, RowNumbers, RowSum, Shard, Size)
from towers.sharding.rewrite.blocks import blocks_apart, blocks_together, some_rows

__all__ = ["Conversions", "Meeting"]

_HALVES = (tf.float16, tf.bfloat16)


class Meeting(NamedTuple):
    """Where the towers of a whole-batch model meet.

    Attributes:
      scope: str, the name of what is met about, without the tower's.
      op: str, the type of the op that made it.
      conversion: str, "sum", "gather", "size", "rows" (where the tower's own begin), "first" (what tower 0 drew) or "moments".
      shape: `tf.TensorShape` of what each tower leaves.
      bytes: int, how many bytes a tower leaves each step; None where its size is not known while the graph is built.
    """
    scope: str
    op: str
    conversion: str
    shape: Shape
    bytes: int


class Conversions:
    """Makes conversions in one tower.

    Args:
      tower: `TowerContext`.
      plan: `towers.sharding.plan.propagation.Plan`.
      now: a function of a tensor that returns what stands for it by now, computed outside of all control flow.
      here: a function of a tensor that returns what stands for it by now, where it stands.
      within: a function of an op and a dict from numbers of inputs to tensors that returns all its inputs by now, where it is.
      copied: a function of an op and inputs that returns its outputs, where shapes change those of an op made anew.
      created: a function of an op, inputs and a tf.cond or tf.while_loop that makes the op anew there.
      whole: `towers.sharding.plan.twin.Twin` or None.
      batch: (tensor, axis) whose size is the number of the tower's examples; None where it has no batch.
      own, first: int, how many examples the tower has and the number of its first; None where that is not known.
    """

    def __init__(self, tower, plan, now, here, within, copied, created, whole, batch, own=None, first=None):
        self._tower, self._plan, self._now, self._within = tower, plan, now, within
        self._here = here
        self._copied, self._created = copied, created
        self._whole, self._batch, self._own, self._first = whole, batch, own, first
        self._made = {}  # (op, number, kind of conversion) -> tensor
        self._counts = {}  # rows -> (own, total, first)
        self._may_meet, self._carry, self._taken = True, None, None
        self.meetings, self.in_place_of = [], {}

    # Functions that ops call, see `towers.sharding.rewrite.carrying`.

    def carry_by(self, carry_out):
        """Takes the function that carries out what ops call: of these conversions, a `Carried`, the op, and its inputs."""
        self._carry = carry_out

    def carried(self, plan, op, inputs):
        """Returns the outputs of an op whose functions follow their plans; `in_place_of` gets what stands for the op."""
        return self._carry(self, plan, op, inputs)

    def for_function(self, plan, now, within, copied, created, taken, may_meet):
        """Returns conversions of the tensors of a function that an op calls; for the arguments see the class.

        Args:
          taken: a function of a tensor that returns the whole batch's of a size that the function takes; None for others.
          may_meet: whether they are made in the tower's own graph, the only one where towers meet.
        """
        found = copy.copy(self)
        found._plan = plan._replace(order=self._plan.order + plan.order, **{
            name: {**getattr(self._plan, name), **getattr(plan, name)} for name in ("placements", "decisions", "inputs")})
        found._now, found._here, found._within, found._copied, found._created = now, now, within, copied, created
        found._made, found._taken, found._may_meet = {}, taken, may_meet
        return found

    def now(self, tensor):
        """Returns what stands for a tensor by now, outside of all control flow."""
        return self._now(tensor)

    def dims_of(self, tensor):
        """Returns the static shape of what stands for a tensor, as far as that is known, a list; None where it is not."""
        dims, placement = None if tensor.shape.rank is None else tensor.shape.as_list(), self._placement(tensor)
        if self._whole is not None:
            dims = self._whole.dims(tensor)
        if dims is None or not isinstance(placement, (Replicate, Shard, Partial, PartialMean)):
            return None
        return dims[:placement.axis] + [None] + dims[placement.axis + 1:] if isinstance(placement, Shard) else dims

    # What `Decision.instead` is built of.

    def made(self, op, inputs):
        """Returns the outputs of an op that takes these inputs."""
        return self._copied(op, inputs)

    def summed(self, tensor, about=None):
        """Returns the sum of a tensor over towers, noted as of another one perhaps; half precision is added up in float32."""
        tensor = tf.convert_to_tensor(tensor)
        self._note(tensor, "sum", about)
        if tensor.dtype in _HALVES:
            return tf.cast(all_reduce(tf.cast(tensor, tf.float32)), tensor.dtype)
        return all_reduce(tensor)

    def meets_by_itself(self, tensor, conversion, dtype, shape):
        """Notes that the towers meet by an exchange of its own where a tensor is made, and what each leaves there."""
        self._add(tensor, conversion, tf.as_dtype(dtype), tf.TensorShape(shape))

    def of_first(self, tensor):
        """Returns what the first tower has of a tensor that no gradient is wanted to, in every tower."""
        self._note(tensor, "first")
        first, = exchange([tensor], lambda parts: [parts[0]] * len(parts), [(tensor.dtype, tensor.shape)])
        return first

    def total_count(self, x, axes, dtype):
        """Returns how many entries of the whole batch some axes of a tensor of the model have, the sharded one among them."""
        placement = self._placement(x)
        _, total, _ = self._count(placement.rows, (x, placement.axis), getattr(placement, "times", None))
        others = [tf.dimension_value(x.shape[axis]) for axis in axes if axis != placement.axis]
        if None not in others and isinstance(total, int):
            return tf.constant(total * int(np.prod(others, dtype=np.int64)), dtype)
        shape = tf.shape(self._now(x))
        return tf.cast(total, dtype) * tf.cast(tf.reduce_prod(tf.gather(shape, [a for a in axes if a != placement.axis])), dtype)

    def batch_count(self):
        """Returns (own, total, first) of the batch's examples: ints, or int32 scalars."""
        return self._count(BATCH, self._batch, 1)

    # Conversions.

    def converted(self, tensor, want, reader=None):
        """Returns what an input is for an op that wants it otherwise.

        Args:
          tensor: of the tower's graph, as the model function made it.
          want: see `Decision.wants`.
          reader: the op that takes it, or None. What is read of a ref variable may be its own memory, and is what that holds when
            the reader runs: what is made of it waits for all that the reader waits for.
        """
        placement = self._placement(tensor)
        if reader is not None and _may_be_memory(tensor):
            waits = [self._here(other).op for other in reader.inputs if other is not tensor] + list(reader.control_inputs)
            with _beside(tensor, self._tower), tf.control_dependencies(waits):
                return self._convert(tensor, placement, want)
        key = end_of(tensor) + (want if not isinstance(want, OwnRows) else ("own", want.axis, want.outer, _end(want.like)),)
        if key not in self._made:
            with _beside(tensor, self._tower):
                self._made[key] = self._convert(tensor, placement, want)
        return self._made[key]

    def _convert(self, tensor, placement, want):
        if isinstance(want, Replicated):
            return self._replicated(tensor, placement)
        if isinstance(want, ShapeOf):
            return self._shape(tensor, placement, want)
        # What needs no meeting about the tensor itself is made where it stands, within a branch or loop.
        if isinstance(want, AsPartial) and isinstance(placement, (Partial, PartialMean, Replicate)):
            return self._as_partial(self._here(tensor), placement)
        if isinstance(want, AsPartial):
            return self._as_partial(self.converted(tensor, Replicated()), Replicate())
        if isinstance(want, OwnRows):
            is_whole = isinstance(placement, Replicate)
            return self.own_rows(self._here(tensor) if is_whole else self.converted(tensor, Replicated()), want)
        return self._numbered(self._here(tensor), placement)

    def met_at_source(self, tensor, parts):
        """Returns a sum's or mean's parts added up for all that read them; what stands for the tensor by now are the parts."""
        with _beside(tensor, self._tower):
            return self.summed(self._as_partial(self._now(tensor), parts), tensor)

    def _replicated(self, tensor, placement):
        if isinstance(placement, Size):
            return self._whole_size(tensor, placement)
        if isinstance(placement, Listed):
            raise Refused("the list %r would have to be the whole batch's as a whole" % tensor.name)
        if isinstance(placement, (OneRow, RowSum)):
            raise Refused("%r is %s of the tower's, by its place: put all of them together, by tf.stack say"
                          % (tensor.name, placement))
        if isinstance(placement, Own):
            raise Refused("what is computed of %r, which each tower has for itself, is nothing of the whole "
                          "batch's" % tensor.name)
        if isinstance(placement, Partial):
            return self.summed(self._now(tensor))
        if isinstance(placement, PartialMean):
            return self.summed(self._as_partial(self._now(tensor), placement), tensor)
        if isinstance(placement, RowNumbers) and tensor.op.type == "Range":  # from 0 on
            return tf.range(0, self.converted(tensor.op.inputs[1], Replicated()), self._now(tensor.op.inputs[2]))
        if isinstance(placement, RowNumbers):
            rows = Shard(placement.axis, placement.rows, placement.times)
            return self._gathered(self.converted(tensor, Numbered()), rows, tensor)
        if isinstance(placement, Replicate):
            return self._now(tensor)
        return self._gathered(self._now(tensor), placement, tensor)

    def _as_partial(self, value, placement):
        """Returns what is a mean's parts, or alike in all towers, as a sum's parts."""
        if isinstance(placement, Partial):
            return value
        rows = placement.rows if isinstance(placement, PartialMean) else BATCH
        like = placement.count if isinstance(placement, PartialMean) and placement.count is not None else self._batch
        if like is None and rows == BATCH:
            return value / tf.constant(self._tower.num_towers, value.dtype)
        own, total, _ = self._count(rows, like, None)
        dtype = tf.float32 if value.dtype in _HALVES else value.dtype
        is_known = isinstance(own, int) and isinstance(total, int)
        with may_differ():
            share = tf.constant(own / total if total else 0.0, tf.float64) if is_known else tf.math.divide_no_nan(
                tf.cast(own, tf.float64), tf.cast(total, tf.float64))
            share = tf.cast(share, dtype.real_dtype)
        with self._where(value), may_differ() if is_known else _nothing():
            precise = tf.cast(value, dtype)
            if is_known and own:
                found = precise * tf.cast(share, dtype)
            else:  # the mean over no rows is NaN, which a product with zero would keep; zeros alone would let no gradient through
                found = tf.where_v2(share > 0, precise * tf.cast(share, dtype), tf.zeros_like(precise))
            return tf.cast(found, value.dtype)

    def _where(self, tensor):
        """Makes ops in the branch or loop that a tensor stands in."""
        return within_control_flow(control_flow_of(tensor.op))

    def _gathered(self, value, placement, tensor):
        self._note(value, "gather")
        axis, rank = placement.axis, value.shape.rank
        if rank is None:
            raise Refused("%r has an unknown rank, and would have to be gathered along axis %d: give it a shape"
                          % (tensor.name, axis))
        static = value.shape.as_list()
        is_in_blocks = isinstance(placement, Blocks)
        if is_in_blocks:
            value = blocks_apart(value, axis, self._blocks_in(value, placement, tensor))
            axis += 1
        order = [axis] + [i for i in range(value.shape.rank) if i != axis]
        value = tf.transpose(value, order) if axis else value
        is_bool = value.dtype == tf.bool
        joined = all_gather(tf.cast(value, tf.int32) if is_bool else value)
        joined = tf.cast(joined, tf.bool) if is_bool else joined
        joined = tf.transpose(joined, np.argsort(order)) if axis else joined
        if is_in_blocks:
            joined = blocks_together(joined, axis - 1)
        static[placement.axis] = self._whole_length(tensor, placement)
        joined.set_shape(static)
        return joined

    def _whole_length(self, tensor, placement):
        dims = None if self._whole is None else self._whole.dims(tensor)
        return None if dims is None else dims[placement.axis]

    def _blocks_in(self, value, placement, tensor):
        """Returns in how many blocks a tower's rows stand, an int or int32 scalar: where it has no rows, as in the others."""
        if placement.outer is not None:
            return placement.outer
        own, _, _ = self._rows_of(placement.rows, placement.times, None, 1)
        number = _number_of_blocks(value, placement.axis, own)
        self._note(number, "rows", tensor)
        return all_reduce(number, "max")

    def own_rows(self, value, want):
        """Returns a tower's own rows of what all towers have alike."""
        axis, outer, rank = want.axis, want.outer, value.shape.rank
        if rank is None:
            raise Refused("%r has an unknown rank: give it a shape" % value.name)
        if isinstance(want.like, Additive):
            rows, times, like = want.like.rows, want.like.times, None
        else:
            placement = self._placement(want.like[0])
            rows, times, like = placement.rows, getattr(placement, "times", None), want.like
            if isinstance(placement, RowNumbers):
                times = None
        own, total, first = self._rows_of(rows, times, like, 1 if outer is None else outer)
        with self._where(value), may_differ():
            outer = _number_of_blocks(value, axis, total) if outer is None else outer
            return some_rows(value, axis, outer, own, first)

    def _numbered(self, value, placement):
        _, _, first = self._rows_of(placement.of.rows, placement.of.times, placement.count, 1)
        with self._where(value), may_differ():
            first = tf.cast(first, value.dtype)
            if placement.column is None:
                return value + first
            return value + first * tf.one_hot(placement.column, tf.dimension_value(value.shape[-1]), dtype=value.dtype)

    # Numbers of rows.

    def _rows_of(self, rows, times, like, outer):
        """Returns (own, total, first) of the rows along an axis, in a block of it: ints, or int32 scalars."""
        if rows == BATCH and times is not None:
            own, total, first = self._count(BATCH, self._batch, 1)
            return own * times, total * times, first * times
        is_one, number = isinstance(outer, int) and outer == 1, outer if isinstance(outer, int) else None
        key = ("rows", rows, times, number) + (() if times is not None else end_of(like[0]) + (like[1],))
        own, total, first = self._count(key, like, None)
        return (own, total, first) if is_one else (own // outer, total // outer, first // outer)

    def _count(self, rows, like, times):
        """Returns (own, total, first) of the entries of (tensor, axis), or of the batch's examples."""
        if rows == BATCH:
            like = self._batch
            if self._own is not None:
                total = self._whole.num_rows
                return (self._own, total, self._first) if times is None else tuple(
                    number * times for number in (self._own, total, self._first))
        if rows not in self._counts:
            tensor, axis = like
            tensor = self._now(tensor)
            own = tf.cast(tensor if axis is None else tf.shape(tensor)[axis], tf.int32)
            self._note(own, "rows", tensor)
            total, first = exchange([own], _totals_and_starts, [(tf.int32, []), (tf.int32, [])], name="rows")
            self._counts[rows] = own, total, first
        return self._counts[rows]

    # Sizes.

    def _whole_size(self, tensor, placement):
        """Returns a tensor computed of sizes as it is computed of the whole batch's."""
        known = None if self._whole is None else self._whole.value(tensor)
        if known is not None:
            return tf.constant(known, tensor.dtype)
        elements = placement.array()
        if not any(each is COMPUTED or isinstance(each, Additive) and each.times is None for each in elements.ravel()):
            return self._of_elements(tensor, elements)
        taken = None if self._taken is None else self._taken(tensor)
        if taken is not None:
            return taken
        if tensor.op.type in OF_SHAPES:
            sources = self._plan.inputs[tensor.op]
            return self._whole_shape(sources[tensor.value_index if tensor.op.type == "ShapeN" else 0], tensor)
        op = tensor.op
        # What a function or loop takes of sizes is known outside of it alone.
        if not op.inputs or op not in self._plan.decisions and op not in set(self._plan.order):
            raise Refused("%r depends on the size of the batch. Hand the batch in with an unknown size, "
                          "tf.placeholder_with_default(x, [None, ...])." % tensor.name)
        inputs = self._within(op, {k: self.converted(source, Replicated()) for k, source in enumerate(self._plan.inputs[op])
                                   if not isinstance(self._placement(source), Replicate)})
        return self._created(op, inputs, control_flow_of(op)).outputs[tensor.value_index]

    def _of_elements(self, tensor, elements):
        """Returns a tensor of sizes of which each element is a number of rows, or alike in all towers."""
        value = tf.reshape(self._now(tensor), [-1]) if any(element is None for element in elements.ravel()) else None

        def number(element, index):
            if isinstance(element, Additive):
                _, total, _ = self._count(element.rows, self._sample(element), 1)
                # Not tf.cast of a number of Python's, which would be rounded to float32 on its way to float64.
                return tf.constant(total * element.times, tensor.dtype) if isinstance(total, int) else (
                    tf.cast(total, tensor.dtype) * tf.constant(element.times, tensor.dtype))
            return value[index] if element is None else tf.constant(element, tensor.dtype)
        found = tf.stack([number(element, index) for index, element in enumerate(elements.ravel())])
        return tf.reshape(found, elements.shape)

    def _sample(self, element):
        """Returns (tensor, axis) that has as many entries as there are rows."""
        if element.rows == BATCH:
            return self._batch
        for op in self._plan.order:
            for output in op.outputs:
                placement = self._plan.placements.get(end_of(output))
                if isinstance(placement, (Shard, RowNumbers)) and placement.rows == element.rows and getattr(
                        placement, "times", 1) == 1:
                    return output, placement.axis
        raise Refused("nothing has as many rows as %s" % element.rows.name)

    def _whole_shape(self, source, tensor):
        value, placement = self._now(source), self._placement(source)
        self._note(tensor, "size")
        shape = tf.shape(value, out_type=tensor.dtype)
        along = tf.one_hot(placement.axis, value.shape.rank, dtype=tensor.dtype)
        whole = all_reduce(shape * along) + shape * (1 - along)
        return tf.reduce_prod(whole) if tensor.op.type == "Size" else whole

    def _shape(self, tensor, placement, want):
        """Returns a shape that is the tower's in some elements, and the whole batch's in the others."""
        value = self._now(tensor)
        whole = value if isinstance(placement, Replicate) else self.converted(tensor, Replicated())
        length = tf.dimension_value(tensor.shape[0])
        with may_differ():
            parts = [value[i] if i in want.own else tf.constant(-1, value.dtype) if i in want.unknown else whole[i]
                     for i in range(length)]
            return tf.stack(parts)

    def _placement(self, tensor):
        return self._plan.placements.get(end_of(tensor), Replicate())

    def _note(self, tensor, conversion, about=None):
        self._add(tensor if about is None else about, conversion, tensor.dtype, tensor.shape)

    def _add(self, about, conversion, dtype, shape):
        if not self._may_meet:
            raise Refused("towers would have to meet about %r within a branch, loop or function, by what is known "
                          "only there (%s)" % (about.name, about.op.type))
        number = shape.num_elements() if shape.rank is not None else None
        self.meetings.append(Meeting(_scope_of(self._tower), about.op.type, conversion, shape,
                                     None if number is None or not dtype.size else number * dtype.size))


def _scope_of(tower):
    scope = tower.relative(tf.get_default_graph().get_name_scope() + "/")
    return scope[:-1].rpartition("/whole_batch")[0] or scope[:-1]


def _beside(tensor, tower):
    """A name scope for what is made of a tensor."""
    name = tensor.op.name if tensor.op.name.startswith(tower.name_scope) else tower.name_scope + tensor.op.name
    return tf.name_scope(name + "/whole_batch/")


def _number_of_blocks(value, axis, rows):
    """Returns how many blocks of so many rows an axis has, an int32 scalar of 1 or more."""
    return tf.maximum(tf.shape(value)[axis] // tf.maximum(rows, 1), 1)


def _may_be_memory(tensor):
    return tensor.op.type == "Identity" and is_ref(tensor.op.inputs[0])


def _end(like):
    return like if isinstance(like, Additive) else (end_of(like[0]), like[1])


@contextlib.contextmanager
def _nothing():
    yield


def _totals_and_starts(per_tower):
    counts, starts = [count for count, in per_tower], [tf.constant(0)]
    for count in counts:
        starts.append(starts[-1] + count)
    return [[starts[-1], start] for start in starts[:-1]]
