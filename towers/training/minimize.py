"""From towers to a train op: update ops gate the averaging, the averaging feeds the optimizer."""
from typing import Callable, Optional, Sequence, Union

import tensorflow.compat.v1 as tf

from towers.api.annotations import Operation, Optimizer, Tensor, Transforms, UpdateOps, Variable
from towers.api.arguments import FLAG, OPTIMIZER, STEP, TEXT, check, optional
from towers.devices.variable_placement import warn_of_stale_reads
from towers.replicas import TOWERS, Tower, Towers
from towers.state.update_ops import chosen_update_ops
from towers.training.gradients import average_gradients, losses_of, scaled_gradients
from towers.training.transforms import Step, begin, check_transforms

__all__ = ["minimize"]


def minimize(replicas: Towers, optimizer: Optimizer, *, update_ops: UpdateOps = "first",
             transforms: Transforms = (), global_step: Optional[Variable] = None, var_list: Optional[Sequence[Variable]] = None,
             loss: Union[str, Callable[[Tower], Tensor], Sequence[Tensor], None] = None, pack: bool = False,
             name: Optional[str] = None) -> Operation:
    """Builds the op of one training step on all towers.

    It computes each tower's gradients, runs the chosen update ops, averages the gradients on the aggregation device,
    transforms them, and applies them once. The step is that of one tower on the global batch.

    Args:
      replicas: `Towers` with a loss.
      optimizer: a `tf.train.Optimizer`. Its slots are made outside of the towers' scopes.
      update_ops: "first", "all", "last" or "none", see `collect_update_ops`, or a list of operations and tensors, of which those
        of several towers run as by "all".
      transforms: list of what becomes of averaged gradients, the gradients of the global batch, in this order:
        `towers.clip_by_global_norm`, `clip_by_value`, `check_finite`, `mask_gradients`, `scale_loss`, `accumulate`, or a
        function of yours, of a list of (gradient, variable), that returns such a list.
      global_step: integer variable that grows by one with each step, or None.
      var_list: list of variables to train; None is all trainable variables.
      loss: which loss, where a model has several: a key of the dict that it returned, or a function of a `Tower` that returns a
        scalar. None is what it returned as its loss. A step of one loss runs the update ops that its own call chose, and
        computes nothing that the others alone need.
      pack: see `average_gradients`.
      name: str, optional name of the operation.

    Returns:
      An operation.

    Raises:
      TypeError: for what is no `tf.train.Optimizer`, a transform that is no function, or update ops that are none.
      ValueError: for towers without a loss or of another graph, another policy, or losses that no variable reaches.
      TowerMismatchError: (a ValueError) where the towers' gradients differ in what they pass.

    Example:

        train_op = towers.minimize(replicas, tf.train.MomentumOptimizer(0.1, 0.9), update_ops="first",
                                   global_step=tf.train.get_or_create_global_step())
        generator_op = towers.minimize(replicas, optimizer, loss="generator_loss", var_list=tf.trainable_variables("generator"))
    """
    check(TOWERS, replicas=replicas)
    check(OPTIMIZER, optimizer=optimizer)
    check(optional(STEP), global_step=global_step)
    check(FLAG, pack=pack)
    check(optional(TEXT), name=name)
    check_transforms(transforms)
    losses = None if loss is None else losses_of(replicas, loss)  # once: a function may build ops
    updates = chosen_update_ops(replicas, update_ops)
    factors, finish = begin(transforms, Step(replicas, updates))
    tower_grads = scaled_gradients(replicas, optimizer, var_list, losses, factors)
    grads = average_gradients(replicas, tower_grads, updates, losses, pack)
    warn_of_stale_reads(grads, [tower.context for tower in replicas])
    scope = tf.get_default_graph().get_name_scope()

    def apply(grads):
        # Under no name scope of ours: some optimizers name variables by it, and checkpoints would no longer load.
        with tf.name_scope(scope + "/" if scope else None):
            return optimizer.apply_gradients(grads, global_step=global_step)

    step = finish(grads, apply)
    return step if name is None else tf.group(step, name=name)
