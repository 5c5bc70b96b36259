"""Gradients that a model function takes itself, where those of a tower's part of the batch are not those of the whole.

A gradient by an example is what one tower would take where it is one of that example's own loss, or of a sum of such losses: of
their mean it is larger, as the tower has fewer of them. A gradient by a weight adds up over the tower's examples. Both train
otherwise in silence, as in an adversarial step, a gradient penalty or an inner step of meta-learning.
"""
import warnings

from towers.first_axis import sizes_of_examples
from towers.axes import reduced_axes
from towers.gradient_hook import detail_of
from towers.private import control_flow_of, forward_op_of
from towers.wording import TowersWarning

__all__ = ["warn_of_inner_gradients"]

_DIVIDES = ("Div", "DivNoNan", "RealDiv")
_OF_WEIGHTS = ("BiasAddGrad", "Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter")


def warn_of_inner_gradients(losses, towers, examples, stacklevel):
    """Warns, once, where a tower's loss depends on gradients that its model function took of its own examples together.

    Only what is sure is said: nothing of gradients whose scale is taken away again, by their sign or their norm, but where they
    pass layers in which towers of other sizes meet; nothing inside of loops and branches.

    Args:
      losses: list over towers of scalar tensors.
      towers: list of `Tower`.
      examples: `towers.along_examples.Examples` of the first of them.
      stacklevel: int, as of `warnings.warn`.
    """
    tower = towers[0]
    found = [op for op in tower.ops if forward_op_of(op) is not None and control_flow_of(op) is None]
    needed = examples.needed_by(losses[0]) if found else ()
    found = [op for op in found if op in needed and not _is_of_layer(op)]
    for op in found:
        if _adds_up_examples(op, examples):
            warnings.warn("The loss of a tower (%r) depends on a gradient that the model function takes itself and that adds up "
                          "over the tower's own examples (%r), so it is not that of the whole batch. Average it over the towers, "
                          "by towers.all_reduce, before it is used." % (losses[0].name, op.name),
                          TowersWarning, stacklevel=stacklevel)
            return
    for op in found:
        how = _how_it_differs(op, losses[0], tower.ops, needed, towers) if _is_of_a_mean(op, examples) else None
        if how is not None:
            warnings.warn(
                "The loss of a tower (%r) depends on a gradient that the model function takes itself, of a mean over the tower's "
                "own examples (%r), %s. Take it of their sum: tf.gradients(tf.reduce_sum(losses), x) is the same in all towers."
                % (losses[0].name, forward_op_of(op).name, how), TowersWarning, stacklevel=stacklevel)
            return


def _is_of_layer(op):
    """Tells whether an op belongs to the gradient of a layer in which towers meet."""
    return getattr(detail_of(forward_op_of(op)), "place", None) is not None


def _adds_up_examples(op, examples):
    if op.type in _OF_WEIGHTS:
        return examples.lie_along(op.inputs[0])
    if op.type == "Sum":
        return examples.are_reduced(op) and not _is_of_one_example(op, examples)
    return op.type != "L2Loss" and examples.are_added_up(op)


def _is_of_one_example(op, examples):
    """Tells whether a sum, over the axes that are 1 in what was broadcast, takes that of one example along for being 1 too."""
    summed, made = op.inputs[0], [consumer for tensor in op.outputs for consumer in tensor.consumers()]
    made += [consumer for neg in made if neg.type == "Neg" for consumer in neg.outputs[0].consumers()]
    shapes = [reshape.outputs[0].shape.as_list() for reshape in made if reshape.type == "Reshape"]
    axes = [axis - summed.shape.rank for axis in reduced_axes(op) if examples.lie_along(summed, axis)]
    broadcast = [x for x in forward_op_of(op).inputs if x.shape.rank is not None and x.shape.as_list() in shapes]
    return bool(broadcast) and all(summed.shape[axis] == 1 for axis in axes) and all(
        -axis <= x.shape.rank and examples.lie_along(x, axis + x.shape.rank) for x in broadcast for axis in axes)


def _is_of_a_mean(op, examples):
    """Tells whether an op is the division in the gradient of a mean over examples."""
    mean = forward_op_of(op)
    return op.type in _DIVIDES and mean.type == "Mean" and examples.are_reduced(mean)


def _how_it_differs(op, loss, ops, needed, towers):
    """Returns why the gradient of a mean is another one in towers, in words; None where it may be the same.

    Args:
      op: the division by the number of examples.
      loss: tensor.
      ops: list of the tower's operations, in the order in which they were made.
      needed: set of those that the loss needs.
      towers: list of `Tower`.
    """
    scaled, reached = ({t.name for t in op.outputs} for _ in range(2))  # what keeps its scale, and all that is computed of it
    for other in ops:
        if other not in needed:
            continue
        inputs = [t.name for t in other.inputs]
        if reached.intersection(inputs):
            reached.update(t.name for t in other.outputs)
            if forward_op_of(other) is not None and _is_of_layer(other) and not _are_alike(towers):
                return "through a layer in which towers of other sizes meet, whose examples weigh more or less"
        by = [name in scaled for name in inputs]
        if any(by) and not (other.type == "Sign" or other.type in _DIVIDES + ("Mul",) and (all(by) or _by_a_size(other, by))):
            scaled.update(t.name for t in other.outputs)
    return "which is larger than that of the whole batch's mean" if loss.name in scaled else None


def _by_a_size(op, by):
    """Tells whether an op scales by a number that is computed, and may be that of the examples."""
    other = op.inputs[by.index(False)]
    return other.shape.rank == 0 and other.op.type != "Const"


def _are_alike(towers):
    sizes = sizes_of_examples(towers)
    return bool(sizes) and all(whole == size * towers[0].context.num_towers for size, whole in sizes.items())
