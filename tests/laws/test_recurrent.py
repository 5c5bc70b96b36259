"""Recurrent models: loops over time in a model function, of TensorFlow's and written by hand, held to the law in float64.

The cells are written by hand, since the newest TensorFlow has none without Keras 2.
"""
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import build, has_tf_layers, train_by
from towers.testing import assert_equals_one_batch

TIME, UNITS = 3, 3


def batch():
    """Sequences [7, TIME, 3] and their lengths, whose largest is another one in each of two or three towers."""
    rng = np.random.RandomState(0)
    return rng.randn(7, TIME, 3), np.array([1, 2, 3, 1, 2, 2, 2], np.int32)


def matrix(name, x, units):
    return tf.get_variable(name, [x.shape[-1], units], x.dtype, tf.glorot_uniform_initializer(seed=len(name)))


class Gru:
    """A gated recurrent unit."""
    state_size = output_size = UNITS

    def zero_state(self, batch_size, dtype):
        return tf.zeros([batch_size, UNITS], dtype)

    def __call__(self, inputs, state, scope=None):
        with tf.variable_scope(scope or "gru"):
            joined = tf.concat([inputs, state], 1)
            gates = tf.sigmoid(tf.matmul(joined, matrix("gates", joined, 2 * UNITS)))
            reset, keep = tf.split(gates, 2, 1)
            joined = tf.concat([inputs, reset * state], 1)
            state = keep * state + (1 - keep) * tf.tanh(tf.matmul(joined, matrix("candidate", joined, UNITS)))
        return state, state


class Lstm:
    """A cell whose state is a pair."""
    state_size, output_size = (UNITS, UNITS), UNITS

    def zero_state(self, batch_size, dtype):
        return tf.zeros([batch_size, UNITS], dtype), tf.zeros([batch_size, UNITS], dtype)

    def __call__(self, inputs, state, scope=None):
        with tf.variable_scope(scope or "lstm"):
            c, h = state
            joined = tf.concat([inputs, h], 1)
            bias = tf.get_variable("bias", [4 * UNITS], inputs.dtype, tf.zeros_initializer())
            i, j, f, o = tf.split(tf.matmul(joined, matrix("kernel", joined, 4 * UNITS)) + bias, 4, 1)
            c = c * tf.sigmoid(f + 1) + tf.sigmoid(i) * tf.tanh(j)
            h = tf.tanh(c) * tf.sigmoid(o)
        return h, (c, h)


def dynamic(cell, **kwargs):
    def network(x, lengths):
        return tf.nn.dynamic_rnn(cell(), x, lengths, dtype=x.dtype, **kwargs)[0]
    return network


def time_major(x, lengths):
    y = tf.nn.dynamic_rnn(Gru(), tf.transpose(x, [1, 0, 2]), lengths, dtype=x.dtype, time_major=True)[0]
    return tf.transpose(y, [1, 0, 2])


def both_ways(x, lengths):
    return tf.concat(tf.nn.bidirectional_dynamic_rnn(Gru(), Lstm(), x, lengths, dtype=x.dtype)[0], 2)


def static(x, lengths):
    return tf.stack(tf.nn.static_rnn(Lstm(), tf.unstack(x, axis=1), dtype=x.dtype, sequence_length=lengths)[0], 1)


def unrolled(x, lengths):
    cell, outputs = Gru(), []
    state = cell.zero_state(tf.shape(x)[0], x.dtype)
    for step in range(TIME):
        with tf.variable_scope("rnn", reuse=step > 0):
            output, state = cell(x[:, step], state)
        outputs.append(output)
    return tf.stack(outputs, 1)


def by_while_loop(x, lengths):
    """As many turns as the longest sequence of this tower has steps; what a sequence does not have is 0."""
    cell, turns = Gru(), tf.reduce_max(lengths)
    outputs = tf.TensorArray(x.dtype, TIME, element_shape=[x.shape[0], UNITS])

    def body(step, state, outputs):
        output, state = cell(x[:, step], state)
        return step + 1, state, outputs.write(step, output)

    zeros = cell.zero_state(x.shape[0], x.dtype)
    _, _, outputs = tf.while_loop(lambda step, *_: step < turns, body, (0, zeros, outputs), parallel_iterations=1)
    _, outputs = tf.while_loop(lambda step, _: step < TIME, lambda step, a: (step + 1, a.write(step, zeros)), (turns, outputs))
    return tf.transpose(outputs.stack(), [1, 0, 2]) * tf.cast(tf.sequence_mask(lengths, TIME), x.dtype)[:, :, None]


def by_scan(x, lengths):
    cell = Gru()
    states = tf.scan(lambda state, step: cell(step, state)[1], tf.transpose(x, [1, 0, 2]), cell.zero_state(x.shape[0], x.dtype))
    return tf.transpose(states, [1, 0, 2])


def by_raw_rnn(x, lengths):
    cell, steps = Gru(), tf.TensorArray(x.dtype, TIME).unstack(tf.transpose(x, [1, 0, 2]))

    def step(time, output, state, _):
        state = cell.zero_state(x.shape[0], x.dtype) if output is None else state
        inputs = tf.cond(tf.reduce_all(time >= TIME), lambda: tf.zeros([x.shape[0], 3], x.dtype), lambda: steps.read(time))
        inputs.set_shape([x.shape[0], 3])
        return time >= lengths, inputs, state, output, None

    outputs = tf.nn.raw_rnn(cell, step)[0].stack()
    outputs = tf.pad(outputs, [[0, TIME - tf.shape(outputs)[0]], [0, 0], [0, 0]])
    return tf.reshape(tf.transpose(outputs, [1, 0, 2]), [x.shape[0], TIME, UNITS])


NETWORKS = {
    "gru": dynamic(Gru, swap_memory=True, parallel_iterations=1), "lstm": dynamic(Lstm), "time major": time_major,
    "both ways": both_ways, "static": static, "unrolled": unrolled, "while loop": by_while_loop, "scan": by_scan,
    "raw": by_raw_rnn}


def model_of(network, before=None, after=None, of_steps=True):
    """A model whose loss is the mean over the steps that sequences have, or over the sequences."""
    def model_fn(x, lengths):
        x = x if before is None else before(x, "before")
        y = network(x, lengths)
        y = y if after is None else after(y, "after")
        mask = tf.cast(tf.sequence_mask(lengths, TIME), y.dtype)
        losses = tf.reduce_mean(tf.square(tf.sin(2 * y) - 0.3), 2) * mask
        if of_steps:
            return {"loss": tf.reduce_sum(losses) / tf.reduce_sum(mask), "weight": tf.reduce_sum(mask)}
        return tf.reduce_mean(tf.reduce_sum(losses, 1) / tf.reduce_sum(mask, 1))
    return model_fn


def synced(x, name):
    return tf_syncbn.sync_batch_norm(x, name=name)


def by_hand(x, name):
    """A batch norm for convert_model to find."""
    with tf.name_scope(name):
        mean, variance = tf.nn.moments(x, [0, 1], keep_dims=True)
        return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)


def assert_law(model_fn, sizes=(2, 5)):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorFlow's own, of deprecated functions
        assert_equals_one_batch(model_fn, batch(), len(sizes), sizes, steps=2)


def networks(*run):
    """Each network for `pytest.mark.parametrize`, all but those of `run` marked `sweep`."""
    return pytest.mark.parametrize("name", [
        pytest.param(name, marks=() if name in run else pytest.mark.sweep) for name in sorted(NETWORKS)])


@pytest.mark.laws
@networks("both ways", "static")
def test_a_recurrent_model_trains_as_one_tower_does(name):
    assert_law(model_of(NETWORKS[name]))


@pytest.mark.laws
@networks("gru", "raw")
def test_batch_norms_before_and_after_a_loop_sync(name):
    assert_law(model_of(NETWORKS[name], synced, synced, of_steps=name != "raw"))


@pytest.mark.laws
def test_batch_norms_before_and_after_a_loop_sync_over_three_towers():
    assert_law(model_of(NETWORKS["lstm"], synced, synced), (1, 4, 2))


@networks("while loop", "scan")
def test_batch_norms_before_and_after_a_loop_are_converted(name):
    converted = tf_syncbn.convert_model(model_of(NETWORKS[name], by_hand, by_hand))
    assert_law(converted)
    assert [layer.scope for layer in converted.converted] == ["before", "after"]


@pytest.mark.sweep
def test_batch_norms_before_and_after_a_loop_that_are_not_converted_break_the_law():
    with pytest.raises(AssertionError, match="do not train as one"):
        assert_law(model_of(NETWORKS["scan"], by_hand, by_hand))


@pytest.mark.laws
def test_a_batch_norm_between_two_loops_syncs():
    def network(x, lengths):
        y = tf.nn.dynamic_rnn(Gru(), x, lengths, dtype=x.dtype, scope="one")[0]
        return tf.nn.dynamic_rnn(Gru(), synced(y, "between"), lengths, dtype=x.dtype, scope="two")[0]

    assert_law(model_of(network))


@pytest.mark.laws
@pytest.mark.parametrize("name", ["lstm", pytest.param("while loop", marks=pytest.mark.sweep)])
def test_a_recurrent_model_of_a_batch_of_unknown_size_trains_as_one_tower(name):
    """The whole batch, of a size that only the run knows, is split by the builder."""
    x, lengths = batch()

    def unknown_network(x, lengths):
        if name == "lstm":
            return tf.reshape(dynamic(Lstm)(x, lengths), [-1, TIME, UNITS])
        cell = Gru()
        state = tf.while_loop(lambda step, _: step < TIME, lambda step, s: (step + 1, cell(x[:, step], s)[1]),
                              (0, cell.zero_state(tf.shape(x)[0], x.dtype)),
                              shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, UNITS])))[1]
        return tf.tile(state[:, None], [1, TIME, 1])

    trained, initial = [], None
    for num_towers in (1, 2):
        with tf.Graph().as_default():
            tf.set_random_seed(0)
            given = tf.placeholder_with_default(x, [None, TIME, 3]), tf.placeholder_with_default(lengths, [None])
            replicas = build(model_of(unknown_network, synced, None), given, num_towers)
            train_op = towers.minimize(replicas, tf.train.MomentumOptimizer(0.05, 0.9))
            losses, before, after = train_by(train_op, replicas.loss, 3, initial)
            initial = before
            trained.append(dict(after, losses=losses))
    assert set(trained[0]) == set(trained[1])
    for key in trained[0]:
        np.testing.assert_allclose(trained[1][key], trained[0][key], rtol=1e-9, atol=1e-11, err_msg=key)


@pytest.mark.skipif(not has_tf_layers(), reason="this TensorFlow has no recurrent cells")
@pytest.mark.sweep
@pytest.mark.parametrize("cell", ["GRUCell", "LSTMCell"])
def test_tensorflows_own_cells_train_as_one_tower_does(cell):
    assert_law(model_of(dynamic(lambda: getattr(tf.nn.rnn_cell, cell)(UNITS)), None, synced))


@pytest.mark.laws
@pytest.mark.skipif(not has_tf_layers(), reason="tf.keras is Keras 3 here")
@pytest.mark.parametrize("layer", ["GRU", pytest.param("LSTM", marks=pytest.mark.sweep)])
def test_keras_recurrent_layers_train_as_one_tower_does(layer):
    def network(x, lengths):
        return getattr(tf.keras.layers, layer)(
            UNITS, return_sequences=True, dtype="float64", kernel_initializer=tf.glorot_uniform_initializer(seed=1),
            recurrent_initializer=tf.glorot_uniform_initializer(seed=2))(x, mask=tf.sequence_mask(lengths, TIME))

    assert_law(model_of(network, None, synced))


class Normalized(Gru):
    """A cell that normalizes over its batch."""

    def __init__(self, normalize):
        self._normalize = normalize

    def __call__(self, inputs, state, scope=None):
        state = tf.tanh(self._normalize(inputs + state))
        return state, state


def dynamically(normalize):
    return lambda x, lengths: tf.nn.dynamic_rnn(Normalized(normalize), x, lengths, dtype=x.dtype)[0]


def scanned(normalize):
    def network(x, lengths):
        steps = tf.scan(lambda s, step: tf.tanh(normalize(step + s)), tf.transpose(x, [1, 0, 2]), tf.zeros_like(x[:, 0]))
        return tf.transpose(steps, [1, 0, 2])
    return network


@pytest.mark.parametrize("loop", [dynamically, scanned])
def test_a_synced_layer_inside_a_loop_is_refused_by_name(loop):
    network = loop(lambda x: tf_syncbn.sync_batch_norm(x, name="of_a_step"))
    with pytest.raises(ValueError, match="sync_batch_norm '.*of_a_step.*' stands inside a tf.cond, a tf.while_loop"):
        build(model_of(network), batch())


def moments_of_a_step(x):
    with tf.name_scope("of_a_step"):
        mean, variance = tf.nn.moments(x, [0], keep_dims=True)
        return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)


@pytest.mark.parametrize("loop", [dynamically, scanned])
def test_a_batch_norm_inside_a_loop_trains_as_one_tower_does_or_is_refused(loop):
    """In a loop towers can't meet; one that has the whole batch in every tower is exact, where its sizes allow that."""
    def network(x, lengths):
        return loop(moments_of_a_step)(x * tf.get_variable("scale", [3], x.dtype, tf.constant_initializer(1.3)), lengths)

    try:
        assert_law(tf_syncbn.convert_model(model_of(network)))
    except ValueError as error:
        assert "convert_model: " in str(error) and "while" in str(error), error


@pytest.mark.laws
def test_a_batch_norm_of_each_steps_inputs_before_the_loop_syncs():
    def of_each_step(x, name):
        flat = tf.reshape(x, [-1, TIME * 3])
        return tf.reshape(tf_syncbn.sync_batch_norm(flat, name=name), [-1, TIME, 3])

    assert_law(model_of(NETWORKS["lstm"], of_each_step))


@pytest.mark.laws
def test_the_mend_for_a_loop_that_normalizes_each_step_is_to_unroll_it():
    """What is refused in a loop syncs in one written out, moments of every step among them."""
    def network(x, lengths):
        cell, state, outputs = Normalized(lambda y: tf_syncbn.sync_batch_norm(y, name="of_a_step")), tf.zeros_like(x[:, 0]), []
        for step in range(TIME):
            with tf.variable_scope("step%d" % step):
                output, state = cell(x[:, step], state)
            outputs.append(output)
        return tf.stack(outputs, 1)

    assert_law(model_of(network))


@pytest.mark.laws
def test_clipped_gradients_of_a_recurrent_model_are_those_of_one_tower():
    trained, initial = [], None
    for num_towers in (1, 2):
        with tf.Graph().as_default():
            tf.set_random_seed(0)
            replicas = build(model_of(dynamic(Lstm), synced), batch(), num_towers)
            train_op = towers.minimize(replicas, tf.train.AdamOptimizer(0.05), transforms=[towers.clip_by_global_norm(1e-2)])
            losses, initial, after = train_by(train_op, replicas.loss, 3, initial)
            trained.append(dict(after, losses=losses))
    for key in trained[0]:
        np.testing.assert_allclose(trained[1][key], trained[0][key], rtol=1e-8, atol=1e-10, err_msg=key)
