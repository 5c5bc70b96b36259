"""Where a tower's examples lie along the first axis, and how many they are: what a number of the model's own is held against."""
import itertools

import numpy as np
import tensorflow.compat.v1 as tf

from towers.exchanges import stands_at_exchange
from towers.graph_walk import end_of
from towers.own_data import own_leaves

__all__ = ["lies_along_examples", "products", "reduces_first_axis", "sizes_of_examples"]

_REDUCTIONS = frozenset(["All", "Any", "ArgMax", "ArgMin", "Max", "Mean", "Min", "Prod", "Sum"])


def lies_along_examples(tensor, context):
    """Tells whether a tensor's first axis is that of the tower's batch, or made of it and others, through all that keeps it."""
    own, seen, stack = own_leaves(context), set(), [tensor]
    while stack:
        tensor = stack.pop()
        op = tensor.op
        if end_of(tensor) in own:
            return True
        if op in seen or tensor.shape.rank == 0 or op in context.meetings.stand_ins or stands_at_exchange(op) or _turns(op):
            continue
        seen.add(op)
        stack.extend(op.inputs[:1] if op.type == "MatMul" else op.inputs)
    return False


def _turns(op):
    """Tells whether an op's output may have another first axis than its input."""
    if op.type in _REDUCTIONS:
        return reduces_first_axis(op) is not False
    if op.type == "Transpose":
        order = tf.get_static_value(op.inputs[1])
        return order is None or len(order) > 0 and order[0] != 0
    return op.type == "MatMul" and op.get_attr("transpose_a")


def reduces_first_axis(op):
    """Tells whether a reduction, `tf.reduce_sum` say, takes the first axis of its input away; None where that is not known."""
    axes, rank = tf.get_static_value(op.inputs[1]), op.inputs[0].shape.rank
    return None if axes is None or rank is None else 0 in np.reshape(axes, -1) % max(rank, 1)


def sizes_of_examples(towers):
    """Returns how many examples tower 0 is known to have: a dict from such sizes to that of the whole batch."""
    leaves = zip(*[tf.nest.flatten(tower.context.batch, expand_composites=True) for tower in towers])
    known = [[leaf.shape.as_list()[0] if tf.is_tensor(leaf) and leaf.shape.rank else None for leaf in of_towers]
             for of_towers in leaves]
    missing = towers[0].context.num_towers - len(towers)  # of other workers, taken to be as large
    return {sizes[0]: sum(sizes) + missing * sizes[0] for sizes in known if None not in sizes and sizes[0]}


def products(numbers, fewest=0):
    """Returns all products of `fewest` or more of a few numbers, None among them left out: a set of floats."""
    numbers = [number for number in numbers if number is not None]
    return {float(np.prod(some)) for count in range(fewest, len(numbers) + 1) for some in itertools.combinations(numbers, count)}
