"""Where a tower's examples lie along the first axis, and how many they are: what a number of the model's own is held against."""
import itertools

import numpy as np
import tensorflow.compat.v1 as tf

from towers.axes import SUMS, WHOLE, axes_behind, product_axes, reduced_axes, reduces_first_axis
from towers.chosen_rows import SAME_ROWS, are_counted, chooser, is_one_hot
from towers.exchanges import stands_at_exchange
from towers.graph_walk import LOOPS_BACK, NO_VALUES, SIZES, end_of
from towers.mapped import LISTS, axes_in_lists, mapped_from
from towers.own_data import leaves_of_rows, own_leaves
from towers.private import forward_op_of
from towers.single_rows import Rows

__all__ = ["EXTREMES", "PRODUCTS", "Examples", "lies_along_examples", "products", "sizes_of_examples", "values_of"]

PRODUCTS = frozenset(["BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "MatMul"])
EXTREMES = frozenset(["EuclideanNorm", "Max", "Min", "Prod"])
# Behind which nothing is sure: loops, branches and state.
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
_LOOKS_UP = frozenset(["Gather", "GatherV2", "ResourceGather"])
_COUNTS_CLASSES = frozenset(["Bincount", "DenseBincount"])
_REDUCTIONS = SUMS | EXTREMES | {"All", "Any", "ArgMax", "ArgMin"}


def lies_along_examples(tensor, context):
    """Tells whether a tensor's first axis is that of the tower's batch, or made of it and others, through all that keeps it.

    Loops, branches and Python functions are taken to keep it, of which `Examples` says nothing.
    """
    own, seen, stack = own_leaves(context), set(), [tensor]
    while stack:
        tensor = stack.pop()
        op = tensor.op
        if end_of(tensor) in own:
            return True
        if op in seen or tensor.shape.rank == 0 or op in context.meetings.stand_ins or stands_at_exchange(op) or _turns(op):
            continue
        seen.add(op)
        if op.type in SIZES:  # how many examples there are, which is none of them
            continue
        stack.extend(mapped_from(op) or (op.inputs[:1] if op.type in ("MatMul", "ReverseSequence") else op.inputs))
    return False


def _turns(op):
    """Tells whether an op's output may have another first axis than its input."""
    if op.type in _REDUCTIONS:
        return reduces_first_axis(op) is not False
    if op.type == "Transpose":
        order = tf.get_static_value(op.inputs[1])
        return order is None or len(order) > 0 and order[0] != 0
    if op.type == "Einsum":
        labels, _, of_output = op.get_attr("equation").decode().partition("->")
        return not of_output or of_output[0] not in [of_input[:1] for of_input in labels.split(",")]
    if op.type == "StridedSlice":
        return bool((op.get_attr("new_axis_mask") | op.get_attr("shrink_axis_mask")) & 1)
    if op.type == "ExpandDims":
        axis, rank = tf.get_static_value(op.inputs[1]), op.outputs[0].shape.rank
        return axis is None or rank is None or int(np.reshape(axis, -1)[0]) % rank == 0
    if op.type in ("Pack", "Unpack"):
        return op.get_attr("axis") == 0
    return op.type == "MatMul" and op.get_attr("transpose_a")


def sizes_of_examples(towers):
    """Returns how many examples tower 0 is known to have: a dict from such sizes to that of the whole batch."""
    leaves = zip(*[leaves_of_rows(tower.context.batch) for tower in towers])
    known = [[leaf.shape.as_list()[0] if leaf.shape.rank else None for leaf in of_towers] for of_towers in leaves]
    missing = towers[0].context.num_towers - len(towers)  # of other workers, taken to be as large
    return {sizes[0]: sum(sizes) + missing * sizes[0] for sizes in known if None not in sizes and sizes[0]}


def products(numbers, fewest=0):
    """Returns all products of `fewest` or more of a few numbers, None among them left out: a set of floats."""
    numbers = [number for number in numbers if number is not None]
    return {float(np.prod(some)) for count in range(fewest, len(numbers) + 1) for some in itertools.combinations(numbers, count)}


def _of_axis(op, number, axis):
    """Returns what input `number` of an op, of a number for each axis, has for an axis of the output, a list of tensors."""
    sizes = op.inputs[number]
    if sizes.op.type != "Pack":
        return [sizes]
    parts = list(sizes.op.inputs)
    if op.type == "StridedSlice":  # an index is an axis less
        parts = [part for i, part in enumerate(parts) if not op.get_attr("shrink_axis_mask") & 1 << i]
    return parts[axis:axis + 1]


def _is_of_segments(op):
    return op.type.startswith("UnsortedSegment")


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
        self.rows = Rows()
        self.rows.fill(towers[0].ops, sizes_of_examples(towers), self.lie_along, self.is_given)

    def end_at(self, tensor):
        """Tells whether nothing is to be looked for behind a tensor: of the batch or of all towers, or where nothing is sure."""
        return (end_of(tensor) in self._leaves or tensor.op in self._stand_ins or stands_at_exchange(tensor.op)
                or _is_unsure(tensor.op) and not _is_of_branches(tensor.op) and not axes_in_lists(tensor.op, 0))

    def is_given(self, tensor):
        """Tells whether a tensor is one of the tower's batch."""
        return end_of(tensor) in self._leaves

    def needed_by(self, tensor):
        """Returns the set of ops that a tensor's value is computed of, up to those behind which nothing is to be looked for."""
        seen, stack = set(), [tensor]
        while stack:
            tensor = stack.pop()
            op = tensor.op
            if op not in seen and op.type not in SIZES | NO_VALUES and not self.end_at(tensor) and not _is_unsure(op):
                seen.add(op)
                stack.extend(op.inputs)
        return seen

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
        if op.type == "UnsortedSegmentSum":
            return self.are_in_classes(op)
        if op.type not in PRODUCTS:
            return False
        axes = product_axes(op)
        takes_rows = axes[0] and axes[0][-1] not in axes[-1] and is_one_hot(op.inputs[0])  # one for each label, not their sum
        return not takes_rows and any(self.lie_along(source, axis) for source, labels in zip(op.inputs, axes)
                                      for axis, label in enumerate(labels) if label not in axes[-1])

    def are_in_classes(self, op):
        """Tells whether an op takes together the examples of each of a number of classes, one that is known beforehand."""
        return _is_of_segments(op) and not self._may_be_for_each(op) and any(map(self.lie_in, list(op.inputs)[:2]))

    def _may_be_for_each(self, op):
        """Tells whether an op of segments may make them for each example, as it may where their number is computed."""
        number = tf.get_static_value(op.inputs[2])
        return number is None or any(size and number % size == 0 for size in self._sizes)

    def _is_of_batch(self, tensor, axis, part):
        of_all = part[1] == 1 or part[1] != tf.dimension_value(tensor.shape[0])  # not one part, with all of them in it
        return axis == 0 and part[0] == 1 and of_all and end_of(tensor) in self._of_rows

    def _is_made_as_long(self, tensor, axis, _):
        op = tensor.op
        numbers = _SAY_SIZES.get(op.type, ())
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
            return [(source,) for source in op.inputs if are_counted(source)]
        return [(source,) for source in (values_of(op) if op.type == "Switch" or op.type in LISTS else op.inputs)]

    def _places(self, tensor, axis, part):
        op = tensor.op
        if op.type in SIZES or op.type in NO_VALUES and chooser(op.inputs[0]) is None:
            return []
        if op.type in _COUNTS_CLASSES or axis == 0 and _is_of_segments(op) and not self._may_be_for_each(op):
            return []
        if op.type == "Slice" and axis == 0 and self._is_behind_examples(op):
            return []
        if op in self.rows.joined and axis == 0:
            return [(self.rows.joined[op], 0, part)]
        if op.type in LISTS:
            return [(source, its, part) for source, its in axes_in_lists(op, axis)]
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
