"""The laws of sync_batch_norm, on batches, towers, masks, groups, dtypes and kernels that Hypothesis draws.

`tests.batch_norm_cases` draws and runs them, `tests.batch_norm_tolerance` says what they come to and how near.
"""
import os

import hypothesis
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from hypothesis import strategies as st

from tests.batch_norm_cases import apply_layer, build_towers, cases, feed, make_data, run_layer, tower_index
from tests.batch_norm_oracle import gradients, largest, normalized, numerical_gradient
from tests.batch_norm_tolerance import assert_law, expect, expect_in_steps
from tests.support import session

CASES = int(os.environ.get("HYPOTHESIS_CASES", 8))
FEW = hypothesis.settings(max_examples=CASES)
FEWER = hypothesis.settings(max_examples=max(CASES // 8, 3))  # for what builds two graphs


@FEW
@hypothesis.given(cases(trainings=(True, True, "fed True", "fed False", False)))
def test_values_gradients_and_moving_averages_are_numpys(case):
    data = make_data(case)
    ours = run_layer(case, data)
    assert_law(case, data, ours, expect(case, data))
    if not case.is_trained:
        assert (ours["moving_mean"] == data.moving_mean).all() and (ours["moving_variance"] == data.moving_variance).all()


@pytest.mark.laws
@FEW
@hypothesis.given(cases(few_values=True, trainings=(True, "fed True"), mean_over_std=(0.0, 1.0, 10.0, 1e2, 1e3, 1e4)))
def test_few_values_and_large_means_are_as_near_as_the_same_steps_come_in_numpy(case):
    data = make_data(case, few_values=True)
    ours = run_layer(case, data)
    assert (ours["moving_variance"] >= 0).all()
    assert_law(case, data, ours, expect(case, data), expect_in_steps(case, data))


@pytest.mark.laws
@FEWER
@hypothesis.given(cases(), st.data())
def test_another_split_of_the_batch_changes_nothing(case, draws):
    case, rows = case._replace(group_size=None, outside=False), case.shape[0]
    cuts = sorted(draws.draw(st.lists(st.integers(0, rows), max_size=4)))
    data, sizes = make_data(case), np.diff([0] + cuts + [rows]).tolist()
    assert_law(case, data, run_layer(case._replace(sizes=sizes), data), run_layer(case, data))


def second_derivatives(case, data):
    """Returns the gradients of sum(dx^2) by x and by gamma, where dx is that of sum(y^3 dy)."""
    with tf.Graph().as_default():
        fed = feed(case, data)

        def penalty(x):
            y = apply_layer(case, data, x, fed)
            return tf.reduce_sum(tf.square(tf.gradients(y ** 3, x, fed.dys[tower_index()])[0]))

        penalties, _ = build_towers(penalty, case, fed)
        slopes = tf.gradients(penalties, fed.xs + [v for v in tf.trainable_variables() if "gamma" in v.op.name])
        with session() as made:
            slopes = made.run(slopes, fed.feed_dict)
    return [np.concatenate(slopes[:len(fed.xs)])] + slopes[len(fed.xs):]


@pytest.mark.laws
@FEWER
@hypothesis.given(cases(trainings=(True, "fed True", "fed False"), dtypes=("float64",), poison=False))
def test_second_derivatives_over_towers_are_those_of_one_tower(case):
    case = case._replace(group_size=None, outside=False)
    data = make_data(case)
    one_tower = second_derivatives(case._replace(sizes=case.shape[:1], outside=True), data)
    for ours, wanted in zip(second_derivatives(case, data), one_tower):
        assert largest(ours - wanted) <= 1e-9 * largest(wanted)


@hypothesis.given(cases(dtypes=("float64",)))
def test_the_two_oracles_agree_in_float64(case):
    data = make_data(case)
    assert_law(case, data, expect_in_steps(case, data), expect(case, data))


def test_the_oracles_gradients_are_difference_quotients_of_its_values():
    rng = np.random.RandomState(0)
    x, dy, gamma, beta, weights = rng.randn(7, 2, 3), rng.randn(7, 2, 3), rng.randn(2), rng.randn(2), rng.rand(7, 3)

    def loss(x, gamma, beta):
        return (normalized(x, 1, gamma, beta, weights, [3])[0] * dy).sum()

    dx, d_gamma, d_beta = gradients(x, dy, 1, gamma, weights, [3])
    np.testing.assert_allclose(dx, numerical_gradient(lambda x: loss(x, gamma, beta), x), atol=1e-8)
    np.testing.assert_allclose(d_gamma, numerical_gradient(lambda gamma: loss(x, gamma, beta), gamma), atol=1e-8)
    np.testing.assert_allclose(d_beta, numerical_gradient(lambda beta: loss(x, gamma, beta), beta), atol=1e-8)
