"""convert_model where the model function has a use of its own for what a batch norm by hand is made of.

A loss that is divided by the sum of weights by which moments are divided wants the tower's own. What towers exchange is a batch
norm's moments of the whole batch, and a sum of examples is the tower's.
"""
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import build, run
from tests.sweeps import covering
from towers.testing import assert_equals_one_batch

SIZES = [[2, 5], [1, 4, 2]]
X = np.random.RandomState(0).randn(7, 3)
VALID = np.array([1.0, 1, 0.5, 1, 0, 2, 1])


@pytest.fixture(params=[SIZES[0], pytest.param(SIZES[1], marks=pytest.mark.sweep)])
def assert_law(request):
    """The law for 2 uneven towers, and in a sweep for 3, in float64, and which layers were converted."""
    def check(model_fn, batch, scopes, kind, **kwargs):
        converted = tf_syncbn.convert_model(model_fn, **kwargs)
        assert_equals_one_batch(converted, batch, num_towers=len(request.param), sizes=request.param)
        assert [(layer.scope, layer.kind) for layer in converted.converted] == [(scope, kind) for scope in scopes]
    return check


def scaled(x):
    return x * tf.get_variable("scale", [3], x.dtype, tf.constant_initializer(1.3)) + 0.2


def masked(y, valid, n, form, scope="bn"):
    """Normalizes by moments of weighted examples, which are divided by the number `n`."""
    weights = valid[:, None]

    def divided(t):
        return {"each": lambda: tf.reduce_sum(t / n, 0), "inverse": lambda: tf.reduce_sum(t, 0) * n,
                "doubled": lambda: 2.0 * tf.reduce_sum(t, 0) / n}.get(form, lambda: tf.reduce_sum(t, 0) / n)()

    with tf.name_scope(scope):
        mean = divided(weights * y)
        variance = divided(weights * tf.square(y - mean))
        if form == "corrected":
            moving = tf.get_variable("moving_variance", [3], y.dtype, trainable=False)
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_sub(moving, (moving - variance * n / (n - 1)) * 0.1))
        return tf.nn.batch_normalization(y, mean, variance, None, None, 1e-3)


NUMBERS = {
    "plain": tf.identity, "corrected": tf.identity, "each": tf.identity, "inverse": lambda n: 1 / n,
    "doubled": lambda n: n * 2.0,  # which is how many examples a tower has, too
    "at least one": lambda n: tf.maximum(n, 1.0), "cast": lambda n: tf.cast(tf.reshape(n, [1]), tf.float64)}


@pytest.mark.parametrize("form", covering(sorted(NUMBERS), one_in=4))
def test_a_loss_is_divided_by_the_towers_own_sum_of_the_weights_that_moments_are_divided_by(form, assert_law):
    def model_fn(x, valid):
        total = tf.reduce_sum(valid)
        n = NUMBERS[form](total)
        y = tf.sin(2 * masked(scaled(x), valid, n, form))
        losses = tf.reduce_sum(tf.square(y - x), 1) * valid
        losses = {"each": lambda: tf.reduce_sum(losses / n), "inverse": lambda: tf.reduce_sum(losses) * n,
                  "doubled": lambda: 2.0 * tf.reduce_sum(losses) / n}.get(
                      form, lambda: tf.reduce_sum(losses) / n)()
        return {"loss": tf.reshape(losses, []), "weight": total}

    assert_law(model_fn, (X, VALID), ["bn"], "sums")


def test_layers_share_a_sum_of_weights(assert_law):
    def model_fn(x, valid):
        n, y = tf.reduce_sum(valid), scaled(x)
        for scope in ("bn1", "bn2"):
            y = tf.sin(2 * masked(y, valid, n, "plain", scope)) + x * x
        return {"loss": tf.reduce_sum(tf.reduce_sum(tf.square(y - x), 1) * valid) / n, "weight": n}

    assert_law(model_fn, (X, VALID), ["bn1", "bn2"], "sums")


def test_a_layer_that_is_left_out_keeps_the_towers_own_sum_of_weights_and_one_that_is_not_gets_that_of_all():
    def model_fn(x, valid):
        n, y = tf.reduce_sum(valid), scaled(x)
        local = masked(y, valid, n, "plain", "bn1")
        return {"loss": tf.reduce_mean(local), "local": local, "synced": masked(y, valid, n, "plain", "bn2")}

    replicas = build(tf_syncbn.convert_model(model_fn, only="bn2"), (X, VALID))
    sizes = [4, 3]
    outputs = run([{name: out[name] for name in ("local", "synced")} for out in (tower.outputs for tower in replicas)])
    for out, rows in zip(outputs, np.split(np.arange(7), np.cumsum(sizes)[:-1])):
        for name, of in (("local", rows), ("synced", np.arange(7))):
            y, weights = 1.3 * X + 0.2, VALID[:, None]
            mean = (weights[of] * y[of]).sum(0) / weights[of].sum()
            variance = (weights[of] * np.square(y[of] - mean)).sum(0) / weights[of].sum()
            np.testing.assert_allclose(out[name], (y[rows] - mean) / np.sqrt(variance + 1e-3), rtol=1e-9)


EXCHANGED = {
    "all_reduce": lambda mean: towers.all_reduce(mean, "mean"),
    "exchange": lambda mean: towers.exchange(
        [mean], lambda left: [[sum(one for one, in left) / len(left)]] * len(left), [(mean.dtype, mean.shape)])[0],
    "all_gather": lambda mean: tf.reduce_mean(towers.all_gather(mean), 0, keepdims=True)}


@pytest.mark.parametrize("how", covering(sorted(EXCHANGED), one_in=4))
def test_moments_that_the_model_exchanges_are_those_of_the_whole_batch(how, assert_law):
    def model_fn(x):
        y = scaled(x)
        with tf.name_scope("bn"):
            mean, variance = tf.nn.moments(y, [0], keep_dims=True)
            z = tf.sin(2 * (y - mean) * tf.rsqrt(variance + 1e-3))
        return tf.reduce_mean(tf.square(z + tf.stop_gradient(EXCHANGED[how](mean)) - 0.3 * x))

    assert_law(model_fn, (X,), ["bn"], "moments")


def test_a_sum_that_the_model_exchanges_beside_a_batch_norm_of_the_same_examples_is_the_towers(assert_law):
    def model_fn(x, valid):
        y = scaled(x)
        with tf.name_scope("bn"):
            mean, variance = tf.nn.weighted_moments(y, [0], valid[:, None] * tf.ones_like(y), keep_dims=True)
            z = tf.nn.batch_normalization(y, mean, variance, None, None, 1e-3)
        of_all = towers.all_reduce(tf.reduce_sum(y, 0)) / towers.all_reduce(tf.cast(tf.shape(y)[0], y.dtype))
        return tf.reduce_mean(tf.square(tf.sin(z) + y - 0.5 * of_all))

    assert_law(model_fn, (X, VALID), ["bn"], "sums")


@pytest.mark.parametrize("resource,sizes", covering([False, True], SIZES))
def test_a_scale_that_is_initialized_by_the_moments_is_read_after_it_is_written(resource, sizes):
    def model_fn(x):
        g, b, first = (tf.get_variable(name, [3], tf.float64, tf.constant_initializer(value), trainable=value < 2,
                                       use_resource=resource)
                       for name, value in (("g", 1.0), ("b", 0.0), ("first", 2.0)))
        y = g * scaled(x) + b
        mean, variance = tf.nn.moments(y, [0])
        scale = tf.where(first > 1, 1 / tf.sqrt(variance + 1e-10), tf.ones_like(variance))
        offset = tf.where(first > 1, -mean * scale, tf.zeros_like(mean))
        with tf.control_dependencies(list(map(tf.stop_gradient, (scale, offset)))):
            written = [tf.assign(g, g * scale), tf.assign_add(b, offset)]
        with tf.control_dependencies(written), tf.control_dependencies([tf.assign(first, tf.zeros([3], tf.float64))]):
            y = g * scaled_again(x) + b
        return tf.reduce_mean(tf.square(tf.sin(y) - x))

    def scaled_again(x):
        with tf.variable_scope("", reuse=True):
            return scaled(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_equals_one_batch(tf_syncbn.convert_model(model_fn), (X,), num_towers=len(sizes), sizes=sizes)


def by_moments_and_average(x, resource):
    """Returns a moving mean, what a layer makes of `x`, and how far its mean moves the other."""
    moving = tf.get_variable("moving_mean", [3], tf.float64, tf.zeros_initializer(), trainable=False, use_resource=resource)
    y = scaled(x)
    with tf.name_scope("bn"):
        mean, variance = tf.nn.moments(y, [0])
        z = tf.nn.batch_normalization(y, mean, variance, None, None, 1e-3)
        return moving, z, 0.1 * (moving - mean)


READ_AFTER = {"times one": lambda moving: moving * 1, "square": tf.square, "read_value": lambda moving: moving.read_value()}


@pytest.mark.parametrize("how,resource", covering(sorted(READ_AFTER), [False, True], one_in=2))
def test_a_moving_average_that_is_read_after_its_update_holds_the_moments_of_all_examples(how, resource, assert_law):
    def model_fn(x):
        moving, z, step = by_moments_and_average(x, resource)
        with tf.control_dependencies([tf.assign_sub(moving, step)]):
            z = tf.identity(z)
        with tf.control_dependencies([z]):
            return tf.reduce_mean(tf.square(tf.sin(z) - x + READ_AFTER[how](moving)))

    assert_law(model_fn, (X,), ["bn"], "moments")


CHECKS = {"check": lambda t: tf.check_numerics(t, "no number"), "print": lambda t: tf.Print(t, []), "identity": tf.identity}


@pytest.mark.parametrize("check,resource", covering(sorted(CHECKS), [False, True], one_in=4))
def test_moving_averages_that_are_checked_before_they_are_written_are_those_of_all_examples(check, resource, assert_law):
    def model_fn(x):
        moving, z, step = by_moments_and_average(x, resource)
        new_mean = tf.assign_sub(moving, CHECKS[check](step))
        return tf.reduce_mean(tf.square(tf.sin(z) - x + 0.1 * new_mean))

    assert_law(model_fn, (X,), ["bn"], "moments")
