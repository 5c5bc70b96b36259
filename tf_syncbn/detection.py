"""Which ops of a graph are batch norms in training mode: what `tf_syncbn.convert_model` is to replace.

Found are ops, not layer objects, so it does not matter what made them: `tf.nn.fused_batch_norm` in all its versions, and
moments over all axes but one, as `tf.nn.moments` computes them, that a square root divides by. What looks like a batch
norm and is none of these is found as a suspect. Nothing is changed here.
"""
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from towers.exchange import branch_of, control_flow_now, control_flow_of

__all__ = ["BatchNorm", "find_batch_norms", "find_hidden", "find_suspects", "is_fused", "is_training"]

_FUSED = ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
_BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
_ROOTS = ("Rsqrt", "Sqrt", "Pow")
_DIFFERENCES = ("Sub", "SquaredDifference")
# What a vector of moments goes through, unchanged or a little, on its way to the square root.
_SAME_VALUE = ("Identity", "StopGradient", "Squeeze", "Reshape", "ExpandDims", "Cast", "CheckNumerics")
_CHOSEN = ("Switch", "RefSwitch", "Merge", "Select", "SelectV2") + _BRANCHES
_SHIFTED = ("Add", "AddV2", "Mul", "RealDiv", "Maximum", "BiasAdd")
_CONSTANT = ("Const", "VariableV2", "Variable", "VarHandleOp")
_READS = ("Identity", "ReadVariableOp", "Enter", "Switch", "Cast")


class BatchNorm(NamedTuple):
    """A batch norm in training mode.

    Fields:
      kind: "fused", "fused in tf.cond" or "moments".
      op: the fused op, or the one that computes the variance.
      axis: int, the channels' axis, not negative.
      mean: "moments": the op that computes the mean; else None.
      frozen: "fused in tf.cond": the fused op of the branch in inference mode; else None.
      trouble: str, why it can't be synced; or None.
    """
    kind: str
    op: Any
    axis: int
    mean: Any = None
    frozen: Any = None
    trouble: Any = None

    @property
    def ops(self):
        """The ops of which a gradient op tells that this batch norm has been differentiated already."""
        return [op for op in (self.op, self.mean, self.frozen) if op is not None]

    @property
    def x(self):
        """What is normalized."""
        return (self.op if self.mean is None else self.mean).inputs[0]


def is_fused(op):
    """Tells whether an op is a fused batch norm, in whatever mode."""
    return op.type in _FUSED


def is_training(op):
    """Tells whether a fused batch norm normalizes by the moments of its batch."""
    return op.get_attr("is_training")


def find_batch_norms(ops, batch):
    """Finds the batch norms in training mode among ops.

    Args:
      ops: list of operations, in the order in which they were made.
      batch: list of tensors, the data that the ops were made of. What depends on variables alone, as standardized weights
        do, is alike in all towers and no batch norm.

    Returns:
      A list of `BatchNorm`, in the order of the ops.
    """
    made, of_data = set(ops), _depend_on_data(ops, batch)
    found = []
    for op in ops:
        if is_fused(op) and is_training(op):
            found.append(_fused(op))
        elif op.type == "Mean":
            batch_norm = _moments(op, made)
            if batch_norm is not None and op in of_data:
                found.append(batch_norm)
    return found


def find_suspects(ops, batch, batch_norms):
    """Returns ops that divide by a standard deviation over examples, as no batch norm in `batch_norms` does.

    Args:
      ops, batch: see `find_batch_norms`.
      batch_norms: list of `BatchNorm`, what `find_batch_norms` returned.

    Returns:
      A list of square root ops.
    """
    known = set(root for batch_norm in batch_norms if batch_norm.mean is not None for root in _roots(batch_norm.op))
    of_data = _depend_on_data(ops, batch)
    return [op for op in ops if op.type in ("Rsqrt", "Sqrt") and op in of_data and op not in known
            and any(_reduces_examples(source) and source in of_data for source in _sources(op))]


def find_hidden(ops):
    """Returns the ops that call a function with a batch norm in training mode in it: tf.function, tf.cond, tf.while_loop.

    Returns:
      A list of operations.
    """
    calls = [(op, names) for op in ops for names in [_function_names(op.node_def)] if names]
    if not calls:
        return []
    graph = calls[0][0].graph
    library = {function.signature.name: function.node_def
               for function in graph.as_graph_def(from_version=graph.version).library.function}

    def hides(name, seen):
        if name in seen or name not in library:
            return False
        seen.add(name)
        return any(node.op in _FUSED and node.attr["is_training"].b or any(hides(n, seen) for n in _function_names(node))
                   for node in library[name])

    return [op for op, names in calls if any(hides(name, set()) for name in names)]


def _function_names(node):
    return [function.name for attribute in node.attr.values()
            for function in [attribute.func] + list(attribute.list.func) if function.name]


def _fused(op):
    axis = op.get_attr("data_format").decode().index("C")
    graph = op.graph
    if control_flow_of(op) is control_flow_now(graph):
        return BatchNorm("fused", op, axis)
    frozen = _sibling(op)
    if frozen is None:
        return BatchNorm("fused in tf.cond", op, axis, trouble=(
            "it stands inside a tf.cond or tf.while_loop, and towers can meet only where every tower comes each step. A tf.cond "
            "that chooses between the two modes of one fused batch norm, and holds nothing else, can be synced: for others "
            "give `training` as a bool, or move the layer out"))
    return BatchNorm("fused in tf.cond", op, axis, frozen=frozen)


def _sibling(op):
    """Returns the batch norm in inference mode of the other branch of a tf.cond around `op`, or None."""
    branch = branch_of(op)
    if branch is None:
        return None
    merges = [(k, merge) for k in range(3) for merge in op.outputs[k].consumers()]
    others = {_other(merge, op.outputs[k], k) for k, merge in merges}
    frozen = others.pop() if len(others) == 1 else None
    if frozen is None or is_training(frozen) or frozen.get_attr("epsilon") != op.get_attr("epsilon"):
        return None
    return frozen if frozen.get_attr("data_format") == op.get_attr("data_format") else None


def _other(merge, tensor, output):
    if merge.type != "Merge" or len(merge.inputs) != 2:
        return None
    other, = [t for t in merge.inputs if t is not tensor] or [None]
    return other.op if other is not None and is_fused(other.op) and other.value_index == output else None


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
        if mean.type == "Mean" and mean in made and mean.inputs[0] is x and _kept_axis(mean) == axis:
            if not _roots(variance):
                return None
            trouble = None
            if tf.dimension_value(x.shape[axis]) is None:
                trouble = "the number of its channels is unknown, in %r of shape %s" % (x.name, x.shape)
            elif control_flow_of(variance) is not control_flow_now(variance.graph):
                trouble = ("its moments are computed inside a tf.cond or tf.while_loop, and towers can meet only where every "
                           "tower comes each step: compute them outside, and choose between results with tf.where")
            return BatchNorm("moments", variance, axis, mean=mean, trouble=trouble)
    return None


def _base_of_square(op):
    """Returns the two tensors whose difference `op` squares, or None."""
    if op.type == "SquaredDifference":
        return tuple(op.inputs)
    is_square = op.type == "Square" or op.type == "Mul" and op.inputs[0] is op.inputs[1]
    if is_square and op.inputs[0].op.type == "Sub":
        return tuple(op.inputs[0].op.inputs)
    return None


def _kept_axis(op):
    """Returns the one axis that a reduction over examples keeps, or None."""
    rank = op.inputs[0].shape.rank
    axes = tf.get_static_value(op.inputs[1])
    if rank is None or axes is None:
        return None
    kept = set(range(rank)) - {int(axis) % rank for axis in axes.reshape([-1])}
    return kept.pop() if len(kept) == 1 and 0 not in kept and rank > 1 else None


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


def _reduces_examples(op):
    """Tells whether a reduction is over axis 0 and leaves more than one number."""
    rank, axes = op.inputs[0].shape.rank, tf.get_static_value(op.inputs[1])
    if not rank or axes is None:
        return False
    axes = {int(axis) % rank for axis in axes.reshape([-1])}
    return 0 in axes and len(axes) < rank


def _depend_on_data(ops, batch):
    """Returns those of `ops` that depend on more than variables and constants, `batch` excepted, which may be constant."""
    made, of_data = set(ops), {tensor.op for tensor in batch}
    for op in ops:
        sources = [tensor.op for tensor in op.inputs]
        if sources:
            is_data = any(s in of_data or s not in made and not _is_of_variables(s) for s in sources)
        else:
            is_data = op.type not in _CONSTANT
        if is_data:
            of_data.add(op)
    return of_data


def _is_of_variables(op):
    while op.type in _READS and op.inputs:
        op = op.inputs[0].op
    return op.type in _CONSTANT
