"""Whole-batch models stand wherever towers do: in loops, workers and Estimators, on any devices, with any variables."""
import functools
import json

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests import worker_programs
from tests.estimators import test_estimator
from tests.processes import run_workers
from tests.support import build, cpus, has_tf_estimator, session, set_variables, train_by, train_plainly
from tests.sweeps import covering
from towers.testing import assert_equals_one_batch

RNG = np.random.RandomState(7)
X, LABELS = RNG.randn(9, 6) * 2 + 1, RNG.randint(0, 3, 9)
SIZES = [3, 1, 5]
SGD, Momentum = tf.train.GradientDescentOptimizer, functools.partial(tf.train.MomentumOptimizer, momentum=0.9)
KNOWN = pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])


def parts(*arrays, known=True, sizes=SIZES):
    """Returns arrays, or tensors of unknown sizes, divided among towers."""
    ends = np.cumsum([0] + list(sizes))
    return towers.PerTower([tuple(
        array[a:b] if known else tf.placeholder_with_default(array[a:b], (None,) + array.shape[1:]) for array in arrays)
        for a, b in zip(ends, ends[1:])])


def assert_close(found, expected, tolerance=1e-9):
    assert set(found) == set(expected)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name)


model = worker_programs.mixing_model


@pytest.mark.laws
@KNOWN
def test_many_steps_in_one_call_train_as_one_tower(known):
    losses, before, expected = train_plainly(model(tf.constant(X), tf.constant(LABELS)), Momentum(0.05), 4)
    with tf.Graph().as_default():
        def step():
            replicas = build(towers.whole_batch(model), parts(X, LABELS, known=known), 3)
            train_op = towers.minimize(replicas, Momentum(0.05))
            with tf.control_dependencies([train_op]):
                return tf.identity(replicas.loss)
        steps, variables = towers.repeat(step, 4), {v.op.name: v for v in tf.global_variables()}
        with session() as made:
            set_variables(made, before)
            found = made.run(steps)
            assert_close(made.run(variables), expected)
    np.testing.assert_allclose(found, losses, rtol=1e-9)


# Each case: a list over workers of their towers' batches, and whether sizes are known.
WORKERS = {"known": ([[3, 1], [5]], True), "unknown": ([[4], [2, 3]], False)}


@pytest.mark.xdist_group("workers")
@pytest.mark.laws
def test_two_workers_with_ragged_gathers_train_as_one_tower(tmp_path):
    for status, output in run_workers(2, "train_whole_batch", tmp_path, json.dumps(WORKERS)):
        assert status == 0, output
    x, labels = worker_programs.examples(9)
    losses, _, expected = train_plainly(model(tf.constant(x), tf.constant(labels)), Momentum(0.05), 3)
    for name in WORKERS:
        for rank in range(2):
            with np.load("%s/%s_%d.npz" % (tmp_path, name, rank)) as found:
                assert_close({key.replace("|", "/"): found[key] for key in found.files}, dict(expected, losses=losses))


@pytest.mark.skipif(not has_tf_estimator(), reason="TensorFlow has no tf.estimator from 2.16 on")
@KNOWN
@pytest.mark.parametrize("way", [
    test_estimator.plain_minimize, test_estimator.clipped, test_estimator.averaged_and_counted])
def test_an_estimator_trains_and_evaluates_as_without_towers(way, known):
    def model_fn(features, labels, mode, wrap=towers.TowerOptimizer):
        loss = model(features["x"], labels)
        train_op = way(wrap, loss) if mode == "train" else None
        metrics = {"mean": tf.metrics.mean(tf.cast(tf.reduce_sum(features["x"], 1), tf.float32))}
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=metrics)

    def estimated(num_towers, initial, mode="train"):
        with tf.Graph().as_default():
            tf.train.get_or_create_global_step()
            tensors = tf.constant if known else lambda array: tf.placeholder_with_default(array, (None,) + array.shape[1:])
            function = functools.partial(model_fn, wrap=lambda optimizer: optimizer)
            if num_towers:
                function = towers.replicate_model_fn(model_fn, devices=cpus(num_towers), convert=towers.whole_batch)
            spec = function(features={"x": tensors(X)}, labels=tensors(LABELS), mode=mode)
            if mode == "train":
                return train_by(spec.train_op, spec.loss, 4, initial)
            with session() as made:
                set_variables(made, initial)
                made.run(spec.eval_metric_ops["mean"][1])
                return made.run([spec.loss, spec.eval_metric_ops["mean"][0]])
    losses, before, expected = estimated(0, None)
    found = estimated(2, before)
    np.testing.assert_allclose(found[0], losses, rtol=1e-9)
    assert_close(found[2], expected)
    np.testing.assert_allclose(estimated(2, before, "eval"), estimated(0, before, "eval"), rtol=1e-6)


def gan(noise, real):
    """A generator with a batch norm by hand, and a discriminator that is told how examples deviate from each other."""
    def dense(x, size, name):
        return tf.matmul(x, tf.get_variable(name, [x.shape[-1], size], tf.float64, worker_programs.normal(len(name))))

    def score(x, reuse):
        with tf.variable_scope("discriminator", reuse=reuse):
            h = tf.tanh(dense(x, 5, "ccc"))
            deviation = tf.reduce_mean(tf.sqrt(tf.reduce_mean(tf.square(h - tf.reduce_mean(h, 0)), 0) + 1e-8))
            h = tf.concat([h, tf.fill([tf.shape(h)[0], 1], deviation)], 1)
            return dense(h, 1, "dddd")

    with tf.variable_scope("generator"):
        h = dense(noise, 5, "a")
        mean, variance = tf.nn.moments(h, [0])
        fake = dense(tf.tanh(tf.nn.batch_normalization(h, mean, variance, None, None, 1e-3)), 4, "bb")
    of_real, of_fake = score(real, False), score(fake, True)
    return {"generator_loss": tf.reduce_mean(tf.nn.softplus(-of_fake)), "fake": fake,
            "discriminator_loss": tf.reduce_mean(tf.nn.softplus(-of_real) + tf.nn.softplus(of_fake))}


@KNOWN
def test_a_gan_trains_in_turn_as_one_tower(known):
    noise, real = X[:, :3], X[:, 2:]

    def trained(num_towers):
        with tf.Graph().as_default():
            batch = parts(noise, real, known=known) if num_towers > 1 else (noise, real)
            replicas, ops = build(towers.whole_batch(gan), batch, num_towers), []
            for name in ("discriminator", "generator"):
                optimizer, loss = Momentum(0.1), name + "_loss"
                grads = towers.compute_gradients(replicas, optimizer, tf.trainable_variables(name), loss=loss)
                ops.append(optimizer.apply_gradients(towers.average_gradients(replicas, grads, loss=loss)))
            with session() as made:
                for op in ops * 3:
                    made.run(op)
                return made.run(dict({v.op.name: v for v in tf.global_variables()}, fake=replicas.merged()["fake"]))
    assert_close(trained(3), trained(1))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_what_meets_of_half_precision_is_added_up_in_float32(dtype):
    x = (np.random.RandomState(0).rand(600, 3) * 8 + 4).astype(dtype)

    def moments(x):
        return {"mean": tf.reduce_mean(x, 0), "sum": tf.reduce_sum(x / 128, 0),
                "normalized": (x - tf.reduce_mean(x, 0)) / tf.sqrt(tf.reduce_mean(tf.square(x - tf.reduce_mean(x, 0)), 0))}

    whole = towers.whole_batch(moments)
    replicas = build(whole, parts(x, sizes=[200, 100, 300]), 3)
    with session() as made:
        found = made.run(replicas.merged())
    exact, epsilon = x.astype(np.float64), np.finfo(dtype).eps
    centred = exact - exact.mean(0)
    expected = {"mean": exact.mean(0), "sum": exact.sum(0) / 128, "normalized": centred / np.sqrt((centred ** 2).mean(0))}
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=8 * epsilon, atol=8 * epsilon * np.abs(value).max(), err_msg=name)
    assert found["normalized"].dtype == dtype


def model_of_few_sums(x, labels):
    """What TensorFlow fixes the order of: it adds up three tensors or more in whichever order it likes."""
    h = tf.matmul(x, tf.get_variable("first", [6, 8], tf.float64, worker_programs.normal(0)))
    centred = h - tf.reduce_mean(h, 0)
    similar = tf.nn.softmax(tf.matmul(centred, tf.stop_gradient(centred), transpose_b=True), 0)
    weights = tf.cast(labels, tf.float64)
    return tf.reduce_sum(weights * tf.reduce_sum(similar ** 2, 1)) / tf.reduce_sum(weights)


@pytest.mark.laws
def test_the_same_towers_give_the_same_bits_on_any_devices():
    def trained(devices, aggregation_device=None):
        with tf.Graph().as_default():
            tf.set_random_seed(0)
            builder = towers.TowerBuilder(devices, aggregation_device, num_towers=4)
            replicas = builder.build(towers.whole_batch(model_of_few_sums), parts(X, LABELS, sizes=[3, 1, 0, 5]))
            train_op = towers.minimize(replicas, Momentum(0.05))
            losses, _, after = train_by(train_op, replicas.loss, 5)
            return dict({name: value.tobytes() for name, value in after.items()}, losses=losses.tobytes())
    first = trained(cpus(1))
    assert trained(["/cpu:1", "/cpu:0"]) == first
    assert trained(["/cpu:2", "/cpu:0", "/cpu:3", "/cpu:1"], "/cpu:1") == first


@pytest.mark.parametrize("placement,resource", covering(
    ["host", "first", "round_robin", "balanced", "replicated"], [False, True],
    also=lambda placement, _: placement == "replicated"))
def test_variables_stand_anywhere(placement, resource):
    def train(num_towers, initial=None):
        with tf.Graph().as_default(), tf.variable_scope(tf.get_variable_scope(), use_resource=resource):
            batch = parts(X, LABELS, known=resource) if num_towers > 1 else (X, LABELS)
            builder = towers.TowerBuilder(cpus(num_towers), variable_placement=placement)
            replicas = builder.build(towers.whole_batch(model), batch)
            return train_by(towers.minimize(replicas, Momentum(0.05)), replicas.loss, 4, initial)
    losses, before, expected = train(1)
    found = train(3, before)
    np.testing.assert_allclose(found[0], losses, rtol=1e-9)
    assert_close(found[2], expected)


@KNOWN
def test_gradients_of_several_batches_add_up(known):
    def train(num_towers, initial=None):
        with tf.Graph().as_default():
            batch = parts(X, LABELS, known=known) if num_towers > 1 else (X, LABELS)
            replicas = build(towers.whole_batch(model), batch, num_towers)
            transforms = [towers.accumulate(2), towers.clip_by_global_norm(0.5)]
            train_op = towers.minimize(replicas, Momentum(0.05), transforms=transforms)
            return train_by(train_op, replicas.loss, 4, initial)
    losses, before, expected = train(1)
    found = train(3, before)
    np.testing.assert_allclose(found[0], losses, rtol=1e-9)
    assert_close(found[2], expected)


@pytest.mark.parametrize("update_ops", ["first", "last", "all"])
def test_every_policy_of_updates_is_that_of_one_tower(update_ops):
    assert_equals_one_batch(towers.whole_batch(model), (X, LABELS), 3, sizes=SIZES, update_ops=update_ops, steps=3)
