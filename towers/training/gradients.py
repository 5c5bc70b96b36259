"""Gradients of all towers, and their average.

The towers' shares of the global batch go in before the backward pass: tower i differentiates `N * weight_i * loss_i`, N
towers. What crosses towers in the backward pass is then already the gradient of the global loss, and the plain mean over
towers is the gradient of `sum_i weight_i * loss_i` through every exchange. Weighting finished gradients instead would be
wrong wherever towers met. The loss that an optimizer is handed carries its share in its gradient, so an optimizer that scales it,
or takes no `grad_loss`, is exact too.
"""
import functools
import operator
import warnings
from typing import Callable, List, Optional, Sequence, Union

import tensorflow.compat.v1 as tf

from towers.api.annotations import GradsAndVars, Optimizer, Tensor, UpdateOps, Variable
from towers.api.arguments import FLAG, OPTIMIZER, VARIABLES, Kind, check, optional
from towers.api.wording import TowersWarning
from towers.batches.empty_batches import tell_shapes
from towers.batches.shares import checked_loss, scalar_loss
from towers.context import check_graph
from towers.graph.gradient_hook import detail_of, with_gradient
from towers.graph.op_types import READS
from towers.meeting.slices import are_slices, join_slices, with_numbers
from towers.meeting.sums import mean_in_order, sum_in_order
from towers.meeting.turns import TowerMismatchError
from towers.replicas import TOWERS, Tower, Towers
from towers.sharding.own_examples import warn_of_own_examples
from towers.state.update_ops import chosen_update_ops
from towers.training.overlap import fill_meetings
from towers.training.packing import averaged_in_packs

__all__ = ["average_gradients", "compute_gradients", "losses_of", "scaled_gradients"]

# TensorFlow's own, which scale losses and gradients back, or hand on to another optimizer.
_SCALES_OR_HANDS_ON = ("MixedPrecisionLossScaleOptimizer", "LossScaleOptimizer", "MovingAverageOptimizer",
                       "SyncReplicasOptimizer", "VariableClippingOptimizer", "TowerOptimizer")


def _are_grads(tower_grads):
    return isinstance(tower_grads, (list, tuple)) and all(isinstance(grads, (list, tuple)) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in grads) for grads in tower_grads)


_GRADS = Kind("a list, over towers, of lists of (gradient, variable)", _are_grads)


def compute_gradients(replicas: Towers, optimizer: Optimizer, var_list: Optional[Sequence[Variable]] = None,
                      loss: Union[str, Callable[[Tower], Tensor], Sequence[Tensor], None] = None) -> List[GradsAndVars]:
    """Computes every tower's gradients by `optimizer.compute_gradients`, on the tower's device.

    Towers meet in the backward pass wherever they met in the forward pass, and compute gradients of variables while they
    wait for each other. A gradient may be there before others have read its variable for the last time: apply what
    `average_gradients` returns, which is there when all are.

    Args:
      replicas: `Towers` with a loss.
      optimizer: a `tf.train.Optimizer`.
      var_list: list of variables; None is all trainable variables of the graph.
      loss: which loss of each tower: a key of the dict that the model function returned, a function of a `Tower` that returns a
        scalar, or a list over towers of scalars. None is what it returned as its loss.

    Returns:
      A list over towers of lists of (gradient, variable), in the same order of variables, `tower_grads[tower][variable]`. A
      gradient is a tensor, `tf.IndexedSlices`, or None where the loss of that tower does not depend on the variable.

    Raises:
      TypeError: if `optimizer` is no `tf.train.Optimizer`, or `loss` none of these.
      ValueError: if the towers have no such loss, or no gradient is left in any tower; under another graph than the towers'; if
        towers are uneven and the optimizer differentiates something else than the loss it is handed.
      TowerMismatchError: (a ValueError) if gradients pass an exchange in some towers and not in others.

    Warns:
      TowersWarning: of a `loss` that is a sum over a tower's examples, or no mean over them, or of examples by their place in
        the batch; of an optimizer with a `compute_gradients` of its own, where there are several towers: one that clips there
        clips each tower's gradients, and not their average; of towers that something rewrote after they were built.
    """
    return scaled_gradients(replicas, optimizer, var_list, loss)


def scaled_gradients(replicas, optimizer, var_list=None, loss=None, factors=()):
    """Computes what `compute_gradients` does, of losses times `factors`, a list of numbers and scalar tensors."""
    check(TOWERS, replicas=replicas)
    check(OPTIMIZER, optimizer=optimizer)
    check(optional(VARIABLES), var_list=var_list)
    check_graph(replicas[0].context.meetings.graph, "compute_gradients")
    losses = losses_of(replicas, loss)
    if len(replicas) > 1:
        _warn_of_own_gradients(optimizer)
        _warn_of_rewritten(replicas)
    # That which the model function returned was looked at when the towers were built.
    if loss is not None:
        warn_of_own_examples(losses, replicas, stacklevel=4)
    tower_grads = []
    first_op, meetings = len(tf.get_default_graph().get_operations()), replicas[0].context.meetings
    # Gated op by op, the gradient by an op's input, for which the other towers wait, would wait for that by its variable. Where
    # nobody waits that is as fast, and keeps less in memory.
    meet = len(replicas) > 1 and len(meetings.turns) > 0
    gate = tf.train.Optimizer.GATE_NONE if meet else tf.train.Optimizer.GATE_OP
    with meetings.gradient_pass() as left:
        for tower, of_tower in zip(replicas, losses):
            with tf.device(tower.context.device), tf.name_scope(tower.name_scope):
                of_tower = _with_factors(tower, of_tower, tower.context.num_towers, factors)
                tower_grads.append(_tower_gradients(tower, *of_tower, optimizer, var_list, gate))
    if meet:
        fill_meetings(left, tf.get_default_graph().get_operations()[first_op:])
    if all(gradient is None for grads in tower_grads for gradient, _ in grads):
        raise ValueError("No gradient reaches any of the variables %s: the loss %r does not depend on them."
                         % ([variable.op.name for _, variable in tower_grads[0]], losses[0].name))
    return tower_grads


def average_gradients(replicas: Towers, tower_grads: Sequence[GradsAndVars], update_ops: UpdateOps = "first",
                      loss: Union[str, Callable[[Tower], Tensor], Sequence[Tensor], None] = None,
                      pack: bool = False) -> GradsAndVars:
    """Averages gradients over towers on the aggregation device, once the update ops have run and the losses are known.

        g_v = sum_i g_iv / N,    N towers

    Args:
      replicas: `Towers`.
      tower_grads: list over towers of lists of (gradient, variable), as `compute_gradients` returns it.
      update_ops: what runs before any gradient is averaged: a policy of `collect_update_ops`, or a list of operations and
        tensors.
      loss: as `compute_gradients` had it.
      pack: whether each tower sends its small gradients in one tensor, which costs two copies and saves transfers: where towers
        and aggregation device are far apart. No bit of the result changes.

    Returns:
      A list of (gradient, variable), none of which is there before all are, so that each may be applied. A gradient that is
      None in every tower is left out. One that is None in some towers counts as zero there: the divisor stays N.
      `tf.IndexedSlices` stay sparse: joined, their values divided by N; where some towers have dense gradients of the same
      variable, they become dense.

    Raises:
      TowerMismatchError: (a ValueError) where the towers' lists hold other variables, or are not one for each tower.
      ValueError: if there is no gradient; under another graph than the towers'; for another policy.
      TypeError: for update ops that are none.
    """
    check(TOWERS, replicas=replicas)
    check(FLAG, pack=pack)
    check_graph(replicas[0].context.meetings.graph, "average_gradients")
    _check_variables(tower_grads, len(replicas))
    averaged, variables = [], []
    # A loss may read a variable last of all. Without the wait it was seen to read what this very step had updated.
    is_known = loss is not None or replicas[0].loss is not None
    waits = chosen_update_ops(replicas, update_ops) + (losses_of(replicas, loss) if is_known else [])
    num_towers, peers = replicas[0].context.num_towers, replicas.peers
    with tf.name_scope("average_gradients"), tf.device(replicas.aggregation_device), tf.control_dependencies(waits):
        axis = tf.constant(0, name="axis") if len(tower_grads) > 2 else 0
        columns = [[gradient for gradient, _ in pairs] for pairs in zip(*tower_grads)]
        average = functools.partial(_mean, num_towers=num_towers, axis=axis) if peers is None else _sum
        packed = averaged_in_packs(columns, [tower.context.device for tower in replicas], average) if pack else {}
        for number, (gradients, (_, variable)) in enumerate(zip(columns, tower_grads[0])):
            gradients = [gradient for gradient in gradients if gradient is not None]
            if gradients:
                averaged.append(packed[number] if number in packed else average(gradients))
                variables.append(variable)
        if peers is not None:
            averaged = peers.average(averaged, variables)
        if not averaged:
            raise ValueError("There is no gradient to average: it is None for every variable in every tower.")
        # TensorFlow 1.15 was seen to apply some variables' updates while others' gradients still read them.
        return list(zip(tf.tuple(averaged), variables))


def losses_of(replicas, loss):
    """Returns each tower's loss, a list; for `loss` and what is raised see `compute_gradients`."""
    if loss is None:
        if replicas[0].loss is None:
            raise ValueError("The model function returned no loss: it has to return a scalar, or a dict with a \"loss\", or "
                             "`loss` has to say which of what it returned is one. It returned %r." % (replicas[0].outputs,))
        return [tower.loss for tower in replicas]
    if isinstance(loss, (list, tuple)) and len(loss) == len(replicas):
        return [scalar_loss(of_tower, index) for index, of_tower in enumerate(loss)]
    if not isinstance(loss, str) and not callable(loss):
        raise TypeError("`loss` has to be a key of what the model function returned, a function of a tower, or a list of %d "
                        "losses, not %r." % (len(replicas), loss))
    check_graph(replicas[0].context.meetings.graph, "minimize")
    losses = []
    for tower in replicas:
        if isinstance(loss, str) and not (isinstance(tower.outputs, dict) and loss in tower.outputs):
            raise ValueError("The model function returned no %r: it returned %r." % (loss, tower.outputs))
        with tf.name_scope(tower.name_scope), tf.device(tower.context.device):
            found = tower.outputs[loss] if isinstance(loss, str) else loss(tower)
        losses.append(checked_loss(scalar_loss(found, tower.context.index), tower.weight, tower.outputs, tower.context))
    return losses


def _warn_of_own_gradients(optimizer):
    kind = type(optimizer)
    if kind.compute_gradients is tf.train.Optimizer.compute_gradients or kind.__name__.startswith(_SCALES_OR_HANDS_ON):
        return
    warnings.warn("%s computes gradients in a way of its own, and does so in each tower, before they are averaged. If it clips "
                  "them, or does anything else to them that is no sum, do that in `transforms` of towers.minimize, or wrap it "
                  "the other way round, around a TowerOptimizer." % kind.__name__, TowersWarning, stacklevel=4)


def _warn_of_rewritten(replicas):
    """Warns where a tower's loss is computed of what was put into the tower after it was built, as graph rewriters do."""
    if replicas.loss is None:
        return
    made = {op: position for position, op in enumerate(replicas.loss.graph.get_operations())}
    tower, built = replicas[0], made[replicas.loss.op]
    own, seen, stack = set(tower.ops), set(), [tower.loss.op]
    while stack:
        op = stack.pop()
        if op in seen or op not in own:
            continue
        seen.add(op)
        for source in [tensor.op for tensor in op.inputs]:
            if made[source] > built and source.type not in READS:
                warnings.warn(
                    "The loss of a tower (%r) is computed of %r, which something put in after the towers were built. A tower "
                    "gets what is not built with it for itself, and variables of its own for it: what rewrites a graph, "
                    "contrib.quantize say, can't be used on towers." % (tower.loss.name, source.name),
                    TowersWarning, stacklevel=4)
                return
            stack.append(source)


def _with_factors(tower, loss, num_towers, factors):
    """Returns a tower's loss, whose gradient carries its share and `factors`, and a list of the ops that were asked for it.

    The list is None where the loss is as it was.
    """
    factors = [tf.cast(factor, loss.dtype) for factor in factors]
    if not isinstance(tower.weight, float):
        factors.append(tf.cast(num_towers * tower.weight, loss.dtype, name="share"))
    elif abs(num_towers * tower.weight - 1) > 1e-12:  # an even share, 49 times 1 / 49, may be off by rounding
        factors.append(tf.constant(num_towers * tower.weight, loss.dtype, name="share"))
    if not factors:
        return loss, None
    asked = []
    # Not as `grad_loss`, which some optimizers drop: the loss itself carries its share, whoever differentiates it.
    return with_gradient("TowersShare", lambda: [tf.identity(loss, name="loss")], "Identity", (factors, asked))[0], asked


def _tower_gradients(tower, loss, asked, optimizer, var_list, gate):
    graph = loss.graph
    first = len(graph.get_operations())
    grads = optimizer.compute_gradients(loss, var_list=var_list, gate_gradients=gate, colocate_gradients_with_ops=True)
    tell_shapes(graph.get_operations()[first:])
    if asked is not None and not asked and any(gradient is not None for gradient, _ in grads):
        raise ValueError("%s.compute_gradients returns gradients that are not of the loss that it was handed in tower %d, %r, so "
                         "the tower's share of the global batch is not in them. It has to differentiate its argument `loss`."
                         % (type(optimizer).__name__, tower.context.index, loss.name))
    return [(_without_nan_of_empty(gradient, tower.weight), variable) for gradient, variable in grads]


@tf.RegisterGradient("TowersShare")
def _share_gradient(op, dy):
    factors, asked = detail_of(op)
    asked.append(op)
    return [functools.reduce(operator.mul, factors, dy)]


def _without_nan_of_empty(gradient, weight):
    """Takes out the NaN that a tower without examples makes of 0 times the derivative of a mean over nothing."""
    if isinstance(weight, float) and weight:
        return gradient
    return with_numbers(gradient, lambda numbers: tf.where_v2(
        tf.logical_or(weight > 0, tf.is_finite(numbers)), numbers, tf.zeros_like(numbers)))


def _mean(gradients, num_towers, axis):
    if are_slices(gradients):
        return join_slices(gradients, lambda values: values / num_towers)
    gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
    if num_towers == 1:
        return tf.identity(gradients[0])  # an op to wait for the updates
    if len(gradients) == num_towers:
        return mean_in_order(gradients, axis)
    return sum_in_order(gradients) * (1.0 / num_towers)


def _sum(gradients):
    """Adds up the gradients of this worker's towers; `towers.workers.peers.Peers.average` divides by the number of all."""
    if are_slices(gradients):
        return join_slices(gradients)
    return tf.identity(sum_in_order([tf.convert_to_tensor(gradient) for gradient in gradients]))


def _check_variables(tower_grads, num_towers):
    check(_GRADS, tower_grads=tower_grads)
    if len(tower_grads) != num_towers:
        raise TowerMismatchError("tower_grads has to hold a list of (gradient, variable) for each of the %d towers; it holds %d."
                                 % (num_towers, len(tower_grads)))
    first = [variable for _, variable in tower_grads[0]]
    for index, grads in enumerate(tower_grads):
        if len(grads) != len(first) or any(a is not b for a, (_, b) in zip(first, grads)):
            raise TowerMismatchError("Tower %d has gradients of %s and tower 0 of %s: the lists have to agree."
                                     % (index, [v.op.name for _, v in grads], [v.op.name for v in first]))
