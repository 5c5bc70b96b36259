"""Losses that are no means over a tower's examples, since they compute something of all of these together.

Towers average their losses. A mean over examples, and sums of such means, come to those of the whole batch; a square root of a
mean, a quotient of two sums (dice, or a mask's loss over the mask's size), the k largest losses or distances of each example to
each other do not, and train otherwise in silence. A loss is followed from its end: whatever sum or mean over the examples it
takes otherwise than by additions and products with what all towers have in common is one that mixes them.
"""
import warnings

import tensorflow.compat.v1 as tf

from towers.along_examples import reduces_first_axis
from towers.exchanges import stands_at_exchange
from towers.graph_walk import end_of
from towers.own_data import own_leaves

__all__ = ["Examples", "added_up", "warn_of_mixed"]

# What a loss may be of sums over examples: additions, and what only moves numbers.
_ADDS = frozenset(["AccumulateNV2", "Add", "AddN", "AddV2", "BiasAdd", "BroadcastTo", "Cast", "ConcatV2", "Cumsum", "DiagPart",
                   "ExpandDims", "Gather", "GatherNd", "GatherV2", "Mean", "Neg", "Pack", "Pad", "PadV2", "Reshape", "ReverseV2",
                   "Slice", "Split", "SplitV", "Squeeze", "StridedSlice", "Sub", "Sum", "Tile", "Transpose", "Unpack"])
_HANDS_ON = frozenset(["CheckNumerics", "CheckNumericsV2", "Identity", "PreventGradient", "Print", "Snapshot", "StopGradient"])
_PRODUCTS = frozenset(["BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "MatMul", "Mul"])
_DIVIDES = frozenset(["Div", "DivNoNan", "RealDiv"])
_SUMS = frozenset(["Mean", "Sum"])
_EXTREMES = frozenset(["EuclideanNorm", "Max", "Min", "Prod"])
_SIZES = frozenset(["Rank", "Shape", "ShapeN", "Size"])
# Whose values are none of their input's: sizes, guards against what is not finite.
_NO_VALUES = frozenset(["IsFinite", "IsInf", "IsNan", "OnesLike", "ZerosLike"])
# Behind which nothing is sure: loops, branches and state.
_UNSURE = ("Assign", "Case", "Enter", "Exit", "If", "Loop", "Merge", "NextIteration", "PyFunc", "Ref", "StatefulPartitionedCall",
           "StatelessIf", "StatelessWhile", "Switch", "TensorArray", "TensorList", "While")
_SAME_ROWS = frozenset(["Cast", "ExpandDims", "Identity", "Reshape", "Squeeze", "StridedSlice"])
_PAIRWISE = frozenset(["Add", "AddV2", "Equal", "Maximum", "Minimum", "Mul", "NotEqual", "RealDiv", "SquaredDifference", "Sub"])

_HOW = {"divides": "is divided by what depends on the tower's own examples (%r)",
        "computes": "computes %r of a sum, mean or extreme over all of the tower's examples",
        "pairs": "holds each of the tower's examples against each other one (%r)",
        "chooses": "is of a part of the tower's examples, chosen among all of them (%r)",
        "counts": "is a mean over as many of the tower's examples as its data say (%r)"}


def warn_of_mixed(losses, towers, stacklevel=3):
    """Warns, once, if tower 0's loss is no mean over its examples, and returns whether it is.

    Only what is sure is said. What a model function hands out as a "weight" that it counted of its data is taken for what its
    loss is divided by.

    Args:
      losses: list over towers of scalar tensors.
      towers: list of `Tower`.
      stacklevel: int, as of `warnings.warn`.
    """
    context, outputs = towers[0].context, towers[0].outputs
    if context.num_towers == 1:
        return False
    examples = Examples(towers)
    weight = outputs.get("weight") if isinstance(outputs, dict) else None
    is_counted = tf.is_tensor(weight) and examples.are_in(weight)
    for kind, op in _mixes(losses[0], examples):
        if kind not in ("divides", "counts") or not is_counted:
            warnings.warn(
                "The loss of a tower (%r) %s, so it is no mean over examples, and the towers' average of it is not the loss of "
                "the whole batch. Where it is a mean over what is counted, a mask say, return that number as \"weight\" beside "
                "the \"loss\"; else compute what takes all examples together by towers.all_reduce or towers.all_gather, or "
                "write a loss for each example and take their mean." % (losses[0].name, _HOW[kind] % op.name),
                stacklevel=stacklevel)
            return True
    return False


def _mixes(loss, examples):
    """Yields (kind, op) where a loss takes examples together otherwise than by their sum."""
    seen, stack = set(), [(loss, None)]
    while stack:
        tensor, reason = stack.pop()
        op = tensor.op
        if (tensor.name, reason) in seen or examples.end_at(tensor) or not examples.are_in(tensor):
            continue
        seen.add((tensor.name, reason))
        own = [source for source in op.inputs if examples.are_in(source)]
        is_reduction = op.type in _SUMS or op.type in _EXTREMES
        if is_reduction and reduces_first_axis(op) and examples.lie_along(op.inputs[0]):
            reason = reason or (("computes", op) if op.type in _EXTREMES else None)
            chooser = _chooser(op.inputs[0])
            if reason is None and chooser is not None and (op.type == "Mean" or chooser.type != "Where"):
                reason = ("counts" if chooser.type == "Where" else "chooses", chooser)
            if reason is not None:
                yield reason
        elif op.type == "TopKV2" and op.inputs[0].shape.rank == 1 and examples.lie_along(op.inputs[0]):
            yield "chooses", op
        elif _holds_pairs(op, examples):
            yield "pairs", op
        elif reason is not None and added_up(op) is not None and examples.lie_along(added_up(op)):
            yield reason
        stack.extend(_sources(tensor, own, reason, examples))


def _sources(tensor, own, reason, examples):
    """Returns the inputs of a tensor's op that hold examples, and for each how the loss takes it, if not by sums alone."""
    op, number = tensor.op, tensor.value_index
    if examples.lie_along(tensor):  # each may be anything of its own example, or of a number that is one for all of them
        own = [source for source in own if source.shape.rank == 0 or examples.lie_along(source)]
    if op.type in _SIZES or op.type in _NO_VALUES:
        return []
    if op.type in _DIVIDES:
        divisor = [op.inputs[1]] if any(source is op.inputs[1] for source in own) else []
        divided = [op.inputs[0]] if any(source is op.inputs[0] for source in own) else []
        by = ("divides", op)
        return [(source, by) for source in divisor] + [(source, reason or (by if divisor else None)) for source in divided]
    if op.type in ("Reciprocal", "Inv"):
        return [(source, ("divides", op)) for source in own]
    if op.type in _HANDS_ON or op.type == "IdentityN":
        return [(op.inputs[number], reason)]
    if op.type in ("Select", "SelectV2") and op.inputs[0].shape.rank == 0:  # what guards against a division by 0, say
        return [(source, reason) for source in own if source is not op.inputs[0]]
    if op.type in _ADDS or op.type in _PRODUCTS and len(own) == 1:
        return [(source, reason) for source in own]
    is_quotient = op.type == "Mul" and any(_is_inverse(source) for source in own)
    return [(source, reason or ("divides" if is_quotient else "computes", op)) for source in own]


def added_up(op):
    """Returns what an op adds up along its first axis, where it is not of the kinds that have axes as an argument; else None."""
    if op.type == "L2Loss" or op.type == "MatMul" and op.get_attr("transpose_a"):
        return op.inputs[0]
    return _turned(op.inputs[0]) if op.type == "MatMul" else None


def _turned(tensor):
    """Returns that whose first axis is the last one of its transpose `tensor`, or None."""
    order = tf.get_static_value(tensor.op.inputs[1]) if tensor.op.type == "Transpose" else None
    return tensor.op.inputs[0] if order is not None and len(order) > 1 and order[-1] == 0 else None


def _is_inverse(tensor):
    while tensor.op.type in ("Cast", "Identity", "Mul", "Reshape", "StopGradient") and (
            tensor.op.type != "Mul" or tensor.op.inputs[0].op.type in _DIVIDES):
        tensor = tensor.op.inputs[0]
    return tensor.op.type in ("Reciprocal", "Inv") or (
        tensor.op.type in _DIVIDES and tf.get_static_value(tensor.op.inputs[0]) is not None)


def _chooser(tensor):
    """Returns the op, Where or TopKV2, that chose which rows of other rows a tensor holds; None where none did."""
    while True:
        op = tensor.op
        if op.type in ("Gather", "GatherV2", "GatherNd"):
            found = _unmoved(op.inputs[1])
            if found.op.type == "Where" or found.op.type == "TopKV2" and found.op.inputs[0].shape.rank == 1:
                return found.op
            return None
        if op.type == "TopKV2" and op.inputs[0].shape.rank == 1:
            return op
        elementwise = [source for source in op.inputs if source.shape.rank == tensor.shape.rank]
        if op.type in _SAME_ROWS or op.type in ("Sum", "Mean") and reduces_first_axis(op) is False:
            tensor = op.inputs[0]
        elif len(elementwise) == 1 and op.type in ("Abs", "Exp", "Log", "Mul", "Neg", "RealDiv", "Relu", "Sqrt", "Square"):
            tensor = elementwise[0]
        else:
            return None


def _unmoved(tensor):
    while tensor.op.type in _SAME_ROWS:
        tensor = tensor.op.inputs[0]
    return tensor


def _holds_pairs(op, examples):
    """Tells whether an op computes something of each two of a tower's examples."""
    if op.type == "MatMul":
        columns = op.inputs[1] if op.get_attr("transpose_b") else _turned(op.inputs[1])
        return (columns is not None and not op.get_attr("transpose_a") and examples.lie_along(op.inputs[0])
                and examples.lie_along(columns))
    if op.type not in _PAIRWISE:
        return False
    for row, other in (op.inputs, list(op.inputs)[::-1]):
        if row.shape.rank == other.shape.rank and _begins_anew(row.op) and other.shape.rank and examples.lie_along(
                row.op.inputs[0]) and examples.lie_along(other) and tf.dimension_value(other.shape[0]) != 1:
            return True
        turned = _turned(row.op.inputs[0] if _begins_anew(row.op) else row)
        if turned is not None and other.shape.rank and tf.dimension_value(other.shape[-1]) == 1 and examples.lie_along(
                turned) and examples.lie_along(other):
            return True
    return False


def _begins_anew(op):
    """Tells whether an op puts an axis of size 1 before the first one."""
    if op.type == "ExpandDims":
        axis = tf.get_static_value(op.inputs[1])
        return axis is not None and int(axis) % (op.inputs[0].shape.rank + 1 if op.inputs[0].shape.rank else 1) == 0
    return op.type == "StridedSlice" and op.get_attr("new_axis_mask") & 1 == 1


class Examples:
    """Which tensors of a tower hold examples, and which of these hold them along their first axis, for sure."""

    def __init__(self, towers):
        of_all = set.intersection(*[own_leaves(tower.context) for tower in towers[:2]]) if len(towers) > 1 else set()
        self._leaves, self._stand_ins = own_leaves(towers[0].context) - of_all, towers[0].context.meetings.stand_ins
        self._are_in, self._lie_along = {}, {}

    def end_at(self, tensor):
        """Tells whether nothing is to be looked for behind a tensor."""
        return (end_of(tensor) in self._leaves or tensor.op in self._stand_ins or stands_at_exchange(tensor.op)
                or tensor.op.type.startswith(_UNSURE))

    def are_in(self, tensor):
        """Tells whether a tensor is computed of the tower's examples, other than by how many they are."""
        return self._reaches(tensor, self._are_in, self._inputs)

    def lie_along(self, tensor):
        """Tells whether a tensor has examples along its first axis."""
        return tensor.shape.rank not in (None, 0) and self._reaches(tensor, self._lie_along, self._rows)

    def _reaches(self, tensor, answers, sources):
        """Tells whether a walk from a tensor comes to the batch. What it knows then, it remembers."""
        path = [(tensor, None)]
        while path:
            now, rest = path[-1]
            if rest is None:
                answer = answers.get(now.name)
                if answer is None and end_of(now) in self._leaves:
                    answer = True
                if answer is None:
                    answers[now.name] = False  # until it is known better, which a loop back would not
                    path[-1] = now, iter([] if self.end_at(now) else sources(now))
                    continue
                if answer:
                    answers.update((passed.name, True) for passed, _ in path)
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
        if op.type in _SIZES:
            return [source for source in op.inputs if _chooser(source) is not None]
        return [] if op.type in _NO_VALUES else list(op.inputs)

    def _rows(self, tensor):
        """Returns the inputs whose first axis is that of a tensor."""
        op, rank = tensor.op, tensor.shape.rank
        if op.type in _SIZES or op.type in _NO_VALUES or not op.inputs or rank is None:
            return []
        first = op.inputs[0]
        if op.type in _SUMS or op.type in _EXTREMES or op.type in ("All", "Any", "ArgMax", "ArgMin"):
            return [first] if reduces_first_axis(op) is False else []
        if op.type == "Transpose":
            order = tf.get_static_value(op.inputs[1])
            return [first] if order is not None and len(order) and order[0] == 0 else []
        if op.type == "MatMul":
            return [] if op.get_attr("transpose_a") else [first]
        if op.type in ("Pack", "Unpack", "Unstack"):
            return list(op.inputs) if op.get_attr("axis") else []
        if op.type == "ExpandDims":
            return [] if _begins_anew(op) else [first]
        if op.type == "StridedSlice":
            return [] if (op.get_attr("new_axis_mask") | op.get_attr("shrink_axis_mask")) & 1 else [first]
        if op.type in ("Reshape", "Squeeze"):
            sizes = [tf.dimension_value(x.shape[0]) if x.shape.rank else None for x in (tensor, first)]
            return [] if sizes[0] == 1 and sizes[1] != 1 or not first.shape.rank else [first]
        if op.type in ("Gather", "GatherV2", "GatherNd", "ResourceGather"):
            return list(op.inputs)[:2]
        return [source for source in op.inputs if source.shape.rank == rank or rank and op.type in _CHANGES_RANK]


_CHANGES_RANK = frozenset(["CTCLoss", "OneHot", "SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits",
                           "DiagPart", "MatrixDiagPart", "Where"])
