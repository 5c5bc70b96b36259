"""Numbers of examples in a model's arithmetic with moments: what sums are divided by, and Bessel's correction.

Where such a number goes into an op, those of all towers have to. A place is a pair (op, number of its input); counts are a
dict from places whose input depends on the data through numbers of examples alone, to the set of places further back
where these numbers themselves go in. What stands between is not the moments' own, and is made anew for them.
"""
import tensorflow.compat.v1 as tf

from tf_syncbn.axis_rules import reduced_axes

__all__ = ["FACTORS", "SAME_VALUE", "corrected_by", "counts_beside", "counts_of", "divisors_of", "with_counts"]

SAME_VALUE = ("Identity", "StopGradient", "Squeeze", "Reshape", "ExpandDims", "Cast", "CheckNumerics")
FACTORS = ("Mul", "RealDiv", "Div", "DivNoNan")
_ARITHMETIC = SAME_VALUE + FACTORS + ("Add", "AddV2", "Sub", "Maximum", "Neg", "Reciprocal", "Inv", "FloorDiv", "Sqrt", "Pow")


def counts_of(op, i, model):
    """Returns the places of the numbers of examples that an input of an op is computed of; none if of other data too."""
    found, seen, stack = set(), set(), [(op, i)]
    while stack:
        place = op, i = stack.pop()
        source = op.inputs[i].op
        if model.layout.is_count(op.inputs[i]):
            found.add(place)
        elif source in model.of_data and source not in seen:
            if source.type not in _ARITHMETIC or model.layout.axes(op.inputs[i]):
                return set()
            seen.add(source)
            stack += [(source, k) for k in range(len(source.inputs))]
    return found


def with_counts(place, counts, whole):
    """Returns an op's input, made anew of other numbers of examples.

    Args:
      place: a place in `counts`.
      counts: the places of the numbers themselves.
      whole: a function of such a number's tensor that returns what takes its place.
    """
    op, i = place
    tensor = op.inputs[i]
    if place in counts:
        return whole(tensor)
    if tensor.op.type not in _ARITHMETIC + ("IdentityN",):
        return tensor
    inputs = [with_counts((tensor.op, k), counts, whole) for k in range(len(tensor.op.inputs))]
    if all(new is old for new, old in zip(inputs, tensor.op.inputs)):
        return tensor
    made = op.graph.create_op(tensor.op.type, inputs, [t.dtype for t in tensor.op.outputs], attrs=tensor.op.node_def.attr,
                              op_def=tensor.op.op_def)
    return made.outputs[tensor.value_index]


def counts_beside(moments, model):
    """Returns the counts that go into ops with moments, given as tensors, and with no other data."""
    reached, counts, stack = set(), {}, [consumer for tensor in moments for consumer in tensor.consumers()]
    names = {tensor.name for tensor in moments}
    while stack:
        op = stack.pop()
        if op in reached or op not in model.order or op.type not in _ARITHMETIC + ("SquaredDifference", "Square"):
            continue
        others = [i for i, tensor in enumerate(op.inputs) if tensor.op in model.of_data and tensor.name not in names
                  and tensor.op not in reached]
        of_counts = {(op, i): counts_of(op, i, model) for i in others}
        if all(of_counts.values()):
            reached.add(op)
            counts.update(of_counts)
            stack += [consumer for tensor in op.outputs for consumer in tensor.consumers()]
    return counts


def corrected_by(number, variance):
    """Returns the ops that give a variance times `number / (number - 1)`, by constants; a list."""
    found, stack = [], [(variance, 1.0)]
    while stack:
        tensor, factor = stack.pop()
        for consumer in tensor.consumers():
            if consumer.type in SAME_VALUE:
                stack.append((consumer.outputs[0], factor))
            elif consumer.type in FACTORS:
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


def divisors_of(op, model):
    """Looks for the numbers of examples that a sum is divided by.

    Returns:
      counts: a constant that is the number of what is added up is one too.
      are_known: False where the sum is multiplied or divided by a constant that may have been computed of such a number.
    """
    number = tf.TensorShape([op.inputs[0].shape[axis] for axis in reduced_axes(op)]).num_elements()
    counts, are_known, stack = {}, True, list(op.outputs)
    while stack:
        tensor = stack.pop()
        for consumer in tensor.consumers():
            if consumer.type in FACTORS and consumer in model.order:
                i = 1 if consumer.inputs[0] is tensor else 0
                found, is_known = _number(consumer, i, model, number)
                are_known = are_known and is_known
                if found:
                    counts[consumer, i] = found
            elif consumer.type in SAME_VALUE:
                stack += consumer.outputs
            elif consumer.type == "IdentityN":
                stack += [output for output, source in zip(consumer.outputs, consumer.inputs) if source is tensor]
    return counts, are_known


def _number(op, i, model, number):
    """Returns the places of a number of examples behind an input, a set of one or none, and whether that is for sure."""
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
