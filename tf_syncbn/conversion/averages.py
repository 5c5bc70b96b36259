"""Moving averages of converted batch norms: which variables average which moments, and in which order they move."""
import functools

from tf_syncbn.conversion.peephole import ROOTS
from tf_syncbn.moving_averages import AveragedLayer, remember_layer
from towers.graph.ordering import order_writes
from towers.graph.walk import end_of, written_variables
from towers.sharding.placements import Replicate

__all__ = ["order_updates", "remember_averages", "sources_of"]


def sources_of(plan, batch_norms):
    """Finds what is computed of the moments of batch norms and of no examples.

    Args:
      plan: `towers.sharding.plan.propagation.Plan` of the tower.
      batch_norms: list of `tf_syncbn.conversion.peephole.Moments`.

    Returns:
      A dict from ops to frozensets of pairs of a batch norm's number and "mean", "variance" or "unknown".
    """
    handed_out = {end: (number, kind) for number, batch_norm in enumerate(batch_norms)
                  for kind, ends in (("mean", batch_norm.means), ("variance", batch_norm.variances)) for end in ends}
    found = {}
    for op in plan.order:
        sources = set()
        for tensor in op.inputs:
            end = end_of(tensor)
            if end in handed_out:
                sources.add(handed_out[end])
            elif isinstance(plan.placements.get(end, Replicate()), Replicate):
                sources.update(found.get(tensor.op, ()))
        if op.type in ROOTS:  # what averages these averages no variance
            sources = {(number, "unknown") for number, _ in sources}
        if sources:
            found[op] = frozenset(sources)
    return found


def remember_averages(batch_norms, scopes, sources, moments_of, tower):
    """Notes the moving averages of batch norms, for `tf_syncbn.recalibrate`.

    Args:
      batch_norms: list of `Moments`.
      scopes: list of their scopes.
      sources: from `sources_of`.
      moments_of: a function of a `Moments` that returns the moments of all towers.
      tower: `TowerContext`.
    """
    kinds = {}  # number of the batch norm -> name of the variable -> what it averages
    for op, of_op in sources.items():
        for variable in written_variables(op):
            for number, kind in of_op:
                kinds.setdefault(number, {}).setdefault(variable.name, set()).update(of_op)
    for number, (batch_norm, scope) in enumerate(zip(batch_norms, scopes)):
        if number not in kinds:
            continue
        averages = {name: next(iter(of_name))[1] if len(of_name) == 1 else "unknown" for name, of_name in kinds[number].items()}
        is_known = sorted(averages.values()) == ["mean", "variance"] and len(batch_norm.kept) == 1
        is_fused = batch_norm.kind == "fused"
        epsilon = batch_norm.op.get_attr("epsilon") if is_fused else 0.0
        remember_layer(AveragedLayer(scope, averages if is_known else dict.fromkeys(averages, "unknown"), is_fused, epsilon,
                                     functools.lru_cache(None)(functools.partial(moments_of, batch_norm))), tower)


def order_updates(plan, sources):
    """Lets a layer that is applied again move its averages after it did so before: TensorFlow gives the two no order.

    Args:
      plan: `Plan` of the tower, which has been carried out.
      sources: from `sources_of`.
    """
    order_writes([op for op in plan.order if op in sources], plan.order)
