"""Transforms of averaged gradients, against NumPy."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.support import build, run, session, set_variables

X = np.random.RandomState(3).randn(6, 3).astype(np.float32)


def train(transforms, num_towers=2):
    """Returns the steps of two variables that one step of plain descent takes."""
    def model(x):
        v, w = (tf.get_variable(name, [3], initializer=tf.zeros_initializer()) for name in "vw")
        return tf.reduce_mean(tf.reduce_sum(x * v + 2 * x * w, 1))

    with tf.Graph().as_default():
        train_op = towers.minimize(build(model, (X,), num_towers), tf.train.GradientDescentOptimizer(1.0), transforms=transforms)
        with tf.control_dependencies([train_op]):
            after = [tf.identity(variable.read_value()) for variable in tf.global_variables()]
        return [-value for value in run(after)]


@pytest.mark.parametrize("num_towers", [1, 3])
@pytest.mark.parametrize("clip_norm", [0.1, 1e3])
def test_clipping_scales_the_gradients_of_the_global_batch_by_one_factor(clip_norm, num_towers):
    slope = X.mean(0, dtype=np.float64)
    norm = np.sqrt(np.sum(slope ** 2) + np.sum((2 * slope) ** 2))
    factor = min(1.0, clip_norm / norm)
    got = train([towers.clip_by_global_norm(clip_norm)], num_towers)
    np.testing.assert_allclose(got, [factor * slope, factor * 2 * slope], rtol=1e-5)


def test_clipped_slices_stay_sparse():
    def model(ids):
        return tf.reduce_mean(tf.nn.embedding_lookup(tf.get_variable("table", [5, 2]), ids))

    seen = []

    def note(grads):
        seen.extend(grads)
        return grads

    replicas = build(model, (np.array([0, 2, 2, 4]),), 2)
    towers.minimize(replicas, tf.train.GradientDescentOptimizer(1.0), transforms=[towers.clip_by_global_norm(0.1), note])
    assert [type(gradient) for gradient, _ in seen] == [tf.IndexedSlices]
    assert run(tf.norm(seen[0][0].values)) <= 0.1 * (1 + 1e-5)


@pytest.mark.parametrize("clip_norm", [0, -1.0])
def test_a_norm_that_clips_everything_is_refused(clip_norm):
    with pytest.raises(ValueError, match="clip_norm has to be more than 0, not %r" % clip_norm):
        towers.clip_by_global_norm(clip_norm)


def test_values_are_clipped_after_the_average():
    slope = X.mean(0, dtype=np.float64)
    got = train([towers.clip_by_value(-0.2, 0.3)], 3)
    np.testing.assert_allclose(got, [np.clip(slope, -0.2, 0.3), np.clip(2 * slope, -0.2, 0.3)], rtol=1e-5)


def test_slices_of_one_row_are_clipped_as_their_sum():
    """The gradient of row 2 is 1, of two slices of 0.5 each; a bound between them clips the sum alone."""
    def model(ids):
        table = tf.get_variable("table", [5, 2], initializer=tf.zeros_initializer())
        return 2 * tf.reduce_mean(tf.reduce_sum(tf.nn.embedding_lookup(table, ids), 1))

    replicas = build(model, (np.array([0, 2, 2, 4]),), 2)
    train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(1.0), transforms=[towers.clip_by_value(-0.75, 0.75)])
    with tf.control_dependencies([train_op]):
        table = tf.identity(tf.global_variables()[0].read_value())
    np.testing.assert_allclose(run(table), -np.repeat([[0.5], [0], [0.75], [0], [0.5]], 2, 1), rtol=1e-6)


def test_bounds_that_enclose_nothing_are_refused():
    with pytest.raises(ValueError, match="the second number has to be more than the first; they are 1.0 and -1.0"):
        towers.clip_by_value(1.0, -1.0)


def test_transforms_are_applied_in_their_order():
    def double(grads):
        return [(2 * gradient, variable) for gradient, variable in grads]

    slope = X.mean(0, dtype=np.float64)
    np.testing.assert_allclose(train([double, towers.clip_by_value(-0.3, 0.3)])[0], np.clip(2 * slope, -0.3, 0.3), rtol=1e-5)
    np.testing.assert_allclose(train([towers.clip_by_value(-0.3, 0.3), double])[0], 2 * np.clip(slope, -0.3, 0.3), rtol=1e-5)


def test_a_function_that_returns_no_list_is_refused_by_its_name():
    with pytest.raises(TypeError, match="The transform forget has to return a list of .gradient, variable.; it returned None"):
        def forget(grads):
            del grads

        train([forget])
    with pytest.raises(ValueError, match="The transform none left no gradient"):
        def none(grads):
            return [(None, variable) for _, variable in grads]

        train([none])
    with pytest.raises(TypeError, match="A transform is a function of a list of .gradient, variable., not 5.0"):
        train([5.0])


def test_a_gradient_that_is_not_finite_is_named_and_nothing_is_trained():
    def model(x):
        good, bad = (tf.get_variable(name, [], initializer=tf.ones_initializer()) for name in ("good", "bad"))
        return tf.reduce_mean(x) * good + tf.sqrt(bad - 1)

    replicas = build(model, (np.ones(4, np.float32),), 2)
    train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(1.0), transforms=[towers.check_finite()])
    with session() as made:
        with pytest.raises(tf.errors.InvalidArgumentError, match="The gradient of the variable 'bad' is not finite"):
            made.run(train_op)
        assert made.run(tf.global_variables()) == [1.0, 1.0]


CHAINS = {
    "clip_by_global_norm": lambda: [towers.clip_by_global_norm(0.05)],
    "clip_by_value": lambda: [towers.clip_by_value(-0.01, 0.02)],
    "check_finite": lambda: [towers.check_finite()],
    "mask_gradients": lambda: [towers.mask_gradients({"kernel": np.arange(12).reshape([3, 4]) % 3 > 0})],
    "scale_loss": lambda: [towers.scale_loss(128)],
    "scale_loss dynamic": lambda: [towers.scale_loss("dynamic")],
    "accumulate": lambda: [towers.accumulate(2)],
    "a function": lambda: [lambda grads: [(gradient + 0.1 * variable.read_value(), variable) for gradient, variable in grads]],
    "all": lambda: [towers.scale_loss(8), towers.check_finite(), towers.accumulate(2), towers.clip_by_global_norm(0.05),
                    towers.mask_gradients({"kernel": [[1], [0], [1]]}), towers.clip_by_value(-0.01, 0.02)],
}


@pytest.mark.parametrize("chain", sorted(CHAINS))
def test_towers_train_as_one_tower_under_each_transform(chain):
    def model(x, y):
        kernel = tf.get_variable("kernel", [3, 4], tf.float64)
        weights = tf.get_variable("weights", [4], tf.float64)
        rows = tf.gather(tf.get_variable("table", [6], tf.float64), tf.cast(tf.floor(tf.abs(x[:, 0])), tf.int32))
        return tf.reduce_mean(tf.square(tf.reduce_sum(tf.tanh(tf.matmul(x, kernel)) * weights, 1) + rows - y))

    rng, trained = np.random.RandomState(1), []
    data = [(rng.randn(size, 3), rng.randn(size)) for size in (7, 5, 3, 8)]
    initial = {"kernel": rng.randn(3, 4), "weights": rng.randn(4), "table": rng.randn(6)}
    for num_towers in (1, 3):
        with tf.Graph().as_default():
            x, y = tf.placeholder(tf.float64, [None, 3]), tf.placeholder(tf.float64, [None])
            train_op = towers.minimize(build(model, (x, y), num_towers), tf.train.MomentumOptimizer(0.1, 0.9),
                                       transforms=CHAINS[chain]())
            with session() as made:
                set_variables(made, initial)
                for of_x, of_y in data:
                    made.run(train_op, {x: of_x, y: of_y})
                trained.append(made.run({v.op.name: v for v in tf.trainable_variables()}))
    for name in initial:
        np.testing.assert_allclose(trained[1][name], trained[0][name], rtol=1e-10, atol=1e-12, err_msg=name)
        assert (trained[0][name] != initial[name]).any()
