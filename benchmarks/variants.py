"""The ways to train the ResNet on the same batch from the same weights, each built and ready to step.

A variant has `load(weights, images, labels)`, which takes the initial weights and the whole batch, and `step()`, which trains
once and returns the loss. Inputs lie in variables on the towers' devices, so that no variant is charged for feeding.
"""
import numpy as np
import tensorflow.compat.v1 as tf

import towers
from benchmarks import lists, mirrored
from benchmarks.networks import IMAGE_SHAPE, NUM_CLASSES, fused_layers, model_fn, synced_layers

__all__ = ["GraphVariant", "LISTS_ONE_CALL", "LISTS_PER_TOWER", "MIRRORED", "ONE_TOWER", "SYNCED", "UNSYNCED", "make_batch",
           "make_variant", "names", "towers_step"]

SYNCED, UNSYNCED, ONE_TOWER = "synced towers", "unsynced towers", "one tower, whole batch"
LISTS_ONE_CALL, LISTS_PER_TOWER = "lists, one gradient call", "lists, a gradient call a tower"
MIRRORED = "MirroredStrategy"
_LEARNING_RATE, _MOMENTUM = 0.01, 0.9


def names():
    """Returns the names of the variants that this process can have; `SYNCED` is ours."""
    own = [SYNCED, UNSYNCED, ONE_TOWER, LISTS_ONE_CALL, LISTS_PER_TOWER]
    return own + [MIRRORED] if mirrored.why_not() is None else own


def make_variant(name, num_towers, batch_size, depth):
    """Builds a variant.

    Args:
      name: str, one of `names()`.
      num_towers: int.
      batch_size: int, of each tower.
      depth: int, of the ResNet.
    """
    if name == MIRRORED:
        return mirrored.Mirrored(num_towers, depth, _LEARNING_RATE, _MOMENTUM)
    devices = ["/cpu:%d" % i for i in range(num_towers)]
    if name == ONE_TOWER:
        devices, batch_size = devices[:1], num_towers * batch_size
    if name in (LISTS_ONE_CALL, LISTS_PER_TOWER):
        def build(*batch):
            return lists.build_step(*batch, _optimizer(), name == LISTS_PER_TOWER, depth)
    else:
        def build(*batch):
            return towers_step(model_fn(synced_layers() if name == SYNCED else fused_layers(), depth), *batch)
    return GraphVariant(build, devices, batch_size)


def make_batch(size, seed=0, image_shape=IMAGE_SHAPE):
    """Returns random images, float32 [size] + image_shape, and labels, int32 [size]."""
    rng = np.random.RandomState(seed)
    return rng.randn(size, *image_shape).astype(np.float32), rng.randint(0, NUM_CLASSES, size).astype(np.int32)


def _optimizer():
    return tf.train.MomentumOptimizer(_LEARNING_RATE, _MOMENTUM)


def towers_step(model, images, labels, devices):
    """Builds towers on lists of their images and labels; returns the loss of the whole batch and the train op."""
    builder = towers.TowerBuilder(devices)
    replicas = builder.build(model, towers.PerTower(list(zip(images, labels))))
    return replicas.loss, towers.minimize(replicas, _optimizer(), update_ops="first")


class GraphVariant:
    """A training step in a graph and a session of its own.

    Args:
      build: function of (images, labels, devices), lists over towers, that returns the loss and the train op.
      devices: list of str.
      batch_size: int, of each tower.
      image_shape: tuple of int.
    """

    def __init__(self, build, devices, batch_size, image_shape=IMAGE_SHAPE):
        self._graph = tf.Graph()
        with self._graph.as_default():
            tf.set_random_seed(0)
            self._images = _input_variables("images", tf.float32, (batch_size,) + image_shape, devices)
            self._labels = _input_variables("labels", tf.int32, (batch_size,), devices)
            fetches = build([v.read_value() for v in self._images], [v.read_value() for v in self._labels], devices)
            self._initialize = [tf.global_variables_initializer(), tf.local_variables_initializer()]
        self._session = tf.Session(graph=self._graph, config=towers.session_config(devices))
        self._session.run(self._initialize)
        self._run = self._session.make_callable(list(fetches))

    def load(self, weights, images, labels):
        """Starts anew from weights, a dict from names such as "first/kernel" to arrays, and the whole batch, arrays."""
        self._session.run(self._initialize)
        variables = {v.op.name: v for v in self._graph.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES)}
        values = [(variables[name], value) for name, value in weights.items()]
        values += list(zip(self._images, np.split(images, len(self._images))))
        values += list(zip(self._labels, np.split(labels, len(self._labels))))
        # All in one run: a large graph takes long to prepare for each.
        self._session.run([variable.initializer for variable, _ in values],
                          {variable.initializer.inputs[1]: value for variable, value in values})

    def weights(self):
        """Returns the trainable variables, a dict from names to arrays."""
        return self._session.run({v.op.name: v for v in self._graph.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES)})

    def step(self):
        """Runs one training step and returns the loss of the whole batch before it."""
        return float(self._run()[0])


def _input_variables(name, dtype, shape, devices):
    """Returns one variable on each device, which training does not touch."""
    variables = []
    for i, device in enumerate(devices):
        with tf.device(device):
            variables.append(tf.get_variable("%s_%d" % (name, i), shape, dtype, initializer=tf.zeros_initializer(),
                                             trainable=False, collections=[tf.GraphKeys.LOCAL_VARIABLES]))
    return variables
