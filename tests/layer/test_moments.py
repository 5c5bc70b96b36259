"""Sums and moments of one tower, of more rows than the laws of `sync_batch_norm` draw."""
import hypothesis
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from hypothesis import strategies as st

from tests.batch_norm_oracle import largest
from tests.support import run, session
from tf_syncbn.kernels.graph_function import call
from tf_syncbn.kernels.local_moments import moments_as_it_is, moments_by_differences
from tf_syncbn.kernels.merge import merge
from tf_syncbn.kernels.moments import split
from tf_syncbn.kernels.rows import add_along, known_count, multiply_along
from tf_syncbn.kernels.sums import channel_sums

CHANNELS = 3
# Of means in standard deviations, of variances. float16 is summed in float32.
TOLERANCES = {"float16": (2e-6, 2e-5), "float32": (2e-6, 2e-5), "float64": (1e-14, 1e-13)}
OF_TWO_VALUES = 3  # times as much: the rounding of each sum of equal numbers errs to the same side


@pytest.mark.parametrize("product", [0, 512, 16384])
@pytest.mark.parametrize("count", [1 << 16, (1 << 16) - 1])
def test_sums_of_many_rows_are_nearer_than_row_added_to_row(product, count):
    x = np.square(np.random.RandomState(0).randn(count, 16)).astype(np.float32)
    exact = x.sum(0, dtype=np.float64)
    assert largest(np.add.reduce(x, 0) / exact - 1) > 1e-5  # row to row
    assert largest(run(channel_sums(tf.constant(x), 1, product)) / exact - 1) < 3e-6


@pytest.mark.parametrize("shape", [[64, 3], [63, 3], [4, 3, 600], [0, 3], [8, 2, 0]])
def test_products_with_vectors_are_the_same_by_joined_rows(shape):
    rng = np.random.RandomState(0)
    x, vector = rng.randn(*shape), rng.randn(shape[-1])
    for function, expected in ((add_along, x + vector), (multiply_along, x * vector)):
        np.testing.assert_array_equal(run(function(tf.constant(x), tf.constant(vector), len(shape) - 1, 512)), expected)


def rows_of(count, means, order, dtype=np.float32):
    """Returns `count` rows of channels of standard deviation 1 and the given means."""
    x = np.random.RandomState(count).randn(count, len(means))
    x = (np.sign(x) if order == "of two values" else x) + means
    return (np.sort(x, 0) if order == "sorted" else x).astype(dtype)


def counts_of(x):
    return known_count(x, 1),


@hypothesis.given(st.integers(0, 3000), st.booleans(), st.lists(st.sampled_from([0.0, -1.0, 3.0, 3.9, 4.1, 10.0, 1e2, 1e4]),
                                                                min_size=CHANNELS, max_size=CHANNELS),
                  st.booleans(), st.sampled_from(["drawn", "sorted", "of two values"]), st.sampled_from(sorted(TOLERANCES)),
                  st.sampled_from([0, 64, 128]))
def test_moments_of_rows_as_they_are_are_numpys(count, is_known, means, constant, order, dtype, product):
    x = rows_of(count, means, order, dtype)
    if constant:
        x[:, 0] = means[0]
    with tf.Graph().as_default(), session() as made:
        fed = tf.placeholder(dtype, x.shape if is_known else [None, CHANNELS])
        packed = call(moments_as_it_is, fed, product=product)
        n, mean, variance = made.run(split(merge(packed, channels=CHANNELS, counts=counts_of(fed))), {fed: x})
    assert n == count and (variance >= 0).all()
    if count:
        exact, means = x.astype(np.longdouble), np.abs(means)
        of_mean, of_variance = np.array(TOLERANCES[dtype]) * (OF_TWO_VALUES if order == "of two values" else 1)
        assert (np.abs(mean - exact.mean(0)) <= of_mean * (means + 1)).all()
        rounding = np.square(np.finfo("float64" if dtype == "float64" else "float32").eps * means)  # where a channel is constant
        assert (np.abs(variance - exact.var(0)) <= of_variance * exact.var(0) + rounding).all()
    else:
        assert not mean.any() and not variance.any()


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("count", [162, 500, 5000])
def test_variance_is_right_where_the_rows_that_differences_are_taken_from_are_all_outliers(count, is_known):
    x = np.full([count, CHANNELS], 0.1, np.float32)  # equal numbers: each sum of them errs to the same side
    x[:count // 9] = 9.93
    with tf.Graph().as_default(), session() as made, tf.device("/cpu:0"):
        fed = tf.placeholder(tf.float32, x.shape if is_known else [None, CHANNELS])
        packed = call(moments_by_differences, fed, None, axis=1)
        _, _, variance = made.run(split(merge(packed, channels=CHANNELS, counts=counts_of(fed))), {fed: x})
    assert largest(variance / x.astype(np.float64).var(0) - 1) < 1e-5


@pytest.mark.parametrize("means,number", [
    ([0, 0, 0], 0), ([-3.5, 3.5, 0], 0), ([0, 4.5, 0], 16), ([0, np.nan, 0], 16), ([1e19, 0, 0], 16)])
def test_rows_are_summed_again_where_a_mean_is_large(means, number):
    moments_as_it_is(tf.constant(rows_of(1024, means, "drawn")), 64)
    differences, = [op.outputs[0] for op in tf.get_default_graph().get_operations() if op.type == "BiasAdd"]
    assert run(differences).shape == (number, 64, CHANNELS)
