"""Square roots and the like by which examples are scaled, and what such a root has of them.

If all that it has are sums, means and numbers of examples, it is that of the whole batch once these are.
"""
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from tf_syncbn.axis_rules import reduced_axes
from tf_syncbn.fused_batch_norms import FUSED, is_fused, is_training
from tf_syncbn.layout import Layout

__all__ = ["SAME_VALUE", "Examined", "Statistics", "corrected_by", "counts_beside", "is_root", "roots_of", "statistics_of",
           "use_of"]

# What a vector of moments goes through, unchanged or a little, on its way to the square root.
SAME_VALUE = ("Identity", "StopGradient", "Squeeze", "Reshape", "ExpandDims", "Cast", "CheckNumerics")
_CHOSEN = ("Switch", "RefSwitch", "Merge", "Select", "SelectV2", "If", "StatelessIf", "Case", "StatelessCase")
_SHIFTED = ("Add", "AddV2", "Mul", "RealDiv", "Maximum", "BiasAdd", "Reciprocal", "Inv", "Neg", "Log")
_FACTORS = ("Mul", "RealDiv", "Div", "DivNoNan")
_ROOTS = ("Rsqrt", "Sqrt")
_SCALES = _FACTORS + ("BatchNormWithGlobalNormalization",) + FUSED
# What is taken of each example before all are added up.
_OF_EACH = SAME_VALUE + ("Sub", "SquaredDifference", "Square", "Mul", "Pow", "Abs", "RealDiv", "AddV2", "Add", "Mean", "Sum")


class Examined(NamedTuple):
    """Ops of a model, and what is known of them.

    Fields:
      order: dict from the operations to their places among them.
      layout: `Layout`, where examples lie.
      of_data: set of those that depend on data.
      of_weights: set of those that depend on variables and on no data.
    """
    order: dict
    layout: Layout
    of_data: set
    of_weights: set


class Statistics(NamedTuple):
    """What a root has of the examples.

    Fields:
      sums: set of the ops that take sums or means over examples.
      counts: set of pairs (op, number of its input), where a number of examples goes in.
      are_all: whether there is nothing else: no example by itself, no maximum, no sum over a part of the batch.
    """
    sums: Any
    counts: Any
    are_all: bool


def is_root(op):
    """Tells whether an op takes a root, or normalizes by a variance that it is given."""
    if op.type == "Pow":
        exponent = tf.get_static_value(op.inputs[1])
        return exponent is None or bool((exponent % 1 != 0).any())
    return op.type in _ROOTS or bool(_given_moments(op)) or op.type == "Exp" and _is_of_log(op)


def _given_moments(op):
    """Returns the numbers of the inputs in which an op is given moments to normalize by."""
    if op.type == "BatchNormWithGlobalNormalization":
        return 1, 2
    return (3, 4) if is_fused(op) and not is_training(op) else ()


def _is_of_log(op):
    """Tells whether an exponential is that of a logarithm times something: a power."""
    stack = [op]
    while stack:
        for tensor in stack.pop().inputs:
            if tensor.op.type == "Log":
                return True
            if tensor.op.type in ("Mul", "Neg", "RealDiv") + SAME_VALUE:
                stack.append(tensor.op)
    return False


def roots_of(op, model):
    """Returns the roots that a variance, or the moments of a fused op, reach through arithmetic; a list."""
    seen, stack, roots = {op}, [op], []
    while stack:
        op = stack.pop()
        for tensor in list(op.outputs)[1:3] if is_fused(op) else op.outputs:
            for consumer in set(tensor.consumers()) - seen:
                given = _given_moments(consumer)
                if is_root(consumer) and (not given or any(consumer.inputs[i] is tensor for i in given)):
                    seen.add(consumer)
                    roots.append(consumer)
                elif consumer.type in SAME_VALUE + _CHOSEN + _SHIFTED:
                    seen.add(consumer)
                    stack.append(consumer)
    return roots


def use_of(root, model):
    """Tells what becomes of a root: it "scales" examples, "meets" them otherwise, or None: it never comes back to them."""
    if _given_moments(root):
        return "scales"
    seen, stack, use = {root}, [root], None
    while stack:
        for tensor in stack.pop().outputs:
            for consumer in set(tensor.consumers()) - seen:
                seen.add(consumer)
                if consumer not in model.order:
                    continue
                if not any(model.layout.axes(output) for output in consumer.outputs):
                    stack.append(consumer)
                elif consumer.type in _SCALES:
                    return "scales"
                else:
                    use = "meets"
    return use


def statistics_of(root, model):
    """Looks for what a root has of the examples; returns `Statistics`."""
    sums, counts, are_all, seen = set(), set(), True, set()
    stack = [(root, i) for i in _given_moments(root) or range(len(root.inputs))]
    while stack:
        op, i = stack.pop()
        tensor, source = op.inputs[i], op.inputs[i].op
        if model.layout.is_count(tensor):
            counts.add((op, i))
        elif source not in seen and source in model.of_data and source in model.order:
            seen.add(source)
            crossing = model.layout.crosses(source) if source.type in ("Mean", "Sum") else None
            if crossing is not None:
                sums.add(source)
                are_all = are_all and crossing == "all" and (source.type == "Mean" or model.layout.is_sure(source.inputs[0]))
                of_each, others = _of_each(source, model)
                stack += of_each
                sums |= others
            elif any(model.layout.axes(t) for t in source.inputs):
                are_all = False
                if source.type in SAME_VALUE + _SHIFTED:  # of sums over a part of the batch perhaps, or of more than them
                    stack += [(source, k) for k in range(len(source.inputs))]
            else:
                stack += [(source, k) for k in range(len(source.inputs))]
    for op in sums:
        if op.type == "Sum":
            more, are_known = _divisors(op, model)
            counts, are_all = counts | more, are_all and are_known
    return Statistics(sums, counts, are_all)


def counts_beside(moments, model):
    """Returns where numbers of examples go in with moments, in Bessel's correction say: a set of (op, number of its input)."""
    reached, stack, counts = set(), list(moments), set()
    while stack:
        tensor = stack.pop()
        for consumer in set(tensor.consumers()) - reached if not model.layout.axes(tensor) else ():
            if consumer in model.order and not any(model.layout.axes(output) for output in consumer.outputs):
                reached.add(consumer)
                stack += consumer.outputs
    seen, stack = set(reached), [(op, i) for op in reached for i in range(len(op.inputs))]
    while stack:
        op, i = stack.pop()
        source = op.inputs[i].op
        if model.layout.is_count(op.inputs[i]):
            counts.add((op, i))
        elif source not in seen and source in model.of_data and not any(map(model.layout.axes, source.inputs)):
            seen.add(source)
            stack += [(source, k) for k in range(len(source.inputs))]
    return counts


def corrected_by(number, variance):
    """Returns the ops that give a variance times `number / (number - 1)`, by constants; a list."""
    found, stack = [], [(variance, 1.0)]
    while stack:
        tensor, factor = stack.pop()
        for consumer in tensor.consumers():
            if consumer.type in SAME_VALUE:
                stack.append((consumer.outputs[0], factor))
            elif consumer.type in _FACTORS:
                i = 1 if consumer.inputs[0] is tensor else 0
                value = tf.get_static_value(consumer.inputs[i])
                if value is None or value.size != 1 or not value or i == 0 and consumer.type != "Mul":
                    continue
                now = factor * value.item() if consumer.type == "Mul" else factor / value.item()
                if number > 1 and abs(now * (number - 1) - number) < 1e-6 * number < 1e-1:
                    found.append(consumer)
                else:
                    stack.append((consumer.outputs[0], now))
    return found


def _of_each(op, model):
    """Looks at what a reduction adds up.

    Returns:
      taken: list of (op, number of its input), what goes in that is no example: a mean, say, that is subtracted.
      others: set of the ops that reduce the same examples alike: the mean of x, if `op` is that of x^2.
    """
    seen, stack, taken, others = set(), [op.inputs[0]], [], set()
    while stack:
        tensor = stack.pop()
        others.update(other for other in tensor.consumers() if other in model.order and other.type == op.type
                      and reduced_axes(other) == reduced_axes(op))
        for i, of_each in enumerate(tensor.op.inputs) if tensor.op.type in _OF_EACH and tensor.op in model.order else ():
            if not model.layout.axes(of_each):
                taken.append((tensor.op, i))
            elif of_each.op not in seen:
                seen.add(of_each.op)
                stack.append(of_each)
    return taken, others - {op}


def _divisors(op, model):
    """Looks for the numbers of examples that a sum is divided by.

    Returns:
      counts: see `Statistics`; a constant that is the number of what is added up is one too.
      are_known: False where it is multiplied or divided by a constant that may have been computed of such a number.
    """
    number = tf.TensorShape([op.inputs[0].shape[axis] for axis in reduced_axes(op)]).num_elements()
    counts, are_known, stack = set(), True, list(op.outputs)
    while stack:
        tensor = stack.pop()
        for consumer in tensor.consumers():
            if consumer.type in _FACTORS:
                place, is_known = _number(consumer, 1 if consumer.inputs[0] is tensor else 0, model, number)
                counts, are_known = counts | place, are_known and is_known
            elif consumer.type in SAME_VALUE:
                stack += consumer.outputs
            elif consumer.type == "IdentityN":
                stack += [output for output, source in zip(consumer.outputs, consumer.inputs) if source is tensor]
    return counts, are_known


def _number(op, i, model, number):
    """Returns where a number of examples goes into an input of an op, a set of one or none, and whether that is for sure."""
    tensor, value = op.inputs[i], _value(op.inputs[i], model)
    if model.layout.is_count(tensor) or number and value == number:
        return {(op, i)}, True
    if value is not None:
        of_number = (number - 1, 1 / number, 1 - 1 / number, number / max(number - 1, 1)) if number and number > 1 else ()
        return set(), not any(abs(value - other) < 1e-6 * other for other in of_number)
    source = tensor.op
    if source.type in SAME_VALUE + ("Reciprocal", "Inv", "Sub", "IdentityN"):
        return _number(source, tensor.value_index, model, number)
    if source.type in ("RealDiv", "Div"):
        return _number(source, 1, model, number)
    return set(), source in model.of_data or source in model.of_weights or source not in model.order


def _value(tensor, model):
    """Returns the one value that all numbers of a constant, or of sums of a constant, have; None where they differ."""
    values = tf.get_static_value(tensor)
    if values is None and tensor.op.type == "Sum":
        of_each, axes = (tf.get_static_value(source) for source in tensor.op.inputs)
        values = None if of_each is None or axes is None else of_each.sum(tuple(axes.reshape([-1])))
    if values is None:
        return model.layout.number(tensor)
    return values.item(0) if values.size and (values == values.item(0)).all() else None
