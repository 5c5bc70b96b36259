"""What is computed of all of a tower's examples together and comes back to each of them: towers compute it otherwise than one.

A batch norm is one such thing, and `tf_syncbn.conversion.detection` finds those of known kinds. This finds whatever else there
is, of no matter which ops, so that nothing stays each tower's own in silence.
"""
from towers.exchanges import stands_at_exchange
from towers.graph_walk import ancestors
from towers.mapped import reads_apart
from towers.private import forward_op_of
from tf_syncbn.conversion.roots import use_of

__all__ = ["find_crossings"]

# What counts how many examples there are of each class.
_COUNTS = frozenset(["Bincount", "DenseBincount", "HistogramFixedWidth", "UniqueWithCounts", "UniqueWithCountsV2"])


def find_crossings(model, known, needed):
    """Returns the ops, in order, that take examples together, whose results examples are computed of.

    What they take are examples, and what they make lies along no axis of theirs. Numbers of examples are integers, and not
    meant, but those of each class are. What an exchange hands on is that of all towers.

    `known` is the set of ops that are of batch norms, or looked at already, `needed` that of what the model's outputs depend on.
    """
    apart = _taken_apart(model)
    exchanged = {op for op in model.order if stands_at_exchange(op)}
    seen = model._replace(order={op: place for op, place in model.order.items() if op in needed and op not in exchanged})
    return [op for op in seen.order if op in model.of_data and op not in known and op not in apart and forward_op_of(op) is None
            and _takes_together(op, model.layout) and use_of(op, seen) is not None and _is_own(op, model, exchanged)]


def _is_own(op, model, exchanged):
    """Tells whether an op is computed of the tower's own data, other than by way of what all towers exchanged."""
    return any(not earlier.inputs and earlier in model.of_data or any(
        tensor.op in model.of_data and tensor.op not in model.order for tensor in earlier.inputs)
        for earlier in ancestors([op], within=model.order, stop=exchanged))


def _takes_together(op, layout):
    if op.type in _COUNTS:
        return any(map(layout.axes, op.inputs)) and not any(map(layout.axes, op.outputs[-1:]))
    return (bool(op.outputs) and op.outputs[0].dtype.is_floating and any(map(layout.axes, op.inputs))
            and not any(map(layout.axes, op.outputs)))


def _taken_apart(model):
    """Returns the ops that take single examples out of a batch, or compute something of one, for that example alone; a set."""
    rows, axes = model.layout.rows, model.layout.axes
    mixed = {source.name for op, source in rows.mixed if use_of(op, model) is not None or any(map(axes, op.outputs))}
    mapped = {read for op in model.order for read in reads_apart(op)}
    of_one = {op: rows.found[op.outputs[0].name].source for op in model.order if op.outputs and op.outputs[0].name in rows.found}
    return mapped | {op for op, source in {**of_one, **rows.taken}.items() if source.name not in mixed}
