"""`towers.whole_batch` of batch norms that stand in a tf.cond: exact in both modes, or refused by name.

What has to meet in a branch meets before it. TensorFlow 2's branches are functions, before which nothing can be computed that
they compute; there a batch norm in a branch may be refused.
"""
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.support import build
from towers.testing import assert_equals_one_batch

X = np.random.RandomState(3).randn(7, 5, 4, 3).astype(np.float32)
GRAPH = tf.control_flow_v2_enabled()


def variables(name, resource=False):
    makers = {"gamma": tf.ones_initializer(), "beta": tf.zeros_initializer(), "mean": tf.zeros_initializer(),
              "variance": tf.ones_initializer()}
    with tf.variable_scope(name, reuse=tf.AUTO_REUSE, use_resource=resource):
        return [tf.get_variable(kind, [3], initializer=maker, trainable=kind in ("gamma", "beta"))
                for kind, maker in makers.items()]


def moved(variables, values):
    return [tf.assign_sub(variable, 0.1 * (variable - value)) for variable, value in zip(variables, values)]


def fused(x, name, training, resource):
    """As tf.layers' layer whose mode is fed: a fused op in each branch, and moving averages that move behind them."""
    gamma, beta, mean, variance = variables(name, resource)
    y, *moments = tf.cond(
        training, lambda: list(tf.nn.fused_batch_norm(x, gamma, beta, epsilon=1e-3)),
        lambda: [tf.nn.fused_batch_norm(x, gamma, beta, mean, variance, 1e-3, is_training=False)[0], mean + 0, variance + 0])
    for op in moved([mean, variance], moments):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, op)
    return y


def with_more(x, name, training, resource):
    """More than a batch norm, and its updates, in the branch; another input in the other one."""
    gamma, beta, mean, variance = variables(name, resource)

    def trained():
        y, *moments = tf.nn.fused_batch_norm(tf.sin(x), gamma, beta, epsilon=1e-3)
        with tf.control_dependencies(moved([mean, variance], moments)):
            return tf.nn.relu(y + 0.3)
    return tf.cond(training, trained, lambda: tf.nn.fused_batch_norm(
        2 * x, gamma, beta, mean, variance, 1e-3, is_training=False)[0])


def of_moments(x, name, training, resource):
    """As tflearn's: moments and updates in the branch that trains, averages in the other one."""
    gamma, beta, mean, variance = variables(name, resource)

    def trained():
        moments = tf.nn.moments(x, [0, 1, 2])
        with tf.control_dependencies(moved([mean, variance], moments)):
            return [tf.identity(moment) for moment in moments]
    return tf.nn.batch_normalization(x, *tf.cond(training, trained, lambda: [mean + 0, variance + 0]), beta, gamma, 1e-3)


def updated_later(x, name, training, resource):
    """The averages alone move in a branch, of moments from outside; of what it hands out, one is not read."""
    gamma, beta, *averages = variables(name, resource)
    y, *moments = tf.nn.fused_batch_norm(x, gamma, beta, epsilon=1e-3)

    def updated():
        with tf.control_dependencies(moved(averages, moments)):
            return [tf.identity(moment) for moment in moments]
    return y + 0 * tf.cond(training, updated, lambda: moments)[0]


def model_of(layer, mode, resource):
    def model_fn(x):
        with tf.variable_scope("", use_resource=resource):
            scale = tf.get_variable("scale", [3], initializer=tf.constant_initializer(1.3))
        training = tf.placeholder_with_default(mode, [])
        y = layer(layer(x * scale, "first", training, resource), "second", training, resource)
        return tf.reduce_mean(tf.square(tf.sin(y) - 0.3 * x))
    return model_fn


@pytest.mark.parametrize("resource", [False, True], ids=["ref", "resource"])
@pytest.mark.parametrize("layer", [fused, with_more, of_moments, updated_later])
@pytest.mark.parametrize("mode", [True, False], ids=["training", "not training"])
def test_batch_norms_in_a_branch_train_as_one_tower_does(layer, mode, resource):
    if GRAPH and not resource:
        pytest.skip("TensorFlow 2's branches take no ref variables")
    model_fn = towers.whole_batch(model_of(layer, mode, resource))
    try:
        assert_equals_one_batch(model_fn, (X,), num_towers=3, sizes=[1, 4, 2])
    except ValueError as error:
        assert GRAPH and str(error).startswith("towers.whole_batch: towers would have to meet"), error


def test_a_branch_by_what_the_whole_batch_comes_to_is_the_same_in_all_towers():
    def model_fn(x):
        moments = tf.cond(tf.reduce_mean(x) > -1, lambda: tf.nn.moments(x, [0, 1, 2]), lambda: (tf.zeros([3]), tf.ones([3])))
        x *= tf.get_variable("scale", [3], initializer=tf.constant_initializer(1.3))
        return tf.reduce_mean(tf.sin(tf.nn.batch_normalization(x, *moments, None, None, 1e-3)))

    for shift in (0, 2):  # either branch
        assert_equals_one_batch(towers.whole_batch(model_fn), (X - shift,), num_towers=2, sizes=[2, 5])


def rows(x, sized):
    """The examples' features, of a number that the model does not know; of chosen examples if not `sized`."""
    y = tf.placeholder_with_default(tf.cast(tf.reduce_mean(x, [1, 2]), tf.float64), [None, 3])
    y = tf.tanh(y * tf.get_variable("scale", [3], tf.float64, tf.constant_initializer([1.3, 0.2, -2])))
    return y if sized else tf.boolean_mask(y, y[:, 0] > -0.1)


def nested(y):
    return tf.cond(tf.shape(y)[0] > 1, lambda: tf.cond(tf.size(y) > 3, lambda: tf.reduce_mean(y ** 2), lambda: tf.reduce_sum(y)),
                   lambda: tf.reduce_mean(y))


BY_SIZE = {
    "by how many they are": lambda y: tf.cond(tf.shape(y)[0] > 4, lambda: tf.reduce_mean(y ** 2), lambda: tf.reduce_mean(y)),
    "by whether there are any": lambda y: tf.cond(
        tf.equal(tf.shape(y)[0], 0), lambda: 0.0 * tf.reduce_sum(y), lambda: tf.reduce_mean(tf.nn.top_k(y, 2)[0] ** 2)),
    "of a constant": lambda y: tf.cond(tf.size(y) > 0, lambda: tf.reduce_mean(tf.exp(y)), lambda: tf.constant(0.0, tf.float64)),
    "by one of them": lambda y: tf.cond(y[0, 1] > -5, lambda: tf.reduce_mean(y ** 2), lambda: tf.reduce_mean(y)),
    "a branch within another one": nested}


@pytest.mark.parametrize("sizes", [[2, 1, 4], [3, 0, 4]])
@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("name", sorted(BY_SIZE))
def test_a_branch_by_the_number_of_examples_is_that_of_the_whole_batch(name, sized, sizes):
    """Control flow 1 asks the branch, not its Switch ops, by what the gradient chooses."""
    assert_equals_one_batch(towers.whole_batch(lambda x: BY_SIZE[name](rows(x, sized))), (X,), 3, sizes=sizes, steps=2)


def branch_by_sum(x, one, other):
    return tf.cond(tf.reduce_sum(x) > -1e9, one, other)


SIZES_OUT = {
    "by a size": lambda x, y: tf.reduce_sum(
        y[:tf.cond(tf.shape(x)[0] > 4, lambda: tf.shape(x)[0] - 4, lambda: tf.shape(x)[0])] ** 2),
    "by a sum": lambda x, y: tf.reduce_sum(y[:branch_by_sum(x, lambda: tf.shape(x)[0] - 4, lambda: tf.shape(x)[0])] ** 2),
    "as a number": lambda x, y: tf.reduce_mean(y ** 2) * branch_by_sum(
        x, lambda: tf.cast(tf.shape(x)[0], y.dtype) ** 2, lambda: tf.ones([], y.dtype)),
    "as a shape": lambda x, y: tf.reduce_mean(tf.reshape(y, branch_by_sum(x, lambda: tf.shape(y), lambda: tf.shape(y) * 2)) ** 2),
    "of a branch within": lambda x, y: tf.reduce_mean(y) * tf.cast(branch_by_sum(x, lambda: branch_by_sum(
        -x, lambda: tf.shape(x)[0] * 2, lambda: 0), lambda: 1), y.dtype),
    "of a loop": lambda x, y: tf.reduce_mean(y ** 2) * tf.cast(tf.while_loop(
        lambda i, n: i < 2, lambda i, n: (i + 1, n + tf.shape(x)[0]), [0, 0])[1], y.dtype),
    "of a function": lambda x, y: tf.reduce_mean(y ** 2) * tf.cast(
        tf.compat.v2.function(lambda z: tf.shape(z)[0] * 2)(x) if GRAPH else tf.shape(x)[0] * 2, y.dtype)}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", sorted(SIZES_OUT))
def test_a_size_that_a_branch_or_loop_hands_out_is_that_of_the_whole_batch(name, known):
    """Where sizes are known, the functions of control flow 2 have the tower's as constants."""
    def model_fn(x):
        x = tf.cast(tf.reduce_mean(x, [1, 2]), tf.float64)
        x = x if known else tf.placeholder_with_default(x, [None, 3])
        return SIZES_OUT[name](x, tf.tanh(x * tf.get_variable("scale", [3], tf.float64, tf.constant_initializer([1.3, 0.2, -2]))))

    if name == "of a loop" and not GRAPH:
        with pytest.raises(ValueError, match="towers.whole_batch: the state of a tf.while_loop, .* has another size"):
            build(towers.whole_batch(model_fn), (X,), 3)
    else:
        assert_equals_one_batch(towers.whole_batch(model_fn), (X,), 3, sizes=[2, 1, 4], steps=2)


@pytest.mark.parametrize("name,is_said", [("by how many they are", True), ("by whether there are any", False)])
def test_plain_towers_that_choose_by_the_number_of_their_examples_are_told(name, is_said):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        replicas = build(lambda x: BY_SIZE[name](rows(x, True)), (X,), 3)
        towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1))
    said = ["chooses by the number of the tower's own examples" in str(each.message) for each in caught]
    assert any(said) == is_said


@pytest.mark.skipif(GRAPH, reason="a branch is a function there")
def test_what_a_branch_chooses_within_another_one_is_not_met_about():
    def model_fn(x):
        training = tf.placeholder_with_default(True, [])

        def inner():
            y = tf.cond(training, lambda: tf.sin(x), lambda: x)
            return tf.nn.fused_batch_norm(y, *variables("bn")[:2])[0]
        return tf.reduce_mean(tf.cond(tf.placeholder_with_default(True, []), inner, lambda: x))

    with pytest.raises(ValueError, match="towers.whole_batch: towers would have to meet about 'tower_0/cond/.*Merge"):
        build(towers.whole_batch(model_fn), (X,))
