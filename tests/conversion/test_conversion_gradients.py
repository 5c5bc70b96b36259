"""convert_model on models that take gradients through their batch norms, as public code writes them."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
from tests.conversion.test_conversion import by_moments, fused
from towers.testing import assert_equals_one_batch

RNG = np.random.RandomState(4)
IMAGES, OTHERS = RNG.randn(7, 4, 4, 2), RNG.randn(7, 4, 4, 2)
LABELS, BETWEEN = RNG.randint(0, 3, 7), RNG.rand(7, 1, 1, 1)


def variable(name, shape):
    return tf.get_variable(name, shape, tf.float64, tf.random_normal_initializer(stddev=0.3, seed=sum(map(ord, name))))


def in_half(layer):
    """The fused op knows no float64."""
    return layer if layer is by_moments else lambda x, name, **kwargs: tf.cast(layer(tf.cast(x, tf.float32), name), tf.float64)


def convolved(x, kernel, layer, name):
    x = tf.nn.conv2d(x, kernel, [1, 1, 1, 1], "SAME")
    return tf.nn.leaky_relu(in_half(layer)(x, name), 0.2)


def critic(x, layer):
    """As WGAN-GP's has it with batch norm left in; its layers are applied to real, made and mixed images in turn."""
    with tf.variable_scope("critic", reuse=tf.AUTO_REUSE):
        x = convolved(x, variable("conv1", [3, 3, 2, 4]), layer, "bn1")
        x = convolved(x, variable("conv2", [3, 3, 4, 4]), layer, "bn2")
        return tf.matmul(tf.reshape(x, [-1, 64]), variable("last", [64, 1]))


def wgan_gp(layer):
    def model_fn(real, made, between):
        made *= 1 + variable("generator", [2])
        mixed = real + between * (made - real)
        slopes, = tf.gradients(critic(mixed, layer), [mixed])
        slopes = tf.sqrt(tf.reduce_sum(tf.square(slopes), [1, 2, 3]) + 1e-12)
        penalty = tf.reduce_mean((slopes - 1.0) ** 2)
        return tf.reduce_mean(critic(made, layer)) - tf.reduce_mean(critic(real, layer)) + 10.0 * penalty
    return model_fn, (IMAGES, OTHERS, BETWEEN)


def maml(layer):
    """One inner step by the gradient of one part of the examples' loss, and the loss of the other part behind it."""
    def forward(x, weights, reuse):
        with tf.variable_scope("model", reuse=reuse):
            x = convolved(x, weights["conv1"], layer, "bn1")
            x = convolved(x, weights["conv2"], layer, "bn2")
            return tf.matmul(tf.reduce_mean(x, [1, 2]), weights["last"])

    def loss_of(logits, labels):  # sparse ones have no second derivative in TensorFlow 1
        labels = tf.one_hot(labels, 3, dtype=logits.dtype)
        return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits_v2(labels=labels, logits=logits))

    def model_fn(first, second, labels):
        weights = {"conv1": variable("conv1", [3, 3, 2, 4]), "conv2": variable("conv2", [3, 3, 4, 4]),
                   "last": variable("last", [4, 3])}
        inner = loss_of(forward(first, weights, tf.AUTO_REUSE), labels)
        slopes = dict(zip(weights, tf.gradients(inner, list(weights.values()))))
        fast = {name: weight - 0.4 * slopes[name] for name, weight in weights.items()}
        return loss_of(forward(second, fast, True), labels) + 0.1 * inner
    return model_fn, (IMAGES, OTHERS, LABELS)


def vat(layer):
    """Virtual adversarial training: a direction by one power iteration, which the loss is smoothed along."""
    def forward(x):
        with tf.variable_scope("model", reuse=tf.AUTO_REUSE):
            x = convolved(x, variable("conv1", [3, 3, 2, 4]), layer, "bn1")
            return tf.matmul(tf.reduce_mean(x, [1, 2]), variable("last", [4, 3]))

    def unit(d):
        d /= 1e-12 + tf.reduce_max(tf.abs(d), [1, 2, 3], keepdims=True)
        return d / tf.sqrt(1e-6 + tf.reduce_sum(d ** 2, [1, 2, 3], keepdims=True))

    def divergence(p, q):
        p_log, q_log = tf.nn.log_softmax(p), tf.nn.log_softmax(q)
        return tf.reduce_mean(tf.reduce_sum(tf.nn.softmax(p) * (p_log - q_log), 1))

    def model_fn(x, direction, labels):
        logits = forward(x)
        step = 1e-1 * unit(direction)
        slope, = tf.gradients(divergence(logits, forward(x + step)), [step], aggregation_method=2)
        smooth = divergence(tf.stop_gradient(logits), forward(x + 2.0 * unit(tf.stop_gradient(slope))))
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)) + smooth
    return model_fn, (IMAGES, OTHERS, LABELS)


@pytest.mark.laws
@pytest.mark.parametrize("sizes", [[2, 5], pytest.param([1, 4, 2], marks=pytest.mark.sweep)])
@pytest.mark.parametrize("layer", [by_moments, fused])
@pytest.mark.parametrize("made", [wgan_gp, maml, vat])
def test_a_model_that_takes_gradients_through_batch_norms_trains_as_one_tower_does(made, layer, sizes):
    model_fn, batch = made(layer)
    converted = tf_syncbn.convert_model(model_fn)
    # Of layers that are applied again TensorFlow gives the moves of averages no order.
    assert_equals_one_batch(converted, batch, len(sizes), sizes, update_ops="none", steps=2)
    assert {found.kind for found in converted.converted} == {"moments" if layer is by_moments else "fused"}
