"""Ops with a gradient function of their own, that of `tf.gradients` and of every `tf.GradientTape`.

`gradient_override_map` puts another gradient on an op of any kind, mostly one that hands its inputs on. What the gradient
function needs of the forward pass besides tensors stays with the graph, as a detail by the op's name.
"""
import tensorflow.compat.v1 as tf

from towers.graph.private import differentiate_op, not_recorded, record_for_tapes

__all__ = ["detail_of", "with_gradient"]

_DETAILS = "_towers_gradient_details"  # attribute of a graph, a dict from names of ops


def with_gradient(gradient, build, op_type, detail=None):
    """Builds ops of which one gets another gradient.

    Args:
      gradient: str, the name that `tf.RegisterGradient` gave a gradient function, one that returns a list or a tuple.
      build: a function without arguments that returns a list of tensors, the first outputs of the op.
      op_type: str, the type of the op, or a list of those that it may have; no other op of `build` may be of them.
      detail: anything that the gradient function wants back, by `detail_of`; None is not kept.

    Returns:
      What `build` returns.
    """
    # Not tf.custom_gradient: wiring a stand-in while it builds its function raises "grad_fn must accept 'variables'".
    types = (op_type,) if isinstance(op_type, str) else op_type
    with not_recorded(), tf.get_default_graph().gradient_override_map(dict.fromkeys(types, gradient)):
        outputs = build()
    op = outputs[0].op
    if detail is not None:
        if not hasattr(op.graph, _DETAILS):
            setattr(op.graph, _DETAILS, {})
        getattr(op.graph, _DETAILS)[op.name] = detail

    def backward(*d_outputs):
        with tf.name_scope(op.name + "_grad"):
            return differentiate_op(op, *d_outputs)

    # A tape looks gradients up by the type of an op, and knows no override.
    record_for_tapes(gradient, outputs, list(op.inputs), backward)
    return outputs


@tf.RegisterGradient("TowersHandOn")
def _hand_on(op, dy, *_):
    return [dy] + [None] * (len(op.inputs) - 1)


def detail_of(op):
    """Returns the detail that `with_gradient` kept with an op; None of others, and in a graph that was imported."""
    return getattr(op.graph, _DETAILS, {}).get(op.name)
