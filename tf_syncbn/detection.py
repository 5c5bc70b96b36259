"""Which ops of a graph are batch norms in training mode: what `tf_syncbn.convert_model` is to replace.

Found are ops, not layer objects, so it does not matter what made them: `tf.nn.fused_batch_norm` in all its versions, and
moments over all axes but one, as `tf.nn.moments` computes them, that a square root divides by. What looks like a batch
norm and is none of these is found as a suspect. Nothing is changed here.
"""
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from towers.exchange import branch_of, control_flow_now, control_flow_of
from towers.graph_walk import calls_of
from tf_syncbn.dependence import depend_on_data, depend_on_variables

__all__ = ["BatchNorm", "Found", "find_batch_norms", "find_hidden", "is_fused", "is_training", "outside_of_branch"]

_FUSED = ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
_BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
_ROOTS = ("Rsqrt", "Sqrt", "Pow")
_MOVED = ("Switch", "RefSwitch")
_DIFFERENCES = ("Sub", "SquaredDifference")
# What a vector of moments goes through, unchanged or a little, on its way to the square root.
_SAME_VALUE = ("Identity", "StopGradient", "Squeeze", "Reshape", "ExpandDims", "Cast", "CheckNumerics")
_CHOSEN = _MOVED + ("Merge", "Select", "SelectV2") + _BRANCHES
_SHIFTED = ("Add", "AddV2", "Mul", "RealDiv", "Maximum", "BiasAdd")


class BatchNorm(NamedTuple):
    """A batch norm in training mode.

    Fields:
      kind: "fused", "fused in tf.cond" or "moments".
      op: the fused op, or the one that computes the variance.
      x: tensor, what is normalized.
      axis: int, the channels' axis, not negative.
      means: "moments": list of the ops that compute the mean; else empty.
      frozen: "fused in tf.cond": the fused op of the branch in inference mode; else None.
      trouble: str, why it can't be synced; or None.
    """
    kind: str
    op: Any
    x: Any
    axis: int
    means: Any = ()
    frozen: Any = None
    trouble: Any = None

    @property
    def ops(self):
        """The ops of which a gradient op tells that this batch norm has been differentiated already."""
        return [self.op] + list(self.means) + ([] if self.frozen is None else [self.frozen])

    @property
    def moments(self):
        """The tensors that hold the batch's mean, and those that hold its variance, two lists."""
        if self.kind == "moments":
            return [mean.outputs[0] for mean in self.means], [self.op.outputs[0]]
        if self.kind == "fused":
            return [self.op.outputs[1]], [self.op.outputs[2]]
        return tuple([merge.outputs[0] for merge in tensor.consumers()] for tensor in self.op.outputs[1:3])


class Found(NamedTuple):
    """What `find_batch_norms` found.

    Fields:
      batch_norms: list of `BatchNorm`, in the order of the ops.
      suspects: list of the square root ops that divide by a standard deviation over examples and belong to none of them.
      of_variables: list of `BatchNorm`, what would be one but depends on variables alone, as standardized weights do.
    """
    batch_norms: Any
    suspects: Any
    of_variables: Any


def is_fused(op):
    """Tells whether an op is a fused batch norm, in whatever mode."""
    return op.type in _FUSED


def is_training(op):
    """Tells whether a fused batch norm normalizes by the moments of its batch."""
    return op.get_attr("is_training")


def find_batch_norms(ops, batch):
    """Finds the batch norms in training mode among ops, and what looks like one.

    Args:
      ops: list of operations, in the order in which they were made.
      batch: list of tensors, the data that the ops were made of. What depends on variables alone is alike in all towers and
        no batch norm.

    Returns:
      `Found`.
    """
    of_data, of_variables = depend_on_data(ops, batch), depend_on_variables(ops)
    made, of_weights = set(ops), of_variables - of_data
    found, of_variables = [], []
    for op in ops:
        if is_fused(op) and is_training(op):
            if not _has_examples_as_channels(op):
                found.append(_fused(op))
        elif op.type == "Mean":
            batch_norm = _moments(op, made)
            if batch_norm is not None:
                (of_variables if op in of_weights else found).append(batch_norm)
    known = set(root for batch_norm in found if batch_norm.means for root in _roots(batch_norm.op))
    suspects = [op for op in ops if op.type in _ROOTS and op not in known
                and any(_kept_axes(source) and source not in of_weights for source in _sources(op))]
    return Found(found, suspects, of_variables)


def find_hidden(ops):
    """Returns the ops that call a function with a batch norm in training mode in it: tf.function, tf.cond, tf.while_loop.

    Returns:
      A list of operations.
    """
    return calls_of(ops, lambda nodes: any(
        node.op in _FUSED and node.attr["is_training"].b or _computes_variance(node, nodes) for node in nodes))


def _computes_variance(node, nodes):
    """Tells whether a node of a function averages squared differences over axis 0, on the way to a square root."""
    if node.op != "Mean" or not any(other.op in ("Rsqrt", "Sqrt") for other in nodes):
        return False
    by_name = {other.name: other for other in nodes}
    squares, axes = (by_name.get(name.split(":")[0]) for name in node.input[:2])
    if squares is None or squares.op not in ("SquaredDifference", "Square") or axes is None or axes.op != "Const":
        return False
    return 0 in tf.make_ndarray(axes.attr["value"].tensor).reshape([-1])


def _has_examples_as_channels(op):
    """Tells whether a fused op normalizes each example by itself, as Keras' LayerNormalization makes it do."""
    reshape = op.inputs[0].op
    if reshape.type != "Reshape" or reshape.outputs[0].shape.rank is None or reshape.inputs[0].shape.rank is None:
        return False
    now, before = (tf.dimension_value(tensor.shape[0]) for tensor in (reshape.outputs[0], reshape.inputs[0]))
    return now == 1 and before != 1


def _fused(op):
    axis = op.get_attr("data_format").decode().index("C")
    kind = "fused" if control_flow_of(op) is control_flow_now(op.graph) else "fused in tf.cond"
    frozen, trouble = None, None
    if tf.dimension_value(op.inputs[1].shape[0] if op.inputs[1].shape.rank else None) is None:
        trouble = "the number of its channels is unknown, in %r of shape %s" % (op.inputs[1].name, op.inputs[1].shape)
    elif kind == "fused in tf.cond":
        frozen = _sibling(op)
        if frozen is None:
            trouble = ("it stands inside a tf.cond or tf.while_loop, and towers can meet only where every tower comes each step. "
                       "A tf.cond that chooses between the two modes of one fused batch norm, of the same input, and holds "
                       "nothing else, can be synced: for others give `training` as a bool, or move the layer out")
    return BatchNorm(kind, op, op.inputs[0], axis, frozen=frozen, trouble=trouble)


def _sibling(op):
    """Returns the batch norm in inference mode of the other branch of a tf.cond around `op`, or None."""
    if branch_of(op) is None:
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
    if branch_of(a.op) is None and branch_of(b.op) is None or a.op.type in _MOVED and b.op.type in _MOVED:
        return outside_of_branch(a) is outside_of_branch(b)
    if a.op.type != b.op.type or a.op.type not in ("ReadVariableOp", "Identity", "Const", "Fill", "Cast"):
        return False
    if a.op.type == "Const":
        return a.op.node_def.attr["value"] == b.op.node_def.attr["value"]
    return all(map(_is_same_outside, a.op.inputs, b.op.inputs))


def outside_of_branch(tensor):
    """Returns what a tensor inside a branch of tf.cond is made of, outside of it: the tensor itself, or a read, made anew."""
    op = tensor.op
    if branch_of(op) is None:
        return tensor
    if op.type in _MOVED:
        return op.inputs[0]
    inputs = [outside_of_branch(t) for t in op.inputs]
    with tf.control_dependencies(None):
        made = op.graph.create_op(op.type, inputs, [t.dtype for t in op.outputs], attrs=op.node_def.attr, op_def=op.op_def)
    return made.outputs[tensor.value_index]


def _moments(variance, made):
    """Returns the batch norm whose variance this Mean op is, or None."""
    centred = _base_of_square(variance.inputs[0].op)
    if centred is None:
        return None
    axis = _kept_axis(variance)
    if axis is None:
        return None
    for x, other in (centred, centred[::-1]):
        mean = _unchanged(other.op)
        if mean.type == "Mean" and mean in made and _is_same(mean.inputs[0], x) and _kept_axis(mean) == axis:
            if not _roots(variance):
                return None
            trouble = None
            if tf.dimension_value(x.shape[axis]) is None:
                trouble = "the number of its channels is unknown, in %r of shape %s" % (x.name, x.shape)
            elif control_flow_of(variance) is not control_flow_now(variance.graph):
                trouble = ("its moments are computed inside a tf.cond or tf.while_loop, and towers can meet only where every "
                           "tower comes each step: compute them outside, and choose between results with tf.where")
            # What the model subtracts need not be the mean that its variance is of.
            means = [op for op in x.consumers() if op in made and op.type == "Mean" and _kept_axis(op) == axis]
            return BatchNorm("moments", variance, x, axis, means=means, trouble=trouble)
    return None


def _is_same(a, b):
    """Tells whether two tensors are one, or two reads of one resource variable."""
    return a is b or a.op.type == b.op.type == "ReadVariableOp" and a.op.inputs[0] is b.op.inputs[0]


def _base_of_square(op):
    """Returns the two tensors whose difference `op` squares, or None."""
    if op.type == "SquaredDifference":
        return tuple(op.inputs)
    is_square = (op.type == "Square" or op.type == "Mul" and op.inputs[0] is op.inputs[1]
                 or op.type == "Pow" and tf.get_static_value(op.inputs[1]) == 2)
    if is_square and op.inputs[0].op.type == "Sub":
        return tuple(op.inputs[0].op.inputs)
    return None


def _kept_axes(op):
    """Returns the axes that a reduction over examples keeps, a set, or None where it is over something else or unknown."""
    rank, axes = op.inputs[0].shape.rank, tf.get_static_value(op.inputs[1])
    if rank is None or axes is None:
        return None
    kept = set(range(rank)) - {int(axis) % rank for axis in axes.reshape([-1])}
    return kept if rank and 0 not in kept else None


def _kept_axis(op):
    """Returns the one axis that a reduction over examples keeps, or None."""
    kept = _kept_axes(op)
    return kept.pop() if kept is not None and len(kept) == 1 else None


def _unchanged(op):
    while op.type in _SAME_VALUE:
        op = op.inputs[0].op
    return op


def _roots(op):
    """Returns the square roots that `op` reaches as a variance does."""
    seen, stack, roots = set(), [op], []
    while stack:
        op = stack.pop()
        for consumer in {c for tensor in op.outputs for c in tensor.consumers()} - seen:
            seen.add(consumer)
            if consumer.type in _ROOTS:
                roots.append(consumer)
            elif consumer.type in _SAME_VALUE + _CHOSEN + _SHIFTED:
                stack.append(consumer)
    return roots


def _sources(op):
    """Returns what a square root is taken of, back through vector arithmetic."""
    seen, stack, sources = set(), [op], []
    while stack:
        for tensor in stack.pop().inputs:
            if tensor.op not in seen:
                seen.add(tensor.op)
                if tensor.op.type in ("Mean", "Sum"):
                    sources.append(tensor.op)
                elif tensor.op.type in _SAME_VALUE + _CHOSEN + _SHIFTED + _DIFFERENCES + ("Square", "DivNoNan", "IdentityN"):
                    stack.append(tensor.op)
    return sources
