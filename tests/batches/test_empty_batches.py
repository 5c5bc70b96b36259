"""Towers that turn out to have no examples count nothing, whatever TensorFlow's kernels make of an empty batch."""
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import build, cpus, run, session, set_variables
from tests.sweeps import covering
from towers.graph.private import runs_onednn
from towers.testing import assert_equals_one_batch

X = np.random.RandomState(0).randn(3, 6, 6, 2).astype(np.float32)
SGD = tf.train.GradientDescentOptimizer


def weights(*shape):
    name = "w%d" % len(tf.trainable_variables())
    return tf.get_variable(name, shape, initializer=tf.glorot_uniform_initializer(seed=len(shape)))


def conv(x):
    return tf.nn.conv2d(x, weights(3, 3, 2, 4), [1, 2, 2, 1], "SAME")


def biased(x):
    return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, weights(3, 3, 2, 4), [1, 1, 1, 1], "VALID"), weights(4)))


LAYERS = {
    "conv2d": conv, "conv2d, bias, relu": biased,
    "conv1d": lambda x: tf.nn.conv1d(tf.reshape(x, [-1, 36, 2]), weights(3, 2, 4), 1, "SAME"),
    "dilated": lambda x: tf.nn.conv2d(x, weights(3, 3, 2, 4), [1, 1, 1, 1], "SAME", dilations=[1, 2, 2, 1]),
    "depthwise": lambda x: tf.nn.depthwise_conv2d(x, weights(3, 3, 2, 2), [1, 1, 1, 1], "SAME"),
    "separable": lambda x: tf.nn.separable_conv2d(x, weights(3, 3, 2, 2), weights(1, 1, 4, 3), [1, 1, 1, 1], "SAME"),
    "transposed": lambda x: tf.nn.conv2d_transpose(x, weights(3, 3, 4, 2), tf.stack([tf.shape(x)[0], 12, 12, 4]), [1, 2, 2, 1]),
    "conv3d": lambda x: tf.nn.conv3d(x[..., None], weights(3, 3, 1, 1, 4), [1, 1, 1, 1, 1], "SAME"),
    "max_pool": lambda x: tf.nn.max_pool(conv(x), [1, 2, 2, 1], [1, 2, 2, 1], "SAME"),
    "avg_pool": lambda x: tf.nn.avg_pool(conv(x), [1, 2, 2, 1], [1, 2, 2, 1], "SAME"),
    "max_pool3d": lambda x: tf.nn.max_pool3d(conv(x)[..., None], [1, 2, 2, 1, 1], [1, 2, 2, 1, 1], "SAME"),
    "synced": lambda x: tf.nn.relu(tf_syncbn.sync_batch_norm(conv(x), name="bn")),
    "dense": lambda x: tf.matmul(tf.reshape(conv(x), [-1, 36]), weights(36, 3)),
}


def model_of(layer):
    def model(x):
        y = layer(x)
        return tf.reduce_mean(tf.reduce_sum(tf.square(tf.sin(tf.reshape(y, [tf.shape(y)[0], -1]))), 1))
    return model


def gradients_of(model, num_towers, batch, initial=None):
    """Returns the loss and the averaged gradients by name, and the variables that they were taken at."""
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None, 6, 6, 2])
        with warnings.catch_warnings():
            warnings.simplefilter("error", towers.TowersWarning)  # what is put in is no examples taken together
            replicas = build(model, (x,), num_towers)
        grads = towers.average_gradients(replicas, towers.compute_gradients(replicas, SGD(1.0)))
        with session() as made:
            set_variables(made, initial or {})
            values = made.run({v.op.name: v for v in tf.global_variables()})
            loss, gradients = made.run([replicas.loss, {v.op.name: g for g, v in grads}], {x: batch})
    return loss, gradients, values


@pytest.mark.parametrize("name,split", covering(sorted(LAYERS), [(4, 1), (4, 2), (3, 3)]))
def test_towers_without_examples_train_as_one_batch(name, split):
    num_towers, size = split
    if name == "dilated" and not runs_onednn():
        pytest.skip("TensorFlow's own kernels on CPU have no gradient of it")
    model = model_of(LAYERS[name])
    loss, expected, initial = gradients_of(model, 1, X[:size])
    got_loss, got, _ = gradients_of(model, num_towers, X[:size], initial)
    assert got_loss == pytest.approx(loss, rel=1e-5)
    largest = max(np.abs(gradient).max() for gradient in expected.values())
    for variable, gradient in expected.items():
        np.testing.assert_allclose(got[variable], gradient, atol=2e-5 * largest, err_msg=variable)


def test_outputs_and_collections_of_an_empty_tower_are_empty():
    def model(x):
        y = conv(x)
        tf.add_to_collection("seen", y)
        return {"loss": tf.reduce_mean(y ** 2), "y": y}

    x = tf.placeholder(tf.float32, [None, 6, 6, 2])
    replicas = build(model, (x,), 3)
    outputs, seen, merged = run([[tower.outputs["y"] for tower in replicas], tf.get_collection("seen"), replicas.merged()["y"]],
                                {x: X[:2]})
    assert [y.shape for y in outputs] == [y.shape for y in seen] == [(1, 3, 3, 4), (1, 3, 3, 4), (0, 3, 3, 4)]
    assert merged.shape == (2, 3, 3, 4)


def test_a_kernel_that_makes_something_of_a_batch_known_to_be_empty_is_refused():
    batch = towers.PerTower([X, X[:0]])
    with pytest.raises(ValueError, match="batch of tower 1 is known to be empty, .* a DepthwiseConv2dNative, makes something"):
        build(model_of(LAYERS["depthwise"]), batch)
    batch = towers.PerTower([tf.placeholder_with_default(x, [None, 6, 6, 2]) for x in batch.batches])
    with tf.variable_scope("unknown"):
        assert np.isfinite(run(build(model_of(LAYERS["depthwise"]), batch).loss))


@pytest.mark.parametrize("sizes", [[3, 0, 7], [0, 3, 7]])
def test_a_tower_that_is_known_to_be_empty_is_like_the_others_where_the_model_does_not_know_sizes(sizes):
    def model_fn(x):
        kernel = tf.get_variable("kernel", [3, 3, 3, 4], tf.float64, tf.random_normal_initializer(seed=1))
        return tf.reduce_mean(tf.nn.conv2d(tf.placeholder_with_default(x, [None, 4, 4, 3]), kernel, [1, 1, 1, 1], "SAME") ** 2)

    assert_equals_one_batch(model_fn, (np.random.RandomState(0).randn(10, 4, 4, 3),), 3, sizes=sizes)


def test_batches_of_known_size_and_one_tower_pay_nothing():
    def ops(num_towers, size):
        with tf.Graph().as_default():
            builder = towers.TowerBuilder(cpus(num_towers))
            replicas = builder.build(model_of(conv), (tf.placeholder(tf.float32, [size, 6, 6, 2]),))
            return [op.type for op in replicas[0].ops]

    assert "PadV2" not in ops(2, 4) + ops(1, None)
    assert ("PadV2" in ops(2, None)) == runs_onednn()
