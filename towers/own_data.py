"""Whether what a tower computed is of its own part of the batch, or the same in all towers."""
import tensorflow.compat.v1 as tf

from towers.exchanges import stands_at_exchange
from towers.graph_walk import end_of, op_of

__all__ = ["own_leaves", "takes_own_data"]


def takes_own_data(items, context, stop=(), own=None):
    """Tells whether tensors or ops of a tower take anything of the tower's own batch.

    What towers exchanged is all of theirs, and scalars of the batch are given to every tower. Only data is followed, not what
    waits for what.

    Args:
      items: list of tensors and operations.
      context: the tower's `TowerContext`.
      stop: operations that are not passed.
      own: set of the ends of what is the tower's own; None is all that it has of the batch.
    """
    own = own_leaves(context) if own is None else own
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


def own_leaves(context):
    """Returns the ends, as `end_of` has them, of what a tower has of the batch: a set."""
    return {end_of(leaf) for leaf in tf.nest.flatten(context.batch, expand_composites=True)
            if tf.is_tensor(leaf) and leaf.shape.rank != 0}
