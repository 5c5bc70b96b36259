"""Gradients that a model function takes itself: said where they are not those of the whole batch, and nowhere else."""
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import SAID, build
from tests.sweeps import covering
from towers.testing import assert_equals_one_batch

RNG = np.random.RandomState(2)
X, Y = RNG.randn(9, 4), RNG.randn(9)


def weights():
    with tf.variable_scope("", reuse=tf.AUTO_REUSE):
        return [tf.get_variable(name, shape, tf.float64, tf.constant_initializer(value)) for name, shape, value in (
            ("w", [4, 3], np.linspace(-1, 1, 12).reshape(4, 3)), ("v", [3], np.array([1., -2., 0.5])))]


def net(x, w=None, v=None):
    w, v = weights() if w is None else (w, v)
    return tf.reduce_sum(tf.tanh(tf.matmul(x, w)) * v, 1)


def synced(x):
    with tf.variable_scope("", reuse=tf.AUTO_REUSE):
        return net(tf_syncbn.sync_batch_norm(x, training=True, name="bn", updates_collections=()))


def error(y, of=net, x=None, *args):
    return tf.reduce_mean(tf.square(of(x, *args) - y))


def penalty(x, y, of, reduced):
    slopes, = tf.gradients(reduced(of(x)), x)
    return error(y, of, x) + tf.reduce_mean(tf.reduce_sum(tf.square(slopes), 1))


def adversarial(x, y, change, of=net, reduced=tf.reduce_mean):
    slopes, = tf.gradients(reduced(tf.square(of(x) - y)), x)
    return error(y, of, x) + error(y, of, tf.stop_gradient(x + change(slopes)))


def normed(slopes):
    slopes /= 1e-12 + tf.reduce_max(tf.abs(slopes), 1, keepdims=True)
    return 0.3 * slopes / tf.sqrt(1e-6 + tf.reduce_sum(tf.square(slopes), 1, keepdims=True))


def inner_step(x, y, average=lambda gradient: gradient):
    w, v = weights()
    gradients = [average(tf.stop_gradient(gradient)) for gradient in tf.gradients(error(y, net, x, w, v), [w, v])]
    return error(y, net, x, w - 0.1 * gradients[0], v - 0.1 * gradients[1])


def of_all(x):
    def average(gradient):
        count = tf.cast(tf.shape(x)[0], x.dtype)
        return towers.all_reduce(gradient * count) / towers.all_reduce(count)
    return average


OTHERS = {
    "a penalty on a mean's slopes": lambda x, y: penalty(x, y, net, tf.reduce_mean),
    "a step by a mean's slopes": lambda x, y: adversarial(x, y, lambda slopes: slopes),
    "a normed step through a layer in which uneven towers meet": lambda x, y: adversarial(x, y, normed, synced),
    "an inner step": inner_step}
SAME = {
    "a penalty on a sum's slopes": lambda x, y: penalty(x, y, net, tf.reduce_sum),
    "a penalty on each one's slopes": lambda x, y: penalty(x, y, net, tf.identity),
    "through a synced layer": lambda x, y: penalty(x, y, synced, tf.reduce_sum),
    "a step by the sign": lambda x, y: adversarial(x, y, lambda slopes: 0.1 * tf.sign(slopes)),
    "a normed step": lambda x, y: adversarial(x, y, normed),
    "a step of unit length": lambda x, y: adversarial(x, y, lambda slopes: tf.nn.l2_normalize(slopes, 1, 1e-30)),
    "a normed step of a sum through a synced layer": lambda x, y: adversarial(x, y, normed, synced, tf.reduce_sum),
    "an inner step by the average of all": lambda x, y: inner_step(x, y, of_all(x)),
    "no gradient": lambda x, y: error(y, net, x)}


@pytest.mark.parametrize("name", covering(sorted(OTHERS), one_in=2))
def test_gradients_of_a_tower_s_examples_together_are_others_and_are_said(name):
    with pytest.warns(UserWarning, match=SAID):
        with pytest.raises(AssertionError):
            assert_equals_one_batch(OTHERS[name], (X, Y), 2, sizes=[2, 7], steps=1)


@pytest.mark.parametrize("name", covering(sorted(SAME), one_in=3))
def test_gradients_that_are_those_of_the_whole_batch_pass_in_silence(name):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*" + SAID)
        assert_equals_one_batch(SAME[name], (X, Y), 2, sizes=[2, 7], steps=2)


def of_each(x):
    """Each example normalized by its own moments, whose gradients add up over it alone."""
    mean, variance = tf.nn.moments(x, [1], keep_dims=True)
    with tf.variable_scope("", reuse=tf.AUTO_REUSE):
        scale = tf.get_variable("scale", [4], x.dtype, tf.constant_initializer([1., 2., -1., 0.5]))
    return tf.reduce_sum(tf.tanh(tf.nn.batch_normalization(x, mean, variance, None, scale, 1e-3)), 1)


def of_rows(x):
    """Each example's rows by a layer, whose slopes are made of the rows of all."""
    with tf.variable_scope("", reuse=tf.AUTO_REUSE):
        kernel = tf.get_variable("kernel", [2, 2], x.dtype, tf.constant_initializer([0.3, -0.8, 0.5, 1.]))
    rows = tf.tanh(tf.matmul(tf.reshape(x, [-1, 2]), kernel))
    return tf.reduce_sum(tf.square(tf.reshape(rows, tf.shape(x))), 1)


@pytest.mark.parametrize("sizes", covering([[1, 3], [1, 2, 4]], one_in=4))
def test_gradients_of_an_example_s_rows_pass_in_silence_beside_a_tower_of_one(sizes):
    def model(x, y):
        slopes, = tf.gradients(tf.reduce_sum(of_rows(x)), x)
        return tf.reduce_mean(of_rows(x) - y) + tf.reduce_mean(tf.square(tf.sqrt(tf.reduce_sum(tf.square(slopes), 1)) - 1))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*no mean over examples")
        assert_equals_one_batch(model, (X[:sum(sizes)], Y[:sum(sizes)]), len(sizes), sizes, steps=2)


@pytest.mark.parametrize("sizes", covering([[1, 3], [3, 1], [1, 1]], one_in=4))
def test_gradients_by_an_example_s_own_moments_pass_in_silence_where_it_is_alone_too(sizes):
    count = sum(sizes)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*" + SAID)
        assert_equals_one_batch(lambda x, y: penalty(x, y, of_each, tf.reduce_sum), (X[:count], Y[:count]), 2, sizes, steps=2)


@pytest.mark.parametrize("shape,sizes", covering([[4], [1, 4]], [[1, 3], [3, 1]]))
def test_gradients_by_a_bias_are_said_where_a_tower_has_one_example(shape, sizes):
    def model(x, y):
        b = tf.get_variable("b", shape, x.dtype, tf.zeros_initializer())
        losses = tf.square(tf.reduce_sum(tf.tanh(x + b), 1) - y)
        return tf.reduce_mean(losses) + tf.reduce_sum(tf.square(tf.gradients(tf.reduce_sum(losses), b)[0]))

    with pytest.warns(UserWarning, match=SAID):
        build(model, towers.PerTower([(X[:size], Y[:size]) for size in sizes]), 2)


def test_a_normed_step_through_a_layer_in_which_even_towers_meet_passes_in_silence():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*" + SAID)
        assert_equals_one_batch(lambda x, y: adversarial(x, y, normed, synced), (X[:8], Y[:8]), 2, steps=1)


def test_one_tower_may_take_any_gradient():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*" + SAID)
        build(inner_step, (X, Y), 1)
