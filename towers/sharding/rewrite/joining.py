"""What all towers have of a tensor, as the one that one tower on the whole batch would have."""
import tensorflow.compat.v1 as tf

from towers.meeting.sums import sum_in_order
from towers.sharding.placements import Blocks, Partial, Shard

__all__ = ["join_placed"]


def join_placed(tensors, placement, peers=None):
    """Returns the whole batch's tensor, of which each tower has what a placement says.

    Args:
      tensors: list over towers of tensors.
      placement: `Replicate`, `Shard`, `Blocks` or `Partial`, the same in all towers.
      peers: `towers.workers.peers.Peers`, other workers to whose towers these are added; what is joined is this worker's own.
    """
    if isinstance(placement, Partial):
        total = sum_in_order(tensors)
        return total if peers is None else peers.sum(total, "merged", total.op.name)
    if isinstance(placement, Shard):
        return tf.concat(tensors, placement.axis)
    if isinstance(placement, Blocks):
        apart = [tf.split(tensor, placement.outer, placement.axis) for tensor in tensors]
        return tf.concat([block for blocks in zip(*apart) for block in blocks], placement.axis)
    return tensors[0]
