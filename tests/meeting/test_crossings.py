"""What convert_model finds no batch norm in, and one tower would compute of the whole batch, is computed of all towers'."""
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
from tests.support import build
from tests.conversion.test_conversion import by_moments
from towers.testing import assert_equals_one_batch

X = np.random.RandomState(0).randn(7, 4, 3)


def normalized(x, mean, variance):
    return (x - mean) * tf.rsqrt(variance + 1e-3)


def of_mask(x):
    mask = tf.broadcast_to(x[:, :, :1] > -0.5, tf.shape(x))
    count = tf.reduce_sum(tf.cast(mask[:, :, 0], x.dtype))
    mean = tf.reduce_sum(tf.where(mask, x, tf.zeros_like(x)), [0, 1]) / count
    return normalized(x, mean, tf.reduce_sum(tf.where(mask, (x - mean) ** 2, tf.zeros_like(x)), [0, 1]) / count)


def of_chosen(x):
    chosen = x[:, 0, 0] > -0.5
    mean = tf.reduce_mean(tf.boolean_mask(x, chosen), [0, 1])
    return normalized(x, mean, tf.reduce_mean(tf.boolean_mask(x - mean, chosen) ** 2, [0, 1]))


def one_sided(x):
    centred = x - tf.reduce_mean(x, [0, 1])
    return centred * tf.rsqrt(tf.reduce_mean(tf.nn.relu(centred) ** 2, [0, 1]) + 1e-3)


def of_absolute_values(x):
    centred = x - tf.reduce_mean(x, [0, 1])
    return centred / (tf.reduce_mean(tf.abs(centred), [0, 1]) + 1e-3)


def of_a_stopped_gradient(x):
    return (x - tf.reduce_mean(x, [0, 1])) / (tf.math.reduce_std(tf.stop_gradient(x), [0, 1]) + 1e-3)


def mean_beside_flat_deviation(x):
    return (x - tf.reduce_mean(x, [0, 1])) / (tf.math.reduce_std(tf.reshape(x, [-1, 3]), 0) + 1e-3)


def with_more_under_the_root(x):
    mean, variance = tf.nn.moments(x, [0, 1])
    return normalized(x, mean, variance + tf.reduce_mean(tf.sin(x) ** 2, [0, 1]))


def by_einsum(x):
    rows = tf.reshape(x, [-1, 3])
    centred = rows - tf.reduce_mean(rows, 0)
    variance = tf.einsum("nc,nc->c", centred, centred) / tf.cast(tf.shape(rows)[0], x.dtype)
    return tf.reshape(centred * tf.rsqrt(variance + 1e-3), tf.shape(x))


def whitened(x):
    rows = tf.reshape(x, [-1, 3])
    centred = rows - tf.reduce_mean(rows, 0)
    covariance = tf.matmul(centred, centred, transpose_a=True) / tf.cast(tf.shape(rows)[0], x.dtype)
    root = tf.linalg.cholesky(covariance + 1e-3 * tf.eye(3, dtype=x.dtype))
    return tf.reshape(tf.transpose(tf.linalg.triangular_solve(root, tf.transpose(centred))), tf.shape(x))


def by_classes(x, count):
    """Each example by how many of the batch are of its class."""
    classes = tf.cast(x[:, 0, 0] > 0, tf.int32)
    return x / (1 + tf.cast(tf.gather(count(classes), classes), x.dtype))[:, None, None]


def by_unique_classes(x):
    _, which, counts = tf.unique_with_counts(tf.cast(x[:, 0, 0] > 0, tf.int32))
    return x / (1 + tf.cast(tf.gather(counts, which), x.dtype))[:, None, None]


CROSSING = [by_unique_classes,
            lambda x: by_classes(x, lambda classes: tf.bincount(classes, minlength=2)),
            lambda x: x * (1 / (1 + tf.bincount(tf.cast(x[:, 0, 0] > 0, tf.int32), minlength=3, dtype=x.dtype))),
            lambda x: by_classes(x, lambda classes: tf.histogram_fixed_width(classes, [0, 2], 2)),
            of_mask, of_chosen, one_sided, of_absolute_values, of_a_stopped_gradient, mean_beside_flat_deviation,
            with_more_under_the_root, by_einsum, whitened,
            lambda x: x / tf.math.reduce_euclidean_norm(x, [0, 1]),
            lambda x: x / tf.sqrt(tf.reduce_max(x * x, [0, 1]) + 1e-3),
            lambda x: x * tf.rsqrt(2 * tf.nn.l2_loss(x)),
            lambda x: x - tf.reduce_mean(x, [0, 1]),
            lambda x: x - x[0]]

# Written out for each example of a batch of known size: the whole batch has more of them than a tower.
WRITTEN_OUT = [lambda x: x + tf.stack([x[i] - x[0] for i in range(x.shape[0])]),
               lambda x: x - tf.reduce_mean(tf.sin(tf.concat(tf.split(x, int(x.shape[0])), 0)), [0, 1])]

if not tf.control_flow_v2_enabled():
    CROSSING += [lambda x: x + tf.scan(lambda state, row: 0.5 * state + row, x)]


def of_each(x, take=tf.unstack, join=tf.stack):
    """What is made of each example, one by one, and joined in their order."""
    return x + join([tf.reduce_mean(row, -2, keepdims=True) for row in take(x)])


def of_own_kernels(x):
    """Each example convolved with a kernel of its own, and added to a bias of its own: what is computed of it, in pieces."""
    size = int(x.shape[0])
    routes = tf.nn.sigmoid(tf.reduce_mean(x, 1))
    kernels = tf.split(tf.matmul(routes, tf.get_variable("experts", [3, 2 * 3 * 3], x.dtype)), size)
    biases = tf.split(tf.matmul(routes, tf.get_variable("biases", [3, 3], x.dtype)), size)
    return tf.concat([tf.nn.bias_add(tf.nn.conv1d(piece, tf.reshape(kernel, [2, 3, 3]), 1, "SAME"), tf.squeeze(bias, axis=0))
                      for piece, kernel, bias in zip(tf.split(x, size), kernels, biases)], 0)


def model_of(layer):
    def model_fn(x):
        y = x * tf.get_variable("scale", [3], x.dtype, tf.ones_initializer())
        with tf.name_scope("mine"):
            y = layer(y)
        return tf.reduce_mean(tf.sin(by_moments(y, "bn")) ** 2)
    return model_fn


@pytest.mark.parametrize("layer", CROSSING)
def test_what_takes_all_examples_and_comes_back_to_them_trains_as_one_tower_does(layer):
    converted = tf_syncbn.convert_model(model_of(layer))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_equals_one_batch(converted, (X,), 2, [2, 5], steps=2)
    # What is whole in every tower by then is normalized in each.
    assert layer is whitened or "bn" in [layer.scope for layer in converted.converted]


@pytest.mark.parametrize("layer", [
    lambda x: [tf.summary.histogram("centred", x - tf.reduce_mean(x, 0)), tf_syncbn.sync_batch_norm(x)][1],
    lambda x: [tf.summary.histogram("classes", tf.bincount(tf.cast(x[:, 0, 0] > 0, tf.int32), minlength=2)), x][1],
    lambda x: x * tf.cast(tf.bincount(tf.constant([0, 1, 1, 2]), minlength=3), x.dtype),
    lambda x: x + 0 * tf.stop_gradient(tf.cast(tf.shape(x)[0], x.dtype))])
def test_what_stands_beside_a_batch_norm_is_let_be(layer):
    converted = tf_syncbn.convert_model(model_of(layer))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        build(converted, (X,), 2)
    assert [layer.scope for layer in converted.converted] == ["bn"]


def test_what_only_leaves_out_is_said_nothing_of():
    converted = tf_syncbn.convert_model(model_of(of_mask), only="^bn$")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        build(converted, (X,), 2)
    assert [layer.scope for layer in converted.converted] == ["bn"]


@pytest.mark.parametrize("layer", WRITTEN_OUT + [
    of_each, lambda x: of_each(x, lambda x: tf.split(x, int(x.shape[0])), lambda rows: tf.concat(rows, 0)), of_own_kernels])
def test_what_is_written_out_for_each_example_trains_as_one_tower_does(layer):
    assert_equals_one_batch(tf_syncbn.convert_model(model_of(layer)), (X,), 2, [2, 5], steps=2)


def test_what_each_example_is_held_against_again_needs_towers_of_as_many():
    def layer(x):
        return x + tf.stack([row - tf.reduce_mean(tf.unstack(x), 0) for row in tf.unstack(x)])
    converted = tf_syncbn.convert_model(model_of(layer))
    assert_equals_one_batch(converted, (X[:6],), 2, [3, 3], steps=2)
    with pytest.raises(ValueError, match="towers would meet otherwise than tower 0"):
        build(converted, (X,), 2)


def test_a_batch_of_unknown_size_is_sliced():
    converted = tf_syncbn.convert_model(model_of(lambda x: tf.concat([x[:, :2], x[:, 2:]], 1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        build(converted, (tf.placeholder(tf.float64, [None, 4, 3]),), 2)
    assert [layer.scope for layer in converted.converted] == ["bn"]
