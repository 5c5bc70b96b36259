"""Whether what a tower computed is of its own part of the batch, or the same in all towers."""
from towers.graph.walk import end_of, tensors_of
from towers.meeting.exchanges import stands_at_exchange

__all__ = ["of_own_data", "own_leaves", "takes_own_data"]


def takes_own_data(tensor, context):
    """Tells whether a tensor is, or takes anything, of the tower's own batch."""
    return end_of(tensor) in _leaves_of(context.batch) or tensor.op in of_own_data(context)


def of_own_data(context, stop=(), own=None):
    """Returns the set of all ops that take anything of a tower's own batch.

    What towers exchanged is all of theirs, and scalars of the batch are given to every tower. Only data is followed, not what
    waits for what.

    Args:
      context: the tower's `TowerContext`.
      stop: operations that are not passed.
      own: set of the ends of what is the tower's own; None is all that it has of the batch.
    """
    own = _leaves_of(context.batch) if own is None else own
    found, stack = set(), [op.outputs[number] for op, number in own]
    while stack:
        for op in stack.pop().consumers():
            if op not in found and op not in stop and op not in context.meetings.stand_ins and not stands_at_exchange(op):
                found.add(op)
                stack.extend(op.outputs)
    return found


def own_leaves(batches, peers):
    """Returns what of each tower's batch others have other values of, a list of sets of ends.

    Args:
      batches: list over towers of nested structures.
      peers: the workers that the towers have peers in, who have all but scalars other; None where there are none.
    """
    if peers is not None:
        return list(map(_leaves_of, batches))
    leaves = [list(map(end_of, tensors_of(batch))) for batch in batches]
    return [{leaf for leaf in of_tower if not all(leaf in of_other for of_other in leaves)} for of_tower in leaves]


def _leaves_of(batch):
    """Returns the ends, as `end_of` has them, of what a tower has of the batch, scalars left out: a set."""
    return {end_of(leaf) for leaf in tensors_of(batch) if leaf.shape.rank != 0}
