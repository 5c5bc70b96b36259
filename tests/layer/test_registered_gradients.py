"""The gradients that both packages register: of whatever kind a gradient arrives, and whoever asks for it."""
import itertools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import build, run
from tests.sweeps import covering
from towers import current_tower
from tf_syncbn.whole_batch import moments_over_towers

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


def all_of(functions):
    """Each function in all settings, most of them marked `sweep`: not on two towers in float64, nor moments in the others."""
    def is_run(function, num_towers, shape, dtype):
        if function == "moments" and num_towers != 2:
            return (shape, dtype) == (("rank 2", tf.float32) if num_towers is None else ("rank 4", tf.float64))
        return num_towers == 2 and dtype == tf.float64 and shape == "rank %d" % (4 if "layer" in function else 2)

    return pytest.mark.parametrize("function,num_towers,shape,dtype", [
        pytest.param(*chosen, marks=() if is_run(*chosen) else pytest.mark.sweep)
        for chosen in itertools.product(functions, [None, 1, 2], sorted(SHAPES), [tf.float64, tf.float32])])


@all_of(sorted(FUNCTIONS))
def test_a_gradient_may_arrive_as_slices(function, num_towers, shape, dtype):
    value = np.random.RandomState(0).randn(*SHAPES[shape])
    ours, by_hand = FUNCTIONS[function]
    x, exact = tf.constant(value, dtype), tf.constant(value)
    parts = tf.split(exact, num_towers or 1)
    got = slope(gathered(results_of(ours, x, num_towers)), x)
    expected = slope(gathered(by_hand(parts)), exact)
    got, expected = run([got, expected])
    np.testing.assert_allclose(got, expected, atol=(1e-9 if dtype == tf.float64 else 1e-4) * np.abs(expected).max())


@pytest.mark.parametrize("num_towers,layer", covering([2, 1], ["fused", "moments"]))
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


def smooth(results):
    """A loss that reads each tower's whole result, and every tower's in another way."""
    return sum(tf.reduce_sum(tf.sin((i + 1) * result)) for i, result in enumerate(results))


def taped(function, x, num_derivatives, weights):
    """Returns a loss and its derivatives along `weights`, each of the one before, by a tape within the next one's."""
    if not num_derivatives:
        return [function(x)]
    with tf.GradientTape() as tape:
        tape.watch(x)
        values = taped(function, x, num_derivatives - 1, weights)
        along = values[-1] if num_derivatives == 1 else tf.reduce_sum(values[-1] * tf.cast(weights, x.dtype))
    return values + [tf.convert_to_tensor(tape.gradient(along, x))]


def differentiated(function, x, num_derivatives, weights):
    """Returns what `taped` does, by `tf.gradients`."""
    values = [function(x)]
    for index in range(num_derivatives):
        along = tf.reduce_sum(values[-1] * tf.cast(weights, x.dtype)) if index else values[-1]
        values.append(slope(along, x))
    return values


def check_close(got, expected, bound):
    for values, exact in zip(got, expected):
        np.testing.assert_allclose(values, exact, atol=bound * np.abs(exact).max())


@all_of(["all_gather", "all_reduce", "layer", "moments"])
def test_a_tape_around_it_finds_the_derivatives_that_tf_gradients_does(function, num_towers, shape, dtype):
    bound, num_derivatives = (1e-9, 3) if dtype == tf.float64 else (1e-3, 2)
    rng = np.random.RandomState(0)
    value, weights = rng.randn(*SHAPES[shape]), rng.randn(*SHAPES[shape])
    ours, by_hand = FUNCTIONS[function]
    x, exact = tf.constant(value, dtype), tf.constant(value)

    def loss(x):
        return smooth(results_of(lambda part: ours(part * part), x, num_towers))

    got = [taped(loss, x, num_derivatives, weights)]
    with tf.variable_scope("again", reuse=tf.AUTO_REUSE):
        got.append(differentiated(loss, x, num_derivatives, weights))
    expected = differentiated(lambda x: smooth(by_hand(tf.split(x * x, num_towers or 1))), exact, num_derivatives, weights)
    got, expected = run([got, expected])
    for values in got:
        check_close(values, expected, bound)


@pytest.mark.parametrize("function", ["all_gather", "all_reduce", "layer", "moments"])
def test_a_persistent_tape_differentiates_the_towers_in_any_order_as_often_as_wanted(function):
    ours, by_hand = FUNCTIONS[function]
    x = tf.constant(np.random.RandomState(0).randn(8, 3))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        losses = [smooth([result]) for result in results_of(lambda part: ours(part * part), x, 2)]
        total = losses[0] + 3 * losses[1]
    first = [tape.gradient(loss, x) for loss in losses]
    second = [tape.gradient(loss, x, output_gradients=tf.constant(factor, tf.float64))
              for loss, factor in ((losses[1], 3), (losses[0], 1))]
    third = slope(losses[0] + 3 * losses[1], x)
    results = by_hand(tf.split(x * x, 2))
    expected = [slope(smooth([results[0]]) + factor * smooth([results[1]]), x) for factor in (1, 3, 3, 3)]
    got, expected = run([[sum(first), sum(second), tape.gradient(total, x), third], expected])
    check_close(got, expected, 1e-9)


@pytest.mark.parametrize("num_towers,shape", covering([1, 2], sorted(SHAPES)))
def test_a_penalty_by_a_tape_within_the_model_function_is_that_of_one_batch(shape, num_towers):
    def penalty(batch_norm, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.sin(batch_norm(x * x))
        return tf.reduce_sum(tf.square(tape.gradient(y, x)))

    x = tf.constant(np.random.RandomState(0).randn(*SHAPES[shape]))
    got = [smooth(results_of(lambda part: penalty(synced, part)[None], x, num_towers))]
    whole = slope(tf.sin(normalized(x * x)), x)
    expected = [smooth([tf.reduce_sum(tf.square(part))[None] for part in tf.split(whole, num_towers)])]
    got, expected = run([got + [slope(got[0], x)], expected + [slope(expected[0], x)]])
    check_close(got, expected, 1e-9)


def test_a_tape_finds_the_gradients_of_a_layers_own_variables():
    value = np.random.RandomState(0).randn(4, 2, 2, 3)

    def model_fn(x):
        return tf.reduce_mean(tf.sin(tf_syncbn.sync_batch_norm(x, name="bn")))

    with tf.variable_scope("", use_resource=True), tf.GradientTape() as tape:
        loss = build(model_fn, (tf.constant(value, tf.float32),), 2).loss
    variables = tf.trainable_variables()
    got, expected = run([tape.gradient(loss, variables), tf.gradients(loss, variables)])
    assert len(got) == 2
    check_close(got, expected, 1e-6)


def test_a_tape_adds_no_nodes_to_the_forward_pass():
    def nodes(tape):
        with tf.Graph().as_default() as graph, tape:
            x = tf.zeros([8, 2, 2, 3])
            getattr(tape, "watch", len)([x])
            build(synced, (x,), 2)
            return len(graph.get_operations())

    assert nodes(tf.GradientTape()) == nodes(tf.name_scope("none"))
