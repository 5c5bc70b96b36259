"""Whether what a tower computed is of its own part of the batch, or the same in all towers; and whether a row is an example's."""
import itertools

import numpy as np
import tensorflow.compat.v1 as tf

from towers.exchanges import stands_at_exchange
from towers.graph_walk import end_of, op_of

__all__ = ["lies_along_examples", "products", "sizes_of_examples", "takes_own_data"]

_REDUCTIONS = frozenset(["All", "Any", "ArgMax", "ArgMin", "Max", "Mean", "Min", "Prod", "Sum"])


def takes_own_data(items, context, stop=()):
    """Tells whether tensors or ops of a tower take anything of the tower's own batch.

    What towers exchanged is all of theirs, and scalars of the batch are given to every tower. Only data is followed, not what
    waits for what.

    Args:
      items: list of tensors and operations.
      context: the tower's `TowerContext`.
      stop: operations that are not passed.
    """
    own = _own_leaves(context)
    seen, stack = set(), []
    for item in items:
        if end_of(item) in own:
            return True
        stack.append(op_of(item))
    while stack:
        op = stack.pop()
        if op in seen or op in stop or op in context.meetings.stand_ins or stands_at_exchange(op):
            continue
        seen.add(op)
        for tensor in op.inputs:
            if end_of(tensor) in own:
                return True
            stack.append(tensor.op)
    return False


def lies_along_examples(tensor, context):
    """Tells whether a tensor's first axis is that of the tower's batch, or made of it and others, through all that keeps it."""
    own, seen, stack = _own_leaves(context), set(), [tensor]
    while stack:
        tensor = stack.pop()
        op = tensor.op
        if end_of(tensor) in own:
            return True
        if op in seen or tensor.shape.rank == 0 or op in context.meetings.stand_ins or stands_at_exchange(op) or _turns(op):
            continue
        seen.add(op)
        stack.extend(op.inputs)
    return False


def sizes_of_examples(towers):
    """Returns how many examples tower 0 is known to have: a dict from such sizes to that of the whole batch."""
    leaves = zip(*[tf.nest.flatten(tower.context.batch, expand_composites=True) for tower in towers])
    known = [[leaf.shape.as_list()[0] if tf.is_tensor(leaf) and leaf.shape.rank else None for leaf in of_towers]
             for of_towers in leaves]
    missing = towers[0].context.num_towers - len(towers)  # of other workers, taken to be as large
    return {sizes[0]: sum(sizes) + missing * sizes[0] for sizes in known if None not in sizes and sizes[0]}


def products(numbers, fewest=0):
    """Returns all products of `fewest` or more of a list of numbers, None among them left out: a set of floats."""
    numbers = [number for number in numbers if number is not None]
    return {float(np.prod(some)) for count in range(fewest, len(numbers) + 1) for some in itertools.combinations(numbers, count)}


def _own_leaves(context):
    return {end_of(leaf) for leaf in tf.nest.flatten(context.batch, expand_composites=True)
            if tf.is_tensor(leaf) and leaf.shape.rank != 0}


def _turns(op):
    """Tells whether an op's output has another first axis than its input."""
    if op.type in _REDUCTIONS:
        axes, rank = tf.get_static_value(op.inputs[1]), op.inputs[0].shape.rank
        return axes is None or rank is None or 0 in np.reshape(axes, -1) % max(rank, 1)
    if op.type == "Transpose":
        order = tf.get_static_value(op.inputs[1])
        return order is None or len(order) > 0 and order[0] != 0
    return op.type == "MatMul" and op.get_attr("transpose_a")
