"""Python's own loops over the examples of a batch of known size: `tf.stack([f(row) for row in tf.unstack(x)])`.

A tower has as many turns of such a loop as it has examples, and the whole batch's model as many as there are. They end in an op
that puts together what all turns made, or in a chain of additions.
"""
from typing import Dict, List, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph.functions import MADE_UP
from towers.graph.op_types import ADDS
from towers.graph.private import position_of

__all__ = ["JOINS", "Join", "attributes_of", "join_of", "own_of_turns", "parts_of", "turns_added_up"]

# Types of ops that put all turns together at once -> which input is the axis along which they do, or the attribute that says it;
# None where they add up, which additions do one after the other.
_JOINS = {"AccumulateNV2": None, "AddN": None, "Concat": 0, "ConcatV2": -1, "Pack": "axis"}
JOINS = frozenset(_JOINS).union(ADDS)

_KINDS = frozenset(["bool", "float", "int", "list(bool)", "list(float)", "list(int)", "string"])
_OF_NO_VALUE = MADE_UP.union(["N", "num", "num_split", "parallel_iterations"])
_ATTRIBUTES: Dict[str, List[str]] = {}  # type of an op -> the names of those that are looked at


class Join(NamedTuple):
    """Ops of a tower that put together what turns made, and their likes in the whole batch's model.

    Attributes:
      ops: list of pairs of operations.
      kind: "Add", or the type of the only op there, which is an Identity of one turn perhaps.
      axis: int, along which turns are put together; None where they are added up.
      turns: list of tensors, as many for each of the tower's examples, those of the first one first.
      of_whole: list of tensors, the same of the whole batch.
      times: int, how many each turn has made.
      are_in_blocks: whether the op takes the first of each turn first, as of two lists.
      others: list of pairs of tensors, what the ops take besides.
    """
    ops: list
    kind: str
    axis: int
    turns: list
    of_whole: list
    times: int
    are_in_blocks: bool
    others: list


def join_of(a, b, own, total):
    """Returns the `Join` that an op of a tower and its like in the whole batch's model make, or None.

    Args:
      a, b: the operations.
      own, total: int, how many examples the tower has, and how many there are.
    """
    if b.type in ADDS:
        return _chain(a, b, own, total) if a.type == b.type else None
    if b.type not in _JOINS or a.type != b.type and (own, a.type) != (1, "Identity"):
        return None  # of a single tensor tf.concat and tf.add_n make an Identity
    (mine, mine_too), (theirs, theirs_too) = _taken_apart(a), _taken_apart(b)
    times = len(theirs) // total
    if not own or not times or len(mine) != own * times or len(theirs) != total * times:
        return None
    are_in_blocks = times > 1 and _form(theirs[0]) == _form(theirs[1])
    if are_in_blocks:
        mine, theirs = ([tensors[k * count + i] for i in range(count) for k in range(times)]
                        for tensors, count in ((mine, own), (theirs, total)))
    return Join([(a, b)], b.type, _axis(b), mine, theirs, times, are_in_blocks, list(zip(mine_too, theirs_too)))


def attributes_of(op):
    """Returns what an op computes by besides its inputs, a list: its attributes, but for types, shapes, functions and counts."""
    if op.type not in _ATTRIBUTES:
        _ATTRIBUTES[op.type] = [] if op.op_def is None else [
            attribute.name for attribute in op.op_def.attr if attribute.name not in _OF_NO_VALUE and attribute.type in _KINDS]
    return [op.get_attr(name) for name in _ATTRIBUTES[op.type]]


def parts_of(op):
    """Returns how many tensors an op puts together at once; None of an addition, which may be one of many."""
    return None if op.type in ADDS else len(_taken_apart(op)[0])


def own_of_turns(turns, times):
    """Returns what each turn of a loop has for itself: a set of operations, and those of them that are other constants in each.

    Args:
      turns, times: see `Join`.

    Raises:
      ValueError: where turns differ in more than their constants, or take other variables.
    """
    own, constants, stack = set(), set(), [[tensor.op for tensor in turns[k::times]] for k in range(times)]
    while stack:
        ops = stack.pop()
        if ops[0] in own or all(op is ops[0] for op in ops):
            continue
        own.update(ops)
        is_source = bool(ops[0].outputs) and not ops[0].inputs and ops[0].type != "Const" and not ops[0].op_def.is_stateful
        if is_source or len({(op.type, len(op.inputs)) for op in ops}) > 1 or any(
                attributes_of(op) != attributes_of(ops[0]) for op in ops):
            raise ValueError("one whose turns are not alike (%r, %r)" % (ops[0].name, ops[-1].name))
        if ops[0].type == "Const":
            values = [tf.get_static_value(op.outputs[0]) for op in ops]
            if not all(np.array_equal(value, values[0]) for value in values):
                constants.update(ops)
        stack.extend([tensor.op for tensor in tensors] for tensors in zip(*[op.inputs for op in ops]))
        waits = [sorted(op.control_inputs, key=position_of) for op in ops]
        if len(set(map(len, waits))) == 1:
            stack.extend(map(list, zip(*waits)))
    return own, constants


def turns_added_up(b, total):
    """Returns what an op of the whole batch's model adds up of all turns, which in a tower of one example is no op at all.

    Args:
      b: the operation.
      total: int, how many examples there are.

    Returns:
      A list of tensors, one for each example; None where the op is another one.
    """
    if b.type in _JOINS and _JOINS[b.type] is None:
        return list(b.inputs) if len(b.inputs) == total else None
    for side in (0, 1) if b.type in ADDS else ():
        links = _links(b, side)[::-1]
        if len(links) == total - 1:
            return [links[0].inputs[side]] + [_added(link, side) for link in links]
    return None


def _taken_apart(op):
    """Returns what an op puts together, and what it takes besides, two lists of tensors."""
    inputs, other = list(op.inputs), _JOINS.get(op.type)
    return (inputs, [inputs.pop(other)]) if isinstance(other, int) else (inputs, [])


def _form(tensor):
    """Returns the types of the last ops that a tensor is made by, a list."""
    found, op = [], tensor.op
    while len(found) < 8:
        found.append(op.type)
        if not op.inputs:
            break
        op = op.inputs[0].op
    return found


def _axis(op):
    at = _JOINS[op.type]
    if isinstance(at, str):
        return op.get_attr(at)
    axis = None if at is None else tf.get_static_value(op.inputs[at])
    return axis if axis is None else int(axis)


def _chain(a, b, own, total):
    """Returns the `Join` of two chains of additions, each to what came before, which only the whole batch's is longer of."""
    for side in (0, 1):
        mine, theirs = _links(a, side), _links(b, side)
        if len(theirs) - len(mine) != total - own:
            continue
        # What the first turn is added to, if anything is, is none of a turn.
        has_start = len(mine) >= own and (total < 2 or _added(theirs[total - 1], side).op.type == _added(
            theirs[total - 2], side).op.type)
        number = own if has_start else own - 1
        if not 1 <= number <= len(mine):
            continue
        mine, theirs = mine[:number][::-1], theirs[:number + total - own][::-1]
        turns, of_whole = ([_added(link, side) for link in links] for links in (mine, theirs))
        start = [(mine[0].inputs[side], theirs[0].inputs[side])]
        if not has_start:
            turns.insert(0, start[0][0])
            of_whole.insert(0, start[0][1])
        return Join(list(zip(mine, theirs[-number:])), "Add", None, turns, of_whole, 1, False, start if has_start else [])
    return None


def _links(op, side):
    """Returns additions, each of which takes the next one's sum on one side, a list."""
    found = []
    while op.type in ADDS:
        found.append(op)
        op = op.inputs[side].op
    return found


def _added(link, side):
    return link.inputs[1 - side]
