"""What people train with: monitored sessions, savers, averages of weights, and TensorFlow's optimizers."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import build, cpus, session, set_variables, train_by, train_plainly

RNG = np.random.RandomState(0)
X, Y = RNG.randn(7, 3), RNG.randn(7)
ROWS = RNG.randn(30, 3)
CONFIG = towers.session_config(cpus(8))


def net(x):
    with tf.variable_scope("net", dtype=x.dtype):
        y = tf.matmul(x, tf.get_variable("w", [3, 4], initializer=tf.glorot_uniform_initializer(seed=0)))
        y = tf_syncbn.sync_batch_norm(y, momentum=0.8, training=None if towers.current_tower() else True, name="bn")
        return tf.matmul(tf.tanh(y), tf.get_variable("head", [4, 1], initializer=tf.glorot_uniform_initializer(seed=1)))[:, 0]


def model(x, y):
    return tf.reduce_mean(tf.square(net(x) - y))


OPTIMIZERS = {
    "sgd": lambda: tf.train.GradientDescentOptimizer(0.1),
    "momentum": lambda: tf.train.MomentumOptimizer(0.1, 0.9),
    "nesterov": lambda: tf.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    "adagrad": lambda: tf.train.AdagradOptimizer(0.1),
    "adagrad_da": lambda: tf.train.AdagradDAOptimizer(0.1, tf.train.get_or_create_global_step()),
    "adadelta": lambda: tf.train.AdadeltaOptimizer(1.0, epsilon=1e-3),
    "rms_prop": lambda: tf.train.RMSPropOptimizer(0.01, momentum=0.5),
    "rms_prop_centered": lambda: tf.train.RMSPropOptimizer(0.01, centered=True),
    "adam": lambda: tf.train.AdamOptimizer(0.01),
    "ftrl": lambda: tf.train.FtrlOptimizer(0.1, l1_regularization_strength=0.01, l2_regularization_strength=0.01),
    "proximal_sgd": lambda: tf.train.ProximalGradientDescentOptimizer(0.1, 0.01, 0.01),
    "proximal_adagrad": lambda: tf.train.ProximalAdagradOptimizer(0.1, l1_regularization_strength=0.01),
}


# With slots, variables of its own, a global step, and in float32; the others differ from these in TensorFlow's kernels.
SHOWN = ("adagrad_da", "adam", "nesterov", "proximal_adagrad")


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in SHOWN else pytest.mark.sweep) for name in sorted(OPTIMIZERS)])
def test_two_uneven_towers_train_as_one_model_without_towers(name):
    single = name.startswith("proximal")  # TensorFlow's kernels of these take no float64
    x, y = (array.astype(np.float32 if single else np.float64) for array in (X, Y))
    tolerance = 1e-5 if single else 1e-8  # roots of what is nearly 0 magnify rounding
    with tf.Graph().as_default():
        loss = model(tf.constant(x), tf.constant(y))
        losses, initial, expected = train_plainly(loss, OPTIMIZERS[name](), 6)
    replicas = build(model, (x, y), 2)
    train_op = towers.minimize(replicas, OPTIMIZERS[name]())
    got_losses, _, got = train_by(train_op, replicas.loss, 6, initial)
    assert set(got) == set(expected)
    np.testing.assert_allclose(got_losses, losses, rtol=tolerance)
    assert losses[-1] != pytest.approx(losses[0], rel=1e-4)
    for variable in expected:
        scale = max(np.abs(expected[variable]).max(), np.abs(expected[variable] - initial[variable]).max())
        np.testing.assert_allclose(got[variable], expected[variable], rtol=0, atol=tolerance * scale + 1e-12, err_msg=variable)


def monitored_training(folder, last_step, num_towers):
    """Trains up to a step, from a checkpoint if there is one; returns the losses and the variables."""
    losses, seen = [], []

    class Watch(tf.train.SessionRunHook):
        def before_run(self, run_context):
            return tf.train.SessionRunArgs(replicas.loss)

        def after_run(self, run_context, run_values):
            losses.append(run_values.results)

        def end(self, session):
            seen.append(session.run({v.op.name: v for v in tf.global_variables()}))

    with tf.Graph().as_default():
        tf.set_random_seed(0)
        step = tf.train.get_or_create_global_step()
        x, y = tf.constant(ROWS), tf.constant(ROWS[:, 0])
        start = tf.cast(step, tf.int32) * 5 % 30
        replicas = build(model, (x[start:start + 5], y[start:start + 5]), num_towers)
        train_op = towers.minimize(replicas, tf.train.MomentumOptimizer(0.05, 0.9), global_step=step)
        hooks = [tf.train.StopAtStepHook(last_step=last_step), tf.train.NanTensorHook(replicas.loss), Watch()]
        with tf.train.MonitoredTrainingSession(
                checkpoint_dir=folder, hooks=hooks, save_checkpoint_steps=2, config=CONFIG) as made:
            while not made.should_stop():
                made.run(train_op)
    return losses, seen[0]


@pytest.mark.laws
@pytest.mark.parametrize("num_towers", [pytest.param(1, marks=pytest.mark.sweep), 3])
def test_monitored_training_that_stopped_goes_on_as_though_it_had_not(num_towers, tmp_path):
    losses, expected = monitored_training(str(tmp_path / "whole"), 7, num_towers)
    first, _ = monitored_training(str(tmp_path / "parts"), 3, num_towers)
    second, got = monitored_training(str(tmp_path / "parts"), 7, num_towers)
    assert first + second == losses and len(first) == 3 and got["global_step"] == 7
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


@pytest.mark.laws
def test_monitored_training_goes_on_with_another_number_of_towers(tmp_path):
    losses, expected = monitored_training(str(tmp_path / "whole"), 6, 1)
    first, _ = monitored_training(str(tmp_path / "parts"), 3, 3)
    second, got = monitored_training(str(tmp_path / "parts"), 6, 2)
    np.testing.assert_allclose(first + second, losses, rtol=1e-9)
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-9, err_msg=name)


def plain_graph():
    """The model without towers, with its optimizer; returns the loss and the train op."""
    loss = model(tf.constant(X), tf.constant(Y))
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS) + [loss]):
        optimizer = tf.train.AdamOptimizer(0.01)
        return loss, optimizer.minimize(loss, gate_gradients=optimizer.GATE_GRAPH)


def tower_graph():
    replicas = build(model, (X, Y), 3)
    return replicas.loss, towers.minimize(replicas, tf.train.AdamOptimizer(0.01))


@pytest.mark.parametrize("graphs", [
    (tower_graph, plain_graph), pytest.param((plain_graph, tower_graph), marks=pytest.mark.sweep)])
def test_checkpoints_of_towers_and_of_plain_models_load_into_each_other(graphs, tmp_path):
    def train(graph, steps, load=None, save=None):
        with tf.Graph().as_default():
            tf.set_random_seed(0)
            loss, train_op = graph()
            saver = tf.train.Saver()
            with session() as made:
                if load:
                    saver.restore(made, load)
                losses = [made.run([loss, train_op])[0] for _ in range(steps)]
                if save:
                    saver.save(made, save)
                return losses

    path, whole = str(tmp_path / "model"), str(tmp_path / "whole")
    first = train(graphs[0], 3, save=path)
    np.testing.assert_allclose(train(graphs[1], 3, load=path), train(graphs[0], 3, load=path, save=whole), rtol=1e-9)
    assert first[-1] != first[0] and sorted(tf.train.list_variables(path)) == sorted(tf.train.list_variables(whole))


def test_averages_of_the_weights_are_those_of_one_tower_and_evaluate(tmp_path):
    path = str(tmp_path / "model")

    def train(num_towers, initial=None, save=None):
        # Of ref variables on another device TensorFlow averages what they were before the step.
        with tf.Graph().as_default(), tf.device("/cpu:0"):
            replicas = build(model, (X, Y), num_towers)
            train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1))
            average = tf.train.ExponentialMovingAverage(0.75)
            with tf.control_dependencies([train_op]):
                train_op = average.apply(tf.trainable_variables())
            variables = {v.op.name: v for v in tf.global_variables()}
            with session() as made:
                set_variables(made, initial or {})
                before = made.run(variables)
                history = [before]
                for _ in range(4):
                    made.run(train_op)
                    history.append(made.run(variables))
                if save:
                    tf.train.Saver().save(made, save)
                return history

    history = train(1)
    got = train(3, history[0], path)[-1]
    averages = {name: history[0][name + "/ExponentialMovingAverage"] for name in ("net/w", "net/head", "net/bn/gamma")}
    for values in history[1:]:
        averages = {name: 0.75 * averages[name] + 0.25 * values[name] for name in averages}
    for name in averages:
        np.testing.assert_allclose(got[name + "/ExponentialMovingAverage"], averages[name], rtol=1e-9)
    evaluated = build(lambda x: net(x), (ROWS,), 2, training=False).merged()
    saver = tf.train.Saver(tf.train.ExponentialMovingAverage(0.75).variables_to_restore())
    with session() as made:
        saver.restore(made, path)
        outputs, values = made.run([evaluated, {v.op.name: v for v in tf.global_variables()}])
    for name in averages:
        np.testing.assert_allclose(values[name], averages[name], rtol=1e-9)
    y = ROWS @ averages["net/w"]
    beta, mean, variance = (got[name] if name.startswith("net/bn/moving") else got[name + "/ExponentialMovingAverage"]
                            for name in ("net/bn/beta", "net/bn/moving_mean", "net/bn/moving_variance"))
    y = (y - mean) / np.sqrt(variance + 1e-3) * averages["net/bn/gamma"] + beta
    np.testing.assert_allclose(outputs, (np.tanh(y) @ averages["net/head"])[:, 0], rtol=1e-9)
