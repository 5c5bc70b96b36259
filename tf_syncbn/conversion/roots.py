"""Square roots and the like by which examples are scaled, and what such a root has of them.

If all that it has are sums, means and numbers of examples, it is that of the whole batch once these are.
"""
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from towers.exchanges import stands_at_exchange
from towers.graph_walk import written_variable
from tf_syncbn.conversion.axis_rules import reduced_axes
from tf_syncbn.conversion.counts import FACTORS, SAME_VALUE, counts_of, divisors_of
from tf_syncbn.conversion.fused_batch_norms import FUSED, is_fused, is_training
from tf_syncbn.conversion.weights import find_weights

__all__ = ["Statistics", "is_root", "roots_of", "statistics_of", "use_of"]

# What a vector of moments goes through on its way to the square root.
_CHOSEN = ("Switch", "RefSwitch", "Merge", "Select", "SelectV2", "If", "StatelessIf", "Case", "StatelessCase")
_SHIFTED = ("Add", "AddV2", "Mul", "RealDiv", "Maximum", "BiasAdd", "Reciprocal", "Inv", "Neg", "Log")
_ROOTS = ("Rsqrt", "Sqrt")
_SCALES = FACTORS + ("BatchNormWithGlobalNormalization",) + FUSED
# What is taken of each example before all are added up.
_OF_EACH = SAME_VALUE + ("Sub", "SquaredDifference", "Square", "Mul", "Pow", "Abs", "RealDiv", "AddV2", "Add", "Mean", "Sum")


class Statistics(NamedTuple):
    """What a root has of the examples.

    Attributes:
      sums: set of the ops that take sums or means over examples.
      weights: set of those of them that are sums of weights, by which moments are divided.
      counts: dict, where numbers of examples and sums of weights go in, see `tf_syncbn.conversion.counts`.
      are_all: whether there is nothing else: no example by itself, no maximum, no sum over a part of the batch.
    """
    sums: Any
    weights: Any
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
    seen, stack = set(), [op]
    while stack:
        for source in {tensor.op for tensor in stack.pop().inputs} - seen:
            if source.type == "Log":
                return True
            if source.type in ("Mul", "Neg", "RealDiv") + SAME_VALUE:
                seen.add(source)
                stack.append(source)
    return False


def roots_of(op):
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


def statistics_of(root, model, known):
    """Looks for what a root has of the examples.

    Args:
      root: operation.
      model: `tf_syncbn.conversion.layout.Examined`.
      known: set of ops, and of places of counts, of earlier batch norms. Their sums are among the root's, their weights and what
        these sums are divided by are not.

    Returns:
      `Statistics`.
    """
    sums, counts, are_all, seen = set(), {}, True, set()
    stack = [(root, i) for i in _given_moments(root) or range(len(root.inputs))]
    while stack:
        op, i = stack.pop()
        source, of_counts = op.inputs[i].op, counts_of(op, i, model)
        if of_counts:
            counts[op, i] = of_counts
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
                    stack += [(source, k) for k in _valued(source)]
            else:
                stack += [(source, k) for k in _valued(source)]
    all_weights, of_weights = find_weights(sums, root, model)
    counts.update(of_weights)
    weights = {op.inputs[i].op for place, numbers in of_weights.items() if place not in known for op, i in numbers}
    for op in sums - all_weights - known:
        more, are_known = divisors_of(op, model, lambda consumer: is_root(consumer) or use_of(consumer, model) is not None,
                                      bool(weights))
        counts.update(more)
        are_all = are_all and are_known
    return Statistics(sums - all_weights | weights, weights, counts, are_all)


def _of_each(op, model):
    """Looks at what a reduction adds up.

    Returns:
      taken: list of (op, number of its input), what goes in that is no example: a mean, say, that is subtracted.
      others: set of the ops that reduce the same examples alike, and are read by examples or averages: the mean of x, if `op` is
        that of x^2. The number of labels that a loss is divided by, which may be a sum of the same weights, is none.
    """
    seen, stack, taken, others = set(), [op.inputs[0]], [], set()
    while stack:
        tensor = stack.pop()
        others.update(other for other in tensor.consumers() if other in model.order and other.type == op.type
                      and reduced_axes(other) == reduced_axes(op) and model.layout.crosses(other) == "all"
                      and (op.type == "Mean" or model.layout.is_sure(tensor)) and _kept(other) == _kept(op)
                      and _is_read(other, model))
        for i in _valued(tensor.op) if tensor.op.type in _OF_EACH and tensor.op in model.order else ():
            of_each = tensor.op.inputs[i]
            if not model.layout.axes(of_each):
                taken.append((tensor.op, i))
            elif of_each.op not in seen:
                seen.add(of_each.op)
                stack.append(of_each)
    return taken, others - {op}


def _valued(op):
    """Returns the numbers of the inputs that an op computes values of; the shape of a reshape is none."""
    return range(1 if op.type in SAME_VALUE else len(op.inputs))


def _kept(op):
    """Returns the sizes of the axes that a reduction keeps."""
    return [size for axis, size in enumerate(op.inputs[0].shape.as_list()) if axis not in reduced_axes(op)]


def _is_read(op, model):
    """Tells whether examples, or what is written into variables, are computed of an op in its own tower."""
    seen, stack = {op}, [op]
    while stack:
        for tensor in stack.pop().outputs:
            for consumer in set(tensor.consumers()) - seen:
                if consumer in model.order and not stands_at_exchange(consumer):
                    if written_variable(consumer) is not None or any(map(model.layout.axes, consumer.outputs)):
                        return True
                    seen.add(consumer)
                    stack.append(consumer)
    return False
