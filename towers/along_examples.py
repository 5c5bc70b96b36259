"""Which tensors of a tower hold examples, and along which axes they hold them, as far as that is sure."""

import numpy as np
import tensorflow.compat.v1 as tf

from towers.axes import WHOLE, axes_behind, product_axes, reduced_axes
from towers.chosen_rows import SAME_ROWS, UNIQUE, are_counted, chooser, is_one_hot
from towers.exchanges import stands_at_exchange
from towers.first_axis import lies_along_examples, sizes_of_examples
from towers.graph_walk import LOOPS_BACK, NO_VALUES, SIZES, end_of
from towers.mapped import LISTS, axes_in_lists, made_in_loop, mapped_from, state_of
from towers.own_data import leaves_of_rows, own_leaves
from towers.private import forward_op_of, is_in_loop
from towers.single_rows import Rows

__all__ = ["PRODUCTS", "Examples", "values_of"]

PRODUCTS = frozenset(["BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "MatMul"])
# Behind which nothing is sure, but for some of them: loops, branches and state.
_UNSURE = ("Assign", "Case", "Enter", "Exit", "If", "Loop", "Merge", "NextIteration", "PyFunc", "Ref", "StatefulPartitionedCall",
           "StatelessIf", "StatelessWhile", "Switch", "TensorArray", "TensorList", "While")
# The numbers of the inputs that `values_of` is of, where not of all.
_VALUES = {"Bincount": (0, 2), "DenseBincount": (0, 2), "Fill": (1,), "OneHot": (0, 2, 3), "PadV2": (0, 2), "Split": (1,)}
_VALUES.update((kind, (0,)) for kind in (
    "BroadcastTo", "Cumsum", "ExpandDims", "MirrorPad", "Pad", "Reshape", "ReverseV2", "Slice", "SplitV", "StridedSlice",
    "Switch", "Tile", "Transpose"))
_VALUES.update((kind, ()) for kind in ("LinSpace", "RandomStandardNormal", "RandomUniform", "Range", "TruncatedNormal"))
# The numbers of the inputs that say how long what an op makes is, along each axis.
_SAY_SIZES = {"BroadcastTo": (1,), "Fill": (0,), "Range": (0, 1, 2), "Reshape": (1,), "Slice": (1, 2), "StridedSlice": (1, 2),
              "Tile": (1,)}
_SAY_SIZES.update((kind, (2,)) for kind in ("UnsortedSegmentMax", "UnsortedSegmentProd", "UnsortedSegmentSum"))
_LOOKS_UP = frozenset(["Gather", "GatherV2", "ResourceGather"])
_ADDS_BY_CLASS = frozenset(["ScatterNd", "UnsortedSegmentSum"])
_COUNTS_CLASSES = frozenset(["Bincount", "DenseBincount"])


def _of_axis(op, number, axis):
    """Returns what input `number` of an op, of a number for each axis, has for an axis of the output, a list of tensors."""
    sizes = op.inputs[number]
    if sizes.op.type != "Pack":
        return [sizes]
    parts = list(sizes.op.inputs)
    if op.type == "StridedSlice":  # an index is an axis less
        parts = [part for i, part in enumerate(parts) if not op.get_attr("shrink_axis_mask") & 1 << i]
    return parts[axis:axis + 1]


def _is_given_to_loop(op):
    """Tells whether an op hands what does not change into a loop of control flow 1."""
    return op.type == "Enter" and op.get_attr("is_constant")


def _is_some_row(op, axis):
    """Tells whether an op in a loop takes a part of an axis, another one in each round perhaps."""
    if op.type not in ("Slice", "StridedSlice") or not is_in_loop(op):
        return False
    if op.type == "Slice" or op.get_attr("ellipsis_mask") | op.get_attr("new_axis_mask"):
        return True
    count, taken = tf.dimension_value(op.inputs[1].shape[0]), op.get_attr("shrink_axis_mask")
    kept = [i for i in range(count or 0) if not taken & 1 << i]  # which of the slice's bounds an axis of the output has
    return count is None or axis < len(kept) and not op.get_attr("begin_mask") & op.get_attr("end_mask") & 1 << kept[axis]


def _is_of_segments(op):
    """Tells whether an op adds up, or else takes together, what belongs to each of a number of classes."""
    is_by_number = op.type == "ScatterNd" and op.inputs[0].shape.rank and tf.dimension_value(op.inputs[0].shape[-1]) == 1
    return bool(is_by_number) or op.type.startswith("UnsortedSegment")


def _is_unsure(op):
    return op.type.startswith(_UNSURE)


def _is_of_branches(op):
    """Tells whether an op belongs to a tf.cond of control flow 1."""
    if op.type == "Merge":
        return not any(source.op.type in LOOPS_BACK for source in op.inputs)
    return op.type == "Switch"  # one of a loop leads to that, where it ends


def values_of(op):
    """Returns the inputs of an op whose values are in its output, not those that say which of them, or how many: a list."""
    numbers = _VALUES.get(op.type)
    if op.type in LISTS:
        return [source for source, _ in axes_in_lists(op, 0)]
    return list(op.inputs) if numbers is None else [op.inputs[number] for number in numbers if number < len(op.inputs)]


def _counts_unique(tensor):
    """Tells whether a number is that of the rows that tf.unique leaves."""
    while tensor.op.type in ("Cast", "Identity", "StridedSlice") or tensor.op.type in SIZES:
        tensor = tensor.op.inputs[0]
    return tensor.op.type in UNIQUE


class Examples:
    """Which tensors of a tower hold examples, and along which axes they hold them, for sure.

    Attributes:
      rows: `towers.single_rows.Rows` of the tower.
    """

    def __init__(self, towers):
        of_all = set.intersection(*[own_leaves(tower.context) for tower in towers[:2]]) if len(towers) > 1 else set()
        self._context, self._stand_ins = towers[0].context, towers[0].context.meetings.stand_ins
        self._leaves = own_leaves(self._context) - of_all
        self._of_rows = {end_of(leaf) for leaf in leaves_of_rows(self._context.batch)} & self._leaves
        self._sizes = [tf.dimension_value(op.outputs[number].shape[0]) or 0 for op, number in self._of_rows
                       if op.outputs[number].shape.rank]
        self._are_in, self._lie_along, self._are_spread, self._are_as_long = {}, {}, {}, {}
        self._unchosen = set()
        self.rows = Rows()
        self.rows.fill(towers[0].ops, sizes_of_examples(towers), self.lie_along, self.is_given)

    def end_at(self, tensor):
        """Tells whether nothing is to be looked for behind a tensor: of the batch or of all towers, or where nothing is sure."""
        return (end_of(tensor) in self._leaves or tensor.op in self._stand_ins or stands_at_exchange(tensor.op)
                or _is_unsure(tensor.op) and not _is_of_branches(tensor.op) and not axes_in_lists(tensor.op, 0)
                and not _is_given_to_loop(tensor.op) and not made_in_loop(tensor.op))

    def is_given(self, tensor):
        """Tells whether a tensor is one of the tower's batch."""
        return end_of(tensor) in self._leaves

    def needed_by(self, tensor):
        """Returns the set of ops that a tensor's value is computed of, up to those behind which nothing is to be looked for."""
        seen, stack = set(), [tensor]
        while stack:
            tensor = stack.pop()
            op = tensor.op
            if op not in seen and op.type not in SIZES | NO_VALUES and not self.end_at(tensor):
                seen.add(op)
                stack.extend(self.made_of(op) if _is_unsure(op) else op.inputs)
        return seen

    def made_of(self, op):
        """Returns the tensors whose values are in what an op makes, a list.

        What a loop makes is made within it; but of each example by itself, of those that it is made of.
        """
        if op.type in LISTS and any(map(self.lie_along, mapped_from(op))):
            return values_of(op)
        return (made_in_loop(op) if op.type in LISTS or op.type == "Exit" else []) or values_of(op)

    def given_to(self, tensor):
        """Returns which tensors of the tower's batch a tensor's value is computed of, a set of (op, number of its output)."""
        tensors = [tensor] + [source for op in self.needed_by(tensor) for source in op.inputs]
        return {end_of(each) for each in tensors if self.is_given(each)}

    def are_in(self, tensor):
        """Tells whether a tensor is computed of the tower's examples, other than by how many they are."""
        return self._reaches((tensor,), self._are_in, self._inputs, self.is_given)

    def lie_along(self, tensor, axis=0):
        """Tells whether a tensor has examples along an axis, its first one or another."""
        shape = tensor.shape.as_list() if tensor.shape.rank else []
        if axis >= len(shape) or not self._is_made_along(tensor, axis):
            return False
        # One example lies along an axis of size 1, where there is one: others are then those that it was joined with.
        return shape[axis] == 1 or not any(size == 1 and self._is_made_along(tensor, i) for i, size in enumerate(shape))

    def _is_made_along(self, tensor, axis):
        return self._reaches((tensor, axis, WHOLE), self._lie_along, self._places, self._is_of_batch)

    def are_rows_of(self, tensor):
        """Tells whether a tensor's first axis is that of examples, surely or, where no other one is, by all that keeps it."""
        return self.lie_along(tensor) or lies_along_examples(tensor, self._context) and not any(
            self.lie_along(tensor, axis) for axis in range(1, tensor.shape.rank or 1))

    def lie_in(self, tensor):
        """Tells whether a tensor has examples along any of its axes."""
        return any(self.lie_along(tensor, axis) for axis in range(tensor.shape.rank or 0))

    def are_spread(self, tensor):
        """Tells whether what stands along an axis of a tensor is one and the same, which holds examples and was repeated."""
        return any(self._reaches((tensor, axis, WHOLE), self._are_spread, self._places, self._is_repeated)
                   for axis in range(tensor.shape.rank or 0))

    def tell_length(self, tensor, axis):
        """Tells whether a tensor is as long along an axis as the tower's examples say, as the longest of them say."""
        return tf.dimension_value(tensor.shape[axis]) is None and self._reaches(
            (tensor, axis, WHOLE), self._are_as_long, self._places, self._is_made_as_long)

    def chooser_of(self, tensor, axes=(0,)):
        """Returns the op that chose which rows of others stand along some axes of a tensor, see `chooser`; else None."""
        return chooser(tensor, self.end_at, axes, self._unchosen)

    def are_reduced(self, op):
        """Tells whether a reduction, `tf.reduce_sum` say, takes an axis away along which examples lie.

        The gradient of a broadcast takes every axis of size 1, that of one example among them, and adds nothing up.
        """
        x, axes = op.inputs[0], reduced_axes(op) or ()
        if forward_op_of(op) is not None:
            axes = [axis for axis in axes if tf.dimension_value(x.shape[axis]) != 1]
        return any(self.lie_along(x, axis) for axis in axes)

    def are_added_up(self, op):
        """Tells whether an op adds up examples, where it is not of the kinds that have axes as an argument: a product, say."""
        if op.type == "L2Loss" or op.type in _COUNTS_CLASSES and op.outputs[0].shape.rank == 1:
            return self.lie_in(op.inputs[0])
        if op.type in _ADDS_BY_CLASS:
            return self.are_in_classes(op)
        if op.type not in PRODUCTS:
            return False
        axes = product_axes(op)
        takes_rows = axes[0] and axes[0][-1] not in axes[-1] and is_one_hot(op.inputs[0])  # one for each label, not their sum
        return not takes_rows and any(self.lie_along(source, axis) for source, labels in zip(op.inputs, axes)
                                      for axis, label in enumerate(labels) if label not in axes[-1])

    def are_taken_in_turn(self, op):
        """Tells whether an op hands out what a loop made of examples that it took one after the other."""
        seen, stack = set(), [tensor.op for tensor in made_in_loop(op)] if op.type == "Exit" else []
        while stack:
            op = stack.pop()
            if op in seen or not is_in_loop(op) or op.type == "Enter":
                continue
            seen.add(op)
            is_row = op.type == "StridedSlice" and op.get_attr("shrink_axis_mask") & 1
            if any(map(self.lie_along, op.inputs[:1] if is_row else values_of(op) if op.type in LISTS else ())):
                return True
            stack.extend(source.op for source in op.inputs)
        return False

    def are_in_classes(self, op):
        """Tells whether an op takes together the examples of each of a number of classes, one that is known beforehand."""
        return _is_of_segments(op) and not self._may_be_for_each(op) and any(map(self.lie_in, list(op.inputs)[:2]))

    def _may_be_for_each(self, op):
        """Tells whether an op of segments may make them for each example, as it may where their number is computed."""
        number = tf.get_static_value(op.inputs[2])  # of classes, or the shape of what they are scattered into
        if number is None:
            return not _counts_unique(op.inputs[2])
        return any(size and np.reshape(number, -1)[0] % size == 0 for size in self._sizes)

    def _is_of_batch(self, tensor, axis, part):
        if axis or part[0] != 1 or end_of(tensor) not in self._of_rows:
            return False
        return part[1] in (1, None) or part[1] != tf.dimension_value(tensor.shape[0])  # not one part, with all of them in it

    def _is_made_as_long(self, tensor, axis, _):
        op = tensor.op
        numbers = _SAY_SIZES.get(op.type, ()) if axis == 0 or not _is_of_segments(op) else ()
        return any(self.are_in(size) for number in numbers if number < len(op.inputs) for size in _of_axis(op, number, axis))

    def _is_repeated(self, tensor, axis, _):
        row = tensor.op.inputs[0] if tensor.op.type in ("BroadcastTo", "Tile") else None
        return (row is not None and row.shape.rank == tensor.shape.rank and tf.dimension_value(row.shape[axis]) == 1
                and self.are_in(row) and not self.lie_in(row))

    def _reaches(self, place, answers, sources, is_end):
        """Tells whether a walk from a place comes to an end that is looked for. What it knows then, it remembers.

        Args:
          place: a tensor and what else says where the walk is, a tuple.
          answers: dict, what is known.
          sources: function of a place, unpacked, that returns those behind it.
          is_end: function of a place, unpacked.
        """
        path = [(place, None)]
        while path:
            now, rest = path[-1]
            key = (now[0].name,) + now[1:]
            if rest is None:
                answer = answers.get(key)
                if answer is None and is_end(*now):
                    answer = True
                if answer is None:
                    answers[key] = False  # until it is known better, which a loop back would not
                    path[-1] = now, iter([] if self.end_at(now[0]) else sources(*now))
                    continue
                if answer:
                    answers.update(((passed[0].name,) + passed[1:], True) for passed, _ in path)
                    return True
                path.pop()
                continue
            following = next(rest, None)
            if following is None:
                path.pop()
            else:
                path.append((following, None))
        return False

    def _inputs(self, tensor):
        op = tensor.op
        if op.type in SIZES or op.type in NO_VALUES:
            return [(source,) for source in op.inputs if are_counted(source, self.end_at, self._unchosen)]
        return [(source,) for source in (self.made_of(op) if op.type in LISTS | {"Exit", "Switch"} else op.inputs)]

    def _places(self, tensor, axis, part):
        op = tensor.op
        if op.type in SIZES or op.type in NO_VALUES and self.chooser_of(op.inputs[0]) is None:
            return []
        if op.type in _COUNTS_CLASSES or axis == 0 and _is_of_segments(op) and not self._may_be_for_each(op):
            return []
        if op.type == "Slice" and axis == 0 and self._is_behind_examples(op) or _is_some_row(op, axis):
            return []
        if op.type in UNIQUE and tensor.value_index != 1:  # which is the number of each example's value among them
            return []
        if op in self.rows.joined and axis == 0:
            return [(self.rows.joined[op], 0, part)]
        if op.type in LISTS:
            return [(source, its, part) for source, its in axes_in_lists(op, axis)]
        state = state_of(op.inputs[0].op if op.type == "Exit" else op) if op.type in ("Exit", "Switch") else []
        if state:  # of each round, as long as it keeps its axes
            return [(source, axis, part) for source in state if source.shape.rank == tensor.shape.rank]
        return axes_behind(tensor, axis, part)

    def _is_behind_examples(self, op):
        """Tells whether a slice takes what was joined behind the examples, sampled candidates behind their classes, say."""
        begin, tensor = op.inputs[1], op.inputs[0]
        first = tf.get_static_value(begin.op.inputs[0] if begin.op.type == "Pack" else begin)
        while tensor.op.type in SAME_ROWS or tensor.op.type in _LOOKS_UP:
            tensor = tensor.op.inputs[tensor.op.type in _LOOKS_UP]
        if first is not None and not np.reshape(first, -1)[0] or tensor.op.type != "ConcatV2":
            return False
        *parts, axis = tensor.op.inputs
        return tf.get_static_value(axis) == 0 and not any(map(self.lie_along, parts[1:]))

    def rows_of(self, tensor):
        """Returns the inputs whose first axis is that of a tensor, a list."""
        return [source for source, axis, _ in self._places(tensor, 0, WHOLE) if axis == 0]
