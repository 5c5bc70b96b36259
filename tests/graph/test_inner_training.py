"""Model functions that bring a training script's habits: those that train by themselves are refused, others work."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import build, session, set_variables, train_by

RNG = np.random.RandomState(3)
X, Y = RNG.randn(8, 3), RNG.randn(8)


def loss_of(x, y):
    w = tf.get_variable("w", [3], tf.float64)
    return tf.reduce_mean(tf.square(tf.reduce_sum(x * w, 1) - y))


def normalized(x):
    mean, variance = tf.nn.moments(x, [0])
    return (x - mean) * tf.rsqrt(variance + 1e-3)


def by_optimizer(optimizer):
    def train(loss):
        return optimizer().minimize(loss, global_step=tf.train.get_or_create_global_step())
    return train


def by_hand(loss):
    variables = tf.trainable_variables()
    gradients = tf.gradients(loss, variables)
    return tf.group(*[tf.assign(variable, variable - 0.1 * gradient) for variable, gradient in zip(variables, gradients)])


class OwnOptimizer(tf.train.Optimizer):
    """Applies gradients by assignments, as some optimizers with weight decay do."""

    def __init__(self):
        super().__init__(False, "Own")

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        return tf.group(*[tf.assign(variable, 0.99 * variable - gradient) for gradient, variable in grads_and_vars])


TRAININGS = {
    "descent": by_optimizer(lambda: tf.train.GradientDescentOptimizer(0.1)),
    "momentum": by_optimizer(lambda: tf.train.MomentumOptimizer(0.1, 0.9)),
    "adam": by_optimizer(lambda: tf.train.AdamOptimizer(0.1)),
    "ftrl": by_optimizer(lambda: tf.train.FtrlOptimizer(0.1)),
    "one of its own": lambda loss: OwnOptimizer().minimize(loss),
    "assignments": by_hand,
}


@pytest.mark.parametrize("num_towers", [1, 2])
@pytest.mark.parametrize("is_converted", [False, True])
@pytest.mark.parametrize("training", sorted(TRAININGS))
def test_a_model_function_that_trains_is_refused_by_the_name_of_its_op(training, is_converted, num_towers):
    def model(x, y):
        with tf.variable_scope("net"):
            loss = loss_of(normalized(x), y)
        return {"loss": loss, "train_op": TRAININGS[training](loss)}

    with pytest.raises(ValueError, match="The model function applies gradients .'tower_0/.*Let it return its loss"):
        build(tf_syncbn.convert_model(model) if is_converted else model, (X, Y), num_towers)


def test_the_trained_variable_is_named():
    def model(x, y):
        loss = loss_of(x, y)
        return {"loss": loss, "train_op": TRAININGS["momentum"](loss)}

    with pytest.raises(ValueError, match="to the variable 'w'"):
        build(model, (X, Y))


def test_what_was_trained_before_the_build_is_nobodys_fault():
    build(loss_of, (X, Y))
    other = tf.get_variable("other", [])
    tf.train.AdamOptimizer(0.1).minimize(tf.square(other))
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
        assert len(build(loss_of, (X, Y))) == 2


def test_gradients_and_assignments_that_train_nothing_are_no_training():
    """A gradient penalty, weights that are clipped, and an average of weights."""
    def model(x, y):
        loss = loss_of(x, y)
        w = tf.trainable_variables()[0]
        average = tf.get_variable("average", [3], tf.float64, tf.zeros_initializer(), trainable=False)
        penalty = tf.reduce_mean(tf.square(tf.gradients(loss, x)[0]))
        clip = tf.assign(w, tf.clip_by_value(w, -1.0, 1.0))
        return {"loss": loss + penalty, "clip": clip, "average": tf.assign_sub(average, 0.1 * (average - w))}

    assert len(build(model, (X, Y))) == 2


def with_saver(x, y, path):
    loss = loss_of(x, y)
    tf.train.Saver()
    return loss


def with_checkpoint(x, y, path):
    loss = loss_of(x, y)
    tf.train.init_from_checkpoint(path, {"w": "w"})
    return loss


def with_global_step(x, y, path):
    step = tf.train.get_or_create_global_step()
    rate = tf.train.exponential_decay(tf.constant(0.1, tf.float64), step, 2, 0.5)
    return loss_of(x, y) + 0.1 * rate * tf.reduce_mean(y)


def with_summaries(x, y, path):
    loss = loss_of(x, y)
    tf.summary.scalar("loss", loss)
    tf.summary.histogram("x", x)
    tf.summary.merge_all()
    return loss


def with_local_variable(x, y, path):
    seen = tf.get_variable("seen", [], tf.float64, tf.zeros_initializer(), collections=[tf.GraphKeys.LOCAL_VARIABLES],
                           trainable=False)
    return loss_of(x, y) + 0 * seen


@pytest.mark.parametrize("model", [with_saver, with_checkpoint, with_global_step, with_summaries, with_local_variable])
def test_what_else_a_script_has_in_its_model_function_works_as_on_one_batch(model, tmp_path):
    path, weights = str(tmp_path / "w"), RNG.randn(3)
    with tf.Graph().as_default():
        w = tf.get_variable("w", [3], tf.float64)
        with session() as made:
            set_variables(made, {"w": weights})
            tf.train.Saver([w]).save(made, path, write_meta_graph=False)
    initial = {} if model is with_checkpoint else {"w": weights}
    optimizer = tf.train.MomentumOptimizer(0.1, 0.9)
    with tf.Graph().as_default():
        loss = model(X, Y, path)
        grads = optimizer.compute_gradients(loss)
        with tf.control_dependencies([loss]):  # which reads the global step too
            train_op = optimizer.apply_gradients(grads, global_step=tf.train.get_global_step())
        losses, _, wanted = train_by(train_op, loss, 4, initial)
    with tf.Graph().as_default():
        replicas = build(lambda x, y: model(x, y, path), (X, Y), 3)
        train_op = towers.minimize(replicas, tf.train.MomentumOptimizer(0.1, 0.9), global_step=tf.train.get_global_step())
        on_towers, before, got = train_by(train_op, replicas.loss, 4, initial)
    np.testing.assert_allclose(on_towers, losses, rtol=1e-10)
    np.testing.assert_array_equal(before["w"], weights)
    assert sorted(got) == sorted(wanted)
    for name in wanted:
        np.testing.assert_allclose(got[name], wanted[name], rtol=1e-10, err_msg=name)
