"""Kernels as graph functions: one node of the caller's graph a call.

Op by op, a synchronized ResNet-20 has more than three times the nodes of the unsynchronized one. A kernel called here is
traced once for each kind of arguments, whatever the number of layers, towers and graphs, and TensorFlow inlines it when it
runs. Such calls work in `tf.while_loop`, and travel with a MetaGraph or SavedModel.
"""
import functools

import tensorflow.compat.v1 as tf

__all__ = ["call"]


def call(kernel, *tensors, jit_compile=False, **static):
    """Computes `kernel(*tensors, **static)` as one node.

    Args:
      kernel: a function at module level that returns a tensor or a tuple of tensors and makes no variables.
      *tensors: tensors of known rank, or None, which reaches the kernel as None.
      jit_compile: whether XLA compiles the kernel (TensorFlow 2).
      **static: hashable values, part of what is traced.

    Returns:
      What the kernel returns.
    """
    signature = tuple(t if t is None else (t.dtype.base_dtype, tuple(t.shape.as_list())) for t in tensors)
    function = _trace(kernel, jit_compile, signature, tuple(sorted(static.items())))
    with tf.name_scope(kernel.__name__):
        return function(*[t for t in tensors if t is not None])


@functools.lru_cache(maxsize=1024)
def _trace(kernel, jit_compile, signature, static):
    def function(*given):
        given = iter(given)
        return kernel(*[spec if spec is None else next(given) for spec in signature], **dict(static))

    function.__name__ = kernel.__name__
    options = {"jit_compile": True} if jit_compile else {}
    # In a graph of its own the trace sees none of the caller's name scopes, devices and control dependencies.
    with tf.Graph().as_default():
        return tf.function(function, autograph=False, **options).get_concrete_function(
            *[tf.TensorSpec(shape, dtype) for dtype, shape in filter(None, signature)])
