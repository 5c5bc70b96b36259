"""Gradients of rows, `tf.IndexedSlices`, among dense ones."""
import tensorflow.compat.v1 as tf

__all__ = ["are_slices", "as_dense", "join_slices", "numbers_of", "ops_of", "with_numbers"]


def numbers_of(gradient):
    """Returns a gradient's tensor: of slices their values."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def ops_of(gradients):
    """Returns the ops of gradients, those of indices too, a list; None among them is left out."""
    tensors = []
    for gradient in gradients:
        tensors += [gradient.values, gradient.indices] if isinstance(gradient, tf.IndexedSlices) else [gradient]
    return [tensor.op for tensor in tensors if tensor is not None]


def with_numbers(gradient, function):
    """Returns what a function makes of a gradient's tensor, in the gradient's form; None stays None."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)


def as_dense(gradient, tensor):
    """Returns the gradient of a tensor as one; what a loop of no turns adds up of slices does not say how many rows it has."""
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.convert_to_tensor(gradient)
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, tf.shape(tensor)[0])


def are_slices(gradients):
    """Tells whether all of a list of gradients are slices."""
    return all(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)


def join_slices(gradients, scale=lambda values: values):
    """Returns the rows of all slices of a variable, one after the other, their values as `scale` makes them."""
    return tf.IndexedSlices(scale(tf.concat([gradient.values for gradient in gradients], 0)),
                            tf.concat([gradient.indices for gradient in gradients], 0), gradients[0].dense_shape)
