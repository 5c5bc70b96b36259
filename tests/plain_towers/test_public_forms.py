"""How public code writes what is of each example: it passes in silence, and trains as one tower."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.support import SAID, build
from tests.sweeps import covering
from towers.testing import assert_equals_one_batch

STEPS, WIDTH = 6, 4
RNG = np.random.RandomState(0)
BATCH = (RNG.randn(15, STEPS, WIDTH), RNG.randint(1, STEPS + 1, 15).astype(np.int32))


def weights(*shape):
    with tf.variable_scope("", reuse=tf.AUTO_REUSE):
        return tf.get_variable("w_%d" % len(shape), shape, tf.float64, tf.constant_initializer(np.cos(np.arange(np.prod(shape)))))


def rows(x):
    return tf.range(tf.shape(x)[0])


def flat(h):
    return tf.reshape(h, [-1, WIDTH])


def numbers_of_examples(h):
    """For each step of each example the example's number, [batch * steps]."""
    return tf.reshape(tf.tile(rows(h)[:, None], [1, STEPS]), [-1])


def largest_steps(h):
    return tf.nn.top_k(h[:, :, 0], 3)[1]


def recurrent(cell, part):
    def of(h, lengths):
        return tf.nn.dynamic_rnn(cell(3, dtype=h.dtype), h, sequence_length=lengths, dtype=h.dtype)[part]
    return of


def unrolled(h, lengths):
    return tf.nn.static_rnn(tf.nn.rnn_cell.GRUCell(3, dtype=h.dtype), tf.unstack(h, axis=1), dtype=h.dtype,
                            sequence_length=lengths)[0][-1]


def number_of_rows(h):
    """As many models know it, Python's number if there is one."""
    return tf.dimension_value(h.shape[0]) or tf.shape(h)[0]


def counted(h):
    """0, 1, 2: a constant if the number of examples is known."""
    return np.arange(tf.dimension_value(h.shape[0]), dtype=np.int32) if tf.dimension_value(h.shape[0]) else rows(h)


def put_back(h, _):
    """Pairs of rows an example, which are flattened for a product and put back by their number."""
    h = tf.reshape(h, [-1, STEPS // 2, WIDTH])
    return tf.reshape(tf.matmul(tf.reshape(h, [-1, WIDTH]), weights(WIDTH, 3)), [number_of_rows(h), STEPS // 2, 3])


def by_grid(h, lengths):
    at, step = tf.meshgrid(rows(h), tf.range(3), indexing="ij")
    return tf.gather_nd(h, tf.stack([at, tf.minimum(step, lengths[:, None] - 1)], 2))


def projected(h, lengths):
    """Masses put into bins of each example's own, as in distributional reinforcement learning."""
    bins = tf.reshape(lengths[:, None] + tf.range(STEPS) % 2 + (rows(h) * 9)[:, None], [-1])
    masses = tf.reshape(tf.nn.softmax(h[:, :, 0]), [-1])
    return tf.reshape(tf.math.unsorted_segment_sum(masses, bins, tf.shape(h)[0] * 9), [-1, 9])


def connectionist(h, lengths):
    labels = tf.cast(h[:, :2, 0] > 0, tf.int32) + 1
    at = tf.where(labels > 0)
    labels = tf.SparseTensor(at, tf.gather_nd(labels, at), tf.shape(labels, out_type=tf.int64))
    return tf.nn.ctc_loss(labels, tf.cast(tf.transpose(h, [1, 0, 2]), tf.float32), 0 * lengths + STEPS)


FORMS = {
    "a recurrent network's outputs": recurrent(tf.nn.rnn_cell.LSTMCell, 0),
    "a recurrent network's state": recurrent(tf.nn.rnn_cell.GRUCell, 1),
    "an unrolled network": unrolled,
    "the steps that a model reads out": lambda h, lengths: tf.gather(
        flat(h), tf.reshape(lengths[:, None] - 1 + tf.reshape(rows(h) * STEPS, [-1, 1]), [-1])),
    "the last step, by a range of steps": lambda h, lengths: tf.gather(
        flat(h), tf.range(0, tf.shape(h)[0] * STEPS, STEPS) + lengths - 1),
    "the last step, by tf.shape": lambda h, lengths: tf.gather(flat(h), rows(h) * tf.shape(h)[1] + (lengths - 1)),
    "the value of an action": lambda h, lengths: tf.gather(tf.reshape(h[:, :, 0], [-1]), rows(h) * STEPS + lengths - 1),
    "nearest neighbours": lambda h, _: tf.gather(flat(h), largest_steps(h) + tf.reshape(rows(h) * STEPS, [-1, 1])),
    "tf.batch_gather": lambda h, _: tf.batch_gather(h, largest_steps(h)),
    "a grid": by_grid,
    "the last step, by numbers of rows beside it": lambda h, lengths: tf.gather_nd(
        h, tf.stack([tf.range(number_of_rows(h)), lengths - 1], 1)),
    "the last step, by a constant beside it": lambda h, lengths: tf.gather_nd(h, tf.stack([counted(h), lengths - 1], 1)),
    "the last step, by a constant in front of it": lambda h, lengths: tf.gather_nd(
        h, tf.concat([counted(h)[:, None], lengths[:, None] - 1], 1)),
    "the last step, by a constant of steps": lambda h, lengths: tf.gather(flat(h), counted(h) * STEPS + lengths - 1),
    "largest steps, by numbers of rows that are repeated": lambda h, _: tf.gather_nd(h, tf.stack(
        [tf.tile(tf.expand_dims(tf.range(number_of_rows(h)), 1), [1, 3]), largest_steps(h)], 2)),
    "tf.gather_nd in batches": lambda h, _: tf.gather_nd(h, largest_steps(h)[:, :, None], batch_dims=1),
    "flattened and put back": put_back,
    "tf.math.segment_sum": lambda h, _: tf.math.segment_sum(flat(h), numbers_of_examples(h)),
    "tf.math.segment_mean": lambda h, _: tf.math.segment_mean(flat(h), numbers_of_examples(h)),
    "tf.math.unsorted_segment_max": lambda h, _: tf.math.unsorted_segment_max(flat(h), numbers_of_examples(h), tf.shape(h)[0]),
    "bins": projected,
    "triplets": lambda h, _: tf.nn.relu(tf.reduce_sum(tf.square(tf.reshape(h[:, 0], [-1, 3, WIDTH])), 1)),
    "tf.nn.ctc_loss": connectionist}

# Whose gradient by the input the model takes.
SLOPES = {
    "tf.transpose": lambda h: tf.transpose(h, [0, 2, 1]) ** 2,
    "tf.tensordot": lambda h: tf.tensordot(h, tf.ones([WIDTH, 2], h.dtype), [[2], [0]]) ** 2,
    "tf.einsum": lambda h: tf.einsum("bij,bik->bjk", h, h),
    "tf.pad": lambda h: tf.pad(h, [[0, 0], [1, 1], [0, 0]]) ** 2,
    "tf.slice": lambda h: tf.slice(h, [0, 1, 0], [-1, 2, -1]) ** 2,
    "tf.nn.top_k": lambda h: tf.nn.top_k(h, 2)[0] ** 2,
    "tf.sort": lambda h: tf.sort(h, 1) ** 2,
    "tf.batch_gather": lambda h: tf.batch_gather(h, largest_steps(h)) ** 2,
    "tf.reduce_sum": lambda h: tf.reduce_sum(h, [1, 2]) ** 2,
    "tf.reduce_mean": lambda h: tf.reduce_mean(h, [1, 2]) ** 2}


def form(name):
    def model_fn(x, lengths):
        if name in SLOPES:
            slopes, = tf.gradients(SLOPES[name](tf.tanh(x * weights(STEPS, WIDTH))), x)
            return tf.reduce_mean(tf.square(slopes))
        return tf.reduce_mean(tf.square(FORMS[name](x * weights(WIDTH), lengths) - 0.1))
    return model_fn


def of_unknown_size(model_fn):
    return lambda *batch: model_fn(*[tf.placeholder_with_default(x, [None] + x.shape.as_list()[1:]) for x in batch])


@pytest.mark.parametrize("name,size", covering(sorted(FORMS) + sorted(SLOPES), ["known", "unknown"], one_in=2))
def test_what_is_of_each_example_passes_in_silence_and_trains_as_one_tower(name, size, silent):
    assert_equals_one_batch(form(name) if size == "known" else of_unknown_size(form(name)), BATCH, 2, sizes=[9, 6], steps=2)


MEETING = {
    "turned by slices": lambda h: h * tf.concat([h[1:], h[:1]], 0),
    "turned by tf.split": lambda h: h * tf.concat(tf.split(h, [1, -1])[::-1], 0),
    "turned by tf.split, by its size": lambda h: h * tf.concat(tf.split(h, [1, tf.shape(h)[0] - 1])[::-1], 0),
    "turned back": lambda h: h + h[::-1],
    "less the first": lambda h: h - h[0],
    "of some alone": lambda h: h[:4]}


@pytest.mark.parametrize("name", sorted(MEETING))
def test_examples_taken_by_their_place_are_said_of_a_batch_that_the_caller_divided_too(name):
    def model_fn(x, _):
        return tf.reduce_mean(tf.square(MEETING[name](x * weights(WIDTH)) - 0.1))

    for of in (model_fn, of_unknown_size(model_fn)):
        with tf.Graph().as_default(), pytest.warns(UserWarning, match=SAID):
            build(of, towers.PerTower([tuple(tf.constant(x[part]) for x in BATCH) for part in (slice(0, 9), slice(9, 15))]), 2)


def all_pairs(h, _):
    one, other = tf.meshgrid(rows(h), rows(h), indexing="ij")
    return tf.gather(h, one) - tf.gather(h, other)


def to_the_longest(h, lengths):
    """A loop that goes on for all until the longest has ended, and a mask of lengths beside it."""
    total = tf.while_loop(lambda k, _: k < tf.reduce_max(lengths), lambda k, total: (
        k + 1, total + tf.reduce_mean(tf.square(h[:, k]))), (0, tf.zeros([], h.dtype)))[1]
    return total + tf.cast(lengths > 3, h.dtype) * h[:, 0, 0]


OTHERS = {
    "pairs": all_pairs,
    "a loop to the longest": to_the_longest,
    "a branch by the longest": lambda h, lengths: tf.cond(
        tf.reduce_max(lengths) > 5, lambda: 2 * h, lambda: h) * tf.cast(lengths > 3, h.dtype)[:, None, None],
    "the next example's steps": lambda h, _: tf.gather(flat(h), (rows(h)[:-1] + 1) * STEPS),
    "the next example's last step": lambda h, lengths: tf.gather_nd(
        h, tf.stack([(tf.range(number_of_rows(h)) + 1) % number_of_rows(h), lengths - 1], 1)),
    "segments of chosen examples": lambda h, lengths: tf.math.segment_sum(
        tf.boolean_mask(h, lengths > 3), tf.where(lengths > 3)[:, 0]),
    "all but some, by their number": lambda h, _: h[:tf.shape(h)[0] - 3]}


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_what_is_of_other_examples_is_said(name):
    def model_fn(x, lengths):
        return tf.reduce_mean(tf.square(OTHERS[name](x * weights(WIDTH), lengths) - 0.1))

    for of in (model_fn, of_unknown_size(model_fn)):
        with tf.Graph().as_default(), pytest.warns(UserWarning, match=SAID):
            build(of, towers.PerTower([tuple(tf.constant(x[part]) for x in BATCH) for part in (slice(0, 9), slice(9, 15))]), 2)


PARTS = {
    "halves": lambda h: h[:tf.shape(h)[0] // 2] - h[tf.shape(h)[0] // 2:],
    "every second": lambda h: h[::2] - h[1::2],
    "tf.split": lambda h: tf.subtract(*tf.split(h, 2))}


@pytest.mark.parametrize("name", sorted(PARTS))
def test_equal_parts_of_what_the_caller_divided_are_the_callers_choice(name, silent):
    def model_fn(x, _):
        return tf.reduce_mean(tf.square(PARTS[name](x * weights(WIDTH)) - 0.1))

    for of in (model_fn, of_unknown_size(model_fn)):
        with tf.Graph().as_default():
            build(of, towers.PerTower([tuple(tf.constant(x[part]) for x in BATCH) for part in (slice(0, 8), slice(8, 14))]), 2)


def test_a_half_of_one_tower_that_is_none_of_another_is_said():
    def model_fn(x, _):
        return tf.reduce_mean(tf.square(x[:4] * weights(WIDTH)))

    with pytest.warns(UserWarning, match=SAID):
        build(model_fn, towers.PerTower([tuple(tf.constant(x[part]) for x in BATCH) for part in (slice(0, 8), slice(8, 15))]), 2)
