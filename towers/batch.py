"""The global batch, and each tower's share of it.

A nested structure of tensors is split along axis 0, the rest spread over the first towers: 10 examples over 4 towers are
3, 3, 2 and 2. Sizes that are known while the graph is built stay Python numbers, so that even towers cost no arithmetic.
"""
import tensorflow.compat.v1 as tf

from towers.placement import HOST

__all__ = ["PerTower", "count_examples", "split_batch"]


class PerTower:
    """A batch already divided: one structure of tensors for each tower, in the order of the towers.

    Args:
      batches: list or tuple; its length is the number of towers.
    """

    def __init__(self, batches):
        self.batches = list(batches)


def split_batch(batch, num_towers):
    """Splits a nested structure of tensors over towers along axis 0; scalars go to every tower.

    Args:
      batch: nested structure (of tuples, lists, dicts) of tensors or arrays; those of rank 1 or more agree in axis 0.
      num_towers: int.

    Returns:
      A list of structures like `batch`, one for each tower.

    Raises:
      ValueError: for an unknown rank, sizes that disagree, nothing to split, or fewer examples than towers.
      TypeError: for sparse and ragged tensors.
    """
    with tf.device(HOST), tf.name_scope("split_batch"):
        leaves = [_to_tensor(leaf) for leaf in tf.nest.flatten(batch)]
        size = _batch_size(leaves, num_towers)
        sizes = _shares(size, num_towers)
        # Named like what is split: TensorFlow names the op where sizes turn out to disagree when it runs.
        parts = [tf.split(leaf, sizes, num=num_towers, name=leaf.op.name.split("/")[-1]) if leaf.shape.rank
                 else [leaf] * num_towers for leaf in leaves]
    return [tf.nest.pack_sequence_as(batch, list(leaves_of_tower)) for leaves_of_tower in zip(*parts)]


def count_examples(batch):
    """Returns the number of examples in one tower's batch: the size along axis 0 of its tensors that have one.

    Returns:
      An int where it is known while the graph is built, else an int32 scalar tensor; None if there is no such tensor.

    Raises:
      ValueError: if the tensors disagree in axis 0, so that none of them tells.
    """
    leaves = [leaf for leaf in tf.nest.flatten(batch) if tf.is_tensor(leaf) and tf.TensorShape(leaf.shape).rank != 0]
    sizes = {tf.dimension_value(leaf.shape[0]) for leaf in leaves if tf.TensorShape(leaf.shape).rank} - {None}
    if len(sizes) > 1:
        raise ValueError("The tensors of a tower's batch have the sizes %s along axis 0, so its share of the global batch is "
                         "unknown: return a \"weight\" from the model function." % sorted(sizes))
    if sizes:
        return sizes.pop()
    return tf.shape(leaves[0], out_type=tf.int32)[0] if leaves else None


def _to_tensor(leaf):
    if isinstance(leaf, tf.SparseTensor) or type(leaf).__name__ == "RaggedTensor":
        raise TypeError("%r can't be split over towers; divide it yourself and hand in towers.PerTower." % (leaf,))
    tensor = tf.convert_to_tensor(leaf)
    if tensor.shape.rank is None:
        raise ValueError("%r has unknown rank and can't be split over towers: give it a shape." % tensor.name)
    return tensor


def _batch_size(leaves, num_towers):
    batched = [leaf for leaf in leaves if leaf.shape.rank]
    if not batched:
        raise ValueError("The batch holds no tensor of rank 1 or more, so there is nothing to split over towers: hand "
                         "in towers.PerTower or a callable that makes each tower's batch.")
    known = {tf.dimension_value(leaf.shape[0]): leaf.name for leaf in batched}
    known.pop(None, None)
    if len(known) > 1:
        raise ValueError("The tensors of a batch have to agree in axis 0; these do not: %s."
                         % ", ".join("%r has %d" % (name, size) for size, name in sorted(known.items())))
    if not known:
        return tf.shape(batched[0])[0]
    size, name = known.popitem()
    if size < num_towers:
        raise ValueError("A batch of %d (%r) is too small for %d towers: each needs an example." % (size, name, num_towers))
    return size


def _shares(size, num_towers):
    if isinstance(size, int):
        return [size // num_towers + (i < size % num_towers) for i in range(num_towers)]
    towers = tf.range(num_towers)
    return size // num_towers + tf.cast(towers < size % num_towers, tf.int32)
