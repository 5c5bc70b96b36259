"""What no check finds of ordinary towers (docs/numerics.md) is what one tower computes, through `whole_batch`, or is refused."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.testing import assert_equals_one_batch

RNG = np.random.RandomState(4)
X, LENGTHS = RNG.randn(9, 4) + 0.3, np.array([1, 3, 2, 1, 4, 2, 2, 1, 3])


def weighed(x):
    with tf.variable_scope("", reuse=tf.AUTO_REUSE):
        return x * tf.get_variable("w", [4], x.dtype, tf.constant_initializer([0.5, 1.0, -1.0, 2.0]))


def padded_to_the_longest(x, lengths):
    valid = tf.sequence_mask(lengths, dtype=x.dtype)
    steps = weighed(x)[:, :tf.shape(valid)[1]] * valid
    return tf.reduce_mean(tf.square(steps)) + tf.reduce_sum(steps) / tf.cast(tf.shape(valid)[1], x.dtype)


def examples_side_by_side(x, _):
    side_by_side = tf.reshape(tf.transpose(weighed(x)), [1, 4, -1])  # [1, 4, batch]
    mean, variance = tf.nn.moments(side_by_side, [0, 2], keepdims=True)
    return tf.reduce_mean(tf.sin((side_by_side - mean) * tf.rsqrt(variance + 1e-3)))


def until_all_are_done(x, _):
    turns, y = tf.while_loop(lambda k, y: tf.logical_and(k < 20, tf.reduce_any(tf.abs(y) > 0.2)),
                             lambda k, y: (k + 1, 0.7 * y), (0, weighed(x)))
    return tf.reduce_mean(tf.square(y)) * tf.cast(turns, x.dtype)


def gradients_in_a_loop(x, _):
    def loss_of(z):
        return tf.reduce_mean(tf.square(tf.sin(weighed(z)) - 0.3))
    moved = tf.while_loop(lambda k, _: k < 2, lambda k, z: (k + 1, z - tf.gradients(loss_of(z), z)[0]), (0, x))[1]
    return loss_of(moved)


def with_rows_that_are_none(x, _):
    with tf.variable_scope("", reuse=tf.AUTO_REUSE):
        token = tf.get_variable("token", [1, 4], x.dtype, tf.ones_initializer())
    rows = tf.pad(tf.concat([token, weighed(x)], 0), [[0, 2], [0, 0]])
    mean, variance = tf.nn.moments(rows, [0])
    return tf.reduce_mean(tf.sin((rows - mean) * tf.rsqrt(variance + 1e-3) + 1))


def normalized_times_a_root(x, _):
    y = weighed(x)
    y = tf.nn.l2_normalize(y - tf.reduce_mean(y, 0), 0) * tf.sqrt(tf.cast(tf.shape(x)[0], x.dtype))
    return tf.reduce_mean(tf.sin(y + 0.5) * tf.cos(weighed(x)))


def filled_by_hand(x, _):
    y = weighed(x)
    filled = tf.TensorArray(x.dtype, 4, element_shape=[]).unstack(tf.reduce_sum(tf.square(y), 0)).stack()
    return tf.sqrt(tf.reduce_sum(filled)) / tf.reduce_sum(tf.square(y - 1))


def rows_of_labels(x, lengths):
    taken = tf.boolean_mask(weighed(x), tf.one_hot(lengths, 4, on_value=True, off_value=False))  # 4 is of no class
    return tf.reduce_mean(tf.sqrt(1 + tf.square(taken)))


def times_a_number_by_chance(x, _):
    return 3 * tf.reduce_sum(tf.square(weighed(x))) / 9 + 0.5 * tf.reduce_sum(weighed(x)) * 2


def by_its_number_twice(x, _):
    size = tf.shape(x)[0] if x.shape.as_list()[0] is None else int(x.shape[0])
    number = tf.cast(size, x.dtype)
    return tf.reduce_mean(tf.square(weighed(x))) / number + number * tf.reduce_mean(weighed(x)) + tf.reduce_sum(weighed(x)) / (
        number * number) + 0.1 * number


def framed(x, _):
    frames = tf.signal.frame(weighed(x), 2, 1)  # along the last axis
    return tf.sqrt(tf.reduce_sum(tf.square(tf.reduce_mean(frames, 0))))


def framed_along_the_batch(x, _):
    return tf.reduce_mean(tf.square(tf.reduce_sum(tf.signal.frame(weighed(x), 2, 1, axis=0), 1)))


def counted_classes(x, lengths):
    ids = tf.minimum(lengths, 3)
    counts = tf.scatter_nd(ids[:, None], tf.ones_like(x[:, 0]), [4])
    again = tf.math.unsorted_segment_sum(tf.ones_like(x[:, 0]), ids, 4)
    return tf.reduce_mean(tf.reduce_sum(tf.square(weighed(x)), 1) / tf.gather(counts + again, ids))


def interleaved(x, lengths):
    """As MixMatch interleaves batches for its batch norms."""
    parts = tf.split(tf.transpose(tf.reshape(tf.concat([weighed(x), x, -x], 0), [3, -1, 4]), [1, 0, 2]), 3, 1)
    y = tf.concat([part[:, 0] for part in parts], 0)
    return tf.reduce_mean(tf.sin((y - tf.reduce_mean(y, 0)) / (0.1 + tf.reduce_max(tf.abs(y), 0))))


def steps_of_all_examples(x, lengths):
    """Steps flattened to rows, as many for each example as the longest has, of which a mask takes some by number."""
    most = tf.reduce_max(lengths)
    rows = tf.reshape(weighed(x)[:, :most], [-1, 1])
    valid = tf.where(tf.reshape(tf.sequence_mask(lengths, most), [-1]))
    return tf.reduce_mean(tf.square(tf.gather_nd(rows - tf.reduce_mean(rows, 0), valid)))


def picked_and_chosen(x, lengths):
    """A value of each example's label, of rows that are several for each, and then the hard ones."""
    rows = tf.reshape(weighed(x), [-1, 2])
    labels = tf.reshape(tf.tile(tf.minimum(lengths, 1)[:, None], [1, 2]), [-1])
    picked = tf.gather_nd(rows, tf.stack([tf.range(tf.shape(rows)[0]), tf.cast(labels, tf.int32)], 1))
    hard = tf.where(picked > 0)
    return tf.reduce_mean(tf.square(tf.gather_nd(picked - tf.reduce_mean(picked), hard)))


def as_many_classes_as_examples(x, lengths):
    return tf.reduce_mean(tf.square(tf.one_hot(lengths, tf.shape(x)[0], dtype=x.dtype) - tf.reduce_sum(weighed(x), 1, True)))


def turned_by_a_number(x, lengths):
    """What is alike in all towers, turned by what they have to add up first."""
    scales = tf.roll(tf.linspace(tf.constant(0.0, x.dtype), 1.0, 4), tf.reduce_sum(lengths), 0)
    return tf.reduce_mean(tf.square(weighed(x) * scales))


MODELS = [steps_of_all_examples, picked_and_chosen, as_many_classes_as_examples, turned_by_a_number,
          padded_to_the_longest, until_all_are_done, gradients_in_a_loop, with_rows_that_are_none, normalized_times_a_root,
          filled_by_hand, rows_of_labels, times_a_number_by_chance, by_its_number_twice, framed, framed_along_the_batch,
          counted_classes, interleaved, examples_side_by_side]


def unsized(model_fn):
    return lambda *batch: model_fn(*[tf.placeholder_with_default(x, [None] + x.shape.as_list()[1:]) for x in batch])


@pytest.mark.parametrize("model_fn", MODELS)
@pytest.mark.parametrize("known", [True, False])
def test_what_no_check_finds_is_that_of_the_whole_batch(model_fn, known):
    if model_fn is until_all_are_done and known and not tf.control_flow_v2_enabled():
        with pytest.raises(ValueError, match="towers.whole_batch: the state of a tf.while_loop, .*placeholder_with_default"):
            assert_equals_one_batch(towers.whole_batch(model_fn), (X, LENGTHS), 3, sizes=[1, 5, 3], steps=2)
        return
    model_fn = model_fn if known else unsized(model_fn)
    assert_equals_one_batch(towers.whole_batch(model_fn), (X, LENGTHS), 3, sizes=[1, 5, 3], steps=2)


def test_rows_of_an_unknown_rank_are_refused_by_name():
    def model_fn(x, lengths):
        rows = tf.gather(weighed(x), tf.squeeze(tf.where(lengths > 1)))
        return tf.sqrt(tf.reduce_mean(tf.square(rows)))

    with pytest.raises(ValueError, match="towers.whole_batch: .*rank"):
        assert_equals_one_batch(towers.whole_batch(model_fn), (X, LENGTHS), 3, sizes=[1, 5, 3], steps=2)


def test_what_goes_through_a_function_of_pythons_is_refused_by_name():
    def model_fn(x, _):
        y = tf.py_func(lambda rows: np.square(rows), [weighed(x)], tf.float64)
        y.set_shape([None, 4])
        return tf.sqrt(tf.reduce_mean(y)) + tf.reduce_mean(weighed(x))

    with pytest.raises(ValueError, match=r"towers.whole_batch: the op 'tower_0/PyFunc' .*each_example"):
        assert_equals_one_batch(towers.whole_batch(model_fn), (X, LENGTHS), 3, sizes=[1, 5, 3], steps=2)
