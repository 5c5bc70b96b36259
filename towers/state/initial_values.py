"""Variables whose initial value a model function computes of its tower's examples: one set of variables starts from tower 0's.

Data-dependent initialization, `tf.get_variable("g", initializer=1 / deviation)` say, means the first batch, and tower 0 has a
part of it.
"""
import warnings

import tensorflow.compat.v1 as tf

from towers.api.wording import TowersWarning, some_of
from towers.graph.op_types import OF_SHAPES
from towers.graph.walk import ancestors, end_of, is_variable, op_of
from towers.state.own_data import of_own_data, own_leaves

__all__ = ["warn_of_initial_values"]


def warn_of_initial_values(towers, batches, added, stacklevel=4):
    """Warns, once, where outputs need a variable whose initial value tower 0 computed of its own part of the batch.

    Args:
      towers: list of `towers.Tower`, all built.
      batches: list over towers of what each model function was called with, nested structures.
      added: dict from keys to what tower 0 added to the graph's collections.
      stacklevel: int, as of `warnings.warn`.
    """
    first = towers[0]
    if first.context.num_towers == 1:
        return
    made, own = set(first.ops), own_leaves(batches, first.context.meetings.peers)[0]
    stop = {op for op in first.ops if op.type in OF_SHAPES or _takes_first_rows(op, own)}
    variables = {item.op: item for items in added.values() for item in items if is_variable(item)}
    of_own = of_own_data(first.context, stop, own)
    found = [op for op, variable in variables.items() if variable.initializer in made and variable.initializer in of_own]
    if not found:
        return
    ends = tf.nest.flatten(first.outputs, expand_composites=True) + [item for items in added.values() for item in items]
    needed = ancestors([end for end in ends if op_of(end) is not None and not is_variable(end)], within=made)
    names = [op.name for op in found if op in needed]
    if names:
        warnings.warn(
            "The initial value of %s is computed of a tower's own examples, and tower 0's is taken: one tower would start from "
            "that of the whole batch. Compute it of all towers' data, by towers.all_reduce or towers.all_gather, or start from a "
            "constant." % some_of(names, 5), TowersWarning, stacklevel=stacklevel)


def _takes_first_rows(op, own):
    """Tells whether an op takes rows of the batch that tower 0 has as the whole batch does: the first five, say."""
    if op.type != "StridedSlice" or end_of(op.inputs[0]) not in own:
        return False
    size, masks = tf.dimension_value(op.inputs[0].shape[0]), [op.get_attr(name + "_mask") & 1 for name in (
        "begin", "end", "ellipsis", "new_axis", "shrink_axis")]
    bounds = [tf.get_static_value(bound) for bound in list(op.inputs)[1:]]
    if size is None or any(bound is None or not len(bound) for bound in bounds) or any(masks[1:4]):
        return False
    begin, end, step = (int(bound[0]) for bound in bounds)
    return 0 <= begin < size if masks[4] else step == 1 and (masks[0] or begin >= 0) and 0 < end <= size
