"""Gradient functions of the model's own in whole-batch models: exact, or refused by name when gradients are taken."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.testing import assert_equals_one_batch

X = np.random.RandomState(0).randn(9, 4)
SIZES = ["known", "unknown"]


def weights(x):
    with tf.variable_scope("", reuse=tf.AUTO_REUSE, use_resource=True):
        return tf.get_variable("w", [4], x.dtype, tf.constant_initializer([0.5, -1.0, 1.5, 0.3]))


def standardized(x):
    mean, variance = tf.nn.moments(x, [0])
    return (x - mean) * tf.rsqrt(variance + 0.1)


@tf.custom_gradient
def swish(x):
    return x * tf.sigmoid(x), lambda dy: dy * (tf.sigmoid(x) + x * tf.sigmoid(x) * (1 - tf.sigmoid(x)))


@tf.custom_gradient
def turned_back(x):
    return tf.identity(x), lambda dy: -0.5 * dy


@tf.custom_gradient
def scaled(x, factor):
    return x * factor, lambda dy: (dy * factor, 3.0 * tf.reduce_sum(dy * x, 0))


@tf.custom_gradient
def sine(x):
    return tf.sin(x), lambda dy: 2.0 * dy * tf.cos(x)


@tf.custom_gradient
def over_the_batch(x):
    y = tf.nn.softmax(x, 0)
    return y, lambda dy: 2.0 * y * (dy - tf.reduce_sum(dy * y, 0))


@tf.custom_gradient
def summed(x):
    return tf.reduce_sum(tf.square(x), 0), lambda dy: 2.5 * dy * x


def clipped_by(clip):
    @tf.custom_gradient
    def clipped(x):
        return tf.identity(x), clip
    return clipped


@tf.custom_gradient
def of_its_mean_gradient(x):
    return tf.identity(x), lambda dy: dy - tf.reduce_mean(dy, 0)


@tf.custom_gradient
def over_its_number(x):
    return tf.identity(x), lambda dy: dy / tf.cast(tf.shape(dy)[0], dy.dtype)


EXACT = {
    "of each example": lambda x: tf.reduce_mean(swish(standardized(x * weights(x)))),
    "turned back": lambda x: tf.reduce_mean(tf.square(turned_back(standardized(x * weights(x))) - 0.3)),
    "with weights": lambda x: tf.reduce_mean(tf.square(standardized(scaled(x, weights(x))) - 0.3 * x)),
    "of a sum over examples": lambda x: tf.reduce_sum(sine(0.1 * tf.reduce_sum(x * weights(x), 0))),
    "of a mean": lambda x: tf.reduce_mean(tf.square(x * weights(x) - sine(tf.reduce_mean(x * weights(x), 0)))),
    "of weights": lambda x: tf.reduce_mean(tf.square(standardized(x) * sine(weights(x)) - 0.3))}
TOGETHER = {
    "over the batch": lambda x: tf.reduce_sum(tf.square(over_the_batch(x * weights(x)) - 0.1 * x)),
    "summed": lambda x: tf.reduce_sum(tf.sin(0.1 * summed(x * weights(x))))}
INEXACT = {
    "clipped": clipped_by(lambda dy: tf.clip_by_value(dy, -0.01, 0.01)),
    "clipped by norm": clipped_by(lambda dy: tf.clip_by_norm(dy, 0.1)),
    "rounded": clipped_by(tf.round),
    "less its mean": of_its_mean_gradient,
    "over its number": over_its_number}


def of_size(model_fn, size):
    if size == "known":
        return model_fn
    return lambda x: model_fn(tf.placeholder_with_default(x, [None, 4]))


def hold(model_fn, size="unknown"):
    assert_equals_one_batch(towers.whole_batch(of_size(model_fn, size)), (X,), num_towers=3, sizes=[4, 2, 3], steps=2)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", sorted(EXACT))
def test_a_function_with_a_gradient_of_its_own_trains_as_in_one_tower(name, size):
    hold(EXACT[name], size)


@pytest.mark.parametrize("name", sorted(TOGETHER))
def test_a_function_that_looks_at_the_examples_together_takes_them_whole(name):
    hold(TOGETHER[name])


@pytest.mark.parametrize("name", sorted(TOGETHER))
def test_where_the_size_is_known_it_would_keep_the_towers_own_and_is_refused(name):
    with pytest.raises(ValueError, match="towers.whole_batch: .*IdentityN.* has a gradient of its own.*placeholder_with_default"):
        hold(TOGETHER[name], "known")


@pytest.mark.parametrize("of", ["examples", "weights"])
@pytest.mark.parametrize("name", sorted(INEXACT))
def test_what_is_not_linear_in_the_gradient_or_looks_at_several_is_refused_when_it_is_taken(name, of):
    if of == "weights" and name in ("less its mean", "over its number"):
        pytest.skip("of weights that is linear")

    def model_fn(x):
        if of == "weights":
            return tf.reduce_mean(tf.square(x * INEXACT[name](weights(x)) - 0.3))
        return tf.reduce_mean(tf.square(INEXACT[name](x * weights(x)) - 0.3))

    with pytest.raises(ValueError, match="towers.whole_batch: the gradient function of 'tower_0/IdentityN' makes .*not linear"):
        hold(model_fn)


def guided(op, dy):
    return tf.where_v2(dy > 0, dy * tf.cast(op.outputs[0] > 0, dy.dtype), tf.zeros_like(dy))


def doubled(op, dy):
    return 2.0 * dy * tf.cast(op.outputs[0] > 0, dy.dtype)


tf.RegisterGradient("OwnGradientsGuided")(guided)
tf.RegisterGradient("OwnGradientsDoubled")(doubled)


def with_gradient(name):
    def model_fn(x):
        with tf.get_default_graph().gradient_override_map({"Relu": name}):
            y = tf.nn.relu(standardized(x * weights(x)))
        return tf.reduce_mean(tf.square(y - 0.3 * x))
    return model_fn


@pytest.mark.parametrize("size", SIZES)
def test_a_gradient_put_on_an_op_is_exact_where_it_is_linear(size):
    hold(with_gradient("OwnGradientsDoubled"), size)


def test_a_gradient_put_on_an_op_is_refused_where_it_is_not():
    with pytest.raises(ValueError, match="towers.whole_batch: the gradient function of 'tower_0/Relu' makes .*not linear"):
        hold(with_gradient("OwnGradientsGuided"))


@pytest.mark.laws
def test_a_gradient_that_the_model_takes_through_it_is_the_whole_batchs():
    def model_fn(x):
        x = x * weights(x)
        loss = tf.reduce_mean(INEXACT["clipped by norm"](swish(standardized(x))))
        return loss + tf.reduce_sum(tf.square(tf.gradients(loss, x)[0]))
    with pytest.raises(ValueError, match="not linear"):  # of the loss's own gradient
        hold(model_fn)

    def penalty(x):
        x = x * weights(x)
        return tf.reduce_sum(tf.square(tf.gradients(tf.reduce_mean(swish(standardized(x))), x)[0]))
    hold(penalty)


def recomputed(function):
    """A model of a layer that is computed anew where its gradient is taken."""
    def model_fn(x):
        with tf.variable_scope("", reuse=tf.AUTO_REUSE, use_resource=True):
            w = tf.get_variable("w", [4, 4], x.dtype, tf.glorot_uniform_initializer(seed=1))
        return tf.reduce_mean(tf.square(tf.recompute_grad(lambda h: tf.tanh(function(tf.matmul(h, w))))(x) - 0.2))
    return model_fn


@pytest.mark.skipif(not hasattr(tf, "recompute_grad"), reason="TensorFlow 1.15 has it not")
@pytest.mark.parametrize("size", SIZES)
def test_a_layer_that_is_computed_anew_for_its_gradient_trains_as_in_one_tower(size):
    hold(recomputed(tf.identity), size)


@pytest.mark.skipif(not hasattr(tf, "recompute_grad"), reason="TensorFlow 1.15 has it not")
def test_a_batch_norm_that_is_computed_anew_for_its_gradient_is_the_whole_batchs():
    hold(recomputed(standardized))
