"""Batch renormalization over towers against NumPy in float64 and, where this TensorFlow has it, tf.layers."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.batch_norm_oracle import gradients
from tests.support import build, has_tf_layers, session

EPSILON, KEEP, RENORM_KEEP = 1e-3, 0.9, 0.7
CLIPPING = {"rmin": 0.5, "rmax": 1.5, "dmax": 0.4}
RNG = np.random.RandomState(0)
BATCHES = [RNG.randn(7, 4, 3) * (1 + step) + step for step in range(4)]
DY = RNG.randn(7, 4, 3)
GAMMA, BETA = np.array([0.5, 1.0, 2.0]), np.array([0.0, 1.0, -1.0])


def moments(x):
    return x.mean((0, 1)), np.sqrt(x.var((0, 1)) + EPSILON)


def in_numpy(parts):
    """Each step's y, dx, d_gamma and d_beta for batches cut into `parts`, and the moving variables after the last."""
    moving = {"moving_mean": np.zeros(3), "moving_stddev": np.ones(3), "renorm_mean": np.zeros(3), "renorm_stddev": np.ones(3)}
    steps = []
    for x in BATCHES:
        results = []
        for part, dy in zip(np.split(x, parts), np.split(DY, parts)):
            mean, stddev = moments(part)
            r = np.clip(stddev / moving["renorm_stddev"], CLIPPING["rmin"], CLIPPING["rmax"])
            d = np.clip((mean - moving["renorm_mean"]) / moving["renorm_stddev"], -CLIPPING["dmax"], CLIPPING["dmax"])
            hat = (part - mean) / stddev
            results.append(((hat * r + d) * GAMMA + BETA, gradients(part, dy, 2, GAMMA * r, epsilon=EPSILON)[0],
                            (dy * (hat * r + d)).sum((0, 1)), dy.sum((0, 1))))
        ys, dxs, d_gammas, d_betas = zip(*results)
        steps.append((np.concatenate(ys), np.concatenate(dxs), sum(d_gammas), sum(d_betas)))
        mean, stddev = moments(x)
        for name, new, keep in (("moving_mean", mean, KEEP), ("moving_stddev", stddev, KEEP),
                                ("renorm_mean", mean, RENORM_KEEP), ("renorm_stddev", stddev, RENORM_KEEP)):
            moving[name] = keep * moving[name] + (1 - keep) * new
    moving["moving_variance"] = moving["moving_stddev"] ** 2 - EPSILON
    return steps, moving


def layer(x, **arguments):
    return tf_syncbn.sync_batch_norm(
        x, momentum=KEEP, epsilon=EPSILON, renorm=True, renorm_momentum=RENORM_KEEP, name="bn",
        gamma_initializer=tf.constant_initializer(GAMMA), beta_initializer=tf.constant_initializer(BETA), **arguments)


@pytest.mark.parametrize("num_towers,group_size", [(1, None), (3, None), (3, 1)])
def test_steps_equal_numpys_and_corrections_are_read_before_they_move(num_towers, group_size):
    x = tf.placeholder(tf.float64, [7, 4, 3])
    limits = dict(CLIPPING, rmax=tf.constant(CLIPPING["rmax"], tf.float64))  # a schedule is a tensor
    replicas = build(lambda x: layer(x, renorm_clipping=limits, group_size=group_size), (x,), num_towers)
    y = replicas.merged()
    slopes = tf.gradients([tower.outputs for tower in replicas], [x] + tf.trainable_variables(), tf.split(
        tf.constant(DY), [3, 2, 2] if num_towers == 3 else [7]))
    expected, expected_moving = in_numpy([3, 5] if group_size else [])
    with session() as made:
        for batch, (y_then, *slopes_then) in zip(BATCHES, expected):
            ours, dx, *affine = made.run([y] + slopes + towers.collect_update_ops(replicas), {x: batch})[:4]
            np.testing.assert_allclose(ours, y_then, atol=1e-9)
            np.testing.assert_allclose(dx, slopes_then[0], atol=1e-9)
            for a, b in zip(affine, slopes_then[1:]):
                np.testing.assert_allclose(a, b, atol=1e-9)
        moving = {v.op.name[3:]: made.run(v) for v in tf.global_variables() if not v.trainable}
    assert sorted(moving) == sorted(expected_moving)
    for name, value in expected_moving.items():
        np.testing.assert_allclose(moving[name], value, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("use_resource", [False, True])
@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("num_towers", [1, 3])
def test_a_layer_applied_twice_reads_before_collected_updates_and_after_inline_ones(num_towers, inline, use_resource):
    arguments = dict(center=False, scale=False, updates_collections=None if inline else tf.GraphKeys.UPDATE_OPS)

    def model(x):
        with tf.variable_scope("", use_resource=use_resource):
            first = layer(x, **arguments)
            for _ in range(20):  # so that a collected update would have time to come before the second correction
                first = tf.identity(tf.sin(first))
            return layer(first, reuse=True, **arguments)

    first = BATCHES[1]  # of moving moments 0 and 1, and without limits, nothing is normalized
    (mean, stddev), rate = moments(first), 1 - RENORM_KEEP
    for _ in range(20):
        first = np.sin(first)
    expected = first
    if inline:
        expected = (first - rate * mean) / (1 + rate * (stddev - 1))
    replicas = build(model, (BATCHES[1],), num_towers)
    fetches, averaged = [replicas.merged(), towers.collect_update_ops(replicas)], tf.global_variables("bn/renorm_mean")
    with session() as made:
        for _ in range(10):
            made.run(tf.global_variables_initializer())
            np.testing.assert_allclose(made.run(fetches)[0], expected, atol=1e-9)
        np.testing.assert_allclose(made.run(averaged)[0], rate * (RENORM_KEEP * mean + moments(first)[0]), atol=1e-9)


def test_without_gamma_and_beta_the_corrections_still_apply():
    replicas = build(lambda x: tf_syncbn.sync_batch_norm(x, renorm=True, epsilon=EPSILON, center=False, scale=False),
                     (BATCHES[1],), 2)
    mean, stddev = moments(BATCHES[1])
    with session() as made:  # of moving moments 0 and 1, and without limits, nothing is normalized
        np.testing.assert_allclose(made.run(replicas.merged()), (BATCHES[1] - mean) / stddev * stddev + mean, atol=1e-9)


def test_out_of_training_neither_corrections_nor_moving_variables_play():
    training = tf.placeholder(tf.bool, [])
    replicas = build(layer, (BATCHES[2],), 2, training=training)
    with session() as made:
        y, _ = made.run([replicas.merged(), towers.collect_update_ops(replicas)], {training: False})
        moving = [made.run(v) for v in tf.global_variables() if not v.trainable]
    np.testing.assert_allclose(y, BATCHES[2] / np.sqrt(1 + EPSILON) * GAMMA + BETA, atol=1e-9)
    assert all((value == value[0]).all() and value[0] in (0, 1) for value in moving)


@pytest.mark.skipif(not has_tf_layers(), reason="this TensorFlow has no tf.layers")
def test_variables_are_those_of_tf_layers_and_move_alike():
    def after_a_step(apply_layer, updates):
        with tf.Graph().as_default():
            apply_layer()
            with session() as made:
                made.run(updates())
                return {v.op.name: made.run(v) for v in tf.global_variables()}

    common = {"momentum": KEEP, "renorm": True, "renorm_momentum": RENORM_KEEP, "epsilon": EPSILON, "name": "bn"}
    x = BATCHES[3].astype(np.float32)
    theirs = after_a_step(lambda: tf.layers.batch_normalization(tf.constant(x), training=True, **common),
                          lambda: tf.get_collection(tf.GraphKeys.UPDATE_OPS))
    ours = after_a_step(lambda: build(lambda x: tf_syncbn.sync_batch_norm(x, **common), (x,), 3),
                        lambda: tf.get_collection(tf.GraphKeys.UPDATE_OPS))
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_refuses_unknown_limits_and_momenta_out_of_range():
    with pytest.raises(ValueError, match="'bn': renorm_clipping takes rmin, rmax and dmax, not max, min"):
        layer(tf.constant(BATCHES[0]), training=True, renorm_clipping={"max": 1, "min": 0})
    with pytest.raises(ValueError, match="momentum is between 0 and 1, not 1.5"):
        tf_syncbn.sync_batch_norm(tf.constant(BATCHES[0]), training=True, renorm=True, renorm_momentum=1.5)
