"""Losses that keep the number of a tower's own examples: said where no mean over towers is one tower's, and nowhere else."""
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.support import SAID, build
from tests.plain_towers.test_summed_losses import C, X, curves, decay, number, of_unknown_size, squares, turned, weights
from towers.testing import assert_equals_one_batch


def mask(x):
    return tf.cast(x[:, 1:2] > -0.5, x.dtype)


def positive(x):
    return tf.reduce_sum(mask(x))


MEANS = {
    "divided": lambda x: tf.reduce_mean(squares(x)) / number(x),
    "divided, beside another": lambda x: tf.reduce_mean(squares(x)) + 0.1 * (tf.reduce_mean(curves(x)) / number(x)),
    "times it": lambda x: tf.reduce_mean(squares(x)) * number(x),
    "times its inverse": lambda x: (1 / number(x)) * tf.reduce_mean(squares(x)),
    "of sums, divided": lambda x: tf.reduce_mean(tf.reduce_sum(squares(x), 1)) / number(x),
    "of what is divided": lambda x: tf.reduce_mean(squares(x) / number(x)),
    "of what is multiplied": lambda x: tf.reduce_mean(tf.reduce_sum(squares(x) * number(x), 1)),
    "divided by what is counted": lambda x: {"loss": tf.reduce_mean(squares(x)) / positive(x), "weight": positive(x)},
    "time first, divided": lambda x: tf.reduce_mean(turned(x)) / number(x),
    "times a share of another number": lambda x: tf.reduce_mean(squares(x)) * (number(x) / (number(x) + 10)),
    "of squares, divided twice": lambda x: tf.reduce_mean(tf.square(squares(x))) / number(x) / number(x)}
SUMS = {
    "divided twice": lambda x: tf.reduce_sum(squares(x)) / number(x) / number(x),
    "by its square": lambda x: tf.reduce_sum(squares(x)) / number(x) ** 2,
    "by the square of it": lambda x: tf.reduce_sum(squares(x)) / tf.square(number(x)),
    "by its root": lambda x: tf.reduce_sum(squares(x)) / tf.sqrt(number(x)),
    "times one over its root": lambda x: tf.reduce_sum(squares(x)) * tf.rsqrt(number(x)),
    "by one less": lambda x: tf.reduce_sum(squares(x)) / (number(x) - 1),
    "by one more": lambda x: tf.reduce_sum(squares(x)) / (1 + number(x)),
    "times a quotient of it by itself": lambda x: tf.reduce_sum(squares(x)) * (number(x) / number(2 * x)),
    "multiplied and divided": lambda x: tf.reduce_sum(squares(x)) * number(x) / number(x),
    "by what is counted and their number": lambda x: {
        "loss": tf.reduce_sum(mask(x) * squares(x)) / tf.maximum(positive(x), 1) / number(x), "weight": positive(x)},
    "of what is divided, divided": lambda x: tf.reduce_sum(squares(x) / number(x)) / number(x),
    "of squares, divided twice": lambda x: tf.nn.l2_loss(squares(x)) / number(x) / number(x)}
# Of a size that is not known: numbers that are no power of it.
OF_NUMBERS = {
    "by the larger of it and a number": lambda x: tf.reduce_sum(squares(x)) / tf.maximum(number(x), 100),
    "by what is between two numbers": lambda x: tf.reduce_sum(squares(x)) / tf.clip_by_value(number(x), 5, 100),
    "times a number and a share": lambda x: tf.reduce_sum(squares(x)) * (0.005 + 1 / number(x)),
    "by how many pairs there are": lambda x: tf.reduce_sum(squares(x)) / tf.cast(
        tf.shape(x)[0] * (tf.shape(x)[0] - 1) // 2, x.dtype),
    "by a third of it, cut": lambda x: tf.reduce_sum(squares(x)) / tf.cast(tf.cast(0.4 * number(x), tf.int32), x.dtype),
    "by all places of a square": lambda x: tf.reduce_sum(squares(x)) / tf.reduce_sum(
        tf.ones([tf.shape(x)[0], tf.shape(x)[0]], x.dtype)),
    "a mean of as many copies of each": lambda x: tf.reduce_mean(tf.reduce_sum(
        tf.tile(squares(x)[:, :1], [1, tf.shape(x)[0]]), 1)),
    "by a half of it, cut": lambda x: tf.reduce_sum(squares(x)) / tf.cast(tf.shape(x)[0] // 2, x.dtype),
    "a mean times what is left of it": lambda x: tf.reduce_mean(squares(x)) * tf.cast(tf.shape(x)[0] % 5 + 1, x.dtype),
    "a mean times how far it is from a number": lambda x: tf.reduce_mean(squares(x)) * tf.cast(
        tf.abs(tf.shape(x)[0] - 5), x.dtype),
    "a mean times its product with itself": lambda x: tf.reduce_mean(squares(x)) * tf.cast(
        tf.reduce_prod([tf.shape(x)[0], tf.shape(x)[0]]), x.dtype),
    "a mean times a power of a number": lambda x: tf.reduce_mean(squares(x)) * tf.pow(
        tf.constant(1.1, x.dtype), number(x))}
OF_VARIABLES = {
    "times it": lambda x: tf.reduce_mean(squares(x)) + decay() * number(x),
    "times it, by a number": lambda x: tf.reduce_mean(squares(x)) + tf.nn.l2_loss(weights()) * number(x) / 1000.0}

RIGHT = {
    "a mean times a number": lambda x: tf.reduce_mean(squares(x)) * 5,
    "a mean by a number": lambda x: tf.reduce_mean(squares(x)) / 12,
    "a mean times it over it": lambda x: tf.reduce_mean(squares(x)) * number(x) / number(x),
    "a mean times what goes by it": lambda x: tf.reduce_mean(tf.reduce_sum(squares(x), 1)) * (
        number(x) / tf.maximum(number(x), 1)),
    "a mean by all examples": lambda x: tf.reduce_mean(squares(x)) / towers.all_reduce(number(x)),
    "a mean by it and the towers": lambda x: tf.reduce_mean(squares(x)) / number(x) / towers.current_tower().num_towers,
    "a sum by its square times it": lambda x: tf.reduce_sum(squares(x)) / number(x) ** 2 * number(x),
    "a sum by it, kept from 0": lambda x: tf.reduce_sum(squares(x)) / (number(x) + 1e-12),
    "a sum by two roots": lambda x: tf.reduce_sum(squares(x) * tf.rsqrt(number(x))) / tf.sqrt(number(x)),
    "a mean of what is multiplied by parts that are divided": lambda x: tf.reduce_mean(
        number(x) * (squares(x) * (curves(x) / number(x)))),
    "a mean by the number of classes": lambda x: tf.reduce_mean(squares(x)) / tf.cast(tf.shape(x)[1], x.dtype),
    "a mean by the number of weights": lambda x: tf.reduce_mean(squares(x)) / tf.cast(tf.shape(weights())[0], x.dtype),
    "a mean of each example's, by its own number": lambda x: tf.reduce_mean(
        tf.reduce_sum(squares(x), 1) / (1 + tf.reduce_sum(tf.cast(x > 0, x.dtype), 1))),
    "0 and a sum, by it": lambda x: (0.0 + tf.reduce_sum(squares(x))) / number(x),
    "a mean times a quotient of it by itself": lambda x: tf.reduce_mean(squares(x)) * (number(x) / number(2 * x)),
    "a decay": lambda x: tf.reduce_mean(squares(x)) + decay()}


KINDS = {"a mean over them": MEANS, "a sum over them": SUMS, "what is of variables alone": OF_VARIABLES}
WRONG = [(kind, name) for kind, models in KINDS.items() for name in sorted(models)]
SIZES = [[6, 6], [3, 1, 8]]


def assert_is_said(kind, model, sizes):
    with pytest.warns(UserWarning, match=SAID):
        build(model, towers.PerTower([(part,) for part in np.split(X, np.cumsum(sizes)[:-1])]), len(sizes))


@pytest.mark.parametrize("kind,name", WRONG)
def test_a_loss_that_keeps_the_number_of_a_towers_examples_is_said(kind, name):
    assert_is_said(kind, KINDS[kind][name], SIZES[0])
    assert_is_said(kind, of_unknown_size(KINDS[kind][name]), SIZES[1])


@pytest.mark.parametrize("name", sorted(OF_NUMBERS))
def test_what_is_no_power_of_their_number_is_said(name):
    assert_is_said_and_differs(of_unknown_size(OF_NUMBERS[name]), [3, 1, 8])


def counted(of, weight):
    return lambda x: {"loss": tf.reduce_sum(mask(x) * squares(x)) / of(x), "weight": weight(x)}


OF_OTHER_WEIGHTS = {
    "of what the mask leaves out": counted(lambda x: tf.reduce_sum(1.5 - mask(x)), positive),
    "of one more": counted(lambda x: positive(x) + 1, lambda x: positive(x) + 1),
    "of a hundred at least": counted(positive, lambda x: tf.maximum(positive(x), 100)),
    "of other numbers": counted(lambda x: tf.reduce_sum(mask(x) + 0.3), lambda x: tf.reduce_sum(mask(x) + 0.1))}
WEIGHTS = {
    "of one at least": counted(lambda x: tf.maximum(positive(x), 1), positive),
    "of what the mask leaves out": counted(lambda x: tf.reduce_sum(1.5 - mask(x)), lambda x: tf.reduce_sum(1.5 - mask(x))),
    "of those that are not 0": counted(lambda x: tf.reduce_sum(tf.cast(tf.not_equal(mask(x), 0), x.dtype)), positive),
    "of tf.count_nonzero": counted(lambda x: tf.cast(tf.count_nonzero(mask(x)), x.dtype), positive)}


def assert_is_said_and_differs(model, sizes):
    with pytest.warns(towers.TowersWarning), pytest.raises(AssertionError):
        assert_equals_one_batch(model, (X,), len(sizes), sizes)


@pytest.mark.parametrize("name", sorted(OF_OTHER_WEIGHTS))
def test_a_weight_that_is_not_what_the_loss_is_a_mean_over_is_said(name):
    assert_is_said_and_differs(OF_OTHER_WEIGHTS[name], [6, 6])


@pytest.mark.parametrize("name", sorted(WEIGHTS))
def test_a_weight_that_is_what_the_loss_is_a_mean_over_passes_in_silence(name, silent):
    assert_equals_one_batch(WEIGHTS[name], (X,), 2, [7, 5])


@pytest.mark.sweep
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind,name", WRONG)
def test_a_loss_that_keeps_the_number_of_a_towers_examples_is_not_one_towers_and_is_said(kind, name, sizes):
    model = KINDS[kind][name]
    for each in (model, of_unknown_size(model)):
        assert_is_said(kind, each, sizes)
    with pytest.raises(AssertionError), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert_equals_one_batch(model, (X,), len(sizes), sizes)


@pytest.mark.parametrize("name", sorted(RIGHT))
def test_what_keeps_none_of_it_is_one_towers_and_passes_in_silence(name):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*" + SAID)
        build(RIGHT[name], (X,), 2)
        build(of_unknown_size(RIGHT[name]), (X,), 3)


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(set(RIGHT) - {"a mean by it and the towers"}))
@pytest.mark.parametrize("num_towers", [2, 3])
def test_what_keeps_none_of_it_trains_as_one_tower(name, num_towers):
    for model in (RIGHT[name], of_unknown_size(RIGHT[name])):
        assert_equals_one_batch(model, (X,), num_towers)


def test_a_size_of_a_batch_whose_size_is_not_known_is_its_number_too():
    model = of_unknown_size(lambda x: tf.reduce_mean(squares(x)) / tf.cast(tf.size(squares(x)[:, 0]), x.dtype))
    with pytest.warns(UserWarning, match=SAID):
        build(model, (X,), 3)


def test_a_number_that_a_shape_may_have_by_chance_is_none_of_the_examples():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*" + SAID)
        build(lambda x: tf.reduce_mean(squares(x)) / int(x.shape[0]) / C, (X,), 3)
