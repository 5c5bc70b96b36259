"""Kernels as graph functions: one node of the caller's graph a call.

Op by op, a synchronized ResNet-20 has more than three times the nodes of the unsynchronized one. A kernel called here is
traced once for each kind of arguments, whatever the number of layers, towers and graphs, and TensorFlow inlines it when it
runs. Such calls work in `tf.while_loop`, and travel with a MetaGraph or SavedModel.
"""
import functools

import tensorflow.compat.v1 as tf

from towers.graph.private import not_recorded
from towers.meeting.exchanges import gradient_place, pass_with_gradient

__all__ = ["call", "call_with_gradient"]


def call(kernel, *tensors, **static):
    """Computes `kernel(*tensors, **static)` as one node, which no `tf.GradientTape` sees.

    Once TensorFlow has inlined the call, a control dependency on it waits for nothing: wait for an identity of a result.

    Args:
      kernel: a function at module level that returns a tensor or a tuple of tensors and makes no variables.
      *tensors: tensors of known rank, or None, which reaches the kernel as None.
      **static: hashable values, part of what is traced.

    Returns:
      What the kernel returns.
    """
    signature = tuple(t if t is None else (t.dtype.base_dtype, tuple(t.shape.as_list())) for t in tensors)
    function = _trace(kernel, signature, tuple(sorted(static.items())))
    with tf.name_scope(kernel.__name__), not_recorded():
        return function(*[t for t in tensors if t is not None])


@functools.lru_cache(maxsize=1024)
def _trace(kernel, signature, static):
    def function(*given):
        given = iter(given)
        # Once inlined, an op's name begins with the call's, and so do those that the gradient of a loop puts beside a call to
        # keep its tensors: where two are "Const", TensorFlow 1.15 aborts.
        with tf.name_scope("kernel"):
            return kernel(*[spec if spec is None else next(given) for spec in signature], **dict(static))

    # In a graph of its own the trace sees none of the caller's name scopes, devices and control dependencies. Not tf.function:
    # that of 1.15 imports all of tf.contrib, 36 MB, to trace how it would initialize variables.
    with tf.Graph().as_default():
        return tf.wrap_function(function, [tf.TensorSpec(shape, dtype) for dtype, shape in filter(None, signature)],
                                kernel.__name__)


def call_with_gradient(kernel, *tensors, plain, **static):
    """Calls a kernel made of ops that TensorFlow does not differentiate rightly, as one that it does.

    Args:
      kernel, *tensors: see `call`; the kernel returns a tuple.
      plain: a function of the same arguments that computes the same, and perhaps more outputs, by ops that may be differentiated.
        The gradient is that of those ops, built only where someone asks for it.
      **static: see `call`.

    Returns:
      What the kernel returns.
    """
    outputs = call(kernel, *tensors, **static)
    given = tuple(tensor is not None for tensor in tensors)
    detail = plain, static, len(outputs), given
    passed_on = list(outputs) + [t for t in tensors if t is not None]
    results = pass_with_gradient("PlainKernel", passed_on, None, detail, "with_gradient")
    return tuple(results[:len(outputs)])


@tf.RegisterGradient("PlainKernel")
def _plain_gradient(op, *d_outputs):
    _, (plain, static, num_outputs, given) = gradient_place(op)
    # Where a loop is differentiated, ops that are given `op.inputs` read what the loop kept of each turn in their place.
    inputs = [tf.identity(tensor) for tensor in op.inputs[num_outputs:]]
    tensors = iter(inputs)
    # Partial derivatives: among the inputs are some that others depend on.
    outputs = plain(*[next(tensors) if there else None for there in given], **static)[:num_outputs]
    d_outputs = [tf.convert_to_tensor(dy) for dy in d_outputs[:num_outputs]]
    d_inputs = tf.gradients(list(outputs), inputs, d_outputs, stop_gradients=inputs)
    return [None] * num_outputs + d_inputs
