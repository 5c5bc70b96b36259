"""The loss of the global batch, which says so where training by it would leave update ops out.

`optimizer.minimize(replicas.loss)` computes the right gradients and never moves a moving average, since nothing runs the towers'
update ops. So the loss is an identity with a gradient function of its own, which looks whether something waits for them and
hands the gradient on as it is, to any order of derivative.
"""
import sys
import warnings

import tensorflow.compat.v1 as tf

from towers.api.wording import TowersWarning
from towers.graph.gradient_hook import detail_of, with_gradient
from towers.graph.walk import ancestors

__all__ = ["watched"]


def watched(loss, update_ops, of_workers=False):
    """Returns `loss` as a tensor whose gradient warns, once, where nothing waits for the update ops of the towers.

    The gradient passes in silence if it is taken under control dependencies on update ops, if `average_gradients` or anything
    else that was built since waits for one, or if the loss itself does.

    Args:
      loss: scalar tensor.
      update_ops: list of all towers' operations and tensors; where it is empty nothing is watched.
      of_workers: whether it is the loss of several workers, whose gradient here would be that of one worker's towers: to take it
        is a ValueError.
    """
    if not update_ops and not of_workers:
        return tf.identity(loss, name="loss")  # the same name for any number of towers
    watch = _Watch(update_ops, len(tf.get_default_graph().get_operations()), of_workers)
    return with_gradient("TowersGlobalLoss", lambda: [tf.identity(loss, name="loss")], "Identity", watch)[0]


class _Watch:
    """The update ops that something has to wait for, and how many ops the graph held when the towers were built."""

    def __init__(self, update_ops, num_ops, of_workers):
        self.ops, self.num_ops = [getattr(update, "op", update) for update in update_ops], num_ops
        self.of_workers = of_workers


@tf.RegisterGradient("TowersGlobalLoss")
def _global_loss_gradient(op, dy):
    watch = detail_of(op)
    if watch is not None and watch.of_workers:
        raise ValueError("The gradient of replicas.loss (%r) is taken, and with several workers it is that of this worker's "
                         "towers alone. Use towers.minimize(replicas, optimizer), which averages over workers too." % op.name)
    # In an imported graph nothing is known of update ops.
    if watch is not None and watch.ops and tf.get_default_graph() is op.graph and not _is_waited_for(watch, op):
        warnings.warn("The gradient of replicas.loss (%r) is taken and nothing waits for the update ops of its towers, %r among "
                      "them: if what applies it does not either, moving averages are never updated. Use "
                      "towers.minimize(replicas, optimizer), or take or apply the gradient within "
                      "`with tf.control_dependencies(towers.collect_update_ops(replicas)):`." % (op.name, watch.ops[0].name),
                      TowersWarning, stacklevel=_frames_of_tensorflow())
        watch.ops = []
    return [dy]


def _is_waited_for(watch, loss_op):
    updates = set(watch.ops)
    made = loss_op.graph.get_operations()[watch.num_ops:]
    return any(source in updates for op in made for source in op.control_inputs + [tensor.op for tensor in op.inputs]) or bool(
        updates & ancestors([loss_op]))


def _frames_of_tensorflow():
    """Returns the `stacklevel` of the caller's warning that points behind TensorFlow's own calls."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_WITHIN):
        frame, level = frame.f_back, level + 1
    return level


_WITHIN = ("towers.", "tensorflow")
