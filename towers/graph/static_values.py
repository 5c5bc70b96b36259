"""What whole numbers of a graph are known to be while it is built: axes that a model computes of ranks and constants."""
import numpy as np
import tensorflow.compat.v1 as tf

__all__ = ["comes_to", "computed", "filling_of", "static_value", "step_along"]

_COMPUTES = {"Add": np.add, "AddV2": np.add, "Cast": np.asarray,
             "ConcatV2": lambda *values: np.concatenate(values[:-1], values[-1]),
             "ExpandDims": lambda x, axis: np.expand_dims(x, int(axis)), "FloorDiv": np.floor_divide, "FloorMod": np.mod,
             "GreaterEqual": np.greater_equal, "InvertPermutation": np.argsort, "Less": np.less,
             "ListDiff": lambda x, y: [each for each in x if each not in y], "Maximum": np.maximum, "Minimum": np.minimum,
             "Mul": np.multiply, "Neg": np.negative,
             "Prod": lambda x, axes, are_kept: np.prod(x, tuple(np.ravel(axes)), x.dtype, keepdims=are_kept),
             "Range": np.arange, "Reshape": np.reshape, "Sub": np.subtract, "Tile": np.tile}
_TAKES = ("Gather", "GatherV2", "Slice", "StridedSlice")
_MOST_STEPS = 9


def static_value(tensor, steps=_MOST_STEPS):
    """Returns the value of a tensor as an array, where it is constant or computed of such in a few steps; else None.

    `tf.get_static_value` knows `tf.range(3)`, and not `tf.range(tf.rank(x) - 1)`, nor the axes that `tf.vectorized_map` makes.
    """
    value, op = tf.get_static_value(tensor), tensor.op
    if value is None and op.type in _TAKES:
        return _taken(op, steps - 1) if steps else None
    if value is not None or not steps or tensor.value_index or not _is_computed(op):
        return value
    return computed(op, [static_value(source, steps - 1) for source in op.inputs])


def computed(op, values):
    """Returns what an op computes of values, an array; None where one of these is None, or the op is none of whole numbers."""
    if not _is_computed(op) or any(value is None for value in values) or op.type.startswith("Floor") and not np.all(values[1]):
        return None
    if op.type == "Pack":
        return np.stack(values, op.get_attr("axis"))
    values = values + [op.get_attr("keep_dims")] if op.type == "Prod" else values
    return np.asarray(_COMPUTES[op.type](*values), op.outputs[0].dtype.as_numpy_dtype)


def step_along(array, axis):
    """Returns by how much whole numbers grow from one entry to the next along an axis, 0 first; 0 where they do otherwise."""
    along = np.moveaxis(array, axis, -1)
    step = int(along.ravel()[1]) if array.dtype.kind == "i" and along.size and along.shape[-1] > 1 else 0
    return step if step > 0 and np.array_equal(along, np.broadcast_to(np.arange(along.shape[-1]) * step, along.shape)) else 0


def _is_computed(op):
    return (op.type in _COMPUTES or op.type == "Pack") and (op.outputs[0].dtype.is_integer or op.outputs[0].dtype.is_bool)


def _taken(op, steps):
    """Returns what an op takes of a vector of known numbers, or of those sizes of a shape that are known; None else."""
    shape, of = op.inputs[0].op, tf.get_static_value(op.inputs[0])
    while shape.type == "Cast":
        shape = shape.inputs[0].op
    if of is None and shape.type == "Shape" and shape.inputs[0].shape.rank is not None:
        of = np.array(shape.inputs[0].shape.as_list(), object)
    at = [static_value(source, steps) for source in list(op.inputs)[1:2 if op.type.startswith("Gather") else 4]]
    if of is None or of.ndim != 1 and op.type != "Slice" or any(each is None for each in at):
        return None
    index = at[0] if op.type.startswith("Gather") else _slice(op, at)
    found = None if index is None else of[index]
    return None if None in np.ravel(found).tolist() else np.asarray(found, op.outputs[0].dtype.as_numpy_dtype)


def _slice(op, bounds):
    """Returns how an op takes a part of a vector, or of any array by tf.slice: an int, a slice or a tuple of such."""
    if op.type == "Slice":
        return tuple(slice(int(begin), None if size < 0 else int(begin + size)) for begin, size in zip(*bounds))
    masks = [op.get_attr(name + "_mask") & 1 for name in ("begin", "end", "shrink_axis", "new_axis", "ellipsis")]
    if any(masks[3:]) or any(len(bound) != 1 for bound in bounds):
        return None
    begin, end, step = (int(bound[0]) for bound in bounds)
    return begin if masks[2] else slice(None if masks[0] else begin, None if masks[1] else end, step)


def comes_to(op, constant):
    """Tells whether an op that goes by unknown sizes may be the constant that TensorFlow makes where they are known."""
    # tf.zeros and tf.ones of up to a thousand entries are constants, and so are such of the shape of something else.
    if (op.type == "Fill" or op.type.endswith("sLike")) and op.outputs[0].dtype != tf.string:
        value = filling_of(op)
        return value is not None and {value.tobytes()}.issuperset(
            each.tobytes() for each in tf.make_ndarray(constant.get_attr("value")).reshape([-1]))
    if op.type == "Shape":
        value, known = constant.outputs[0], op.inputs[0].shape
        return value.dtype.is_integer and value.shape.rank == 1 and known.rank in (None, tf.dimension_value(value.shape[0]))
    return False


def filling_of(op):
    """Returns the one value that tf.zeros, tf.ones or the like fills a tensor with, a scalar; None where it is not known."""
    value = tf.get_static_value(op.inputs[1]) if op.type == "Fill" else int(op.type == "OnesLike")
    return None if value is None else np.asarray(value, op.outputs[0].dtype.as_numpy_dtype)
