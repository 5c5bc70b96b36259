"""Where control flow 1 comes together again, and the lists that its loops read and write."""
import dataclasses

import numpy as np

from towers.graph.op_types import LOOPS_BACK
from towers.graph.private import control_flow_of, is_loop, outer_control_flow
from towers.graph.static_values import static_value
from towers.sharding.nodes import Numbered, OwnRows, Refused, Replicated, Unfit
from towers.sharding.placements import (BATCH, COMPUTED, Additive, Blocks, InTurn, Listed, Replicate, RowNumbers, Rows, Running,
                                        Shard, Size, Turn, moved, size_of)
from towers.sharding.rules.loops.in_turn import has_all_rows, is_stack_of_rows, joined_in_turn, refuse_rows, state_of_turn
from towers.sharding.rules.loops.turns import (are_numbers, is_list_of_rows, is_turn, number_of_rows, numbers_all_rows, row_read,
                                               source_of)
from towers.sharding.rules.pointwise import jointly_linear
from towers.sharding.rules.table import ANY, SUMS, rule

__all__ = ["element_written", "joined"]

_ROWS = (Shard, Blocks, RowNumbers)


def joined(node, numbers):
    """Returns wants and the placement of what is one input or the other, as a branch or the turns of a loop have it.

    Args:
      node: `Node`.
      numbers: list of int, the inputs whose placements are known yet.
    """
    found = [node.inputs[k].placement for k in numbers]
    if all(isinstance(placement, Replicate) for placement in found):
        return {}, found[0] if all(placement.is_known_as(found[0]) for placement in found) else Replicate()
    if len({getattr(placement, "times", None) for placement in found if isinstance(placement, _ROWS)}) > 1:
        raise Unfit()  # one has twice the rows of the other, say
    if all(placement == found[0] for placement in found):
        return {}, found[0]
    if all(isinstance(placement, Listed) for placement in found):
        merged = found[0]
        for placement in found[1:]:
            merged = _merged(merged, placement)
        if merged is None:
            raise Refused("%r is a list whose elements are %s" % (node.op.name, " and ".join(
                str(placement.element) for placement in found)))
        return {}, merged
    if any(isinstance(placement, Listed) for placement in found):
        raise Unfit()
    if any(isinstance(placement, (InTurn, Running)) for placement in found):
        return joined_in_turn(node, numbers)
    if any(isinstance(placement, _ROWS) for placement in found):
        return _of_rows(node, numbers)
    if all(isinstance(placement, (Size, Replicate)) for placement in found):
        arrays = [node.inputs[k].elements() for k in numbers]
        if any(array is None or array.shape != arrays[0].shape for array in arrays):
            raise Unfit()
        out = np.empty(arrays[0].shape, object)
        for index in np.ndindex(out.shape):
            each = [array[index] for array in arrays]
            is_same = all(element == each[0] and element is not None for element in each) and not (
                isinstance(each[0], Additive) and each[0].times is None)
            out[index] = each[0] if is_same else COMPUTED if any(
                isinstance(element, Additive) or element is COMPUTED for element in each) else None
        return {}, size_of(out)
    wants, placement = jointly_linear(node, numbers)
    return {k: want for k, want in wants.items() if k in numbers}, placement


def _merged(one, other):
    """Returns the placement of one list or the other, some of whose elements are not known yet; None where there is none."""
    if one == other or other is None:
        return one
    if not isinstance(one, Listed) or not isinstance(other, Listed):
        return other if one is None else None
    element = _merged(one.element, other.element)
    is_none = element is None and (one.element, other.element) != (None, None)
    of = one.of if one.of == other.of else one.of + " or " + other.of
    return None if is_none else Listed(element, one.by_row or other.by_row, of)


def _of_rows(node, numbers):
    rows = [k for k in numbers if isinstance(node.inputs[k].placement, _ROWS)]
    layouts = {(node.inputs[k].placement.axis, getattr(node.inputs[k].placement, "outer", 1)) for k in rows}
    if len(layouts) > 1:
        raise Unfit()
    first = node.inputs[rows[0]].placement
    like, outer = (node.inputs[rows[0]].tensor, first.axis), getattr(first, "outer", 1)
    wants = {k: Numbered() for k in rows if isinstance(node.inputs[k].placement, RowNumbers)}
    for k in set(numbers).difference(rows):
        if not _is_as_long(node, k, rows[0]):
            raise Unfit()
        wants[k] = OwnRows(first.axis, like, outer)
    same = {node.inputs[k].placement.rows for k in rows}
    named = same.pop() if len(same) == 1 else Rows(node.op.name)
    return wants, Shard(first.axis, named, first.times) if outer == 1 else dataclasses.replace(first, rows=named)


def _is_as_long(node, one, other):
    """Tells whether it is known that an input has as many entries as another has rows, in one tower on the whole batch."""
    one, other = node.inputs[one], node.inputs[other]
    if one.rank != other.rank:
        return False
    axis = other.placement.axis
    sizes = [value.dims[axis] if node.context.is_only_asked else value.whole[axis] for value in (one, other)]
    return sizes[0] is not None and sizes[0] == sizes[1]


@rule("Merge RefMerge", ANY + (InTurn, Running, Turn), always=True)
def merge(node):
    numbers = [k for k, value in enumerate(node.inputs) if value.placement is not None]
    decision = state_of_turn(node, numbers) if node.context.carries_turns else None
    if decision is not None:
        return decision
    try:
        wants, placement = joined(node, numbers)
        if isinstance(placement, Size) and any(tensor.op.type in LOOPS_BACK for tensor in node.op.inputs):
            raise Unfit()  # in a loop a number would be computed of itself
    except Unfit:
        wants, placement = {k: Replicated() for k in numbers if not isinstance(node.inputs[k].placement, Replicate)}, Replicate()
    return node.decide([placement, Replicate()], wants)


@rule("TensorArrayV3", (Size,), always=True)
def array(node):
    if node.context.carries_turns and node.context.counts_rows(node.inputs[0].tensor):
        return node.decide([Replicate(), Listed(None, BATCH)])
    return node.decide([Replicate(), Listed(None)], node.wanted([0]))


def element_written(node, flow, value, placement, wants):
    """Returns the `Decision` of an op that writes what has a placement into a list."""
    others = node.wanted(k for k in range(len(node.inputs)) if k not in (flow, value))
    is_of_turn = value != 1 and is_turn(node.context, node.inputs[1].tensor)
    is_row = node.context.carries_turns and is_of_turn and isinstance(placement, (InTurn, Replicate))
    before = node.inputs[flow].placement
    if is_row and (has_all_rows(before) or getattr(before, "element", None) is None and _grows(node)):
        return node.decide(Listed(InTurn(), BATCH, getattr(before, "of", "")), others)
    refuse_rows(node, flow)
    if is_of_turn and node.context.carries_turns:
        raise Refused("%r writes what is an example's own into a list that is made for others." % node.op.name)
    before = before.element if isinstance(before, Listed) else None
    by_row = BATCH if isinstance(placement, InTurn) and is_of_turn else None
    merged = _merged(before, placement)
    if merged is not None:
        return node.decide(Listed(merged, by_row), {**others, **wants})
    if isinstance(before, Replicate):
        return node.decide(Listed(before), {**others, value: Replicated()})
    if isinstance(before, Shard) and isinstance(placement, Replicate):
        raise Refused("%r writes what is alike in all towers into a list of the towers' own examples"
                      % node.op.name)
    raise Refused("%r writes what is %s into a list whose elements are %s" % (node.op.name, placement, before))


def _grows(node):
    """Tells whether an op writes into a list of control flow 1 that is as long as what is written."""
    flow = control_flow_of(node.op)
    is_in_each_turn = node.type.startswith("TensorArray") and flow is not None and is_loop(flow) and (
        outer_control_flow(flow) is None)
    made = source_of(node.inputs[0].tensor).op if is_in_each_turn else None
    return made is not None and made.type == "TensorArrayV3" and made.get_attr("dynamic_size") and (
        static_value(made.inputs[0]) == 0)


@rule("TensorArrayWriteV3", (Shard, Blocks, Listed) + SUMS, always=True)
def written(node):
    return element_written(node, 3, 2, node.inputs[2].placement, {})


@rule("TensorArrayScatterV3", (Shard, Blocks, Listed, RowNumbers) + SUMS, always=True)
def scattered(node):
    placement = node.inputs[2].placement
    is_numbers = are_numbers(node.context, placement)
    if is_numbers or is_list_of_rows(node.context, placement):
        numbers_all_rows(node, 1)
        if node.context.carries_turns and not has_all_rows(node.inputs[3].placement):
            raise Refused("%r puts the tower's examples into a list that is made for others." % node.op.name)
        return node.decide(Listed(Turn() if is_numbers else InTurn(), BATCH))
    if isinstance(placement, (Shard, Blocks)):
        if placement.axis == 0:
            return element_written(node, 3, 2, Replicate(), node.wanted([2]))
        placement = moved(placement, placement.axis - 1)
    return element_written(node, 3, 2, placement, {})


@rule("TensorArrayReadV3", (Listed,), always=True)
def read(node):
    row_read(node, 2)
    return node.decide(_element(node, 2), node.wanted([1]))


def _element(node, flow):
    placement = node.inputs[flow].placement
    if not isinstance(placement, Listed):
        return Replicate()
    return Replicate() if placement.element is None else placement.element


@rule("TensorArrayGatherV3", (Listed, RowNumbers), always=True)
def stacked(node):
    element = _element(node, 2)
    if is_stack_of_rows(node, 2, numbers=1):
        return node.decide(Shard(0, BATCH, 1))
    if isinstance(element, (Shard, Blocks)):
        element = moved(element, element.axis + 1)
    return node.decide(element, node.wanted([1]))


@rule("TensorArrayConcatV3", (Listed,), always=True)
def concatenated(node):
    refuse_rows(node, 1)
    element = _element(node, 1)
    if isinstance(element, (Shard, Blocks)) and element.axis == 0:
        raise Refused("%r joins a list of the towers' own examples along their axis: stack it, and reshape"
                      % node.op.name)
    return node.decide([element, Replicate()])


@rule("TensorArraySizeV3 TensorArrayCloseV3", (Listed,), always=True)
def size_of_list(node):
    placement = node.inputs[-1].placement
    return node.decide(number_of_rows(1) if isinstance(placement, Listed) and placement.by_row else Replicate())


@rule("TensorArrayGradV3", (Listed,), always=True)
def gradient_of_list(node):
    refuse_rows(node, 1)
    return node.decide([Replicate(), Listed(None)])
