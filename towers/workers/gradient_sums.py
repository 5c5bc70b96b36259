"""Gradients summed over workers: dense ones in few large tensors, sparse ones row by row."""
import tensorflow.compat.v1 as tf

from towers.meeting.slices import with_numbers

__all__ = ["describe", "scaled", "sum_gradients"]

_PACK_BYTES = 1 << 26  # of one transfer: packing takes as much memory, and what is large gains nothing


def sum_gradients(collectives, gradients, purpose):
    """Adds up gradients over workers.

    Args:
      collectives: `towers.workers.collectives.Collectives`.
      gradients: list of tensors and `tf.IndexedSlices`, this worker's; of the same kind, shape and dtype in every worker.
      purpose: tuple of str and int, see `Collectives.sum`.

    Returns:
      A list of the same kinds. The rows of slices are those of all workers, in the order of their ranks.
    """
    sums = [None] * len(gradients)
    for turn, numbers in enumerate(_packs(gradients)):
        tensors = [gradients[number] for number in numbers]
        packed = tensors[0] if len(tensors) == 1 else tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0, name="pack")
        total = collectives.sum(packed, purpose + ("pack", turn))
        if len(tensors) > 1:
            parts = tf.split(total, [tensor.shape.num_elements() for tensor in tensors], name="unpack")
            for number, tensor, part in zip(numbers, tensors, parts):
                sums[number] = tf.reshape(part, tensor.shape)
        else:
            sums[numbers[0]] = total
    for number, gradient in enumerate(gradients):
        if isinstance(gradient, tf.IndexedSlices):
            values = collectives.join_varied(gradient.values, purpose + ("values", number))
            indices = collectives.join_varied(gradient.indices, purpose + ("indices", number))
            sums[number] = tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0), gradient.dense_shape)
    return sums


def scaled(gradient, factor):
    """Returns a gradient times a number."""
    return with_numbers(gradient, lambda numbers: numbers * factor)


def describe(gradient, variable):
    """Returns what a gradient is, in words that are the same in every worker."""
    kind = "rows of " if isinstance(gradient, tf.IndexedSlices) else ""
    return "%s%s, %s%s" % (kind, variable.op.name, variable.dtype.base_dtype.name, variable.shape)


def _packs(gradients):
    """Returns lists of numbers of dense gradients that cross together; a gradient of an unknown size crosses by itself."""
    packs, open_packs = [], {}  # dtype -> (numbers, bytes)
    for number, gradient in enumerate(gradients):
        if isinstance(gradient, tf.IndexedSlices):
            continue
        if not gradient.shape.is_fully_defined():
            packs.append([number])
            continue
        dtype, size = gradient.dtype.base_dtype, gradient.shape.num_elements() * gradient.dtype.size
        numbers, so_far = open_packs.get(dtype, (None, 0))
        if numbers is None or so_far + size > _PACK_BYTES:
            numbers, so_far = [], 0
            packs.append(numbers)
        numbers.append(number)
        open_packs[dtype] = numbers, so_far + size
    return packs
