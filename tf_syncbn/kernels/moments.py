"""What crosses towers forward, in one vector: vector arithmetic costs by the op, not by the number."""
import tensorflow.compat.v1 as tf

__all__ = ["bessel", "parts", "split"]


def split(moments):
    """Splits a vector [2C + 1] into a count [1], means [C] and biased variances [C]."""
    channels = (tf.dimension_value(moments.shape[0]) - 1) // 2
    return tf.split(moments, [1, channels, channels])


def parts(count, mean, variance):
    """Returns the three; where the latter two are None, the parts of a vector [2C + 1] that stands in the place of the first."""
    return split(count) if mean is None else (count, mean, variance)


def bessel(count):
    """Returns the factor from a biased variance to an unbiased one, `n / max(n - 1, 1)`."""
    return count / tf.maximum(count - 1, 1)
