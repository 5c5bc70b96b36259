"""The global batch, and each tower's share of it.

A nested structure of tensors is split along axis 0, the rest spread over the first towers: 10 examples over 4 towers are
3, 3, 2 and 2. Sizes that are known while the graph is built stay Python numbers, so that even towers cost no arithmetic.
"""
from typing import Sequence

import tensorflow.compat.v1 as tf

from towers.api.annotations import Structure
from towers.api.arguments import LIST, as_tensor, check
from towers.batches.rows import is_ragged, is_sparse, num_rows, split_rows
from towers.devices.placement import HOST

__all__ = ["PerTower", "check_batch", "count_examples", "even_sizes", "is_dataset", "known_sizes", "split_batch"]


class PerTower:
    """A batch already divided: one structure of tensors for each tower, in the order of the towers.

    Args:
      batches: list or tuple; its length is the number of towers.
    """

    def __init__(self, batches: Sequence[Structure]) -> None:
        check(LIST, batches=batches)
        self.batches = list(batches)


def split_batch(batch, num_towers):
    """Splits a nested structure of tensors over towers along axis 0; scalars go to every tower, and None does.

    Args:
      batch: nested structure (of tuples, lists, dicts) of tensors or arrays; those of rank 1 or more agree in axis 0. Sparse and
        ragged tensors among them are divided by rows, like the others.
      num_towers: int.

    Returns:
      A list of structures like `batch`, one for each tower.

    Raises:
      ValueError: for an unknown rank, sizes that disagree, nothing to split, or fewer examples than towers.
      TypeError: for a data set or iterator within a structure, in place of what it hands out.
    """
    check_batch(batch)
    with tf.device(HOST), tf.name_scope("split_batch"):
        leaves = [leaf if leaf is None else _to_tensor(leaf) for leaf in tf.nest.flatten(batch)]
        size = _batch_size([leaf for leaf in leaves if leaf is not None], num_towers)
        sizes = even_sizes(size, num_towers)
        parts = [_split(leaf, size, sizes, num_towers) if leaf is not None and leaf.shape.rank else [leaf] * num_towers
                 for leaf in leaves]
    return [tf.nest.pack_sequence_as(batch, list(leaves_of_tower)) for leaves_of_tower in zip(*parts)]


def is_dataset(batch):
    """Tells whether a batch is a data set of either version of `tf.data`."""
    return hasattr(batch, "element_spec") and hasattr(batch, "batch")


def check_batch(batch):
    """Raises TypeError where a batch has a data set or an iterator in it, not the tensors that these hand out."""
    for leaf in tf.nest.flatten(batch):
        if is_dataset(leaf):
            raise TypeError("The batch holds a data set, %r: hand it in alone as the batch of all towers, or else the tensors of "
                            "its next batch, tf.compat.v1.data.make_one_shot_iterator(dataset).get_next()." % (leaf,))
        if hasattr(leaf, "get_next"):
            raise TypeError("The batch holds an iterator, %r: hand it in alone as the batch of all towers, or else the tensors "
                            "that its get_next() returns." % (leaf,))


def known_sizes(batches):
    """Returns the sizes along axis 0 that the parts of a batch have in all towers, as far as they are known.

    Args:
      batches: list over towers of nested structures.

    Returns:
      A list over the parts, as `tf.nest.flatten` orders them, of lists over towers of int, None in the place of a list where a
      size is not known or there is none; None where the towers' structures differ.
    """
    flat = [tf.nest.flatten(batch) for batch in batches]
    if any(len(leaves) != len(flat[0]) for leaves in flat):
        return None
    return [_known_of(column) for column in zip(*flat)]


def _known_of(leaves):
    shapes = [tf.TensorShape(getattr(leaf, "shape", None)) if not is_ragged(leaf) else tf.TensorShape(None) for leaf in leaves]
    if any(not shape.rank for shape in shapes):
        return None
    sizes = [tf.dimension_value(shape[0]) for shape in shapes]
    return None if None in sizes else sizes


def count_examples(batch, context):
    """Returns the number of examples in one tower's batch: the size along axis 0 of its tensors that have one.

    Args:
      batch: nested structure of tensors.
      context: the tower's `TowerContext`.

    Returns:
      An int where it is known while the graph is built, else an int32 scalar tensor, which fails when it is run if the tensors
      disagree in axis 0 and there are other towers; None if no tensor has a size.

    Raises:
      ValueError: if the tensors disagree in axis 0, so that none of them tells.
    """
    leaves = [leaf for leaf in tf.nest.flatten(batch)
              if (tf.is_tensor(leaf) or is_ragged(leaf)) and tf.TensorShape(leaf.shape).rank != 0]
    sizes = [tf.dimension_value(leaf.shape[0]) if tf.TensorShape(leaf.shape).rank else None for leaf in leaves]
    known = set(sizes) - {None}
    if len(known) > 1:
        raise ValueError("The tensors of a tower's batch have the sizes %s along axis 0, so its share of the global batch is "
                         "unknown: return a \"weight\" from the model function." % sorted(known))
    if None in sizes and len(leaves) > 1 and context.num_towers > 1 and not _split_alike(leaves):
        return _checked_size(leaves, context.index)
    if known:
        return known.pop()
    if leaves and is_ragged(leaves[0]):
        return tf.cast(leaves[0].nrows(), tf.int32)
    return tf.shape(leaves[0], out_type=tf.int32)[0] if leaves else None


def _split_alike(leaves):
    """Tells whether `leaves` are parts of tensors that were split by the same sizes, which fails where these disagree."""
    ops = [leaf.op for leaf in leaves if isinstance(leaf, tf.Tensor)]
    return len(ops) == len(leaves) and all(op.type == "SplitV" for op in ops) and len(
        {(op.inputs[1].name, leaf.value_index) for op, leaf in zip(ops, leaves)}) == 1


def _checked_size(leaves, tower):
    names = ", ".join(getattr(leaf, "name", type(leaf).__name__) for leaf in leaves)
    with tf.name_scope("batch_size"):
        # Where a leaf's rank is unknown it may turn out to be a scalar, which has no size.
        sizes = [leaf.nrows() if is_ragged(leaf) else tf.shape(leaf) for leaf in leaves]
        with tf.device(HOST):
            sizes = tf.concat([tf.reshape(tf.cast(size, tf.int32), [-1])[:1] for size in sizes], 0)
            check = tf.raw_ops.Assert(condition=tf.reduce_all(tf.equal(sizes, sizes[0])), summarize=len(leaves), data=[
                "The tensors %s in the batch of tower %d disagree in size along axis 0, so its share of the global batch is "
                "unknown: give them one size, or return a weight from the model function. Their sizes are"
                % (names, tower), sizes])
            with tf.control_dependencies([check]):
                return tf.identity(sizes[0])


def _to_tensor(leaf):
    tensor = leaf if is_sparse(leaf) or is_ragged(leaf) else as_tensor(leaf, "batch")
    if tensor.shape.rank is None:
        raise ValueError("%r has unknown rank and can't be split over towers: give it a shape." % _name(tensor))
    return tensor


def _name(leaf):
    if is_ragged(leaf):
        return "%s (ragged)" % leaf.flat_values.name
    return "%s (sparse)" % leaf.values.name if is_sparse(leaf) else leaf.name


def _split(leaf, size, sizes, num_towers):
    if isinstance(leaf, tf.Tensor):
        # Named like what is split: TensorFlow names the op where sizes turn out to disagree when it runs.
        return tf.split(leaf, sizes, num=num_towers, name=leaf.op.name.split("/")[-1])
    if tf.dimension_value(leaf.shape[0]) is not None and isinstance(size, int):
        return split_rows(leaf, sizes, num_towers)
    rows = num_rows(leaf)
    check = tf.raw_ops.Assert(condition=tf.equal(rows, size), data=[
        "The tensors of a batch have to agree in axis 0: this is the number of rows of %s, and that of the others"
        % _name(leaf), rows, tf.convert_to_tensor(size)])
    with tf.control_dependencies([check]):
        leaf = tf.nest.map_structure(tf.identity, leaf, expand_composites=True)
        return split_rows(leaf, sizes, num_towers)


def _batch_size(leaves, num_towers):
    batched = [leaf for leaf in leaves if leaf.shape.rank]
    if not batched:
        raise ValueError("The batch holds no tensor of rank 1 or more, so there is nothing to split over towers: hand in tensors "
                         "or arrays (each number of a list is taken by itself, np.asarray makes it one), towers.PerTower, or a "
                         "callable that makes each tower's batch.")
    known = {tf.dimension_value(leaf.shape[0]): _name(leaf) for leaf in batched}
    known.pop(None, None)
    if len(known) > 1:
        raise ValueError("The tensors of a batch have to agree in axis 0; these do not: %s."
                         % ", ".join("%r has %d" % (name, size) for size, name in sorted(known.items())))
    if not known:
        return num_rows(batched[0])
    size, name = known.popitem()
    if size < num_towers:
        raise ValueError("A batch of %d (%r) is too small for %d towers: each needs an example." % (size, name, num_towers))
    return size


def even_sizes(size, num_towers):
    """Divides a number of examples, an int or a scalar tensor, over towers; the first ones take the rest."""
    if isinstance(size, int):
        return [size // num_towers + (i < size % num_towers) for i in range(num_towers)]
    towers = tf.range(num_towers)
    return size // num_towers + tf.cast(towers < size % num_towers, tf.int32)
