"""Where a tower's examples lie along the first axis, and how many they are: what a number of the model's own is held against."""
import itertools

import numpy as np
import tensorflow.compat.v1 as tf

from towers.axes import REDUCTIONS, reduces_first_axis
from towers.exchanges import stands_at_exchange
from towers.graph_walk import SIZES, end_of
from towers.mapped import mapped_from
from towers.own_data import leaves_of_rows, own_leaves

__all__ = ["lies_along_examples", "products", "sizes_of_examples"]


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
    if op.type in REDUCTIONS:
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
