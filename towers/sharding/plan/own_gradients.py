"""Ops with gradient functions of the model's own: `tf.custom_gradient`, and what `gradient_override_map` puts another one on.

Such a gradient function runs when the plan has been carried out, and may keep tensors of the forward pass. So a function of
`tf.custom_gradient` takes the tower's own examples where it computes each by itself, and else all that it takes is whole. What
its gradient function makes is looked at in `towers.sharding.plan.gradient_functions`.
"""
from towers.graph.gradient_hook import detail_of
from towers.graph.private import gradient_of
from towers.graph.walk import end_of
from towers.sharding.nodes import Refused
from towers.sharding.placements import Replicate, Shard

__all__ = ["OwnGradients"]


class OwnGradients:
    """The ops with gradient functions of the model's own.

    Args:
      order: list of ops, each behind what it takes.

    Attributes:
      ops: list of those of them that have such a gradient.
      inside: dict from the ops of a function of `tf.custom_gradient`, its end among them, to that end, which has the gradient.
      whole: set of the ends of functions that take what they take whole, as they look at the examples together.
    """

    def __init__(self, order):
        self.ops = [op for op in order if gradient_of(op) is not None and detail_of(op) is None]
        self.inside, self.whole, self._taken, self._returned = {}, set(), {}, {}
        position = {op: number for number, op in enumerate(order)}
        for op in self.ops:
            if op.type == "IdentityN":  # which hands on what the function returned, then what it took
                self._add(op, position)

    def _add(self, end, position):
        ends, within = [end_of(tensor) for tensor in end.inputs], set()
        returned = []
        for number, tensor in enumerate(end.inputs):
            is_behind, passed = _between(tensor, set(ends[number + 1:]), position)
            if is_behind:
                returned.append(number)
                within |= passed
        self._returned[end], self._taken[end] = returned, {ends[k] for k in range(len(ends)) if k not in returned}
        self.inside[end] = end
        for op in sorted(within, key=position.__getitem__):
            if any(end_of(tensor) in self._taken[end] or self.inside.get(tensor.op) is end for tensor in op.inputs):
                self.inside.setdefault(op, end)

    def returned(self, op):
        """Returns the numbers of the outputs of an op that are results: the others are what a function took."""
        return self._returned.get(op, range(len(op.outputs)))

    def taken_whole(self, op, placements):
        """Returns which inputs of an op such a function takes whole, a list of int."""
        end = self.inside.get(op)
        if end is None:
            return []
        return [k for k, tensor in enumerate(op.inputs) if end_of(tensor) in self._taken[end] and not isinstance(
            placements[k], Replicate) and (end in self.whole or not isinstance(placements[k], Shard))]

    def that_look_at_all(self, plan, meets):
        """Returns the ends of functions that do not compute each example by itself, by a plan, a set.

        Args:
          plan: `towers.sharding.plan.propagation.Plan`.
          meets: a function of an op that tells whether towers meet for it by the plan, or it is made anew.
        """
        found = {end for op, end in self.inside.items() if op is not end and meets(op, self._taken[end])}
        for end, returned in self._returned.items():
            placements = [plan.placements.get(end_of(tensor), Replicate()) for tensor in end.inputs]
            takes_rows = any(isinstance(p, Shard) for k, p in enumerate(placements) if k not in returned)
            if takes_rows and not all(isinstance(placements[k], Shard) for k in returned):
                found.add(end)
        return found

    def refuse_other_sizes(self, plan, whole_dims):
        """Refuses functions of what has another shape in a tower than it will have: it is made anew, and they keep what was.

        Args:
          plan: `towers.sharding.plan.propagation.Plan`.
          whole_dims: a function of a tensor that returns its shape in one tower on the whole batch, or None.
        """
        for end in self._taken:
            for tensor in end.inputs:
                whole, placement = whole_dims(tensor), plan.placements.get(end_of(tensor))
                own = None if tensor.shape.rank is None else tensor.shape.as_list()
                rows = placement.axis if isinstance(placement, Shard) and end not in self.whole else None
                if whole and own and any(axis != rows and pair[0] != pair[1] for axis, pair in enumerate(zip(whole, own))):
                    raise Refused("%r has a gradient of its own, and its function takes %r for all examples of a batch whose "
                                  "size is known. Hand the batch in with an unknown size, tf.placeholder_with_default(x, "
                                  "[None, ...])." % (end.name, tensor.name))


def _between(tensor, later, within):
    """Tells whether a tensor is among others, or computed of them, and returns the ops between, a set."""
    if end_of(tensor) in later:
        return True, set()
    is_behind, seen, stack = False, set(), [tensor.op]
    while stack:
        op = stack.pop()
        if op in seen or op not in within:
            continue
        seen.add(op)
        for source in op.inputs:
            if end_of(source) in later:
                is_behind = True
            else:
                stack.append(source.op)
    return is_behind, seen
