"""ResNets, written once over a few layers, so that every variant trains the very same network.

He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition" (2015). Section 4.2, for 32 x 32 images: depth 6n + 2,
three stages of n blocks with 16, 32 and 64 channels, shortcuts without parameters. Table 1: ResNet-50, of bottlenecks.
"""
import functools
from typing import Callable, NamedTuple

import tensorflow.compat.v1 as tf

import tf_syncbn
from benchmarks.unsynced import EPSILON, MOMENTUM, fused_batch_norm

__all__ = ["IMAGE_SHAPE", "Layers", "NUM_CLASSES", "fused_layers", "model_fn", "resnet", "resnet_50", "synced_layers"]

IMAGE_SHAPE, NUM_CLASSES = (32, 32, 3), 10


class Layers(NamedTuple):
    """What a network is made of. `x` is whatever the variant passes from layer to layer: a tensor, or a list of them.

    Variables are named `<name>/kernel`, `<name>/bias`, `<name>/gamma` and so on in every variant.

    Attributes:
      each: function of (a function of tensors, *xs) that applies what has no variables.
      conv: function of (x, channels, stride, name): a convolution 3 x 3 without bias. Those of plain tensors take a `size`.
      batch_norm: function of (x, name), with moving averages.
      dense: function of (x, units, name): a matrix product and a bias.
    """
    each: Callable
    conv: Callable
    batch_norm: Callable
    dense: Callable


def resnet(layers, images, depth=20):
    """Applies the ResNet.

    Args:
      layers: `Layers`.
      images: float32 [b, 32, 32, 3], in the form that `layers` takes.
      depth: int, 6n + 2.

    Returns:
      Logits [b, 10], in the form that `layers` returns.
    """
    def norm_relu(x, name):
        return layers.each(tf.nn.relu, layers.batch_norm(x, name))

    x = norm_relu(layers.conv(images, 16, 1, "first"), "first_bn")
    for stage in range(3):
        for block in range((depth - 2) // 6):
            name = "stage%d_block%d/" % (stage, block)
            channels, stride = 16 << stage, 2 if stage and not block else 1
            shortcut = layers.each(_narrow_and_widen, x) if stride > 1 else x
            x = norm_relu(layers.conv(x, channels, stride, name + "conv1"), name + "bn1")
            x = layers.batch_norm(layers.conv(x, channels, 1, name + "conv2"), name + "bn2")
            x = layers.each(_add_relu, x, shortcut)
    return layers.dense(layers.each(_mean_over_positions, x), NUM_CLASSES, "dense")


def model_fn(layers, depth=20):
    """Returns a model function of images [b, 32, 32, 3] and labels [b] that returns the mean loss, for `towers`."""
    def loss(images, labels):
        logits = resnet(layers, images, depth)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
    return loss


def resnet_50(layers, axis=3, dtype=tf.float32):
    """Returns a model function as `model_fn`, of a ResNet-50 for images of any size, of layers on plain tensors.

    Args:
      layers: `Layers` on tensors whose channels lie along `axis`.
      axis: int, 3 or 1, which a CPU has no convolutions for.
      dtype: tf.float32 or tf.float16, of what is computed; variables and the loss are float32.
    """
    def norm_relu(x, name):
        return tf.nn.relu(layers.batch_norm(x, name))

    def bottleneck(x, channels, stride, name):
        shortcut = x
        if x.shape.as_list()[axis] != 4 * channels:
            shortcut = layers.batch_norm(layers.conv(x, 4 * channels, stride, name + "conv0", size=1), name + "bn0")
        x = norm_relu(layers.conv(x, channels, 1, name + "conv1", size=1), name + "bn1")
        x = norm_relu(layers.conv(x, channels, stride, name + "conv2"), name + "bn2")
        return tf.nn.relu(layers.batch_norm(layers.conv(x, 4 * channels, 1, name + "conv3", size=1), name + "bn3") + shortcut)

    def loss(images, labels):
        images = tf.cast(images if axis == 3 else tf.transpose(images, [0, 3, 1, 2]), dtype)
        x = norm_relu(layers.conv(images, 64, 2, "first", size=7), "first_bn")
        x = tf.nn.max_pool2d(x, 3, 2, "SAME", _layout(axis))
        for stage, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                x = bottleneck(x, 64 << stage, 2 if stage and not block else 1, "stage%d_block%d/" % (stage, block))
        x = tf.cast(tf.reduce_mean(x, [1, 2] if axis == 3 else [2, 3]), tf.float32)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=labels, logits=layers.dense(x, NUM_CLASSES, "dense")))
    return loss


def synced_layers(axis=3):
    """Returns plain layers on tensors whose channels lie along an axis, 3 or 1, with `tf_syncbn.sync_batch_norm`."""
    return Layers(_each, functools.partial(_conv, axis=axis), functools.partial(_synced, axis=axis), _dense)


def fused_layers(axis=3):
    """Returns such layers with the fused op, of each tower alone."""
    return Layers(_each, functools.partial(_conv, axis=axis), functools.partial(fused_batch_norm, axis=axis), _dense)


def _synced(x, name, axis=3):
    return tf_syncbn.sync_batch_norm(x, axis, MOMENTUM, EPSILON, name=name)


def _layout(axis):
    return "NHWC" if axis == 3 else "NCHW"


def _each(function, *xs):
    return function(*xs)


def _conv(x, channels, stride, name, size=3, axis=3):
    with tf.variable_scope(name):
        kernel = tf.get_variable("kernel", [size, size, x.shape.as_list()[axis], channels],
                                 initializer=tf.variance_scaling_initializer(2.0, "fan_out"))
        strides = [1 if i in (0, axis) else stride for i in range(4)]
        return tf.nn.conv2d(x, tf.cast(kernel, x.dtype), strides=strides, padding="SAME", data_format=_layout(axis))


def _dense(x, units, name):
    with tf.variable_scope(name):
        kernel = tf.get_variable("kernel", [x.shape.as_list()[-1], units], initializer=tf.glorot_uniform_initializer())
        return tf.matmul(x, kernel) + tf.get_variable("bias", [units], initializer=tf.zeros_initializer())


def _narrow_and_widen(x):
    more = x.shape.as_list()[-1] // 2
    return tf.pad(x[:, ::2, ::2], [[0, 0], [0, 0], [0, 0], [more, more]])


def _add_relu(x, shortcut):
    return tf.nn.relu(x + shortcut)


def _mean_over_positions(x):
    return tf.reduce_mean(x, [1, 2])
