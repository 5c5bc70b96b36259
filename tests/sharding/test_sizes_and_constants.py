"""What is computed of sizes, and what TensorFlow makes a constant where it knows them, is the whole batch's."""
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.plain_towers import test_public_forms as forms
from tests.support import build
from tests.sweeps import covering
from towers.testing import assert_equals_one_batch

RNG = np.random.RandomState(0)
X = RNG.randn(5, 6, 3)


def weights(*shape):
    return tf.get_variable("w", shape, tf.float64, tf.constant_initializer(np.cos(np.arange(np.prod(shape)))))


def of_unknown_size(x):
    return tf.placeholder_with_default(x, [None] + x.shape.as_list()[1:])


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("share", [0.7, 0.3])
def test_a_share_of_the_numbers_that_there_are_is_rounded_as_one_tower_rounds_it(known, share):
    """0.7 * 18 + 0.7 * 12 is less than 0.7 * 30, and 21 of the hardest pixels are not 20."""
    def model_fn(x):
        losses = tf.reshape(tf.square((x if known else of_unknown_size(x)) * weights(6, 3)), [-1])
        count = tf.cast(tf.constant(share, tf.float64) * tf.cast(tf.shape(losses)[0], tf.float64), tf.int32)
        return tf.reduce_mean(tf.nn.top_k(losses, count)[0])
    assert_equals_one_batch(towers.whole_batch(model_fn), (np.concatenate([X] * 2),), 2, sizes=[6, 4], steps=2)


@pytest.mark.parametrize("sizes", [[3, 2], [4, 1]])
def test_zeros_that_are_a_constant_in_a_tower_alone(sizes):
    """`tf.zeros` of more than a thousand numbers is an op."""
    def model_fn(x, y):
        logits = x * weights(300)
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=logits)) + tf.reduce_mean(
            tf.square(tf.zeros([int(x.shape[0]), 300], x.dtype) + logits))
    x = RNG.randn(5, 300)
    for of in (model_fn, towers.whole_batch(model_fn)):
        assert_equals_one_batch(of, (x, (x > 0) * 1.0), 2, sizes=sizes, steps=2)


@pytest.mark.parametrize("sizes", [[3, 2], [4, 1], [2, 1, 2]])
def test_shapes_that_tensorflow_knows_but_of_one_example(sizes):
    """Of [1, 6] and an unknown size the sum may have any; of [2, 6] and an unknown one it has two rows."""
    def model_fn(x):
        x = x[:, :, 0]
        y = x + of_unknown_size(x) * weights(6)
        return tf.reduce_mean(tf.reduce_logsumexp(y, 1) + tf.reduce_sum(tf.square(y - tf.ones_like(y)), 1))
    for of in (model_fn, towers.whole_batch(model_fn)):
        assert_equals_one_batch(of, (X,), len(sizes), sizes=sizes, steps=2)


def test_constants_of_other_values_are_refused():
    def model_fn(x):
        shape = [int(x.shape[0]), 300]
        filled = tf.fill(shape, tf.constant(1.0, x.dtype)) if shape[0] > 4 else tf.zeros(shape, x.dtype)
        return tf.reduce_mean(filled + x * weights(300))
    with pytest.raises(ValueError, match="makes other ops of a batch of another size"):
        build(towers.whole_batch(model_fn), towers.PerTower([(tf.constant(RNG.randn(size, 300)),) for size in (3, 2)]), 2)


SLOPES = dict(forms.SLOPES, **{"tf.reduce_prod": lambda h: tf.reduce_prod(h, 1)})


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", sorted(SLOPES))
def test_towers_need_not_meet_about_the_gradient_of_each_example(name, known):
    def model_fn(x):
        x = x if known else of_unknown_size(x)
        slopes, = tf.gradients(SLOPES[name](tf.tanh(x * weights(6, 4))), x)
        return tf.reduce_mean(tf.square(slopes))
    whole = towers.whole_batch(model_fn)
    with warnings.catch_warnings():
        warnings.simplefilter("error", towers.TowersWarning)
        assert_equals_one_batch(whole, (forms.BATCH[0][:5],), 2, sizes=[3, 2], steps=2)
    # Rows that an example may take of others; and TensorFlow 1.15 knows less of what tf.sort makes.
    are_gathered = name == "tf.batch_gather" or name == "tf.sort" and not known and tf.__version__.startswith("1.")
    assert are_gathered or not [meeting for meeting in whole.meetings if meeting.conversion == "gather"]


OWN_NUMBERS = ["a grid", "bins", "the last step, by a constant beside it", "the last step, by a constant in front of it",
               "the last step, by numbers of rows beside it", "tf.gather_nd in batches", "tf.math.segment_mean",
               "tf.math.segment_sum", "tf.nn.ctc_loss"]


@pytest.mark.parametrize("name,known", covering(OWN_NUMBERS, [True, False], one_in=3))
def test_towers_need_not_meet_about_rows_that_are_taken_by_the_numbers_of_their_own(name, known):
    whole = towers.whole_batch(forms.form(name) if known else forms.of_unknown_size(forms.form(name)))
    assert_equals_one_batch(whole, forms.BATCH, 3, sizes=[8, 1, 6], steps=2)
    assert not [meeting for meeting in whole.meetings if meeting.conversion == "gather"]


def test_a_constant_that_numbers_examples_is_the_whole_batchs_where_it_is_a_value():
    def model_fn(x):
        numbers = np.arange(int(x.shape[0]), dtype=np.int32)
        x = x[:, 0, 0] * weights(1) * numbers.astype(np.float64)
        return tf.reduce_mean(tf.sin(x + tf.cast(tf.constant(3 * numbers), x.dtype)))
    assert_equals_one_batch(towers.whole_batch(model_fn), (X,), 3, sizes=[2, 1, len(X) - 3], steps=2)


def by_steps(h, lengths):
    return tf.gather(tf.reshape(h, [-1, 3]), tf.range(tf.shape(h)[0]) * 6 + lengths)


def by_a_range_of_steps(h, lengths):
    return tf.gather(tf.reshape(h, [-1, 3]), lengths + tf.range(0, tf.shape(h)[0] * 6, 6))


def first_steps(h, _):
    return tf.gather(tf.reshape(h, [-1, 3]), tf.range(tf.shape(h)[0]) * 6)


def largest_of_each(h, _):
    numbers = tf.reshape(tf.tile(tf.range(tf.shape(h)[0])[:, None], [1, 6]), [-1])
    return tf.math.unsorted_segment_max(tf.reshape(h, [-1, 3]), numbers, tf.shape(h)[0])


def numbers_themselves(h, lengths):
    return h[:, 0] * tf.cast(tf.range(tf.shape(h)[0])[:, None] * 5 + lengths[:, None], h.dtype)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("take", [by_steps, by_a_range_of_steps, first_steps, largest_of_each, numbers_themselves])
def test_numbers_of_examples_times_their_steps_number_the_whole_batchs_rows(take, known):
    def model_fn(x, lengths):
        x, lengths = (x, lengths) if known else (of_unknown_size(x), of_unknown_size(lengths))
        return tf.reduce_mean(tf.square(take(x * weights(3), lengths) - 0.1))
    whole = towers.whole_batch(model_fn)
    assert_equals_one_batch(whole, (X, np.array([5, 2, 0, 3, 1], np.int32)), 3, sizes=[2, 1, 2], steps=2)
    assert take not in (first_steps, largest_of_each) or whole.meetings == []


def chosen_size(h, _):
    """Of two sizes that are known, the one that a branch has."""
    count = tf.cond(tf.reduce_sum(h) > 1e9, lambda: tf.shape(h)[1] - 2, lambda: tf.shape(h)[1] - 1)
    return tf.reduce_sum(tf.square(h)) / tf.cast(tf.shape(h)[0] * count, h.dtype)


def counted_down(h, _):
    """A counter that begins at a size that is known."""
    def turn(step, total):
        return step - 1, total + tf.reduce_sum(tf.square(h[:, step])) / tf.cast(tf.shape(h)[0] * (step + 1), h.dtype)
    return tf.while_loop(lambda step, _: step >= 0, turn, (tf.shape(h)[1] - 1, tf.zeros([], h.dtype)))[1]


def half_in_a_branch(h, _):
    half = tf.cast(tf.shape(h)[0], h.dtype) * 0.5
    return tf.cond(tf.reduce_sum(h) > 1e9, lambda: tf.reduce_mean(h), lambda: tf.reduce_sum(tf.square(h)) / half)


def last_of_a_stepped_range(h, _):
    return tf.reduce_mean(h) * tf.cast(tf.reduce_max(tf.range(0, tf.shape(h)[0] * 6, 6)), h.dtype)


def shifted_segments(h, _):
    """Numbers below 0 are of no segment: the first example's, and no other's."""
    numbers = tf.range(tf.shape(h)[0]) - 1
    return tf.reduce_mean(tf.tanh(tf.math.unsorted_segment_max(h[:, 0], numbers, tf.shape(h)[0]))) + tf.reduce_mean(
        tf.sin(tf.math.unsorted_segment_sum(h[:, 1], numbers, tf.shape(h)[0])))


def padded_to_one(h, _):
    """A row of zeros where there is no example, as no whole batch has it."""
    count = tf.shape(h)[0]
    return tf.exp(tf.reduce_mean(tf.square(tf.pad(h, [[0, tf.maximum(count, 1) - count], [0, 0], [0, 0]]) - 1)))


def kept_product(h, _):
    """Rows of all the rest, by a product whose axis is kept."""
    return tf.reduce_mean(tf.square(tf.reshape(h, tf.concat([[-1], tf.reduce_prod(tf.shape(h)[1:], keepdims=True)], 0)) - 0.1))


def by_halves_of_a_row(h, _):
    return tf.reduce_mean(h) * tf.reduce_sum(tf.range(0.0, tf.cast(tf.shape(h)[0], tf.float64), 0.5))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("compute", [chosen_size, counted_down, half_in_a_branch, last_of_a_stepped_range, shifted_segments,
                                     padded_to_one, kept_product, by_halves_of_a_row])
def test_what_is_known_of_sizes_is_what_one_tower_knows(compute, known):
    def model_fn(x):
        return compute((x if known else of_unknown_size(x)) * weights(3), None)
    sizes = [3, 0, 2] if compute is padded_to_one and not known else [3, 2]
    assert_equals_one_batch(towers.whole_batch(model_fn), (X,), len(sizes), sizes=sizes, steps=2)


def test_another_constant_is_no_shape():
    def model_fn(x):
        y = x[:, :, 0] + of_unknown_size(x)[:, :, 0] * weights(6)
        shape = tf.constant([7, 6]) if int(x.shape[0]) > 1 else tf.shape(y)
        return tf.reduce_mean(y) * tf.cast(tf.reduce_sum(shape), y.dtype)
    with pytest.raises(ValueError, match="makes other ops of a batch of another size"):
        build(towers.whole_batch(model_fn), towers.PerTower([(tf.constant(X[part]),) for part in (slice(0, 1), slice(1, 5))]), 2)
