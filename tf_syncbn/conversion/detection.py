"""Which ops of a graph are batch norms in training mode: what `tf_syncbn.convert_model` is to replace.

Found are ops, not layer objects, so it does not matter what made them: `tf.nn.fused_batch_norm` in all its versions; moments
over all examples, as `tf.nn.moments` computes them, that a square root divides by; and any other sums or means over all
examples that come back to them by way of a root, as a scale. What crosses examples otherwise and looks like a batch norm is
found as a suspect. Nothing is changed here.
"""
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from towers.graph_walk import calls_of
from towers.private import branches_of, control_flow_now, control_flow_of, forward_op_of
from tf_syncbn.conversion.axis_rules import reduced_axes
from tf_syncbn.conversion.counts import SAME_VALUE, corrected_by, counts_beside, is_corrected
from tf_syncbn.conversion.dependence import depend_on_data, depend_on_variables, find_statistics, find_updates
from tf_syncbn.conversion.fused_batch_norms import (FUSED, BatchNorm, channels_axis, fused_batch_norm, is_fused,
                                                    is_given_to_branch, is_training, never_runs)
from tf_syncbn.conversion.layout import Examined, Layout
from tf_syncbn.conversion.roots import is_root, roots_of, statistics_of, use_of
from tf_syncbn.conversion.squares import find_squares, squared

__all__ = ["Found", "find_batch_norms", "find_hidden"]

_IN_CONTROL_FLOW = ("its moments are computed inside a tf.cond or tf.while_loop, and towers can meet only where every "
                    "tower comes each step: compute them outside, and choose between results with tf.where")


class Found(NamedTuple):
    """What `find_batch_norms` found.

    Attributes:
      batch_norms: list of `BatchNorm`, in the order of the ops.
      suspects: list of the square root ops that divide by a standard deviation over examples and belong to none of them, and of
        the fused ops over examples that lie along the channels' axis too.
      of_variables: list of `BatchNorm`, what would be one but depends on variables alone, as standardized weights do.
      model: `Examined`, what the ops were found to do with examples.
      known: set of the ops that were looked at: of these three, and what they scale by.
    """
    batch_norms: Any
    suspects: Any
    of_variables: Any
    model: Any
    known: Any


def find_batch_norms(ops, batch):
    """Finds the batch norms in training mode among ops, and what looks like one.

    Args:
      ops: list of operations, in the order in which they were made.
      batch: list of tensors, the data that the ops were made of. What depends on variables alone is alike in all towers and
        no batch norm.

    Returns:
      `Found`.
    """
    of_data = depend_on_data(ops, batch)
    model = Examined({op: i for i, op in enumerate(ops)}, Layout(ops, batch), of_data, depend_on_variables(ops) - of_data)
    found, suspects, of_variables = [], [], []
    for op in ops:
        if is_fused(op) and is_training(op):
            axes = set(model.layout.axes(op.inputs[0]))
            if _is_of_rows(op, axes) or never_runs(op):
                continue
            if channels_axis(op) not in axes:
                found.append(fused_batch_norm(op))
            elif axes != {channels_axis(op)}:  # else each example is normalized by itself
                suspects.append(op)
        elif op.type == "Mean" and not never_runs(op):
            batch_norm = _moments(op, model)
            if batch_norm is not None:
                (of_variables if op in model.of_weights else found).append(batch_norm)
    averaged, of_variables = _by_averages(of_variables, ops, batch)
    found += averaged  # a first state of zeros, say: weights have no moving averages
    known = {op for batch_norm in found for op in batch_norm.ops}
    known |= {root for batch_norm in found for root in roots_of(batch_norm.op) if not model.layout.axes(root.outputs[0])}
    for op in ops:
        if op not in known and op not in model.of_weights and is_root(op):
            batch_norm, is_suspect = _sums(op, model, known)
            if batch_norm is not None:
                found.append(batch_norm)
                known.update(batch_norm.ops, batch_norm.counts)
            elif is_suspect:
                suspects.append(op)
    found.sort(key=lambda batch_norm: model.order[batch_norm.op])
    for k, batch_norm in enumerate(found):
        beside = counts_beside(sum(batch_norm.moments, [op.outputs[0] for op in batch_norm.weights]), model)
        counts = dict(batch_norm.counts)
        counts.update((place, of_counts) for place, of_counts in beside.items() if place not in known)
        known.update(counts)
        in_order = sorted(counts.items(), key=lambda item: (model.order[item[0][0]], item[0][1]))
        is_apart = batch_norm.kind == "moments" and bool(counts) and _is_in_control_flow(batch_norm.op)
        trouble = batch_norm.trouble or (_IN_CONTROL_FLOW if is_apart else None)
        found[k] = batch_norm._replace(counts=dict(in_order), trouble=trouble)
    return Found(found, suspects, of_variables, model, known)


def _is_of_rows(op, axes):
    """Tells whether a fused op normalizes the rows of a matrix, [1, rows, features, 1], as Keras' LayerNormalization does.

    In a tower of one example it can't be told along which axis of size 1 that lies; `axes` are the presumed ones. A batch norm
    has a scale, or averages.
    """
    x = op.inputs[0]
    return (x.op.type == "Reshape" and channels_axis(op) == 1 and x.shape.rank == 4 and x.shape.as_list()[::3] == [1, 1]
            and axes <= {0} and _unchanged(op.inputs[1].op).type in ("Const", "Fill")
            and not any(tensor.consumers() for tensor in op.outputs[1:3]))


def _by_averages(batch_norms, ops, batch):
    """Returns those of some batch norms whose moments go into what a variable is written, and the others: two lists."""
    if not batch_norms:
        return [], []
    statistics = find_statistics(ops, batch, batch_norms)
    averaged = {index for op in find_updates(ops, statistics) for index, _ in statistics[op]}
    return [[batch_norm for index, batch_norm in enumerate(batch_norms) if (index in averaged) == is_averaged]
            for is_averaged in (True, False)]


def find_hidden(ops):
    """Returns the ops that call a function with a batch norm in training mode in it: tf.function, tf.cond, tf.while_loop.

    Returns:
      A list of operations.
    """
    return calls_of(ops, lambda nodes: any(
        node.op in FUSED and node.attr["is_training"].b or _computes_variance(node, nodes) for node in nodes))


def _computes_variance(node, nodes):
    """Tells whether a node of a function averages squared differences over axis 0, on the way to a square root."""
    if node.op != "Mean" or not any(other.op in ("Rsqrt", "Sqrt") for other in nodes):
        return False
    by_name = {other.name: other for other in nodes}
    squares, axes = (by_name.get(name.split(":")[0]) for name in node.input[:2])
    if squares is None or squares.op not in ("SquaredDifference", "Square") or axes is None or axes.op != "Const":
        return False
    return 0 in tf.make_ndarray(axes.attr["value"].tensor).reshape([-1])


def _moments(variance, model):
    """Returns the batch norm whose variance this Mean op is, or None."""
    centred, reduced = _base_of_square(variance.inputs[0].op), reduced_axes(variance)
    if centred is None or reduced is None or not _takes_examples(variance, reduced, model):
        return None
    for x, other in (centred, centred[::-1]):
        mean = _unchanged(other.op)
        if mean.type == "Mean" and mean in model.order and _is_same(mean.inputs[0], x) and reduced_axes(mean) == reduced:
            kept, roots = tuple(axis for axis in range(x.shape.rank) if axis not in reduced), roots_of(variance)
            # The root of one number may be a loss or a summary.
            if not roots or not kept and not any(use_of(root, model) == "scales" for root in roots):
                return None
            can_stand_outside = branches_of(variance) and is_given_to_branch(x)
            trouble = _IN_CONTROL_FLOW if _is_in_control_flow(variance) and not can_stand_outside else None
            if any(tf.dimension_value(x.shape[axis]) is None for axis in kept):
                trouble = "the number of its channels is unknown, in %r of shape %s" % (x.name, x.shape)
            # What the model subtracts need not be the mean that its variance is of.
            means = [op for op in x.consumers() if op in model.order and op.type == "Mean" and reduced_axes(op) == reduced]
            number = tf.TensorShape([x.shape[axis] for axis in reduced]).num_elements()
            corrected = [(op, number) for op in corrected_by(number, variance.outputs[0], model)] if number else []
            if corrected and _is_in_control_flow(variance):
                trouble = _IN_CONTROL_FLOW
            return BatchNorm("moments", variance, x, kept, means=means, corrected=corrected, trouble=trouble)
    return None


def _takes_examples(op, reduced, model):
    """Tells whether a reduction takes all examples together, or what stands for them in weights that are standardized."""
    if op in model.of_weights:
        return 0 in reduced and len(reduced) == op.inputs[0].shape.rank - 1
    return model.layout.crosses(op) == "all"


def _is_in_control_flow(op):
    return control_flow_of(op) is not control_flow_now(op.graph)


def _is_same(a, b):
    """Tells whether two tensors are one, or two reads of one resource variable."""
    return a is b or a.op.type == b.op.type == "ReadVariableOp" and a.op.inputs[0] is b.op.inputs[0]


def _base_of_square(op):
    """Returns the two tensors whose difference `op` squares, or None."""
    base = squared(op)
    if len(base) == 1 and base[0].op.type == "Sub":
        base = base[0].op.inputs
    return tuple(base) if len(base) == 2 else None


def _unchanged(op):
    while op.type in SAME_VALUE:
        op = op.inputs[0].op
    return op


def _sums(root, model, known):
    """Returns the batch norm of sums over examples that a root is of, or None, and whether it looks like one else.

    What is `known` is of an earlier one: its ops, and where its counts go in.
    """
    sums, weights, counts, are_all = statistics_of(root, model, known)
    sums = sorted((op for op in sums if op not in known and forward_op_of(op) is None), key=model.order.get)
    use = use_of(root, model) if sums else None
    if use != "scales" or not are_all:
        return None, bool(sums) and (use is not None or root.outputs[0].shape.rank != 0)
    counts = {place: of_counts for place, of_counts in counts.items() if place not in known}
    unknown = [op.outputs[0] for op in sums if not op.outputs[0].shape.is_fully_defined()]
    trouble = _IN_CONTROL_FLOW if any(map(_is_in_control_flow, sums)) else None
    if not weights and is_corrected(root, sums, counts, model):
        trouble = ("what it computes of its moments is multiplied by n / (n - 1), where n is a constant, the number of one "
                   "tower's examples: take it of tf.shape, or take moments by tf.nn.moments")
    if unknown:
        trouble = "the number of its channels is unknown, in %r of shape %s" % (unknown[0].name, unknown[0].shape)
    squares, x = find_squares(sums, model), sums[0].inputs[0]
    sums, counts = _besides(squares, sums, counts)
    sums, kind = [op for op in sums if op not in weights], "squares" if squares else "sums"
    return BatchNorm(kind, root, x, (), sums=sums, squares=squares, weights=weights, counts=counts, trouble=trouble), False


def _besides(squares, sums, counts):
    """Returns those of sums, and of places of counts, that something else reads than variances that are known as such."""
    replaced = {op for variance in squares for op in [variance.op] + variance.means}
    inside = {op for variance in squares for op in variance.made_of}

    def is_unread(op):
        return op in replaced or op in inside and all(map(is_unread, op.outputs[0].consumers()))

    return [op for op in sums if not is_unread(op)], {
        place: of_counts for place, of_counts in counts.items() if not is_unread(place[0])}
