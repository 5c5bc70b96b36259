"""Scaled losses: the same training, and steps that overflow leave nothing behind."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import build, session, set_variables
from tests.sweeps import covering

RNG = np.random.RandomState(9)
X, Y = RNG.randn(12, 3).astype(np.float32), RNG.randn(12).astype(np.float32)
WEIGHTS = RNG.randn(3).astype(np.float32)


def model(x, y):
    """Keeps moving averages by a layer of its own, and by one that is synced."""
    w = tf.get_variable("w", [3])
    mean = tf.get_variable("mean", [3], initializer=tf.zeros_initializer(), trainable=False)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_sub(mean, 0.1 * (mean - tf.reduce_mean(x, 0))))
    x = tf_syncbn.sync_batch_norm(x, training=True)
    return tf.reduce_mean(tf.square(tf.reduce_sum(x * w, 1) - y))


def states(transforms, *trainings, update_ops="first", optimizer=None):
    """Trains on 3 uneven towers; returns of each of several lists of batches all variables by name, before and after each one."""
    with tf.Graph().as_default():
        x, y = tf.placeholder(tf.float32, [None, 3]), tf.placeholder(tf.float32, [None])
        train_op = towers.minimize(build(model, (x, y), 3), optimizer or tf.train.AdamOptimizer(0.1), transforms=transforms,
                                   update_ops=update_ops, global_step=tf.train.get_or_create_global_step())
        variables, found = {variable.op.name: variable for variable in tf.global_variables()}, [[] for _ in trainings]
        for feeds, states_of in zip(trainings, found):
            with session() as made:
                set_variables(made, {"w": WEIGHTS})
                states_of.append(made.run(variables))
                for of_x, of_y in feeds:
                    made.run(train_op, {x: of_x, y: of_y})
                    states_of.append(made.run(variables))
        return found


BATCHES = [(X[:10], Y[:10]), (X[2:], Y[2:]), (X[::-1], Y[::-1])]
OVERFLOW = (X, np.float32(1e38) * Y)  # its gradients times a scale are infinite in float32


@pytest.mark.parametrize("scale", [pytest.param(1024.0, marks=pytest.mark.sweep), "dynamic"])
def test_a_scale_that_is_a_power_of_two_changes_no_bit(scale):
    (plain,), (scaled,) = states([], BATCHES), states([towers.scale_loss(scale)], BATCHES)
    for a, b in zip(plain, scaled):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], name)


@pytest.mark.parametrize("scale,update_ops", covering([8, "dynamic"], ["first", "all"]))
def test_a_step_that_overflows_leaves_nothing_behind(scale, update_ops):
    without, (initial, one, same, two, three) = states(
        [towers.scale_loss(scale)], BATCHES, [BATCHES[0], OVERFLOW] + BATCHES[1:], update_ops=update_ops)
    for name in sorted(set(one) - {"current_loss_scale", "good_steps"}):
        np.testing.assert_array_equal(one[name], same[name], name)
        if name != "w" and "Adam" not in name and "beta" not in name:
            assert (np.asarray(one[name]) != initial[name]).any(), name
    for name in sorted(set(one) - {"current_loss_scale", "good_steps"}):
        for a, b in zip(without[2:], (two, three)):
            np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert [step["global_step"] for step in (one, same, two, three)] == [1, 1, 2, 3]


def test_a_dynamic_scale_is_halved_by_overflow_and_doubled_after_good_steps():
    with tf.Graph().as_default():
        x, y = tf.placeholder(tf.float32, [None, 3]), tf.placeholder(tf.float32, [None])
        scale = tf.train.experimental.DynamicLossScale(64, increment_period=2)
        train_op = towers.minimize(build(model, (x, y)), tf.train.AdamOptimizer(0.1), transforms=[towers.scale_loss(scale)])
        with session() as made:
            found = [made.run(scale())]
            for of_x, of_y in [BATCHES[0], OVERFLOW, BATCHES[0], BATCHES[1], BATCHES[2], OVERFLOW]:
                made.run(train_op, {x: of_x, y: of_y})
                found.append(made.run(scale()))
    assert found == [64, 64, 32, 32, 64, 64, 32]


def test_gradients_that_vanish_in_half_precision_are_kept():
    """A gradient of 1e-8 is 0 in float16, whose least number is 6e-8."""
    def half(x):
        w = tf.get_variable("w", [3], initializer=tf.zeros_initializer())
        return tf.reduce_mean(tf.cast(tf.cast(w, tf.float16) * x, tf.float32)) * 1e-7

    x, steps = np.ones([4, 3], np.float16), []
    for transforms in ([], [towers.scale_loss(2.0 ** 14)]):
        with tf.Graph().as_default():
            train_op = towers.minimize(build(half, (x,), 2), tf.train.GradientDescentOptimizer(1.0), transforms=transforms)
            with session() as made:
                made.run(train_op)
                steps.append(made.run(tf.trainable_variables())[0])
    np.testing.assert_array_equal(steps[0], 0)
    np.testing.assert_allclose(steps[1], -np.ones(3) * 1e-7 / 3, rtol=1e-2)


@pytest.mark.laws
def test_transforms_before_it_see_multiplied_gradients_and_those_after_it_none():
    def add(grads):
        return [(gradient + 1, variable) for gradient, variable in grads]

    steps = []
    for transforms in ([add, towers.scale_loss(16)], [towers.scale_loss(16), add]):
        (before, after), = states(transforms, [(X, Y)], optimizer=tf.train.GradientDescentOptimizer(1.0))
        steps.append(before["w"] - after["w"])
    np.testing.assert_allclose(steps[1] - steps[0], 1 - 1 / 16, rtol=1e-4)


@pytest.mark.laws
def test_an_overflow_counts_for_all_that_comes_after():
    """Accumulated gradients take no part of a batch that overflowed."""
    chain = [towers.scale_loss(8), towers.accumulate(2)]
    with pytest.warns(UserWarning, match="accumulate"):
        (*_, got), (*_, wanted) = states(chain, [BATCHES[0], OVERFLOW, BATCHES[1]], BATCHES[:2])
    for name in sorted(wanted):
        np.testing.assert_allclose(got[name], wanted[name], rtol=1e-6, err_msg=name)
    assert got["global_step"] == 1


def test_slices_stay_sparse_and_are_divided():
    def looks_up(ids):
        table = tf.get_variable("table", [4, 2], initializer=tf.zeros_initializer())
        return tf.reduce_mean(tf.reduce_sum(tf.nn.embedding_lookup(table, ids), 1))

    train_op = towers.minimize(build(looks_up, (np.array([0, 1, 1, 3]),)), tf.train.GradientDescentOptimizer(1.0),
                               transforms=[towers.scale_loss(128)])
    with session() as made:
        made.run(train_op)
        np.testing.assert_allclose(made.run(tf.trainable_variables())[0], -np.repeat([[1], [2], [0], [1]], 2, 1) / 4, rtol=1e-6)


@pytest.mark.parametrize("scale, error, match", [
    ("static", ValueError, "scale_loss takes a number, \"dynamic\" or a tf.train.experimental.LossScale, not 'static'"),
    (None, TypeError, "LossScale, not None"),
    (True, TypeError, "LossScale, not True"),
    (0.5, ValueError, "the scale has to be 1 or more, and finite, not 0.5"),
    (float("inf"), ValueError, "not inf"),
])
def test_scales_that_are_none_are_refused(scale, error, match):
    with pytest.raises(error, match=match):
        towers.scale_loss(scale)
