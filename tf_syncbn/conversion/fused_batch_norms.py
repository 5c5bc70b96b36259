"""What a batch norm of a graph is, and those of a fused op: alone, or in a tf.cond that chooses between its two modes."""
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from towers.graph_walk import is_ref
from towers.private import branches_of, control_flow_now, control_flow_of

__all__ = ["FUSED", "MOVED", "BatchNorm", "channels_axis", "decider", "fused_batch_norm", "is_fused",
           "is_given_to_branch", "is_training", "never_runs", "outside_of_branch"]

FUSED = ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
MOVED = ("Switch", "RefSwitch")


class BatchNorm(NamedTuple):
    """A batch norm in training mode.

    Attributes:
      kind: "fused", "fused in tf.cond", "moments", "squares" or "sums".
      op: the fused op, the one that computes the variance, or of "squares" and "sums" the root.
      x: tensor, what is normalized.
      kept: tuple of int, the axes that have moments of their own, not negative: the channels' alone in fused ones.
      means: "moments": list of the ops that compute the mean; else empty.
      frozen: "fused in tf.cond": the fused op of the branch in inference mode; else None.
      sums: "squares" and "sums": list of the ops that take sums or means over examples, in order; else empty.
      squares: "squares": list of `tf_syncbn.conversion.squares.Squares`, variances of sums that are none of `sums`; else empty.
      weights: "squares" and "sums": set of the sums of weights that moments are divided by, none of `sums`; else empty.
      counts: dict, where numbers of examples go in with the moments, see `tf_syncbn.conversion.counts`.
      corrected: "moments": list of (op, n) that give the variance times n / (n - 1), where n is a constant; else empty.
      trouble: str, why it can't be synced; or None.
    """
    kind: str
    op: Any
    x: Any
    kept: tuple
    means: Any = ()
    frozen: Any = None
    sums: Any = ()
    squares: Any = ()
    weights: Any = ()
    counts: Any = ()
    corrected: Any = ()
    trouble: Any = None

    @property
    def ops(self):
        """The ops of which a gradient op tells that this batch norm has been differentiated already."""
        of_squares = [op for squares in self.squares for op in [squares.op] + squares.made_of]
        frozen = [] if self.frozen is None else [self.frozen]
        return [self.op, *self.means, *self.sums, *self.weights, *of_squares, *frozen]

    @property
    def moments(self):
        """The tensors that hold the batch's mean, and those that hold its variance, two lists; of sums all are in the second."""
        if self.kind == "moments":
            return [mean.outputs[0] for mean in self.means], [self.op.outputs[0]]
        if self.kind in ("squares", "sums"):
            ops = [op for squares in self.squares for op in squares.means + [squares.op]] + list(self.sums)
            return [], [op.outputs[0] for op in ops]
        if self.kind == "fused":
            return [self.op.outputs[1]], [self.op.outputs[2]]
        return tuple([merge.outputs[0] for merge in tensor.consumers()] for tensor in self.op.outputs[1:3])


def is_fused(op):
    """Tells whether an op is a fused batch norm, in whatever mode."""
    return op.type in FUSED


def is_training(op):
    """Tells whether a fused batch norm normalizes by the moments of its batch."""
    return op.get_attr("is_training")


def channels_axis(op):
    """Returns the channels' axis of a fused batch norm."""
    return op.get_attr("data_format").decode().index("C")


def fused_batch_norm(op):
    """Returns the `BatchNorm` that a fused op in training mode is."""
    axis = channels_axis(op)
    kind = "fused" if control_flow_of(op) is control_flow_now(op.graph) else "fused in tf.cond"
    frozen, trouble = None, None
    known = [x.shape[i] for x, i in ((op.inputs[0], axis), (op.inputs[1], 0)) if x.shape.rank]
    if all(tf.dimension_value(size) is None for size in known):
        trouble = "the number of its channels is unknown, in %r of shape %s" % (op.inputs[1].name, op.inputs[1].shape)
    elif kind == "fused in tf.cond":
        frozen = _sibling(op)
        if frozen is None or not is_given_to_branch(op.inputs[0]):
            trouble = ("it stands inside a tf.cond or tf.while_loop, and towers can meet only where every tower comes each step. "
                       "A tf.cond that chooses between the two modes of one fused batch norm, of the same input, and holds "
                       "nothing else, can be synced: for others give `training` as a bool, or move the layer out")
    return BatchNorm(kind, op, op.inputs[0], (axis,), frozen=frozen, trouble=trouble)


def decider(predicate):
    """Returns what a tf.cond chooses by, as it is outside of all of them; what was read of a ref variable stays what was read."""
    while predicate.op.type in MOVED or predicate.op.type == "Identity" and not is_ref(predicate.op.inputs[0]):
        predicate = predicate.op.inputs[0]
    return predicate


def _given_to_branch(tensor):
    """Returns what a tensor in a branch of a tf.cond is where the branch, and each that this stands in, took it from outside.

    It may have been made in one of them: then that is returned.
    """
    while tensor.op.type in MOVED and branches_of(tensor.op):
        tensor = tensor.op.inputs[0]
    return tensor


def is_given_to_branch(tensor):
    """Tells whether a tensor in a branch of a tf.cond is one from outside, or that in another dtype."""
    tensor = _given_to_branch(tensor)
    while tensor.op.type in ("Cast", "Identity") and branches_of(tensor.op):
        tensor = _given_to_branch(tensor.op.inputs[0])
    return not branches_of(tensor.op)


def never_runs(op):
    """Tells whether an op stands in the one branch of a tf.cond within the other branch of another one, by the same predicate."""
    chosen = {}
    return any(chosen.setdefault(decider(predicate).name, branch) != branch for predicate, branch in branches_of(op))


def _sibling(op):
    """Returns the batch norm in inference mode of the other branch of a tf.cond around `op`, or None."""
    if not branches_of(op):
        return None
    merges = [(k, merge) for k in range(3) for merge in op.outputs[k].consumers()]
    others = {_other(merge, op.outputs[k], k) for k, merge in merges}
    frozen = others.pop() if len(others) == 1 else None
    if frozen is None or is_training(frozen) or any(
            frozen.get_attr(name) != op.get_attr(name) for name in ("epsilon", "data_format")):
        return None
    return frozen if all(_is_same_outside(a, b) for a, b in zip(op.inputs[:3], frozen.inputs[:3])) else None


def _other(merge, tensor, output):
    if merge.type != "Merge" or len(merge.inputs) != 2:
        return None
    other, = [t for t in merge.inputs if t is not tensor] or [None]
    return other.op if other is not None and is_fused(other.op) and other.value_index == output else None


def _is_same_outside(a, b):
    """Tells whether what two branches of a tf.cond take is one tensor outside, one variable, or one constant."""
    if not branches_of(a.op) and not branches_of(b.op) or a.op.type in MOVED and b.op.type in MOVED:
        return _given_to_branch(a) is _given_to_branch(b)
    if a.op.type != b.op.type or a.op.type not in ("ReadVariableOp", "Identity", "Const", "Fill", "Cast"):
        return False
    if a.op.type == "Const":
        return a.op.node_def.attr["value"] == b.op.node_def.attr["value"]
    return all(map(_is_same_outside, a.op.inputs, b.op.inputs))


def outside_of_branch(tensor):
    """Returns what a tensor inside a branch of tf.cond is made of, outside of it: the tensor itself, or made anew, a read say."""
    op = tensor.op
    if not branches_of(op):
        return tensor
    if op.type in MOVED:
        return outside_of_branch(op.inputs[0])
    inputs = [outside_of_branch(t) for t in op.inputs]
    with tf.control_dependencies(None):
        made = op.graph.create_op(op.type, inputs, [t.dtype for t in op.outputs], attrs=op.node_def.attr, op_def=op.op_def)
    return made.outputs[tensor.value_index]
