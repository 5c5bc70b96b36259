"""The gradients that both packages register: of whatever kind a gradient arrives, and whoever asks for it."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import build, run
from tf_syncbn.whole_batch import moments_over_towers
from towers import current_tower

SHAPES = {"rank 2": [8, 3], "rank 4": [4, 2, 2, 3]}


def synced(x):
    with tf.variable_scope("", reuse=tf.AUTO_REUSE):
        return tf_syncbn.sync_batch_norm(x, center=False, scale=False, training=True, updates_collections=(), name="bn")


def normalized(x):
    """Batch norm by plain ops, whose gradients are TensorFlow's own."""
    axes = list(range(x.shape.rank - 1))
    centred = x - tf.reduce_mean(x, axes, keepdims=True)
    return centred / tf.sqrt(tf.reduce_mean(tf.square(centred), axes, keepdims=True) + 1e-3)


def moments(x):
    return moments_over_towers(x, x.shape.rank - 1, current_tower())[1:]


def moments_by_hand(x):
    axes = list(range(x.shape.rank - 1))
    mean = tf.reduce_mean(x, axes)
    return tf.concat([mean, tf.reduce_mean(tf.square(x - mean), axes)], 0)


def slopes_of(batch_norm):
    return lambda x: tf.gradients(tf.sin(batch_norm(x * x)), x)[0]


# What a tower computes of its part, and what it is to be: a function of all parts that returns each tower's result.
FUNCTIONS = {
    "layer": (synced, lambda parts: tf.split(normalized(tf.concat(parts, 0)), len(parts))),
    "moments": (moments, lambda parts: [moments_by_hand(tf.concat(parts, 0))] * len(parts)),
    "all_reduce": (towers.all_reduce, lambda parts: [sum(parts)] * len(parts)),
    "all_gather": (towers.all_gather, lambda parts: [tf.concat(parts, 0)] * len(parts)),
    "layer's gradient": (slopes_of(synced), lambda parts: tf.split(slopes_of(normalized)(tf.concat(parts, 0)), len(parts))),
}


def gathered(results):
    """A loss that reads some rows of each tower's result, some of them twice."""
    return sum(tf.reduce_sum(tf.sin((i + 1) * tf.gather(result, [1, 0, 1]))) for i, result in enumerate(results))


def slope(y, x):
    return tf.convert_to_tensor(tf.gradients(y, x)[0])


def results_of(function, x, num_towers):
    """Returns what each tower's function computes of its part of `x`; outside of towers for None."""
    return [function(x)] if num_towers is None else [tower.outputs for tower in build(function, (x,), num_towers)]


@pytest.mark.parametrize("dtype", [tf.float64, tf.float32])
@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("num_towers", [None, 1, 2])
@pytest.mark.parametrize("function", sorted(FUNCTIONS))
def test_a_gradient_may_arrive_as_slices(function, num_towers, shape, dtype):
    value = np.random.RandomState(0).randn(*SHAPES[shape])
    ours, by_hand = FUNCTIONS[function]
    x, exact = tf.constant(value, dtype), tf.constant(value)
    parts = tf.split(exact, num_towers or 1)
    got = slope(gathered(results_of(ours, x, num_towers)), x)
    expected = slope(gathered(by_hand(parts)), exact)
    got, expected = run([got, expected])
    np.testing.assert_allclose(got, expected, atol=(1e-9 if dtype == tf.float64 else 1e-4) * np.abs(expected).max())


@pytest.mark.parametrize("num_towers", [1, 2])
@pytest.mark.parametrize("layer", ["fused", "moments"])
def test_rows_of_a_converted_layer_may_be_gathered(layer, num_towers):
    value = np.random.RandomState(0).randn(4, 2, 2, 3)

    def model_fn(x):
        if layer == "fused":
            return tf.nn.fused_batch_norm(x, tf.ones([3]), tf.zeros([3]), epsilon=1e-3)[0]
        mean, variance = tf.nn.moments(x, [0, 1, 2])
        return (x - mean) / tf.sqrt(variance + 1e-3)

    x, exact = tf.constant(value, tf.float32), tf.constant(value)
    got = slope(gathered(results_of(tf_syncbn.convert_model(model_fn), x, num_towers)), x)
    expected = slope(gathered(FUNCTIONS["layer"][1](tf.split(exact, num_towers))), exact)
    got, expected = run([got, expected])
    np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max())
