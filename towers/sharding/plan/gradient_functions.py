"""What gradient functions of the model's own make, held to the plan that their towers followed.

They run when the plan has been carried out, in each gradient pass. Of what they keep of the forward pass they get what stands
for it now. What they make has to need no meeting: to compute each example by itself where the gradient is of the tower's own
examples, and to be linear in the gradient, of which each tower has its part.
"""
from towers.graph.private import forward_op_of, rewire
from towers.graph.walk import end_of
from towers.sharding.nodes import Refused
from towers.sharding.placements import Own, Partial, PartialMean, Replicate, Shard
from towers.sharding.plan.facts import Facts
from towers.sharding.plan.loops import meets_for
from towers.sharding.plan.propagation import propagate

__all__ = ["gradient_check"]

_OF_SHAPES = frozenset(["BroadcastGradientArgs"])  # the axes that it tells are those of a tower's shapes too


def gradient_check(plan, now):
    """Returns a function of the ops that a gradient pass made, which raises `Refused` where they are not exact.

    Args:
      plan: `towers.sharding.plan.propagation.Plan`.
      now: a function of a tensor that returns what stands for it, now that the plan has been carried out.
    """
    def check(made):
        ends, of_end, made = {now(op.outputs[0]).op: op for op in plan.own_gradients.ops}, {}, dict.fromkeys(made)
        for op in made:
            end = _end_of(op, ends, made)
            if end is not None:
                of_end.setdefault(end, []).append(op)
        for end, ops in of_end.items():
            _check(end, ops, made, plan, now)
    return check


def _end_of(op, ends, made):
    """Returns the op with a gradient of its own whose gradient function made an op, or None."""
    while op in made:  # what it differentiates itself, it has made itself
        op = forward_op_of(op)
    return ends.get(op)


def _needed(ops):
    """Returns those of a gradient function's ops that what it returns is computed of, in order.

    `recompute_grad` lets ops wait for the gradient by x == x of what has no NaN, which is true whatever x is; where TensorFlow
    knows that, a truth about the gradient remains that nobody reads.
    """
    inside = set(ops)

    def is_returned(out):
        readers = out.consumers()
        return any(reader not in inside for reader in readers) if readers else out.dtype.is_floating or out.dtype.is_complex
    seen, stack = set(), [op for op in ops if any(map(is_returned, op.outputs))]
    while stack:
        op = stack.pop()
        if op in inside and op not in seen:
            seen.add(op)
            if not (op.type == "Equal" and op.inputs[0] is op.inputs[1] and not op.inputs[0].dtype.is_floating):
                stack.extend(tensor.op for tensor in op.inputs)
    return [op for op in ops if op in seen]


def _check(end, ops, made, plan, now):
    ops = _needed(ops)
    slopes, given, inside = set(), {}, set(ops)
    stands = dict(zip(map(end_of, plan.inputs[end]), now(end.outputs[0]).op.inputs))
    wants = plan.decisions[end].wants if end in plan.decisions else {}
    made_whole = {end_of(plan.inputs[end][k]) for k in wants}
    for op in ops:
        for number, tensor in enumerate(op.inputs):
            if tensor.op in inside:
                continue
            new = stands.get(end_of(tensor), now(tensor))
            placement = Replicate() if end_of(tensor) in made_whole else plan.placements.get(end_of(tensor), Replicate())
            if new is not tensor:
                if not new.shape.is_compatible_with(tensor.shape):
                    raise Refused("the gradient function of %r keeps %r, which has another shape for the whole batch. Hand the "
                                  "batch in with an unknown size, tf.placeholder_with_default(x, [None, ...])."
                                  % (end.name, tensor.name))
                rewire(op, number, new)
            if tensor.op in made:
                slopes.add(end_of(tensor))
            else:
                given[end_of(new)] = placement
    found = {plan.placements.get((end, number), Replicate()) for number in plan.own_gradients.returned(end)}
    rows = [placement for placement in found if isinstance(placement, Shard)]
    if rows and len(found) > 1:
        raise Refused("%r has a gradient of its own, and returns the tower's own examples beside others." % end.name)
    _expect_no_meeting(end, ops, {**given, **dict.fromkeys(slopes, rows[0] if rows else Partial())})
    if rows:
        _expect_no_meeting(end, ops, {**dict.fromkeys(given, Replicate()), **dict.fromkeys(slopes, Partial())})


def _expect_no_meeting(end, ops, given):
    plan = propagate(ops, Facts(given), own_gradients=False)
    meeting = [op for op, decision in plan.decisions.items() if op.type not in _OF_SHAPES and (
        decision.instead or decision.own or any(meets_for(want, plan.placements.get(end_of(op.inputs[k]), Replicate()))
                                                for k, want in decision.wants.items()))]
    meeting += [op for (op, _), placement in plan.placements.items() if isinstance(placement, (Own, PartialMean))]
    if meeting:
        raise Refused("the gradient function of %r makes %r, a %s, which is not linear in the gradient, or looks at several "
                      "examples; and each tower has its part of the gradient alone."
                      % (end.name, meeting[0].name, meeting[0].type))
