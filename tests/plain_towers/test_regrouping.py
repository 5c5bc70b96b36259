"""Reshapes by the batch size as a number, which regroup a tower's examples: said, and nothing else is."""
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.support import SAID, build
from towers.testing import assert_equals_one_batch

B = 12
X = np.random.RandomState(5).randn(B, 8, 3)


def dense(x):
    kernel = tf.get_variable("kernel", [x.shape.as_list()[-1], 1], tf.float64, tf.ones_initializer())
    return tf.reduce_mean(tf.square(tf.sin(tf.tensordot(x, kernel, 1)) - 0.2))


REGROUPED = {
    "flattened": lambda x: dense(tf.reshape(x, [B, -1])),
    "after an op": lambda x: dense(tf.reshape(tf.nn.relu(x + 1), [B, -1])),
    "in three axes": lambda x: dense(tf.reshape(x, [B, 2, -1])),
    "in parts of all examples": lambda x: dense(tf.reshape(x, [2 * B, -1]))}

FINE = {
    "of any number": lambda x: dense(tf.reshape(x, [-1, 24])),
    "of its own number": lambda x: dense(tf.reshape(x, [tf.shape(x)[0], 24])),
    "of parts": lambda x: dense(tf.reshape(x, [-1, 4])),
    "of one row": lambda x: tf.reduce_mean(tf.reshape(tf.square(x), [1, -1])) * tf.get_variable(
        "v", [], tf.float64, tf.ones_initializer()),
    "of a mean": lambda x: dense(x) + tf.reduce_sum(tf.reshape(tf.reduce_mean(x, 0), [B, -1])),
    "of a weight": lambda x: dense(x) + tf.reduce_sum(tf.reshape(
        tf.get_variable("v", [B, 3], tf.float64, tf.ones_initializer()), [B, -1]) ** 2)}

FINE_OF_KNOWN_SIZE = {
    "of its own number": lambda x: dense(tf.reshape(x, [int(x.shape[0]), -1])),
    "of its own number times an axis": lambda x: dense(tf.reshape(x, [8 * int(x.shape[0]), -1]))}


def of_unknown_size(model):
    def called(x):
        return model(tf.placeholder_with_default(x, [None, 8, 3]))
    return called


@pytest.mark.parametrize("name", sorted(REGROUPED))
def test_rows_of_parts_of_examples_make_another_network_and_are_said(name):
    build(REGROUPED[name], (X,), 1)
    kernel, = tf.trainable_variables()
    with tf.Graph().as_default(), pytest.warns(UserWarning, match=SAID):
        build(REGROUPED[name], (X,), 2)
        of_towers, = tf.trainable_variables()
    assert of_towers.shape.as_list()[0] * 2 == kernel.shape.as_list()[0]


def test_rows_of_a_batch_of_unknown_size_are_not_known_to_be_examples():
    def model(x):
        return tf.reduce_mean(tf.reshape(x * tf.get_variable("v", [], tf.float64, tf.ones_initializer()), [B, -1]))
    with pytest.warns(UserWarning, match=SAID):
        build(of_unknown_size(model), (X,), 2)


@pytest.mark.parametrize("name", sorted(FINE))
@pytest.mark.parametrize("num_towers", [2, 3])
def test_rows_that_are_examples_pass_in_silence(name, num_towers, silent):
    for model in (FINE[name], of_unknown_size(FINE[name])):
        assert_equals_one_batch(model, (X,), num_towers)


@pytest.mark.parametrize("name", sorted(FINE_OF_KNOWN_SIZE))
@pytest.mark.parametrize("num_towers,sizes", [(2, None), (3, None), (3, [1, 7, 4])])
def test_rows_by_the_towers_own_number_pass_in_silence(name, num_towers, sizes, silent):
    assert_equals_one_batch(FINE_OF_KNOWN_SIZE[name], (X,), num_towers, sizes)


def test_one_tower_may_know_its_batch(silent):
    build(REGROUPED["flattened"], (X,), 1)


def deviations(x, of_all):
    """A discriminator's standard deviation over groups of at most four examples, beside each; of all towers' where asked."""
    y, start = towers.all_gather(x, with_offset=True) if of_all else (x, 0)
    size = tf.minimum(4, tf.shape(y)[0])
    y = tf.reshape(y, [size, -1, 8, 3])
    y = tf.sqrt(tf.reduce_mean(tf.square(y - tf.reduce_mean(y, 0, keepdims=True)), 0) + 1e-8)
    y = tf.tile(tf.reduce_mean(y, [1, 2], keepdims=True), [size, 8, 1])
    return dense(tf.concat([x, y[start:start + tf.shape(x)[0]] if of_all else y], 2))


def test_groups_of_a_towers_examples_are_said_and_those_of_all_towers_are_one_towers():
    with pytest.warns(UserWarning, match=SAID), pytest.raises(AssertionError):
        assert_equals_one_batch(lambda x: deviations(x, False), (X,), 3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The model function makes groups")
        assert_equals_one_batch(lambda x: deviations(x, True), (X,), 2, sizes=[5, 7])
