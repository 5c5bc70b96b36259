"""What towers compute while they wait for one another in the backward pass."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import build, run
from towers.graph.private import control_flow_of
from towers.graph.walk import ancestors
from towers.testing import assert_equals_one_batch

IMAGES = np.random.RandomState(0).randn(6, 4, 4, 3)


def convolve_and_normalize(x, name):
    kernel = tf.get_variable(name, [1, 1, x.shape[-1], 3], x.dtype, tf.glorot_uniform_initializer(seed=len(name)))
    return tf_syncbn.sync_batch_norm(tf.nn.conv2d(x, kernel, [1, 1, 1, 1], "SAME"), name="bn_" + name)


def chain(images):
    for i in range(3):
        images = tf.nn.relu(convolve_and_normalize(images, "conv%d" % i))
    return tf.reduce_mean(images ** 2)


def differentiate(model, num_towers=2):
    """Returns a dict: (tower, name of a variable) -> what its gradient depends on."""
    tower_grads = towers.compute_gradients(build(model, (IMAGES,), num_towers), tf.train.GradientDescentOptimizer(1.0))
    return {(i, v.op.name): ancestors([g]) for i, grads in enumerate(tower_grads) for g, v in grads}


def contributions(layer, tower):
    """Returns the ops whose results a tower leaves at a layer's meeting of the backward pass."""
    meeting = [op for op in tf.get_default_graph().get_operations()
               if op.type == "AddN" and op.name.startswith("cross_tower/%s/" % layer) and "gradient" in op.name]
    return {op.inputs[tower].op for op in meeting}


def test_gradients_by_kernels_wait_for_their_own_towers_next_contribution_alone():
    needed = differentiate(chain)
    for tower, other in ((0, 1), (1, 0)):
        for i in (1, 2):
            below = "bn_conv%d" % (i - 1)
            assert contributions(below, tower) and contributions(below, tower) <= needed[tower, "conv%d" % i]
            assert not contributions(below, other) & needed[tower, "conv%d" % i]


def test_what_waits_keeps_its_inputs_no_longer_than_until_the_next_meeting():
    def residual(images):
        x = convolve_and_normalize(images, "stem")
        for i in range(3):  # from each block a path leads past all meetings to the stem's
            x += tf.sin(convolve_and_normalize(tf.nn.relu(convolve_and_normalize(x, "a%d" % i)), "b%d" % i))
        return tf.reduce_mean(x ** 2)

    needed = differentiate(residual)
    for i in range(3):
        assert contributions("bn_a%d" % i, 0) <= needed[0, "b%d" % i]
        assert not contributions("bn_stem", 0) & needed[0, "b%d" % i]
        assert contributions("bn_b%d" % (i - 1) if i else "bn_stem", 0) <= needed[0, "a%d" % i]


def test_of_several_layers_before_a_meeting_the_nearest_waits():
    def deep(images):
        x = convolve_and_normalize(images, "conv")
        for i in range(3):
            x = tf.tanh(tf.matmul(tf.reshape(x, [-1, 3]), tf.get_variable("dense%d" % i, [3, 3], x.dtype)))
        return tf.reduce_mean(x ** 2)

    needed, left = differentiate(deep), contributions("bn_conv", 0)
    assert [left <= needed[0, "dense%d" % i] for i in range(3)] == [True, False, False]


def test_one_tower_waits_for_nothing():
    needed = differentiate(chain, 1)
    assert not contributions("bn_conv0", 0) & needed[0, "conv1"]


def test_no_op_of_a_loop_waits_for_one_outside():
    def loop(x, name):
        weights = tf.get_variable(name, [3], tf.float64)
        return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, tf.sin(y * weights)), [tf.constant(0), x])[1]

    def model(images):
        x = tf.reduce_sum(convolve_and_normalize(images, "below"), 0)
        x += loop(tf.get_variable("bias", [4, 4, 3], tf.float64), "beside_the_path")
        return tf.reduce_mean(loop(convolve_and_normalize(tf.expand_dims(x, 0), "above"), "on_the_path") ** 2)

    tower_grads = towers.compute_gradients(build(model, (IMAGES,), 2), tf.train.GradientDescentOptimizer(1.0))
    left = {op for layer in ("bn_below", "bn_above") for tower in range(2) for op in contributions(layer, tower)}
    assert len(left) == 4
    for op in tf.get_default_graph().get_operations():
        if op.type == "Exit" or control_flow_of(op) is not None:
            assert not left.intersection(op.control_inputs), op.name
    assert all(np.isfinite(gradient).all() for gradient in run([g for grads in tower_grads for g, _ in grads]))


@pytest.mark.laws
@pytest.mark.parametrize("sizes", [None, [1, 5]])
def test_models_with_loops_and_branches_train_as_on_one_batch(sizes):
    def model(images):
        x, weights = convolve_and_normalize(images, "below"), tf.get_variable("weights", [3], tf.float64)
        kernels = [tf.get_variable(name, [1, 1, 3, 3], tf.float64) for name in ("taken", "other")]
        x = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, tf.sin(y * weights)), [tf.constant(0), x])[1]
        x = tf.cond(tf.reduce_sum(weights ** 2) > 0, lambda: tf.nn.conv2d(x, kernels[0], [1, 1, 1, 1], "SAME"),
                    lambda: 2 * tf.nn.conv2d(x, kernels[1], [1, 1, 1, 1], "SAME"))
        return tf.reduce_mean(convolve_and_normalize(x, "above") ** 2 * weights)

    assert_equals_one_batch(model, (IMAGES,), 2, sizes)
