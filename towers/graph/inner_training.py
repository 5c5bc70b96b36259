"""Model functions that train by themselves, which towers can't be: each would train on its own part of the batch."""
import re

import tensorflow.compat.v1 as tf

from towers.graph.private import forward_op_of
from towers.graph.walk import ancestors, op_of, writes_of, written_variable

__all__ = ["applies_gradients", "refuse_training"]

_APPLIES = re.compile("(Resource)?(Sparse)?Apply[A-Z]")  # types of the ops that optimizers end in


def applies_gradients(op):
    """Tells whether an op is one of those that TensorFlow's optimizers end in."""
    return bool(_APPLIES.match(op.type))


def refuse_training(ops, train_ops=()):
    """Raises ValueError where a model function applies gradients.

    Args:
      ops: list of operations that it made.
      train_ops: what it added to `tf.GraphKeys.TRAIN_OP`, where an optimizer leaves its op.
    """
    applied = next(filter(applies_gradients, ops), None) or next(
        (op for op in map(op_of, train_ops) if op is not None), None) or _written_by_gradients(ops)
    if applied is not None:
        variable = written_variable(applied)
        raise ValueError(
            "The model function applies gradients (%r%s): each tower would train by its own part of the batch. Let it return its "
            "loss, and train outside of it, by towers.minimize(replicas, optimizer)."
            % (applied.name, "" if variable is None else ", to the variable %r" % variable.name))


def _written_by_gradients(ops):
    """Returns an op that assigns to a trainable variable what gradients were made of, or None."""
    trainable = {variable.op for variable in tf.trainable_variables()}
    writes = [op for op in writes_of(ops) if written_variable(op) in trainable] if trainable else []
    if not writes:
        return None
    made = set(ops)
    return next((op for op in writes if any(forward_op_of(each) is not None for each in ancestors([op], made))), None)
