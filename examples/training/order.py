"""The order in which a training sees its examples, and a pipeline that follows it."""
import numpy as np
import tensorflow.compat.v1 as tf

__all__ = ["Pipeline", "rows_of_part"]


class Pipeline:
    """Batches of examples, prefetched on the host.

    In training an epoch's order is drawn from the seed and the epoch alone, and a last batch that is not full is left out. So an
    epoch begun again at any step goes on as it would have, and processes that take their rows of the same batches have these
    batches together. To be made under the device and the name scope of the input.

    Args:
      count: int, the number of examples.
      example: function of an epoch and an example's number, int64 scalar tensors, that returns the example's tensors.
      batch_size: int.
      training: whether it is for training.
      seed: int.
      rows: (first, last + 1), the rows of each batch in training that are this process's; None is all of them.
      feed: dict from placeholders that `example` reads to what they are given, once an epoch.

    Attributes:
      batch: the tensors of the next batch.
    """

    def __init__(self, count, example, batch_size, training, seed=0, rows=None, feed=None):
        self._count, self._batch_size, self._training, self._seed = count, batch_size, training, seed
        self._rows, self._feed = rows or (0, batch_size), dict(feed or {})
        self._order = tf.placeholder(tf.int64, [None])
        self._epoch = tf.placeholder(tf.int64, [])
        dataset = tf.data.Dataset.from_tensor_slices(self._order)
        dataset = dataset.map(lambda index: example(self._epoch, index), num_parallel_calls=2)
        dataset = dataset.batch(self._rows[1] - self._rows[0], drop_remainder=training).prefetch(4)
        self._iterator = tf.data.make_initializable_iterator(dataset)
        self.batch = self._iterator.get_next()

    @property
    def steps_an_epoch(self):
        """How many batches an epoch has."""
        return self._count // self._batch_size if self._training else -(-self._count // self._batch_size)

    def start(self, session, epoch=0, skip=0):
        """Starts an epoch at its batch number `skip`."""
        order = np.arange(self._count)
        if self._training:
            np.random.RandomState((self._seed * 1000003 + epoch) % 2**32).shuffle(order)
            batches = order[:self.steps_an_epoch * self._batch_size].reshape(-1, self._batch_size)
            order = batches[skip:, slice(*self._rows)].reshape(-1)
        session.run(self._iterator.initializer, {**self._feed, self._order: order, self._epoch: epoch})


def rows_of_part(batch_size, part, parts, towers_a_part):
    """Returns which rows of a batch the towers of one part of all get, (first, last + 1).

    As `towers.TowerBuilder` splits a batch over all towers: the first ones take what does not divide.
    """
    each, rest = divmod(batch_size, parts * towers_a_part)
    first, end = (tower * each + min(tower, rest) for tower in (part * towers_a_part, (part + 1) * towers_a_part))
    return first, end
