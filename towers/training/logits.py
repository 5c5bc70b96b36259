"""What stands behind a model's outputs: the logits that a softmax was taken of, or a layer that ends in no softmax at all.

A loss of probabilities is exact only by their logits: the log of a probability that has come to 0 is lost, and its gradient too.
The graph still holds them. Only ops are passed that change no value: what is found computes the very same outputs.
"""
import tensorflow.compat.v1 as tf

from towers.graph.op_types import ADDS, ENTERS, HANDS_ON, QUOTIENTS, READS, SAME_NUMBERS
from towers.graph.private import gradient_of, taken_from_outside
from towers.graph.static_values import static_value
from towers.graph.walk import computes_the_same, variable_of
from towers.sharding.rules.table import LAYER, RULES

__all__ = ["find_logits", "looks_like"]

_REDONE = {  # ops that move values or name their type anew, and how another tensor goes through
    "Reshape": lambda op, tensor: tf.reshape(tensor, op.inputs[1]),
    "ExpandDims": lambda op, tensor: tf.expand_dims(tensor, op.inputs[1]),
    "Squeeze": lambda op, tensor: tf.squeeze(tensor, op.get_attr("squeeze_dims") or None),
    "Transpose": lambda op, tensor: tf.transpose(tensor, op.inputs[1]),
    "Cast": lambda op, tensor: tf.cast(tensor, op.outputs[0].dtype),
}
_EXACT = {tf.float16: (tf.float32, tf.float64), tf.bfloat16: (tf.float32, tf.float64), tf.float32: (tf.float64,)}
# Averages of probabilities are probabilities, and of logits, logits: what looks like either does so through these too.
_AVERAGES = ("ResizeBilinear", "ResizeNearestNeighbor", "AvgPool", "AvgPool3D", "StopGradient")
# What may be a layer where it takes a variable: ops by the rules of products and of each example, and what adds a bias.
_LAYERS = ADDS.union({"BiasAdd"}, (name for name, rule in RULES.items() if rule.does == LAYER))


def find_logits(outputs, axis):
    """Returns the logits of which `outputs` are the softmax along an axis, or None where none is found.

    A softmax is TensorFlow's op, or exponentials divided by their sum. Between it and `outputs` may stand identities, casts to a
    wider type, transpositions, and reshapes that leave the classes together. What these wait for, the logits wait for too.

    Args:
      outputs: floating point tensor of known rank.
      axis: int, 0 or more, along which the classes lie.

    Returns:
      A tensor of the shape and dtype of `outputs`.

    Raises:
      ValueError: if the softmax was taken along another axis.
    """
    found = _walk_back(outputs, axis)
    if found is None:
        return None
    logits, passed, waits = found
    with tf.control_dependencies(waits):
        logits = tf.identity(logits, name="logits") if waits else logits
    for op in reversed(passed):
        logits = _REDONE[op.type](op, logits)
    logits.set_shape(outputs.shape)
    return logits


def _walk_back(outputs, axis):
    """Returns what a softmax is of, the ops of `_REDONE` behind it, last one first, and what these wait for, a set; or None."""
    given, tensor, passed, waits = axis, outputs, [], set()
    while tensor.shape.rank is not None and gradient_of(tensor.op) is None:
        op = tensor.op
        waits.update(op.control_inputs)
        if op.type == "Softmax":
            if axis != tensor.shape.rank - 1:
                raise ValueError("%r is the softmax %r along another axis than axis %d of shape %s, where its classes were said "
                                 "to lie: give the axis that the softmax was taken along as `axis`."
                                 % (outputs.name, op.name, given, outputs.shape))
            return op.inputs[0], passed, waits
        logits = _of_exponentials(op, axis)
        if logits is not None:
            return logits, passed, waits
        if op.type not in HANDS_ON:
            axis = _axis_before(op, axis)
            if axis is None:
                return None
            passed.append(op)
        tensor = op.inputs[0]
    return None


def looks_like(outputs, axis):
    """Tells what outputs without a softmax that `find_logits` finds look like: "probabilities", "logits", or neither, None.

    Probabilities are sigmoids, what was divided by its sum over the classes, and averages of softmaxes. Logits end in a layer
    with a variable kernel or bias.
    """
    tensor, is_moved = outputs, False
    while tensor.op.type in HANDS_ON.union(_AVERAGES, _REDONE):
        is_moved = is_moved or tensor.op.type in _REDONE and tensor.op.type != "Cast"
        tensor = tensor.op.inputs[0]
    op = tensor.op
    of_classes = op.type == "Softmax" and axis == outputs.shape.rank - 1 or (
        op.type in QUOTIENTS and _is_sum(op.inputs[1], op.inputs[0], axis))
    if op.type == "Sigmoid" or of_classes and not is_moved:
        return "probabilities"
    if op.type in _LAYERS and any(_is_variable(part) for part in op.inputs) and not any(map(_ends_in_softmax, op.inputs)):
        return "logits"
    return None


def _ends_in_softmax(tensor):
    while tensor.op.type in HANDS_ON.union(_REDONE):
        tensor = tensor.op.inputs[0]
    return tensor.op.type == "Softmax"


def _is_variable(tensor):
    while True:
        outside = taken_from_outside(tensor.op)
        if outside is None and tensor.op.type not in SAME_NUMBERS | READS | ENTERS:
            break
        tensor = tensor.op.inputs[0] if outside is None else outside
    return variable_of(tensor.op) is not None


def _is_sum(total, tensor, axis):
    """Tells whether `total` is the sum over an axis of `tensor`, that axis kept."""
    op = total.op
    if op.type != "Sum" or not op.get_attr("keep_dims") or not computes_the_same(op.inputs[0], tensor):
        return False
    axes = tf.get_static_value(op.inputs[1])
    return axes is not None and [a % tensor.shape.rank for a in axes.reshape([-1])] == [axis]


def _of_exponentials(op, axis):
    """Returns what the exponentials are of that `op` divides by their sum, less what is subtracted from all classes alike."""
    if op.type not in QUOTIENTS or op.inputs[0].op.type != "Exp" or not _is_sum(op.inputs[1], op.inputs[0], axis):
        return None
    exponent = op.inputs[0].op.inputs[0]
    if exponent.op.type == "Sub":
        logits, common = exponent.op.inputs
        if logits.shape.rank == common.shape.rank == exponent.shape.rank and tf.dimension_value(common.shape[axis]) == 1 and (
                tf.dimension_value(logits.shape[axis]) != 1):
            return logits
    return exponent


def _axis_before(op, axis):
    """Returns the axis of an op's input that is `axis` of its output, the values along it in their order; else None."""
    before, after = op.inputs[0].shape if op.inputs else None, op.outputs[0].shape
    if op.type not in _REDONE or before.rank is None:
        return None
    if op.type == "Cast":
        return axis if op.outputs[0].dtype in _EXACT.get(op.inputs[0].dtype, ()) else None
    if op.type == "Transpose":
        order = static_value(op.inputs[1])
        return None if order is None else int(order[axis])
    size, behind = tf.dimension_value(after[axis]), after[axis + 1:].num_elements()
    if size is None or size == 1 or behind is None:  # one class lies along any axis of size 1
        return None
    return next((i for i in range(before.rank) if tf.dimension_value(before[i]) == size
                 and before[i + 1:].num_elements() == behind), None)
