"""What plain towers are asked of, each by itself: nobody knows the whole batch's sizes, and nothing is to be changed.

Where a batch has a known size, Python's numbers are constants in the graph, and what depends on them is a guess: a size that a
shape is made of, a constant that `tf.shape` became, a loop of Python's with as many turns as the tower has examples. What a guess
is wrong about is said or not said in a warning, and changes no number.
"""
import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph.private import forward_op_of, position_of
from towers.graph.static_values import static_value
from towers.graph.walk import end_of
from towers.sharding.bodies import Bodies
from towers.sharding.nodes import Decision
from towers.sharding.placements import BATCH, Additive, OneRow, Shard, Size, size_of
from towers.sharding.plan.facts import Facts
from towers.sharding.plan.row_loops import JOINS, join_of, own_of_turns, parts_of
from towers.sharding.rules.loops.single_rows import takes_row_of
from towers.sharding.rules.plain.table import PLAIN_RULES, UNKNOWN_RULE

__all__ = ["Guesses"]

_OF_SHAPE = frozenset(["dims", "input_sizes", "multiples", "num_elements", "output_shape", "shape", "size"])
_MOST_AXES = 8


class _NoTwin:
    """Knows of the whole batch's model what `towers.sharding.plan.twin.Twin` does: nothing."""

    def __init__(self):
        self.bodies, self.sums, self.num_rows, self.first = Bodies(), frozenset(), None, 0

    def dims(self, tensor):
        """Returns None."""

    constant = value = dims


class Guesses(Facts):
    """`Facts` of a plain tower.

    Args:
      given, layers, outer, is_whole: see `Facts`.
      ops: iterable of the tower's operations that are looked at.
      num_rows: int, the tower's examples; None where that is not known.
      handed_on: dict from ops that hand on a tensor to that, see `towers.TowerContext`.
    """

    is_only_asked, of_unknown = True, UNKNOWN_RULE

    def __init__(self, given, whole=None, num_rows=None, layers=None, ops=(), outer=None, is_whole=False, handed_on=None):
        super().__init__(given, whole or _NoTwin(), num_rows, layers, outer=outer, is_whole=is_whole, rules=PLAIN_RULES,
                         follows_turns=True)
        self.handed_on = handed_on or {}
        self._turns, self._joins, self._varying, self._counts, self._of_variables = ({}, {}, set(), {num_rows}, {
            tuple(variable.shape.as_list()) for variable in tf.global_variables() if variable.shape.rank}) if outer is None else (
                outer._turns, outer._joins, outer._varying, outer._counts, outer._of_variables)
        self._ops, self._shapes = ops, None
        for op in sorted((op for op in ops if op.type in JOINS), key=position_of, reverse=True):
            if op not in self._joins:
                self._find_turns(op)

    def _find_turns(self, op):
        """Finds a loop of Python's over the examples, or over equal parts of the batch, that an op ends."""
        for count in sorted({parts_of(op), self.num_rows} - {None, 0, 1}, reverse=True):
            join = join_of(op, op, count, count) if not self.num_rows or self.num_rows % count == 0 else None
            try:
                own, constants = (None, None) if join is None else own_of_turns(join.turns, join.times)
            except ValueError:
                continue
            if own is None or not all(_takes_own(join, turn, own, count) for turn in range(count)):
                continue
            self._counts.add(count)
            self._varying |= constants
            for number, turn in enumerate(join.turns):
                stack = [turn.op]
                while stack:
                    each = stack.pop()
                    if each in own and each not in self._turns:
                        self._turns[each] = OneRow(number // join.times, count)
                        stack.extend(source.op for source in each.inputs)
            self._joins.update((mine, join) for mine, _ in join.ops)
            return

    def whole_dims(self, tensor):
        """Returns the tower's own shape, with None where the batch lies, or may lie."""
        if tensor.shape.rank is None or self.num_rows is None:
            return None
        dims, placement = tensor.shape.as_list(), self.placements.get(end_of(tensor))
        axis = self._likely_axis(tensor.op, dims) if placement is None else getattr(placement, "axis", None)
        return [None if k == axis else size for k, size in enumerate(dims)]

    def _likely_axis(self, op, dims):
        """Returns where the examples may lie in what an op makes: where a shape says -1, or their number."""
        target = tf.get_static_value(op.inputs[1]) if op.type == "Reshape" else None
        if target is not None and -1 in target:
            return target.tolist().index(-1)
        return next((axis for axis, size in enumerate(dims) if size and self._is_multiple(size, op)), None)

    def _is_multiple(self, size, *ops):
        """Tells whether a size is a number of rows for each of the tower's examples, as ops may make of their first inputs."""
        return size % self.num_rows == 0 and any(size // self.num_rows in self._products(op) for op in ops)

    def _products(self, op):
        """Returns how many rows for each example may be made of an op's first input, products of some of its sizes; a set."""
        found, dims = {1}, op.inputs[0].shape.as_list() if op.inputs and op.inputs[0].shape.rank else []
        axis = getattr(self.placements.get(end_of(op.inputs[0])), "axis", None) if dims else None
        for k, size in enumerate(dims[:_MOST_AXES]):
            size = size // self.num_rows if size and k == axis else size
            found |= {size * each for each in found if size and size > 1}
        return found

    @property
    def first(self):
        """0: every tower is asked as if it were the only one."""
        return 0

    def row_of(self, op):
        """See `Facts`. Of constants, only those that say which row is taken are an example's own."""
        row = self._turns.get(op)
        return None if row is None or op.type == "Const" and not all(
            takes_row_of(consumer, row.of) for consumer in op.outputs[0].consumers()) else row

    def varies(self, op):
        """See `Facts`."""
        return op in self._varying

    def join_of(self, op):
        """See `Facts`. What looks like a loop over the examples and takes none of them is none."""
        join = self._joins.get(op)
        is_of_rows = join is not None and any(isinstance(self.placements.get(end_of(turn)), OneRow) for turn in join.turns)
        return join if is_of_rows else None

    def takes_apart(self, op, count, axis):
        """See `Facts`."""
        return count in self._counts

    def counts_rows(self, tensor):
        """See `Facts`."""
        if isinstance(self.placements.get(end_of(tensor)), Size):
            return super().counts_rows(tensor)
        value = static_value(tensor)
        return value is not None and np.shape(value) == () and value.dtype.kind in "iu" and value == self.num_rows

    def of_constant(self, op, is_whole=False):
        """Returns the `Decision` for a constant that a shape is made of, or that `tf.shape` became; None for others."""
        output = op.outputs[0]
        if not self.num_rows or output.dtype.base_dtype not in (tf.int32, tf.int64) or output.shape.rank not in (0, 1):
            return None
        value = tf.get_static_value(output)
        users = [consumer for consumer in output.consumers() if _makes_shape(consumer, output)]
        name = op.name.rpartition("/")[2]
        is_shape = name.startswith("Shape")
        known = self._of_shape(op, value) if output.shape.rank and (is_shape or forward_op_of(op) is not None) else None
        if known is not None:
            return known
        is_shape = is_shape and self.num_rows in np.ravel(value).tolist() and tuple(np.ravel(value)) not in self._of_variables
        if not users and not is_shape:
            return None
        numbers = np.ravel(value).tolist()
        if -1 in numbers:  # then the examples are what is left, if no size before is theirs
            numbers = numbers[:numbers.index(-1)]
        found = [k for k, number in enumerate(numbers) if number and (
            number == self.num_rows or self._is_multiple(number, *users))]
        if not found and -1 not in value and any(
                user.type == "Reshape" and _has_rows(self.placements.get(end_of(user.inputs[0]))) for user in users):
            found = [k for k, number in enumerate(numbers) if number and number % self.num_rows == 0]
        elements = np.ravel(value).astype(object)
        if found:
            elements[found[0]] = Additive(numbers[found[0]] // self.num_rows, BATCH)
        return Decision([size_of(elements.reshape(value.shape))])

    def _of_shape(self, op, value):
        """Returns the `Decision` for the shape of what has rows for each example; None of no such.

        That is, in a gradient, what the forward op takes, or what was made in the same scope. -1 stands for a size not known.
        """
        forward, dims, elements = forward_op_of(op), tuple(value.tolist()), value.astype(object)
        taken = [] if forward is None else [source for source in forward.inputs if _dims(source) == dims]
        for output in taken + self._beside(op, dims):
            placement = self.placements.get(end_of(output))
            if _has_rows(placement):
                elements[placement.axis] = Additive(placement.times, placement.rows)
                return Decision([size_of(elements)])
        return None

    def _beside(self, op, dims):
        """Returns the tensors of a shape that are made in the scope of an op, a list."""
        if self._shapes is None:
            self._shapes = {}
            for other in sorted(self._ops, key=position_of):
                for output in other.outputs:
                    self._shapes.setdefault((_scope_of(other), _dims(output)), []).append(output)
        return self._shapes.get((_scope_of(op), dims), [])


def _scope_of(op):
    return op.name.rpartition("/")[0]


def _dims(tensor):
    """Returns the shape of a tensor, a tuple with -1 for what is not known of it; None where the rank is not known."""
    return None if tensor.shape.rank is None else tuple(-1 if size is None else size for size in tensor.shape.as_list())


def _has_rows(placement):
    """Tells whether there are so many rows for each example."""
    return type(placement) is Shard and bool(placement.times)


def _makes_shape(consumer, tensor):
    """Tells whether an op takes a tensor as a shape, or as a number of elements."""
    names = [] if consumer.op_def is None else [argument.name for argument in consumer.op_def.input_arg]
    return len(names) == len(consumer.inputs) and any(
        source is tensor and name in _OF_SHAPE for name, source in zip(names, consumer.inputs))


def _takes_own(join, turn, own, count):
    """Tells whether a turn takes its own row, or part, of something."""
    stack, seen = [join.turns[turn * join.times + k] for k in range(join.times)], set()
    while stack:
        tensor = stack.pop()
        if len(tensor.op.outputs) == count and tensor.value_index == turn:
            return True
        if tensor.op in own and tensor.op not in seen:
            seen.add(tensor.op)
            at = static_value(tensor.op.inputs[1]) if takes_row_of(tensor.op, count) else None
            if at is not None and np.size(at) and np.ravel(at)[0] == turn:
                return True
            stack.extend(tensor.op.inputs)
    return False
