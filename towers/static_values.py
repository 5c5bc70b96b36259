"""What whole numbers of a graph are known to be while it is built: axes that a model computes of ranks and constants."""
import numpy as np
import tensorflow.compat.v1 as tf

__all__ = ["static_value"]

_COMPUTES = {"Add": np.add, "AddV2": np.add, "Cast": np.asarray, "FloorDiv": np.floor_divide, "FloorMod": np.mod,
             "GreaterEqual": np.greater_equal, "Less": np.less, "Maximum": np.maximum, "Minimum": np.minimum,
             "Mul": np.multiply, "Neg": np.negative, "Range": np.arange, "Sub": np.subtract}
_MOST_STEPS = 6


def static_value(tensor, steps=_MOST_STEPS):
    """Returns the value of a tensor as an array, where it is constant or computed of such in a few steps; else None.

    `tf.get_static_value` knows `tf.range(3)`, and not `tf.range(tf.rank(x) - 1)`, nor the axes that `tf.vectorized_map` makes.
    """
    value, op = tf.get_static_value(tensor), tensor.op
    if value is not None or not steps or op.type not in _COMPUTES or not (tensor.dtype.is_integer or tensor.dtype.is_bool):
        return value
    values = [static_value(source, steps - 1) for source in op.inputs]
    if any(value is None for value in values) or op.type.startswith("Floor") and not np.all(values[1]):
        return None
    return np.asarray(_COMPUTES[op.type](*values), tensor.dtype.as_numpy_dtype)
