"""Models with several losses: generators and discriminators that are trained in turn, on towers as on one batch."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import build, run, session
from tests.sweeps import covering
from towers.graph.walk import written_variables

RNG = np.random.RandomState(0)
NOISE, REAL = RNG.randn(9, 3), RNG.randn(9, 4)
SGD = tf.train.GradientDescentOptimizer


def dense(x, size, name):
    kernel = tf.get_variable(name, [x.shape[-1], size], tf.float64, tf.glorot_uniform_initializer(seed=len(name)))
    return tf.matmul(x, kernel)


def gan(noise, real):
    """A generator and a discriminator with batch norm in both; the latter is applied twice."""
    with tf.variable_scope("generator"):
        fake = dense(tf.tanh(tf_syncbn.sync_batch_norm(dense(noise, 5, "a"), training=True, name="bn")), 4, "bb")

    def score(x, reuse):
        with tf.variable_scope("discriminator", reuse=reuse):
            return dense(tf.tanh(tf_syncbn.sync_batch_norm(dense(x, 5, "ccc"), training=True, name="bn")), 1, "dddd")

    of_real, of_fake = score(real, False), score(fake, True)
    return {"generator_loss": tf.reduce_mean(tf.nn.softplus(-of_fake)), "fake": fake,
            "discriminator_loss": tf.reduce_mean(tf.nn.softplus(-of_real) + tf.nn.softplus(of_fake))}


def trained_in_turn(make_ops, steps=3):
    """Runs the two train ops in turn, and returns all variables."""
    with tf.Graph().as_default():
        ops = make_ops()
        with session() as made:
            made.run(tf.global_variables_initializer())
            for _ in range(steps):
                for op in ops:
                    made.run(op)
            return made.run({v.op.name: v for v in tf.global_variables()})


def plainly():
    losses, ops = gan(tf.constant(NOISE), tf.constant(REAL)), []
    updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
    for name in ("discriminator", "generator"):
        optimizer, variables = tf.train.MomentumOptimizer(0.1, 0.5), tf.trainable_variables(name)
        with tf.control_dependencies(updates):
            gradients = optimizer.compute_gradients(losses[name + "_loss"], variables, gate_gradients=optimizer.GATE_GRAPH)
        with tf.control_dependencies([losses[name + "_loss"]] + updates):
            ops.append(optimizer.apply_gradients(gradients))
    return ops


@pytest.mark.parametrize("how,sizes", covering(["key", "function", "in parts"], [[1, 6, 2], [5, 4], [9]]))
def test_a_gan_on_towers_trains_as_on_one_batch(sizes, how):
    def on_towers():
        ends, ops = np.cumsum(sizes)[:-1], []
        replicas = build(gan, towers.PerTower(list(zip(np.split(NOISE, ends), np.split(REAL, ends)))), len(sizes))
        for name in ("discriminator", "generator"):
            optimizer, variables, key = tf.train.MomentumOptimizer(0.1, 0.5), tf.trainable_variables(name), name + "_loss"
            if how == "in parts":
                tower_grads = towers.compute_gradients(replicas, optimizer, variables, loss=key)
                ops.append(optimizer.apply_gradients(towers.average_gradients(replicas, tower_grads, loss=key)))
            else:
                loss = key if how == "key" else lambda tower, key=key: 1.0 * tower.outputs[key]
                ops.append(towers.minimize(replicas, optimizer, var_list=variables, loss=loss))
        return ops

    expected, ours = trained_in_turn(plainly), trained_in_turn(on_towers)
    assert set(ours) == set(expected)
    for name in expected:
        np.testing.assert_allclose(ours[name], expected[name], rtol=1e-9, atol=1e-12, err_msg=name)


def test_a_step_of_one_loss_runs_the_updates_that_its_call_chose_and_nothing_of_the_other():
    replicas = build(gan, (NOISE, REAL), 2)
    update, = [op for op in tf.get_collection(tf.GraphKeys.UPDATE_OPS)
               if [v.name for v in written_variables(op)] == ["generator/bn/moving_mean"]]
    d_op = towers.minimize(replicas, SGD(0.1), update_ops=[update], var_list=tf.trainable_variables("discriminator"),
                           loss="discriminator_loss")
    with session() as made:
        made.run(tf.global_variables_initializer())
        before = made.run({v.op.name: v for v in tf.global_variables()})
        made.run(d_op)
        after = made.run({v.op.name: v for v in tf.global_variables()})
    moved = {name for name in before if (before[name] != after[name]).any()}
    assert moved == {v.op.name for v in tf.trainable_variables("discriminator")} | {"generator/bn/moving_mean"}


def test_losses_of_weighted_towers_fail_where_they_are_nan_and_the_weight_is_0():
    def model(x, valid):
        w = tf.get_variable("w", [], tf.float64, tf.ones_initializer())
        return {"first": tf.reduce_sum(x * w * valid) / tf.reduce_sum(valid), "weight": tf.reduce_sum(valid)}

    replicas = build(model, (NOISE[:, 0], np.array([1.0] * 6 + [0] * 3)), 3)
    with pytest.raises(tf.errors.InvalidArgumentError, match="loss of tower 2 .* is not finite where its weight is 0"):
        run(towers.minimize(replicas, SGD(0.1), loss="first"))


@pytest.mark.parametrize("loss,error,words", [
    ("generator", ValueError, "returned no 'generator': it returned"), ("fake", ValueError, "has to be a floating point scalar"),
    (3, TypeError, "a function of a tower, or a list of 2 losses, not 3"), ([0.5], TypeError, "a list of 2 losses"),
    (lambda tower: tower.outputs["fake"], ValueError, "has to be a floating point scalar"),
    (None, ValueError, "`loss` has to say which of what it returned is one"),
    (lambda tower: tf.constant(1.0), ValueError, "No gradient reaches any of the variables")])
def test_what_is_no_loss_is_refused(loss, error, words):
    replicas = build(gan, (NOISE, REAL), 2)
    with pytest.raises(error, match=words):
        towers.minimize(replicas, SGD(0.1), loss=loss)
