"""What a later tower does by its own data, beside ops that tower 0's stand for.

An op of tower 0 that takes the place of a later tower's waits for nothing of what that one waited for: a sum of the tower's own
examples that is written first, or in the same branch of a tf.cond. Such effects have to happen all the same.
"""
from towers.graph.op_types import CALLS
from towers.graph.ordering import take_instead
from towers.graph.private import branches_of, control_flow_now, control_flow_of, run_after, wait_only_for, waiting_for
from towers.graph.walk import ancestors, descendants, is_ref

__all__ = ["OwnEffects"]


class OwnEffects:
    """The effects of a tower that are its own: writes of variables, and what else its outputs need.

    Args:
      view: `towers.state.reads_and_writes.View` of the tower.
      shared: set of variables whose writes tower 0's stand for.
    """

    def __init__(self, view, shared):
        self._view = view
        own = {op for op, variables in view.writes.items() if not shared.issuperset(variables)}
        own.update(op for op in view.of_batch if op in view.needed and _is_an_effect(op))
        self._effects = own & view.needed
        self._after = descendants(self._effects, within=view.needed) if self._effects else set()
        inner = [op for op in own if control_flow_of(op) is not control_flow_now(op.graph)]
        self._results = {result for op in inner for result in view.results(op)}

    def holds(self, op):
        """Tells whether an op stands in a tf.cond or loop beside effects that are the tower's own."""
        return not self._results.isdisjoint(self._view.results(op)) and op not in self._results

    def is_result(self, op):
        """Tells whether an op stands for effects of the tower's own in a tf.cond or loop."""
        return op in self._results

    def takers(self, op):
        """Returns the ops of the tower that take what an op gives, or wait for it, a list."""
        takers = [consumer for tensor in op.outputs for consumer in tensor.consumers()] + waiting_for(op)
        return [taker for taker in takers if taker in self._view.made]

    def can_leave_out(self, op, writes):
        """Tells whether `leave_out` can take a write out of a tf.cond, `writes` being all of its variable in the tower."""
        is_of_ref = len(op.outputs) == 1 and is_ref(op.outputs[0]) and is_ref(op.inputs[0])
        return (op in self._view.needed and len(writes) == 1 and len(branches_of(op)) == 1 and op.type not in CALLS
                and (is_of_ref or not op.outputs)
                and all(control_flow_of(taker) is control_flow_of(op) for taker in self.takers(op)))

    def leave_out(self, op, others):
        """Lets all that takes what a write gives, or waits for it, read the variable after `others` instead.

        What the write waited for of the tower's own effects is waited for still.
        """
        before = [source for source in [tensor.op for tensor in op.inputs] + op.control_inputs if source in self._after]
        _read_instead(op, op.inputs[0], others + before)
        for waiting in waiting_for(op):
            earlier = [each for each in waiting.control_inputs if each is not op]
            wait_only_for(waiting, dict.fromkeys(earlier + others + before))

    def before(self, op):
        """Returns a list: what stands outside of tf.conds and loops for those effects that an op of `needed` waits for."""
        found = self._effects.intersection(ancestors([op], within=self._after))
        results = {result for effect in found for result in self._view.results(effect)} - {op}
        return sorted(results, key=lambda result: result.name)


def _is_an_effect(op):
    """Tells whether an op, not of one that writes variables, is there for what it does: an assertion, a print."""
    return op.op_def is not None and op.op_def.is_stateful and (not op.outputs or op.type in CALLS)


def _read_instead(op, tensor, earlier):
    """Lets what takes an op's outputs take a tensor, after other ops."""
    for taken in op.outputs:
        for consumer in taken.consumers():
            take_instead([consumer], taken, tensor)
            run_after(consumer, earlier)
