"""Steps in front of the examples, nobody knows how many: what flattens them and takes them apart again stays each tower's own."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import SAID
from tests.sweeps import covering
from towers.testing import assert_equals_one_batch

STEPS, WIDTH = 6, 4
RNG = np.random.RandomState(0)
BATCH = (RNG.randn(12, STEPS, WIDTH), RNG.randint(1, STEPS + 1, 12).astype(np.int32))


def weights(*shape):
    with tf.variable_scope("", reuse=tf.AUTO_REUSE):
        return tf.get_variable("w_%d_%d" % (len(shape), shape[-1]), shape, tf.float64,
                               tf.constant_initializer(np.cos(np.arange(np.prod(shape)))))


def projected(h, width=3):
    """As `tf.layers.dense` has it: the steps and examples are flattened for a product."""
    return tf.tensordot(h, weights(int(h.shape[-1]), width), 1)


def flat(h):
    return tf.reshape(h, [-1, int(h.shape[-1])])


def labels(h):
    return tf.cast(h[:, :, 0] > 0, tf.int32)


def cross_entropy(h, _):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(logits=projected(h), labels=labels(h))


def recurrent(h, lengths):
    cell = tf.nn.rnn_cell.GRUCell(3, dtype=h.dtype)
    return projected(tf.nn.dynamic_rnn(cell, h, sequence_length=lengths, dtype=h.dtype, time_major=True)[0], 2)


def slopes(h, _):
    return tf.gradients(tf.tanh(projected(tf.tanh(projected(h)), 2)), h)[0]


def turns(of, first):
    return tf.while_loop(lambda k, _: k < 3, lambda k, y: (k + 1, tf.tanh(of(y))), (0, first))[1]


def in_a_branch(h, _):
    rows = flat(h) * weights(WIDTH)
    numbers = tf.range(tf.shape(rows)[0])[:, None]
    return tf.cond(tf.reduce_sum(weights(WIDTH)) > -9, lambda: tf.sin(rows + tf.cast(numbers, rows.dtype)), lambda: rows)


OWN = {
    "a projection": lambda h, _: projected(h),
    "two projections": lambda h, _: projected(tf.tanh(projected(h)), 2),
    "cross-entropy": cross_entropy,
    "a recurrent network": recurrent,
    "a gradient that the model takes": slopes,
    "heads": lambda h, _: tf.reshape(projected(h, 4), [tf.shape(h)[0], tf.shape(h)[1], 2, 2]),
    "heads beside examples": lambda h, _: tf.reshape(projected(h, 4), [tf.shape(h)[0], tf.shape(h)[1] * 2, 2]),
    "flattened twice": lambda h, _: tf.reshape(flat(h), [-1, WIDTH]) * weights(WIDTH),
    "a projection in a loop": lambda h, _: turns(lambda y: projected(y, WIDTH), h),
    "flattened before a loop": lambda h, _: turns(lambda y: y * weights(WIDTH) + flat(h), flat(h)),
    "columns by number": lambda h, _: tf.gather(flat(h) * weights(WIDTH), [2, 0], axis=1),
    "embeddings": lambda h, _: tf.gather(weights(2, 3), tf.reshape(labels(h), [-1])) * flat(h)[:, :3],
    "taken apart in a loop": lambda h, _: turns(lambda y: flat(tf.reshape(y, tf.shape(h)) * weights(WIDTH)), flat(h)),
    "taken apart": lambda h, _: tf.reshape(flat(h) * weights(WIDTH), [-1, tf.shape(h)[1], WIDTH])[1:]}

TOGETHER = {
    "a softmax of all": lambda h, _: tf.nn.softmax(flat(projected(h)), 0) * flat(h)[:, :3],
    "over the largest": lambda h, _: flat(projected(h)) / tf.reduce_max(tf.abs(flat(projected(h))), 0),
    "own moments": lambda h, _: (flat(h) - tf.reduce_mean(flat(projected(h, 4)), 0)) / tf.math.reduce_std(flat(h), 0),
    "steps of other examples": lambda h, _: flat(projected(h)) * tf.nn.softmax(flat(tf.reverse(h, [1])), 0)[:, :1],
    "by their places": lambda h, _: flat(projected(h)) * tf.cast(tf.range(tf.shape(flat(h))[0])[:, None], h.dtype),
    "by their places, in a branch": in_a_branch,
    "by numbers that are no steps": lambda h, _: tf.gather(
        flat(h) * weights(WIDTH), tf.range(tf.shape(h)[1]) * (tf.shape(h)[0] // 2)),
    "parts of each in front": lambda h, _: tf.nn.softmax(tf.reshape(tf.gather(
        tf.stack([h * weights(WIDTH), tf.sin(h), tf.cos(h), h * 2], 2), tf.range(tf.shape(h)[0] // 2), axis=2),
        [-1, tf.shape(h)[1], WIDTH]), 0),
    "softmax in a branch": lambda h, _: tf.cond(tf.reduce_sum(weights(WIDTH)) > -9, lambda: tf.nn.softmax(
        flat(h), 0) * flat(h), lambda: flat(h)) * weights(WIDTH),
    "chosen ones": lambda h, lengths: tf.boolean_mask(
        cross_entropy(h, lengths), tf.transpose(tf.sequence_mask(lengths, tf.shape(h)[0])))}


def one_step_of_each(h, number):
    return tf.boolean_mask(h, tf.one_hot(tf.argmax(h[:, :, number], 0), tf.shape(h)[0], axis=0) > 0)


TOGETHER["one step of each example, by two masks"] = lambda h, _: one_step_of_each(
    h * weights(WIDTH), 0) * one_step_of_each(h, 1)


def model_of(form, is_known):
    def model_fn(x, lengths):
        x = tf.placeholder_with_default(x, [x.shape[0] if is_known else None, None, WIDTH])
        return tf.reduce_mean(tf.square(form(tf.transpose(x, [1, 0, 2]), lengths) - 0.1))
    return model_fn


@pytest.mark.parametrize("name,is_known", covering(sorted(OWN), [True, False], one_in=2))
def test_what_is_of_each_example_passes_in_silence_and_is_not_gathered(name, is_known, recwarn):
    whole = towers.whole_batch(model_of(OWN[name], is_known))
    for model_fn in (model_of(OWN[name], is_known), whole):
        assert_equals_one_batch(model_fn, BATCH, 2, sizes=[7, 5], steps=2)
    assert not [warning for warning in recwarn if SAID in str(warning.message)]
    gathered = [meeting.scope for meeting in whole.meetings if meeting.conversion == "gather"]
    assert not gathered or gathered == ["rnn/CheckSeqLen"]  # lengths, by which all towers take as many steps


@pytest.mark.parametrize("name,is_known", covering(sorted(TOGETHER), [True, False], one_in=2))
def test_what_takes_examples_together_is_the_whole_batchs_and_is_said_of_plain_towers(name, is_known):
    assert_equals_one_batch(towers.whole_batch(model_of(TOGETHER[name], is_known)), BATCH, 3, sizes=[5, 1, 6], steps=2)
    with pytest.warns(towers.TowersWarning):
        assert_differs(model_of(TOGETHER[name], is_known))


@pytest.mark.parametrize("is_known", [True, False])
def test_steps_that_a_mask_chooses_pass_in_silence_over_the_number_of_examples(is_known, recwarn):
    def form(h, lengths):
        mask = tf.transpose(tf.sequence_mask(lengths, tf.shape(h)[0]))
        of_steps = tf.boolean_mask(cross_entropy(h, lengths), mask) * tf.boolean_mask(h, mask)[:, 0]
        return tf.sqrt(1 + tf.square(tf.reduce_sum(weights(WIDTH)))) * tf.reduce_sum(of_steps) / tf.cast(tf.shape(h)[1], h.dtype)

    def model_fn(x, lengths):
        x = tf.placeholder_with_default(x, [x.shape[0] if is_known else None, None, WIDTH])
        return form(tf.transpose(x, [1, 0, 2]), lengths)
    assert_equals_one_batch(model_fn, BATCH, 2, sizes=[7, 5], steps=2)
    assert not [warning for warning in recwarn if SAID in str(warning.message)]


def test_known_steps_of_unknown_examples_are_taken_apart_by_what_is_left(recwarn):
    def model_fn(x, _):
        h = tf.transpose(tf.placeholder_with_default(x, [None, STEPS, WIDTH]), [1, 0, 2])
        apart = tf.reshape(flat(h) * weights(WIDTH), [-1, tf.shape(h)[1], WIDTH])
        return tf.reduce_mean(tf.square(apart[1:] - 0.1)) + tf.reduce_mean(tf.square(tf.reduce_max(apart, 0)))

    whole = towers.whole_batch(model_fn)
    for each in (model_fn, whole):
        assert_equals_one_batch(each, BATCH, 2, sizes=[7, 5], steps=2)
    assert not [warning for warning in recwarn if SAID in str(warning.message)]
    assert not [meeting for meeting in whole.meetings if meeting.conversion == "gather"]


@pytest.mark.parametrize("of_shape", [
    lambda shape: [shape[1], shape[0], WIDTH], lambda shape: [shape[1], -1, WIDTH], lambda shape: [-1, shape[0], WIDTH]])
def test_a_reshape_that_takes_examples_for_steps_is_the_whole_batchs_and_said_of_plain_towers(of_shape):
    def model_fn(x, _):
        x = tf.placeholder_with_default(x, [None, None, WIDTH])
        return tf.reduce_mean(tf.square(tf.nn.softmax(tf.reshape(x * weights(WIDTH), of_shape(tf.shape(x))), 1) - 0.1))

    assert_equals_one_batch(towers.whole_batch(model_fn), BATCH, 2, sizes=[7, 5], steps=2)
    with pytest.warns(towers.TowersWarning):
        assert_differs(model_fn)


def first_steps(x, count):
    """Rows, so many of each example."""
    return tf.reshape(x[:, :count] * weights(WIDTH), [-1, WIDTH])


def chosen(one, other):
    return tf.cond(tf.reduce_sum(weights(WIDTH)) > -9, lambda: one, lambda: other)


OF_ANOTHER_NUMBER = {
    "two or one of each": lambda x, _: tf.nn.softmax(chosen(first_steps(x, 2), first_steps(x, 1)), 0),
    "one or two of each": lambda x, _: tf.nn.softmax(chosen(first_steps(x, 1), first_steps(x, 2)), 0),
    "one of each, or all sorted": lambda x, _: tf.nn.softmax(chosen(tf.sort(first_steps(x, 2), 0), first_steps(x, 1)), 0),
    "twice as many in each turn": lambda x, _: tf.nn.softmax(tf.while_loop(lambda k, _: k < 2, lambda k, y: (
        k + 1, tf.reshape(tf.stack([y, tf.sin(y)], 1), [-1, WIDTH])), (0, first_steps(x, 1)), shape_invariants=(
            tf.TensorShape([]), tf.TensorShape([None, WIDTH])))[1], 0),
    "lengths in another order": lambda x, lengths: tf.concat([x, x], 0) * tf.reverse_sequence(
        tf.concat([x, tf.sin(x)], 0) * weights(WIDTH), tf.reshape(tf.tile(lengths[:, None], [1, 2]), [-1]), 1, 0)}


@pytest.mark.parametrize("name", sorted(OF_ANOTHER_NUMBER))
def test_rows_that_are_laid_out_otherwise_are_no_others(name):
    def model_fn(x, lengths):
        x = tf.placeholder_with_default(x, [None, STEPS, WIDTH])
        return tf.reduce_mean(tf.square(OF_ANOTHER_NUMBER[name](x, lengths) - 0.1))

    assert_equals_one_batch(towers.whole_batch(model_fn), BATCH, 2, sizes=[7, 5], steps=2)
    with pytest.warns(towers.TowersWarning):
        assert_differs(model_fn)


def by_place(rows):
    """Some rows of the whole batch, times what stands for their place."""
    return tf.nn.softmax(rows[2:32:3] * weights(WIDTH) * np.cos(np.arange(10))[:, None], 0)


def twice(h):
    return flat(tf.concat([h, tf.sin(h)], 0))


def of_a_sequence(h):
    elements = tf.TensorArray(h.dtype, 2, infer_shape=False, clear_after_read=False).write(0, flat(h)).write(1, twice(h))
    return tf.ensure_shape(elements.read(1), [None, WIDTH])


FLATTENED_ELSEWHERE = {
    "twice the steps in a branch": lambda h: chosen(twice(h), flat(h)),
    "twice the steps in the other branch": lambda h: chosen(flat(h), twice(h)),
    "in branches": lambda h: tf.cond(tf.reduce_sum(weights(WIDTH)) > -9, lambda: flat(h * 2), lambda: flat(tf.sin(h))),
    "in a function": lambda h: tf.function(lambda h: flat(h * 2))(h),
    "twice the steps in each turn": lambda h: tf.while_loop(
        lambda k, _: k < 2, lambda k, y: (k + 1, twice(tf.reshape(y, [-1, tf.shape(h)[1], WIDTH]))), (0, flat(h)),
        shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, WIDTH])))[1],
    "in a sequence": of_a_sequence,
    "one after the other": lambda h: tf.scan(lambda state, row: 0.5 * state + tf.sin(row), flat(h)),
    "each by itself": lambda h: tf.map_fn(tf.sin, flat(h)),
    "by their number, in a branch": lambda h, *_: flat(h) * tf.cond(
        tf.reduce_sum(weights(WIDTH)) > -9, lambda of=flat(h): tf.sqrt(tf.cast(tf.shape(of)[0], h.dtype)), lambda: h[0, 0, 0]),
    "by their number, in a function": lambda h: flat(h) * tf.function(
        lambda number: tf.sqrt(tf.cast(number, tf.float64)))(tf.shape(flat(h))[0]),
    "in as many turns as they are twelves": lambda h, *_: tf.while_loop(
        lambda k, _, of=flat(h): k < tf.shape(of)[0] // 12, lambda k, y: (k + 1, tf.sin(y) * weights(WIDTH)), (0, flat(h)),
        shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, WIDTH])))[1]}


@pytest.mark.parametrize("name,sizes", covering(sorted(FLATTENED_ELSEWHERE), [(7, 5), (6, 0, 6)], one_in=2))
def test_steps_that_are_flattened_or_counted_elsewhere_are_the_whole_batchs(name, sizes):
    model_fn = model_of(lambda h, _: by_place(FLATTENED_ELSEWHERE[name](h)), False)
    assert_equals_one_batch(towers.whole_batch(model_fn), BATCH, len(sizes), sizes=sizes, steps=2)


def assert_differs(model_fn):
    with pytest.raises(AssertionError):
        assert_equals_one_batch(model_fn, BATCH, 2, sizes=[7, 5], steps=2)


def test_batch_norms_of_flattened_steps_are_synced():
    def form(h, _):
        return tf.tanh(tf.layers.batch_normalization(flat(projected(h)), training=True))
    assert_equals_one_batch(tf_syncbn.convert_model(model_of(form, False)), BATCH, 2, sizes=[7, 5], steps=2)


def test_flattened_steps_are_handed_out_as_the_whole_batchs():
    def model_fn(x, lengths):
        h = tf.transpose(tf.placeholder_with_default(x, [None, None, WIDTH]), [1, 0, 2])
        return {"loss": tf.reduce_mean(projected(h)), "flat": flat(h)}

    inputs = [tf.constant(part) for part in BATCH]
    replicas = towers.TowerBuilder(["/cpu:0"] * 2).build(towers.whole_batch(model_fn), towers.PerTower(
        [tuple(x[:7] for x in inputs), tuple(x[7:] for x in inputs)]))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        merged = session.run(replicas.merged()["flat"])
    np.testing.assert_array_equal(merged, BATCH[0].transpose([1, 0, 2]).reshape([-1, WIDTH]))
