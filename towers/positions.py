"""What a model computes of a tower's examples by their place in the batch: another order, running sums, parts.

N towers have other examples at these places than one tower on the whole batch has, and nothing else would tell: mixup with the
batch turned round, two halves that are held against each other, a softmax or a sum that runs along the batch.
"""
import warnings

import numpy as np
import tensorflow.compat.v1 as tf

from towers.chosen_rows import OTHER_ROWS
from towers.first_axis import sizes_of_examples
from towers.mapped import LISTS, carried_along
from towers.wording import TowersWarning

__all__ = ["warn_of_positions"]

_RUNS_ALONG = {"Cumprod": 1, "Cumsum": 1, "ReverseV2": 1, "Roll": 2}  # the number of the input that says along which axes
_OF_LAST_AXIS = frozenset(["LogSoftmax", "Softmax", "TopKV2"])
# What adds up, or puts together, what was made of single examples.
_JOIN_ROWS = frozenset(["AccumulateNV2", "Add", "AddN", "AddV2", "Assert", "ConcatV2", "IdentityN", "Merge", "Pack", "Switch"])
_SPLITS = {"Split": (1, 0), "SplitV": (0, 2)}  # the numbers of the inputs that are what is split, and its axis


def warn_of_positions(losses, towers, examples, is_divided, stacklevel):
    """Warns, once, where tower 0's loss is of examples that are taken by their place in the tower's batch.

    Only what is sure is said. Parts of equal size that are never held against each other may be treated alike, and pass.

    Args:
      losses: list over towers of scalar tensors.
      towers: list of `Tower`.
      examples: `towers.along_examples.Examples` of the first of them.
      is_divided: whether the caller divided the batch, and so chose what is a tower's part of it.
      stacklevel: int, as of `warnings.warn`.
    """
    if 1 in sizes_of_examples(towers):
        return
    needed = examples.needed_by(losses[0])
    ops = [op for op in towers[0].ops if op in needed]
    found = next((op for op in ops if _runs_along_examples(op, examples)), None)
    if found is not None:
        what, mend = "computes %r along the examples of a tower", (
            "Compute that of all towers' examples, towers.all_gather(x, with_offset=True), and take the tower's rows of what "
            "comes out; or compute it of the whole batch, before that is handed in.")
    else:
        found = None if is_divided else _of_single_rows(losses[0], needed, examples.rows)
        if found is None and not is_divided and any(map(_may_cut, ops)):
            found = _Parts(ops, examples).unlike()
        what, mend = "takes parts of a tower's examples by where they stand (%r)", (
            "Take the batch apart before it is handed in, as a tuple: the towers divide each of its tensors.")
    if found is not None:
        warnings.warn("The model function %s: each of %d towers has other examples there than one tower of the whole batch has. "
                      "%s" % (what % found.name, towers[0].context.num_towers, mend), TowersWarning, stacklevel=stacklevel)


def _runs_along_examples(op, examples):
    """Tells whether an op goes along the batch from row to row, or turns it, or takes all rows of it together and keeps them."""
    x = op.inputs[0] if op.inputs else None
    if op.type in LISTS:
        return any(map(examples.lie_along, carried_along(op)))
    if op.type in _RUNS_ALONG:
        axes = tf.get_static_value(op.inputs[_RUNS_ALONG[op.type]])
        return axes is not None and bool(x.shape.rank) and any(
            examples.lie_along(x, int(axis)) for axis in np.reshape(axes, -1) % x.shape.rank)
    if op.type in _OF_LAST_AXIS:
        if x.shape.rank == 1:
            return op.type != "TopKV2" and examples.lie_along(x)  # of the largest towers.mixed_losses tells
        return x.op.type == "Transpose" and _last_of(x.op.inputs[1]) == 0 and examples.lie_along(x.op.inputs[0])
    place = _place(op)
    return place is not None and place[2] < 0 and examples.lie_along(x)


def _of_single_rows(loss, needed, rows):
    """Returns an op that holds two of a tower's examples against each other by number, or its only one."""
    if loss.name in rows.found:
        return loss.op
    for op, _ in rows.mixed:
        numbers = {rows.found[source.name].number for source in op.inputs if source.name in rows.found}
        if op in needed and op.type not in _JOIN_ROWS and len(numbers) > 1:
            return op
    return None


def _last_of(order):
    """Returns the last number of a transposition's order, None where it is not known."""
    if order.op.type == "ConcatV2" and tf.get_static_value(order) is None:  # as tf.nn.softmax makes it
        order = order.op.inputs[len(order.op.inputs) - 2]
    numbers = tf.get_static_value(order)
    return int(numbers[-1]) if numbers is not None and len(numbers) else None


def _place(op):
    """Returns the rows that a slice takes, (first, last + 1, step), None for a bound that it does not set.

    For other ops, for a row without its axis, and where only the run knows the bounds, None is returned.
    """
    if op.type == "Slice":
        first, size = (tf.get_static_value(tensor) for tensor in list(op.inputs)[1:])
        if first is None or size is None or not len(first):
            return None
        return int(first[0]), None if size[0] < 0 else int(first[0] + size[0]), 1
    if op.type != "StridedSlice":
        return None
    is_set = {name: op.get_attr(name + "_mask") & 1 for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    if is_set["begin"] and is_set["end"] or is_set["ellipsis"]:
        step = tf.get_static_value(op.inputs[3])
        return None if step is None else (None, None, 1 if is_set["ellipsis"] else int(step[0]))
    bounds = [tf.get_static_value(tensor) for tensor in list(op.inputs)[1:]]
    if is_set["new_axis"] or is_set["shrink_axis"] or any(bound is None for bound in bounds):
        return None
    first, last, step = (int(bound[0]) for bound in bounds)
    return None if is_set["begin"] else first, None if is_set["end"] else last, step


def _may_cut(op):
    if op.type in _SPLITS:
        axis, rank = tf.get_static_value(op.inputs[_SPLITS[op.type][1]]), op.inputs[_SPLITS[op.type][0]].shape.rank
        return rank is not None and axis is not None and int(axis) % rank == 0
    return op.type in ("Slice", "StridedSlice") and _place(op) != (None, None, 1)


class _Parts:
    """The parts that a model takes of its batch, and where two of them are held against each other.

    Followed is what holds the rows of the batch, or of a part of it, each once and in their order.

    Args:
      ops: list of a tower's operations, in their order.
      examples: `towers.along_examples.Examples` of the tower.
    """

    def __init__(self, ops, examples):
        self._examples, self._of = examples, {}  # a tensor's name -> which part it is, (first, last + 1) of each cut in turn
        self._cuts, self._held = {}, []  # (what is cut, its size) -> {(first, last + 1): op}; ops that made what is held
        self._makers = {}  # a part -> the op that made it
        for op in ops:
            for tensor in op.outputs:
                part = self._part_of(tensor)
                if part is not None:
                    self._of[tensor.name] = part

    def unlike(self):
        """Returns an op that takes a part of another size than the rest, or that is held against the rest; None if none does."""
        unlike = [op for (_, size), cuts in self._cuts.items() if not _are_alike(sorted(cuts), size) for op in cuts.values()]
        return next(iter(self._held + unlike), None)

    def _part_of(self, tensor):
        op, parts = tensor.op, set()
        if self._examples.end_at(tensor):
            return None
        for source in self._examples.rows_of(tensor):
            if self._examples.is_given(source) and self._examples.lie_along(source):
                parts.add(())
            elif self._examples.lie_along(source):
                parts.add(self._of.get(source.name))
        if not parts or None in parts:
            return None
        if len(parts) > 1:
            self._held.extend(self._makers[part] for part in sorted(parts) if part)
            return None
        part, = parts
        if _may_cut(op):
            return self._cut(tensor, part)
        return part if _keeps_rows(tensor, self._examples) else None

    def _cut(self, tensor, part):
        """Returns which part of the batch is taken of one; None where that is not known."""
        op = tensor.op
        x = op.inputs[_SPLITS.get(op.type, (0,))[0]]
        size = tf.dimension_value(x.shape[0])
        if op.type in _SPLITS:
            sizes = [tf.dimension_value(output.shape[0]) for output in op.outputs]
            if None in sizes:  # of Split all are equal
                size, sizes = (len(sizes), [1] * len(sizes)) if op.type == "Split" else (size, sizes)
            if len(sizes) == 1 or None in sizes:
                return part if len(sizes) == 1 else None
            first = sum(sizes[:tensor.value_index])
            last = first + sizes[tensor.value_index]
        else:
            first, last, step = _place(op) or (None, None, 0)
            first = first or 0
            if size is not None:
                last = size if last is None else min(last + size if last < 0 else last, size)
                first = max(first + size, 0) if first < 0 else first
            if step != 1 or size is None and first == 0 and (last is None or last > 1):
                return None
            if (first, last) == (0, size):
                return part
        self._cuts.setdefault((x.name, size), {})[first, last] = op
        self._makers[part + ((first, last),)] = op
        return part + ((first, last),)


def _are_alike(cuts, size):
    """Tells whether parts are of one size and together all there is."""
    ends = [0] + [last for _, last in cuts]
    return size is not None and [first for first, _ in cuts] == ends[:-1] and ends[-1] == size and len(set(np.diff(ends))) == 1


def _keeps_rows(tensor, examples):
    """Tells whether an op that takes rows returns as many, each of the one of its number."""
    op, x = tensor.op, tensor.op.inputs[0]
    if op.type in ("Gather", "GatherNd", "GatherV2", "ResourceGather"):
        return not examples.lie_along(x)
    if op.type in ("ConcatV2", "Pad", "PadV2", "MirrorPad", "Tile"):
        value = tf.get_static_value(op.inputs[-1] if op.type == "ConcatV2" else op.inputs[1])
        if value is None:
            return False
        return int(value) % tensor.shape.rank != 0 if op.type == "ConcatV2" else (
            value[0] == 1 if op.type == "Tile" else not np.any(value[0]))
    if op.type == "Reshape":
        sizes = [tf.dimension_value(shape[0]) for shape in (x.shape, tensor.shape)]
        rest = [shape[1:].num_elements() for shape in (x.shape, tensor.shape)]
        return sizes[0] == sizes[1] and (sizes[0] is not None or rest[0] is not None and rest[0] == rest[1])
    return not OTHER_ROWS.match(op.type)
