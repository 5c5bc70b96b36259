"""Numbers of examples in a model's arithmetic with moments: what sums are divided by, and Bessel's correction.

Where such a number goes into an op, those of all towers have to. A place is a pair (op, number of its input); counts are a
dict from places whose input depends on the data through numbers of examples alone, to the set of places further back
where these numbers themselves go in. What stands between is not the moments' own, and is made anew for them.
"""
import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph_walk import descendants
from towers.static_values import static_value
from tf_syncbn.conversion.axis_rules import reduced_axes

__all__ = ["DIVISIONS", "FACTORS", "SAME_VALUE", "corrected_by", "counts_beside", "counts_of", "divisors_of", "is_corrected",
           "with_counts"]

SAME_VALUE = ("Identity", "StopGradient", "Squeeze", "Reshape", "ExpandDims", "Cast", "CheckNumerics")
DIVISIONS = ("RealDiv", "Div", "DivNoNan")
FACTORS = ("Mul",) + DIVISIONS
_OF_NUMBERS = {"Add": np.add, "AddV2": np.add, "Sub": np.subtract, "Mul": np.multiply, "RealDiv": np.divide, "Div": np.divide,
               "DivNoNan": np.divide, "FloorDiv": np.floor_divide, "Maximum": np.maximum, "Neg": np.negative,
               "Reciprocal": np.reciprocal, "Inv": np.reciprocal, "Sqrt": np.sqrt, "Pow": np.power}
_ARITHMETIC = SAME_VALUE + tuple(_OF_NUMBERS)


def counts_of(op, i, model, is_count=None):
    """Returns the places of the numbers of examples that an input of an op is computed of; none if of other data too.

    `is_count` is a function that tells whether a tensor is such a number; None is whether it is a size.
    """
    found, seen, stack, is_count = set(), set(), [(op, i)], is_count or model.layout.is_count
    while stack:
        place = op, i = stack.pop()
        source = op.inputs[i].op
        if is_count(op.inputs[i]):
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


def corrected_by(number, variance, model, counts=()):
    """Returns the ops that give a variance times `number / (number - 1)`, by constants or what is computed of them; a list.

    Constants at the places `counts` are replaced, and make no such factor.

    Other factors may stand before these: the share of a moving average, say.
    """
    found, stack, wanted = [], [(variance, ())], number / max(number - 1, 1)
    rounding = 1e-12 if variance.dtype == tf.float64 else 4e-7
    while stack:
        tensor, products = stack.pop()  # of the last factor, of the last two, and so on
        for consumer in tensor.consumers():
            if consumer.type in SAME_VALUE:
                stack.append((consumer.outputs[0], products))
            elif consumer.type in FACTORS:
                i = 1 if consumer.inputs[0] is tensor else 0
                if (consumer, i) in counts:
                    stack.append((consumer.outputs[0], ()))
                    continue
                value = None if consumer.inputs[i].op in model.of_data else _computed_value(consumer.inputs[i], model)
                if not value or i == 0 and consumer.type != "Mul":
                    continue
                factor = value if consumer.type == "Mul" else 1 / value
                now = tuple(product * factor for product in (1.0,) + products)
                if wanted > 1 + 4 * rounding and any(abs(product - wanted) < rounding * wanted for product in now):
                    found.append(consumer)
                else:
                    stack.append((consumer.outputs[0], now))
    return found


def is_corrected(root, sums, counts, model):
    """Tells whether anything between sums or means and a root that is of them is multiplied by Bessel's correction, a constant.

    Args:
      root: operation.
      sums: list of operations, Sums or Means.
      counts: places of constants that are no such factor, as they become those of all towers.
      model: `tf_syncbn.conversion.layout.Examined`.
    """
    numbers = {number for number in map(_number_added_up, sums) if number and number > 1}
    first, before, stack = min(map(model.order.get, sums)), set(), [root]
    while stack:  # not back to where the network begins
        sources = {tensor.op for tensor in stack.pop().inputs} - before
        stack += [source for source in sources if model.order.get(source, -1) >= first]
        before.update(stack)
    between = descendants(sums, within=before)
    return any(corrected_by(number, tensor, model, counts) for number in numbers for op in between for tensor in op.outputs[:1]
               if tensor.dtype.is_floating)


def divisors_of(op, model, is_used, are_weighted):
    """Looks for the numbers of examples that a sum, or what is computed of it, is multiplied or divided by.

    Args:
      op: operation, a Sum or Mean over examples.
      model: `tf_syncbn.conversion.layout.Examined`.
      is_used: a function of an op that tells whether examples are computed of it.
      are_weighted: bool, whether sums of weights stand for numbers of examples, and no constant does.

    Returns:
      counts: a constant that is the number of what is added up is one too.
      are_known: False where the factor is a constant that may have been computed of such a number.
    """
    counts, are_known, seen, stack = {}, True, set(), [(op.outputs[0], None if are_weighted else _number_added_up(op))]
    while stack:
        tensor, number = stack.pop()
        for consumer in set(tensor.consumers()) - seen:
            if consumer not in model.order or any(map(model.layout.axes, consumer.outputs)) or not is_used(consumer):
                continue
            seen.add(consumer)
            if consumer.type in FACTORS and consumer.inputs[0] is not consumer.inputs[1]:
                i = 1 if consumer.inputs[0] is tensor else 0
                is_inverted = consumer.type in DIVISIONS and i == 0 and number == 1  # the 1 of 1 / n counts nothing
                found, is_known = (set(), True) if is_inverted else _number(consumer, i, model, number)
                are_known = are_known and is_known
                if found:
                    counts[consumer, i] = found
            if consumer.type == "IdentityN":
                stack += [(output, number) for output, source in zip(consumer.outputs, consumer.inputs) if source is tensor]
            elif consumer.type in ("Sum", "Mean"):
                stack.append((consumer.outputs[0], None if are_weighted else _number_added_up(consumer)))
            elif consumer.type in _ARITHMETIC + ("Square", "SquaredDifference", "Rsqrt"):
                stack.append((consumer.outputs[0], number))
    return counts, are_known


def _number_added_up(op):
    """Returns how many numbers a reduction adds up, and those before it that it is of; None where that is unknown.

    What a sum is of has been divided by its number where it is a mean.
    """
    reduced, number, kinds = reduced_axes(op), 1, ("Sum",) if op.type == "Sum" else ("Sum", "Mean")
    while reduced is not None:
        size = tf.TensorShape([op.inputs[0].shape[axis] for axis in reduced]).num_elements() if op.type in kinds else 1
        number, op = size and number * size, op.inputs[0].op
        while op.type in SAME_VALUE:
            op = op.inputs[0].op
        if number is None or op.type not in ("Sum", "Mean"):
            return number
        reduced = reduced_axes(op)
    return None


def _number(op, i, model, number):
    """Returns the places of a number of examples behind an input, a set, and whether these are for sure all of them."""
    of_counts = counts_of(op, i, model)
    if of_counts:
        return of_counts, True
    tensor, value, computed = op.inputs[i], _value(op.inputs[i], model), _computed_value(op.inputs[i], model)
    is_number = number and number in (value, computed)
    if is_number and (number > 1 or op.type != "Mul"):
        return {(op, i)}, True
    if is_number:  # a product with 1, which 1 / n is too
        return set(), False
    found, is_known = (set(), True) if value is not None else _number_behind(tensor, model, number)
    if not found and computed is not None:
        of_number = [n ** power for n in (number, number - 1, number / (number - 1)) for power in (1, -1, 0.5, -0.5)
                     if n != 1] if number and number > 1 else ()
        return set(), is_known and not any(abs(computed - other) < 1e-6 * other for other in of_number)
    return found, is_known


def _number_behind(tensor, model, number):
    """Returns what `_number` does, of what a tensor is computed of."""
    source = tensor.op
    is_share = source.type == "Sub" and _computed_value(source.inputs[1], model) is None  # 1 less what is learned, not n - 1
    if source.type in SAME_VALUE + ("Reciprocal", "Inv", "Sub", "IdentityN") and not is_share:
        return _number(source, tensor.value_index, model, number)
    if source.type in ("RealDiv", "Div") and source.inputs[0].op not in model.of_data:
        found, is_known = _number(source, 1, model, number)
        return found.union(_number(source, 0, model, number)[0] if number and number > 1 else ()), is_known
    return set(), source in model.of_data or source in model.of_weights or source not in model.order


def _value(tensor, model):
    """Returns the one value that all numbers of a constant, or of sums of a constant, have; None where they differ."""
    values = tf.get_static_value(tensor)
    if values is None and tensor.op.type == "Sum":
        of_each, axes = tf.get_static_value(tensor.op.inputs[0]), static_value(tensor.op.inputs[1])
        values = None if of_each is None or axes is None else of_each.sum(tuple(axes.reshape([-1])))
    if values is None:
        return model.layout.number(tensor)
    return values.item(0) if values.size and (values == values.item(0)).all() else None


def _computed_value(tensor, model):
    """Returns the one value of what is computed of constants, or of sizes that are known, by arithmetic too."""
    op, value = tensor.op, _value(tensor, model)
    if op.type == "Unpack" and value is None:
        values = tf.get_static_value(op.inputs[0])
        value = None if values is None or values.ndim != 1 else values[tensor.value_index].item()
    if value is None and tensor.shape.num_elements() == 1 and op.type in _ARITHMETIC and op not in model.of_data:
        values = [_computed_value(source, model) for source in (op.inputs[:1] if op.type in SAME_VALUE else op.inputs)]
        with np.errstate(all="ignore"):  # n - 1 of one example
            value = None if None in values else float(_OF_NUMBERS.get(op.type, np.asarray)(*map(np.float64, values)))
    return value
