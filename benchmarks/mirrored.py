"""The peer of TensorFlow 2: `tf.distribute.MirroredStrategy` with Keras' `BatchNormalization(synchronized=True)`.

As its documentation has it: a Keras model made in the strategy's scope, an optimizer of Keras, and a step under
`tf.function` that runs the replicas and sums their losses. It needs eager execution in the process.
"""
import numpy as np
import tensorflow as tf2
import tensorflow.compat.v1 as tf

from benchmarks.networks import IMAGE_SHAPE, Layers, resnet
from benchmarks.unsynced import EPSILON, MOMENTUM

__all__ = ["Mirrored", "keras_version", "make_cpus", "why_not"]


def why_not():
    """Returns why this lane or process has no such peer, a sentence, or None where it has."""
    if tf.__version__.startswith("1."):
        return "TensorFlow %s has no synchronized batch norm under MirroredStrategy." % tf.__version__
    if not tf.executing_eagerly():
        return "MirroredStrategy with Keras needs eager execution, and --v1-behaviour turns it off."
    return None


def make_cpus(count):
    """Makes `count` logical CPU devices; it has to be called before TensorFlow's eager runtime starts."""
    tf2.config.set_logical_device_configuration(
        tf2.config.list_physical_devices("CPU")[0], [tf2.config.LogicalDeviceConfiguration()] * count)


def keras_version():
    """Returns the version of the Keras that `Mirrored` uses: TensorFlow's own, 2.15 beside TensorFlow 2.15, later 3."""
    import keras  # not above: TensorFlow 1.15 comes without
    return keras.__version__


class Mirrored:
    """The ResNet on `num_towers` CPU replicas, ready to step; a `benchmarks.variants` variant.

    Args:
      num_towers: int, as many CPU devices exist.
      depth: int, of the ResNet.
      learning_rate, momentum: floats of SGD.
    """

    def __init__(self, num_towers, depth, learning_rate, momentum):
        import keras
        self._keras = keras
        self._num_towers = num_towers
        self._strategy = tf2.distribute.MirroredStrategy(["/cpu:%d" % i for i in range(num_towers)])
        with self._strategy.scope():
            self._layers = {}
            images = keras.Input(IMAGE_SHAPE)
            self._model = keras.Model(images, resnet(self._keras_layers(), images, depth))
            self._optimizer = keras.optimizers.SGD(learning_rate, momentum=momentum)
            self._optimizer.build(self._model.trainable_variables)
        self._step = tf2.function(self._step_of_all)

    def load(self, weights, images, labels):
        """Takes weights, a dict from names such as "first/kernel" to arrays, and the whole batch, arrays.

        The optimizer's state stays.
        """
        for name, value in weights.items():
            layer, attribute = name.rsplit("/", 1)
            getattr(self._layers[layer], attribute).assign(value)
        self._images, self._labels = self._divide(images), self._divide(labels)

    def step(self):
        """Runs one training step and returns the loss of the whole batch before it."""
        return float(self._step(self._images, self._labels))

    def _divide(self, array):
        parts = np.split(array, self._num_towers)
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: tf2.constant(parts[context.replica_id_in_sync_group]))

    def _step_of_all(self, images, labels):
        losses = self._strategy.run(self._step_of_one, (images, labels))
        return self._strategy.reduce("SUM", losses, axis=None)

    def _step_of_one(self, images, labels):
        with tf2.GradientTape() as tape:
            logits = self._model(images, training=True)
            losses = tf2.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            loss = tf2.reduce_mean(losses) / self._num_towers  # the optimizer sums the replicas' gradients
        variables = self._model.trainable_variables
        self._optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    def _keras_layers(self):
        layers = self._keras.layers

        def made(name, layer, x):
            self._layers[name] = layer
            return layer(x)

        def each(function, *xs):
            return layers.Lambda(lambda tensors: function(*tensors))(list(xs))

        def conv(x, channels, stride, name):
            return made(name, layers.Conv2D(channels, 3, stride, "same", use_bias=False), x)

        def batch_norm(x, name):
            return made(name, layers.BatchNormalization(momentum=MOMENTUM, epsilon=EPSILON, synchronized=True), x)

        def dense(x, units, name):
            return made(name, layers.Dense(units), x)

        return Layers(each, conv, batch_norm, dense)
