"""Sums of weights that moments are divided by, which a loss may be divided by too.

Moments want the sum of all towers' weights, and a loss that of its own tower's. So such a sum stays as it is, and is a count, see
`tf_syncbn.conversion.counts`: that of all towers goes in where moments are computed, and there alone.
"""
from towers.exchanges import stands_at_exchange
from towers.graph_walk import ancestors, written_variable
from tf_syncbn.conversion.counts import DIVISIONS, counts_of

__all__ = ["find_weights"]


def find_weights(sums, root, model):
    """Finds those sums that moments are divided by.

    Args:
      sums: set of operations, what a root has of the examples.
      root: operation.
      model: `tf_syncbn.conversion.layout.Examined`.

    Returns:
      weights: set of operations, some of `sums`, each of one number.
      counts: dict, where these numbers go into what is computed of the other sums, or into variables.
    """
    weights = {op for op in sums if op.type == "Sum" and op.outputs[0].shape.num_elements() == 1 and _divides(op, model)}
    if not weights:
        return weights, {}
    of_moments = ancestors([root], within=model.order).union(_computed_of(sums - weights, model))
    counts = {}
    for consumer in sorted(_computed_of(weights, model) - weights, key=model.order.get):
        if consumer in of_moments or written_variable(consumer) is not None:
            counts.update(_places(consumer, weights, model))
    return weights, counts


def _divides(op, model):
    """Tells whether anything is divided by a sum, or by what is computed of it alone."""
    return any(consumer.type in ("Reciprocal", "Inv") or consumer.type in DIVISIONS
               and counts_of(consumer, 1, model, lambda tensor: tensor.op is op) for consumer in _computed_of({op}, model))


def _places(consumer, weights, model):
    """Returns the counts of the inputs of an op that are computed of weights alone; none where all of its data are."""
    data = [i for i, tensor in enumerate(consumer.inputs) if tensor.op in model.of_data or tensor.op in weights]
    found = {(consumer, i): counts_of(consumer, i, model, lambda tensor: tensor.op in weights) for i in data}
    if all(found.values()) and written_variable(consumer) is None and not any(map(model.layout.axes, consumer.outputs)):
        return {}  # it is a number itself
    return {place: of_weights for place, of_weights in found.items() if of_weights}


def _computed_of(ops, model):
    """Returns the set of what is computed of ops, up to the first ops that make examples."""
    seen, stack = set(ops), list(ops)
    while stack:
        for tensor in stack.pop().outputs:
            for consumer in set(tensor.consumers()) - seen:
                if consumer in model.order and not stands_at_exchange(consumer):
                    seen.add(consumer)
                    if not any(map(model.layout.axes, consumer.outputs)):
                        stack.append(consumer)
    return seen
