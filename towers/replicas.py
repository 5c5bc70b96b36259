"""What a build returns: the towers, the loss of the global batch, and the outputs of all of them as one tower's."""
import re
from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union, overload

import tensorflow.compat.v1 as tf

from towers.api.annotations import Operation, Structure, Tensor
from towers.api.arguments import Kind
from towers.batches.shares import shares, weighted_sum
from towers.context import TowerContext, check_graph
from towers.graph.walk import end_of
from towers.meeting.global_loss import watched
from towers.sharding.placements import PartialMean
from towers.sharding.rewrite.joining import join_placed

__all__ = ["TOWERS", "Tower", "Towers"]


class Tower(NamedTuple):
    """One replica of the model function.

    Attributes:
      context: `TowerContext`.
      outputs: what the model function returned.
      loss: scalar tensor, or None where the model function returned none.
      weight: the tower's share of the global batch; all shares sum to 1. A float where it is known while the graph is
        built, else a float64 scalar tensor. Where no tower's batch has a size, the towers share alike.
      update_ops: list, what the model function added to `tf.GraphKeys.UPDATE_OPS`.
      ops: list of all operations that the call of the model function made.
    """
    context: TowerContext
    outputs: Any
    loss: Optional[Tensor]
    weight: Union[float, Tensor]
    update_ops: List[Operation]
    ops: List[Operation]

    @property
    def name_scope(self) -> str:
        """The name scope of the tower's ops, ending in "/"."""
        return self.context.name_scope

    @property
    def own_updates(self) -> List[Operation]:
        """Those of `update_ops` that are not shared by all towers."""
        shared = set(map(id, self.context.shared_updates))
        return [update for update in self.update_ops if id(update) not in shared]


class Towers:
    """The towers of one build, a sequence of `Tower`.

    Attributes:
      aggregation_device: str, where towers meet and gradients are averaged.
      loss: the loss of the global batch, `sum_i weight_i * loss_i`, a scalar tensor; None where there is none. Towers
        without examples count nothing, whatever their loss came to. To take its gradient outside of `towers.minimize` is a
        TowersWarning where nothing waits for the towers' update ops, as in `optimizer.minimize(replicas.loss)`.
      weight: what the towers' shares are shares of: the number of examples, or the sum of what model functions returned as
        "weight". An int where it is known while the graph is built, else a float64 scalar tensor; None where no tower's batch has
        a size.
      summaries: list of the summaries that the model function made in this build, tower 0's: of its examples, under tags that
        have no tower in them. `tf.summary.merge(replicas.summaries)` makes them one op, apart from those of other builds.
    """

    def __init__(self, towers: Sequence[Tower], aggregation_device: str, weight: Union[int, Tensor, None] = None,
                 summaries: Sequence[Tensor] = ()) -> None:
        self._towers, self.summaries, self.peers = tuple(towers), list(summaries), towers[0].context.meetings.peers
        self.aggregation_device = aggregation_device
        self.weight = weight
        self._merged = None
        self.loss: Optional[Tensor] = None
        if self[0].loss is not None:
            with tf.name_scope("global_loss"), tf.device(aggregation_device):
                loss = weighted_sum([tower.loss for tower in self], [tower.weight for tower in self])
                loss = loss if self.peers is None else self.peers.sum(loss, "loss")
                self.loss = watched(loss, [update for tower in self for update in tower.update_ops], self.peers is not None)

    def __len__(self) -> int:
        return len(self._towers)

    @overload
    def __getitem__(self, index: int) -> Tower: ...

    @overload
    def __getitem__(self, index: slice) -> Tuple[Tower, ...]: ...

    def __getitem__(self, index: Union[int, slice]) -> Union[Tower, Tuple[Tower, ...]]:
        return self._towers[index]

    def __iter__(self) -> Iterator[Tower]:
        return iter(self._towers)

    def __repr__(self) -> str:
        return "Towers(%s)" % ", ".join(tower.context.device for tower in self)

    def merged(self) -> Structure:
        """Returns the outputs of all towers as those of the global batch, in the structure that the model function returned.

        Tensors of rank 1 or more are joined along axis 0 in the order of the towers. Scalars are averaged by weight;
        integers and booleans among them are averaged as float32. Those of a whole-batch model are what one tower would return:
        joined along the axis that holds their examples, added up, or any tower's where all have the same
        (`towers.whole_batch`). Built by the first call, on the aggregation device, where
        the towers were built: no loop or control dependency around the call has a part in it. What stands under a key of a dict
        is named for it, "merged/KEY", for any number of towers. None stays None.

        Raises:
          TypeError: where an output is no tensor: an operation, say.
          ValueError: under another graph than the towers'.
          RuntimeError: if the graph is finalized and this is the first call.
        """
        if self._merged is None:
            meetings = self[0].context.meetings
            check_graph(meetings.graph, "replicas.merged")
            if meetings.graph.finalized:
                raise RuntimeError("replicas.merged() makes ops when it is first called, and the graph is finalized, as a "
                                   "monitored session does it: call it before the session is made.")
            with meetings.where_built(), tf.name_scope("merged"), tf.device(self.aggregation_device):
                per_tower = [tf.nest.flatten(tower.outputs) for tower in self]
                # tf.train.ExponentialMovingAverage names its variables for the tensors that it averages.
                leaves = [None if leaf[0] is None else tf.identity(self._merge(list(leaf)), name=name)
                          for leaf, name in zip(zip(*per_tower), _names_of(self[0].outputs))]
                self._merged = tf.nest.pack_sequence_as(self[0].outputs, leaves)
        return self._merged

    def _merge(self, leaves):
        if isinstance(leaves[0], (tf.Operation, tf.SparseTensor)):
            raise TypeError("replicas.merged() joins and averages tensors, and the model function returned %r: leave it out of "
                            "the outputs, and take each tower's, [tower.outputs for tower in replicas]." % (leaves[0],))
        if self[0].context.placements and not isinstance(leaves[0], tf.Tensor):
            return tf.convert_to_tensor(leaves[0])  # a variable or number of a whole-batch model, the same in all towers
        leaves = [tf.convert_to_tensor(leaf) for leaf in leaves]
        placement = self[0].context.placements.get(end_of(leaves[0]))
        if placement is not None and not isinstance(placement, PartialMean):
            return join_placed(leaves, placement, self.peers)
        if leaves[0].shape.rank != 0 and placement is None:
            return tf.concat(leaves, 0)
        if not (leaves[0].dtype.is_floating or leaves[0].dtype.is_complex):
            leaves = [tf.cast(leaf, tf.float32) for leaf in leaves]
        weights = [tower.weight for tower in self]
        if self.peers is not None:  # shares of all workers' batch, of which these outputs are a part
            weights, _ = shares(weights, self.aggregation_device)
        return weighted_sum(leaves, weights)


def _names_of(outputs):
    """Returns a name for each tensor of a structure, as `tf.nest.flatten` orders them: the outermost key that it stands under."""
    if not isinstance(outputs, dict):
        return ["output"] * len(tf.nest.flatten(outputs))
    return [re.sub("[^A-Za-z0-9_.]", "_", str(key)).lstrip("_") or "output"
            for key in sorted(outputs) for _ in tf.nest.flatten(outputs[key])]


TOWERS = Kind("the Towers that TowerBuilder.build returned", lambda value: isinstance(value, Towers))
