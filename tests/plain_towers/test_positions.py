"""Examples that a model takes by their place in the batch: said where towers train otherwise than one, and nowhere else."""
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.support import SAID, build, control_flow_2
from tests.sweeps import covering
from towers.testing import assert_equals_one_batch

B, C = 12, 4
RNG = np.random.RandomState(5)
X, Y, LABELS = RNG.randn(B, C), RNG.randn(B, 1), RNG.randint(0, 3, B)


def features(x):
    with tf.variable_scope("", reuse=tf.AUTO_REUSE):
        return tf.sin(tf.matmul(x, tf.get_variable("w", [C, C], x.dtype, tf.glorot_uniform_initializer(seed=1))) - 0.3)


def loss_of(h, y):
    return tf.reduce_mean(tf.square(tf.reduce_sum(tf.nn.relu(h + 0.5), 1, keepdims=True) - y))


def halves(x):
    return tf.split(features(x), 2)


def deep(x):
    """The features by way of an image network: each row is still the one of its example."""
    h = tf.reshape(features(x), [-1, 2, 2, 1])
    kernel = tf.get_variable("kernel", [2, 2, 1, 3], x.dtype, tf.glorot_uniform_initializer(seed=2))
    h = tf.nn.conv2d(tf.pad(h, [[0, 0], [1, 1], [0, 1], [0, 0]]), kernel, [1, 1, 1, 1], "VALID")
    return tf.reduce_mean(tf.nn.relu(tf.concat([h, -h], 3)), [1, 2])


RUNNING = {
    "mixup with the batch turned": lambda x, y, _: loss_of(0.7 * features(x) + 0.3 * tf.reverse(features(x), [0]), y),
    "turned by a slice": lambda x, y, _: loss_of(features(0.7 * x + 0.3 * x[::-1]), y),
    "rolled": lambda x, y, _: loss_of(features(x) - tf.roll(features(x), 1, 0), y),
    "rolled along two axes": lambda x, y, _: loss_of(features(x) - tf.roll(features(x), [1, 2], [1, 0]), y),
    "a running sum": lambda x, y, _: loss_of(tf.cumsum(features(x)), y),
    "a running product": lambda x, y, _: loss_of(tf.math.cumprod(features(x), reverse=True), y),
    "a softmax along the batch": lambda x, y, _: loss_of(tf.nn.softmax(features(x), axis=0), y),
    "weights of a softmax": lambda x, y, _: tf.reduce_mean(
        tf.nn.softmax(tf.reduce_sum(features(x), 1)) * tf.reduce_sum(features(x) * y, 1)),
    "sorted": lambda x, y, _: loss_of(tf.sort(features(x), axis=0), y)}
RUNNING["a scan along the batch"] = lambda x, y, _: loss_of(tf.scan(lambda state, row: tf.tanh(state + row), features(x)), y)
RUNNING["a softmax along what is chosen"] = lambda x, y, labels: tf.reduce_mean(tf.map_fn(
    lambda k: tf.reduce_sum(tf.nn.log_softmax(tf.boolean_mask(tf.reduce_sum(features(x), 1), tf.equal(labels, k)))),
    tf.range(3, dtype=labels.dtype), x.dtype))
TAKING = {
    "each two, by number": lambda x, *_: tf.reduce_mean(tf.stack([
        tf.reduce_sum(features(x)[i] * features(x)[j]) ** 2 for i in range(B // 3) for j in range(B // 3)])),
    "each one and the next, of tf.unstack": lambda x, *_: tf.add_n([
        tf.reduce_mean((one - other) ** 2) for one, other in zip(tf.unstack(x * features(x)), tf.unstack(features(x))[1:])]),
    "the first one alone, by number": lambda x, *_: tf.reduce_sum(features(x)[0] ** 2),
    "halves against each other": lambda x, y, _: tf.reduce_mean(tf.square(tf.subtract(*halves(x)))),
    "halves side by side": lambda x, y, _: loss_of(tf.concat(halves(x), 1), tf.split(y, 2)[0]),
    "halves of a network": lambda x, y, _: tf.reduce_mean(tf.square(tf.subtract(*tf.split(deep(x), 2)))),
    "halves by slices": lambda x, y, _: tf.reduce_mean(tf.square(features(x)[:2] - features(x[2:]))),
    "the first one": lambda x, y, _: loss_of(features(x) - features(x)[:1], y),
    "the last one": lambda x, y, _: loss_of(features(x) - features(x)[-1:], y),
    "those with labels": lambda x, y, _: loss_of(features(x)[:3], y[:3]) + 0.1 * tf.reduce_mean(features(x)),
    "those with and without": lambda x, y, _: loss_of(features(x)[:3], y[:3]) + tf.reduce_mean(features(x)[3:]),
    "by tf.slice": lambda x, y, _: loss_of(features(tf.slice(x, [1, 0], [-1, -1])), y[1:]),
    "of a given size": lambda x, y, _: tf.reduce_mean(tf.square(tf.split(features(x), [1, 3])[0]))}


def in_parts(x, y, _):
    """Parts of a batch one after the other, which saves memory."""
    return tf.add_n([loss_of(features(a), b) for a, b in zip(tf.split(x, 2), tf.split(y, 2))]) / 2


def joined_again(x, y, _):
    return loss_of(tf.concat([features(part) for part in tf.split(x, 2)], 0), y)


def two_networks_at_once(x, y, _):
    first, second = tf.split(features(tf.concat([x, 2 * x], 0)), 2)
    return loss_of(first - second, y)


def along_time(x, y, _):
    h = tf.cumsum(tf.reverse(features(x), [1]), 1) + tf.roll(features(x), 1, -1) + tf.nn.softmax(features(x))
    first, second = tf.split(h, 2, 1)
    return loss_of(first - second[:, ::-1] + h[:, :1], y)


def time_major(x, y, _):
    h = tf.transpose(features(x))
    return loss_of(tf.transpose(tf.cumsum(tf.reverse(h, [0]), 0) - tf.nn.softmax(h, axis=0) + h[:1]), y)


def scanned_over_time(x, y, _):
    h = tf.scan(lambda state, step: tf.tanh(state + step), tf.transpose(features(x)))
    return loss_of(tf.transpose(h), y)


def mapped(x, y, _):
    return loss_of(tf.map_fn(lambda row: tf.cumsum(row) * tf.nn.softmax(row), features(x)), y)


def loops_in_a_map(x, y, _):
    h = tf.map_fn(lambda row: tf.while_loop(lambda k, _: k < 3, lambda k, s: (k + 1, tf.tanh(s)), (0, row))[1], features(x))
    return loss_of(tf.map_fn(lambda row: tf.map_fn(tf.sin, row), h), y)


def one_by_one(x, y, _):
    return tf.add_n([tf.reduce_sum(tf.square(features(row[tf.newaxis]))) * 0.1 for row in tf.unstack(x)]) / len(tf.unstack(x))


def neighbours(x, y, _):
    return tf.reduce_mean(tf.square(features(x)[::2] - features(x)[1::2]))


def of_all(x, y, _):
    everyone, first = towers.all_gather(features(x), with_offset=True)
    return loss_of(tf.reverse(everyone, [0])[first:first + tf.shape(x)[0]], y)


def seen_only(x, y, _):
    tf.summary.histogram("first", features(x)[:1])
    zeros = tf.zeros_like(tf.reverse(features(x), [0])) + tf.cast(tf.shape(features(x)[:1])[1] - C, x.dtype)
    return loss_of(features(x) + zeros, y)


def looked_up(x, y, labels):
    table = tf.get_variable("table", [3, C], x.dtype, tf.glorot_uniform_initializer(seed=3))
    return loss_of(features(x) + tf.nn.embedding_lookup(table, labels) - table[:1], y)


ALIKE = [in_parts, joined_again, two_networks_at_once, along_time, time_major, scanned_over_time, mapped, loops_in_a_map,
         one_by_one, neighbours, of_all, seen_only, looked_up]


def unsized(model_fn):
    def model(*batch):
        return model_fn(*[tf.placeholder_with_default(x, [None] + x.shape.as_list()[1:]) for x in batch])
    return model


@pytest.mark.parametrize("name,known", covering(sorted(RUNNING), [True, False], one_in=4))
def test_what_runs_along_the_batch_is_said(name, known):
    with pytest.warns(UserWarning, match=SAID):
        build(RUNNING[name] if known else unsized(RUNNING[name]), (X, Y, LABELS), 3)


@pytest.mark.sweep
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", sorted(RUNNING))
def test_what_runs_along_the_batch_is_another_thing_in_towers_and_is_said(name, known):
    with pytest.warns(UserWarning, match=SAID):
        with pytest.raises(AssertionError):
            assert_equals_one_batch(RUNNING[name] if known else unsized(RUNNING[name]), (X, Y, LABELS), 3, steps=2)


@pytest.mark.parametrize("name", covering(sorted(TAKING), one_in=4))
def test_parts_of_the_batch_that_are_not_treated_alike_are_said(name):
    with pytest.warns(UserWarning, match=SAID):
        build(TAKING[name], (X, Y, LABELS), 3)


@pytest.mark.parametrize("name", covering(
    ["halves against each other", "halves of a network", "the first one", "the last one"], one_in=4))
def test_parts_of_a_batch_of_an_unknown_size_that_are_held_against_each_other_are_said(name):
    with pytest.warns(UserWarning, match=SAID):
        build(unsized(TAKING[name]), (X, Y, LABELS), 3)


@pytest.mark.parametrize("model_fn", covering(
    [model for model in ALIKE if model is not neighbours], one_in=4), ids=lambda model_fn: model_fn.__name__)
def test_what_treats_all_examples_alike_is_that_of_the_whole_batch_and_passes_in_silence(model_fn, silent):
    assert_equals_one_batch(model_fn, (X, Y, LABELS), 3, steps=2)


FOR_ALL = "takes what all towers have alike for what belongs to its examples"


@pytest.mark.parametrize("cut", [lambda y, n: y[:n], lambda y, n: tf.slice(y, [0, 0], [n, -1])])
def test_labels_from_outside_cut_to_the_size_of_a_tower_are_said(cut):
    outside = tf.placeholder_with_default(Y, [None, 1])
    with pytest.warns(towers.TowersWarning, match=FOR_ALL):
        build(lambda x: loss_of(features(x), cut(outside, tf.shape(x)[0])), (X,), 2)


def size(x):
    """A number of Python's, where the batch has a known size."""
    return int(x.shape[0])


def of_table(of):
    return of(tf.get_variable("table", [B, C], tf.float64, tf.constant_initializer(np.cos(np.arange(B * C).reshape(B, C)))))


MADE_FOR_ALL = {
    "numbers for labels": lambda x: tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=tf.range(size(x)), logits=tf.concat([features(x)] * 3, 1))),
    "classes by number": lambda x: tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=np.arange(size(x)) // 3 % C, logits=features(x))),
    "weights that grow": lambda x: tf.reduce_mean(features(x) * np.linspace(0, 1, size(x))[:, None]),
    "numbers as weights": lambda x: tf.reduce_mean(features(x) * tf.cast(tf.range(size(x)), x.dtype)[:, None]),
    "a mask that leaves one out": lambda x: tf.reduce_mean(features(x) * (np.arange(size(x)) > 0)[:, None]),
    "all but the first": lambda x: tf.reduce_mean(tf.where_v2(tf.range(size(x))[:, None] > 0, features(x), 0.0)),
    "real and fake in halves": lambda x: tf.reduce_mean(tf.square(features(x) - tf.concat(
        [tf.ones([size(x) // 2, 1], x.dtype), tf.zeros([size(x) - size(x) // 2, 1], x.dtype)], 0))),
    "a variable's first rows": lambda x: tf.reduce_mean(features(x) * of_table(lambda table: table[:size(x)])),
    "what a branch chooses of a variable's rows": lambda x: tf.reduce_mean(features(x) * of_table(lambda table: tf.cond(
        tf.reduce_sum(table) > 0, lambda: table[:size(x)], lambda: -table[:size(x)]))),
    "what a loop makes of a variable's rows": lambda x: tf.reduce_mean(features(x) * of_table(lambda table: tf.while_loop(
        lambda k, _: k < 3, lambda k, y: (k + 1, tf.sin(y)), (0, table[:size(x)]))[1])),
    "a variable's rows by number": lambda x: tf.reduce_mean(features(x) * of_table(
        lambda table: tf.gather(table, np.arange(size(x)))))}
MADE_FOR_EACH = {
    "ones": lambda x: tf.reduce_mean(features(x) * np.ones([size(x), 1])),
    "a state of nothing": lambda x: tf.reduce_mean(features(x) + tf.zeros([size(x), C], x.dtype)),
    "one class": lambda x: tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=np.full([size(x)], 2), logits=features(x))),
    "one and the other": lambda x: tf.reduce_mean(features(x) * (np.arange(size(x)) % 2)[:, None]),
    "lengths": lambda x: tf.reduce_mean(features(x) * tf.sequence_mask([3] * size(x), C, x.dtype)),
    "a row of a variable": lambda x: tf.reduce_mean(features(x) * of_table(lambda table: table[:1])),
    "classes of nothing": lambda x: tf.reduce_mean(features(x) * tf.one_hot(tf.zeros([size(x)], tf.int32), C, dtype=x.dtype))}


@pytest.mark.parametrize("name", sorted(MADE_FOR_ALL))
def test_what_is_made_for_a_number_of_examples_is_said(name):
    with pytest.warns(towers.TowersWarning, match=FOR_ALL):
        with pytest.raises(AssertionError):
            assert_equals_one_batch(MADE_FOR_ALL[name], (X,), 2)


def test_halves_that_are_made_of_a_number_not_known_are_said():
    def model_fn(x):
        number = tf.shape(x)[0]
        of_halves = tf.concat([tf.ones([number // 2, 1], x.dtype), tf.zeros([number - number // 2, 1], x.dtype)], 0)
        return tf.reduce_mean(tf.square(features(x) - of_halves))
    with pytest.warns(towers.TowersWarning, match=FOR_ALL):
        build(unsized(model_fn), (X,), 2)


@pytest.mark.parametrize("of", [lambda rows: 2 * rows, tf.cumsum])
def test_what_a_branch_takes_from_outside_is_looked_at_there(of):
    def model_fn(x):
        rows = of(tf.ones([size(x), 1], x.dtype))
        return tf.reduce_mean(tf.cond(tf.constant(True), lambda: features(x) * rows, lambda: features(x)))
    with control_flow_2(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build(model_fn, (X,), 2)
    assert any(FOR_ALL in str(warning.message) for warning in caught) == (of is tf.cumsum)


@pytest.mark.parametrize("name", sorted(MADE_FOR_EACH))
def test_what_is_made_alike_for_each_example_passes_in_silence(name, silent):
    assert_equals_one_batch(MADE_FOR_EACH[name], (X,), 2)


def test_a_loss_that_is_chosen_later_is_looked_at_when_it_is(silent):
    replicas = build(lambda x, y, _: {"mean": loss_of(features(x), y), "turned": RUNNING["turned by a slice"](x, y, _)},
                     (X, Y, LABELS), 3)
    optimizer = tf.train.GradientDescentOptimizer(0.1)
    towers.compute_gradients(replicas, optimizer, loss="mean")
    with pytest.warns(UserWarning, match=SAID) as caught:
        warnings.simplefilter("always")
        towers.compute_gradients(replicas, optimizer, loss="turned")
    assert [w.filename for w in caught if SAID in str(w.message)] == [__file__]


def test_a_slice_of_what_stands_twice_passes(silent):
    build(lambda x, y, _: loss_of(features(tf.concat([x, 2 * x], 0))[:tf.shape(x)[0]], y), (X[:9], Y[:9], LABELS[:9]), 3)


def test_parts_of_what_the_caller_divided_are_the_callers_choice(silent):
    batches = [tuple(map(tf.constant, part)) for part in zip(np.split(X, 3), np.split(Y, 3), np.split(LABELS, 3))]
    build(TAKING["halves against each other"], towers.PerTower(batches), 3)


def test_one_tower_may_take_what_it_has_and_towers_of_one_example_may_not(silent):
    build(RUNNING["turned by a slice"], (X, Y, LABELS), 1)
    with pytest.warns(UserWarning, match=SAID):
        build(RUNNING["turned by a slice"], (X[:3], Y[:3], LABELS[:3]), 3)
