"""The terms that a loss adds up, and what it divides each of them by."""
from typing import List, NamedTuple, Optional, Tuple

import tensorflow.compat.v1 as tf

from towers.first_axis import lies_along_examples
from towers.axes import reduced_axes, reduces_first_axis
from towers.divisors import (
    DIVIDES, MOST_DIVISORS, PASSES, RESHAPES, Divisor, divisors_of, divisors_within, is_given, number_of, size_of)
from towers.graph_walk import SIZES, end_of
from towers.own_data import own_leaves, takes_own_data
from towers.private import is_in_loop

__all__ = ["Term", "terms_of"]

_OF_LOOPS = frozenset(["Enter", "Exit", "Merge", "NextIteration", "Switch"])  # and of branches, of control flow 1
_OF_WEIGHTS = frozenset(["L2Loss", "Sqrt", "Square"])  # what decays end with, beside sums and means


class Term(NamedTuple):
    """A term of a loss.

    Attributes:
      tensor: what is added up along an axis, if `is_sum`; else a term that is no sum, or one of no examples.
      shape: list, that of what is added up, of None where a size is not known; the axis of the examples is the first one.
      divisors: tuple of `Divisor`, what the loss divides it by.
      is_sum: bool; None of what is one part of a sum, see `terms_of`.
      are_examples: whether it is examples that are added up, for sure; of a first axis that is not looked at here.
    """
    tensor: tf.Tensor
    shape: List[Optional[int]]
    divisors: Tuple[Divisor, ...]
    is_sum: Optional[bool]
    are_examples: bool = False


def terms_of(loss, context, examples):
    """Yields the terms of a loss, `Term`.

    Args:
      loss: scalar tensor.
      context: the tower's `TowerContext`.
      examples: the tower's `towers.along_examples.Examples`. Terms alike of all of its `rows` are one sum.
    """
    parts, rows = {}, examples.rows.found
    for term in _terms_and_parts(loss, context, examples):
        if term.is_sum is not None:
            yield term
            continue
        row, alike = rows[term.tensor.name], tuple((divisor.number, divisor.kind) for divisor in term.divisors)
        size = tf.dimension_value(row.source.shape[0])
        of_all = parts.setdefault((size, alike), {})
        of_all[row.number] = Term(row.source, [size] + term.shape, term.divisors, True)
    for (size, _), of_all in parts.items():
        if len(of_all) == size:
            yield of_all[0]


def _terms_and_parts(loss, context, every):
    """Yields the terms of a loss, and each that is of a single example, of which more may make a sum."""
    rows = every.rows.found
    seen, stack = set(), [(loss, (), False)]
    while stack:
        tensor, divisors, is_within = stack.pop()  # a sum, which repeats what is added to its examples
        kind, inputs = tensor.op.type, list(tensor.op.inputs)
        if (tensor.name, divisors, is_within) in seen or len(divisors) > MOST_DIVISORS:
            continue
        seen.add((tensor.name, divisors, is_within))
        following, is_of_row = [], tensor.name in rows
        examples = _taken_one_by_one(tensor, context)
        if examples is not None:
            yield _sum_of(examples, divisors + divisors_within(tensor, context))
        elif kind in RESHAPES:
            following = [(inputs[0], divisors)]
        elif kind in PASSES:
            following = [(source, divisors) for source in inputs]
        elif kind == "Mul":
            following = _without_factors(tensor.op, divisors, context)
        elif kind in DIVIDES and (is_given(inputs[1]) or size_of(inputs[1], context) is not None):
            following = [(inputs[0], divisors + divisors_of(inputs[1], tensor.op, context))]
        elif kind in ("Select", "SelectV2") and inputs[0].shape.rank == 0 and any(map(_is_zero, inputs[1:])):
            following = [(source, divisors) for source in inputs[1:]]
        elif kind == "Mean" and _is_of_sums(inputs[0], every):
            following = [] if _is_of_rows(inputs[0], rows) else [(inputs[0], divisors)]  # over what is no number of examples
        elif kind in _OF_LOOPS:
            following = [(source, divisors) for source in (inputs if kind == "Merge" else inputs[:1])]
        elif is_of_row:
            pass  # whose sums are over no examples
        elif kind in ("Einsum", "MatMul"):
            for summed, other in _contracted(tensor.op):
                if other is None:
                    yield _sum_of(summed, divisors)
                elif takes_own_data([other], context):
                    yield _sum_of(summed, divisors + divisors_within(other, context))
        elif kind in ("L2Loss", "Sum"):
            yield from _sums_of(tensor.op, divisors, every)
        if kind == "Sum" and examples is None and reduces_first_axis(tensor.op) is not None:
            following = [(inputs[0], divisors)]  # over classes, say: of what lies along the examples still
        if is_of_row and not following and (kind not in DIVIDES | {"Mul"} or all(source.name in rows for source in inputs)):
            yield _part_of(tensor, divisors + divisors_within(tensor, context))
        adds_up = kind in ("Mean", "Sum") and not _is_list(inputs[0])
        if divisors and not is_within and (adds_up or kind in _OF_WEIGHTS):
            yield Term(tensor, [], divisors, False)
        is_within = is_within or adds_up
        stack.extend((source, by, is_within) for source, by in following)


def _sum_of(tensor, divisors):
    return Term(tensor, _shape_of(tensor), divisors, True)


def _sums_of(op, divisors, examples):
    """Yields what an op adds up along its first axis, and along each other one of the examples: a batch may be turned."""
    tensor = op.inputs[0]
    axes = range(tensor.shape.rank or 1) if op.type == "L2Loss" else reduced_axes(op) or ()
    for axis in axes:
        if axis == 0 or examples.lie_along(tensor, axis):
            shape = _shape_of(tensor)
            yield Term(tensor, shape[axis:axis + 1] + shape[:axis] + shape[axis + 1:], divisors, True, axis > 0)


def _part_of(tensor, divisors):
    """Returns what is of a single example, as the part of a sum over the examples."""
    return Term(tensor, _shape_of(tensor.op.inputs[0] if tensor.op.type == "L2Loss" else tensor), divisors, None)


def _shape_of(tensor):
    return [None] if tensor.shape.rank is None else tensor.shape.as_list()


def _without_factors(op, divisors, context):
    """Returns what a product is of besides numbers, and all that this is divided by: a list of (tensor, divisors)."""
    inputs = list(op.inputs)
    numbers = [number_of(tensor) for tensor in inputs]
    if 0 in numbers or context.num_towers in numbers and not (context.num_towers == 2 and any(map(_is_half, inputs))):
        return []  # nothing; or a sum, and meant as one
    if any(number is not None for number in numbers):
        more = tuple(Divisor(1 / number, "factor", op.name) for number in numbers if number)
        return [(tensor, divisors + more) for tensor, number in zip(inputs, numbers) if number is None]
    own = [tensor for tensor in inputs if takes_own_data([tensor], context)]
    return [(own[0], divisors)] if len(own) == 1 and all(is_given(tensor) for tensor in inputs if tensor is not own[0]) else []


def _is_half(tensor):
    """Tells whether a tensor is a tf.nn.l2_loss, half of a sum, that is divided by something perhaps."""
    while tensor.op.type in RESHAPES or tensor.op.type in DIVIDES:
        tensor = tensor.op.inputs[0]
    return tensor.op.type == "L2Loss"


def _taken_one_by_one(tensor, context):
    """Returns the examples of which a tensor in a loop holds one, another in each round, and no others; else None."""
    if tensor.op.type in _OF_LOOPS | PASSES | DIVIDES | {"Mul", "Select", "SelectV2"} or not is_in_loop(tensor.op):
        return None  # what is followed further, or could be divided by anything
    own, found, seen, stack = own_leaves(context), None, set(), [tensor]
    while stack:
        tensor = stack.pop()
        op = tensor.op
        if end_of(tensor) in own:
            return None
        is_state = op.type in _OF_LOOPS and op.type != "Enter"
        if is_state and tensor.dtype.is_floating:  # what the largest of all is held against, say
            return None
        if op in seen or is_state or op.type in SIZES:
            continue
        seen.add(op)
        is_row = op.type == "StridedSlice" and op.get_attr("shrink_axis_mask") & 1 or (
            op.type == "GatherV2" and op.inputs[1].shape.rank == 0)
        is_row = is_row and tf.get_static_value(op.inputs[1]) is None
        if op.type in ("TensorArrayScatterV3", "TensorListFromTensor") or is_row:
            examples = op.inputs[2 if op.type == "TensorArrayScatterV3" else 0]
            if lies_along_examples(examples, context):
                found = examples
                continue
        stack.extend(op.inputs)
    return found


def _is_list(tensor):
    """Tells whether a tensor holds a list of scalars."""
    while tensor.op.type in RESHAPES:
        tensor = tensor.op.inputs[0]
    return tensor.op.type == "Pack" and all(source.shape.rank == 0 for source in tensor.op.inputs)


def _is_of_rows(tensor, rows):
    """Tells whether a tensor is a list that holds something of single examples, so that its mean is one over examples."""
    while tensor.op.type in RESHAPES:
        tensor = tensor.op.inputs[0]
    return tensor.op.type == "Pack" and any(source.name in rows for source in tensor.op.inputs)


def _is_of_sums(tensor, examples):
    """Tells whether a tensor holds a list of scalars, or sums along an axis, so that its mean is none over examples."""
    if _is_list(tensor):
        return True
    while tensor.op.type in RESHAPES:
        tensor = tensor.op.inputs[0]
    op = tensor.op
    return op.type == "L2Loss" or op.type == "Sum" and tensor.shape.is_fully_defined() and (
        reduces_first_axis(op) is True or examples.are_reduced(op))


def _contracted(op):
    """Yields (summed, other), what a product of tensors adds up along its first axis, and by what there, None by nothing."""
    if op.type == "Einsum":
        labels, _, of_output = op.get_attr("equation").decode().partition("->")
        labels = labels.split(",")
        first = labels[0][:1]
        if len(labels) == 2 and first != "." and first not in of_output:
            if first not in labels[1]:
                yield op.inputs[0], None
            elif first == labels[1][0]:
                yield op.inputs[0], op.inputs[1]
    elif op.get_attr("transpose_a"):
        yield op.inputs[0], op.inputs[1]
    elif not op.get_attr("transpose_b"):
        yield op.inputs[1], op.inputs[0]


def _is_zero(tensor):
    return tensor.op.type == "ZerosLike" or number_of(tensor) == 0
