"""Reshapes that take a number of the model's own for the tower's number of examples.

`tf.reshape(x, [BATCH_SIZE, -1])` of a tower, which has a part of the batch, makes rows of parts of examples, and the layer behind
gets other weights than with one tower: where nothing else holds the rows to the labels it trains, and is another network. So are
groups of examples, `tf.reshape(x, [tf.minimum(4, tf.shape(x)[0]), -1, ...])`, by whose deviations GANs tell how alike images are.
"""
import warnings

import tensorflow.compat.v1 as tf

from towers.first_axis import lies_along_examples, products, sizes_of_examples
from towers.wording import TowersWarning

__all__ = ["warn_of_regrouping"]


def warn_of_regrouping(towers, stacklevel=3):
    """Warns, once, where tower 0 reshapes its examples into a number of rows that is none of its own, or into groups.

    Args:
      towers: list of `Tower`.
      stacklevel: int, as of `warnings.warn`.
    """
    context = towers[0].context
    if context.num_towers == 1:
        return
    sizes = sizes_of_examples(towers)
    for op in towers[0].ops:
        size = _size_of_groups(op)
        if size is not None and lies_along_examples(op.inputs[0], context):
            warnings.warn(
                "The model function makes groups of %d of a tower's examples (%r, of shape %s, by %r), and %d towers make others "
                "than one tower of the whole batch. Where examples of a group are computed together, make groups of all towers' "
                "examples, towers.all_gather(x, with_offset=True), and take the tower's rows of what comes out."
                % (size, op.inputs[0].name, op.inputs[0].shape, op.name, context.num_towers),
                TowersWarning, stacklevel=stacklevel)
            return
        rows = _rows(op)
        if rows is not None and not _may_be_examples(op, rows, sizes) and lies_along_examples(op.inputs[0], context):
            warnings.warn(
                "The model function reshapes a tower's examples (%r, of shape %s) to %d rows (%r), a number of its own: of %d "
                "towers each has a part of the batch, and the rows are parts of its examples. Write tf.shape(x)[0] where the "
                "batch size stands, or -1 there and the other number in full."
                % (op.inputs[0].name, op.inputs[0].shape, rows, op.name, context.num_towers),
                TowersWarning, stacklevel=stacklevel)
            return


def _rows(op):
    """Returns the number of rows that an op reshapes to, where another axis takes what comes; else None."""
    if op.type != "Reshape" or op.inputs[0].shape.rank in (None, 0):
        return None
    shape = tf.get_static_value(op.inputs[1])
    return int(shape[0]) if shape is not None and len(shape) > 1 and shape[0] > 1 and -1 in shape[1:] else None


def _size_of_groups(op):
    """Returns the size of groups, at most all examples, that an op reshapes to; None where it doesn't."""
    shape = op.inputs[1].op if op.type == "Reshape" else None
    if shape is None or shape.type != "Pack" or len(shape.inputs) < 2 or shape.inputs[0].op.type != "Minimum":
        return None
    if all(tf.get_static_value(size) != -1 for size in list(shape.inputs)[1:]):
        return None
    sizes = [tf.get_static_value(size) for size in shape.inputs[0].op.inputs]
    known = [int(size) for size in sizes if size is not None and size > 1]
    return min(known) if known else None


def _may_be_examples(op, rows, sizes):
    shape = op.inputs[0].shape.as_list()
    if shape[0] is None:
        return False
    own = [size for size in sizes if shape[0] % size == 0]
    return not own or rows % sizes[max(own)] != 0 or rows in {
        max(own) * number for number in products([shape[0] // max(own)] + shape[1:])}
