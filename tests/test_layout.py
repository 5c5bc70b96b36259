"""Layout: along which axes examples lie, held against what values tell in random chains of ops that move axes."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.support import run
from tf_syncbn.conversion.layout import Layout

BATCH = 7  # no other size is a multiple of it


def transpose(x, rng, _):
    return tf.transpose(x, rng.permutation(x.shape.rank))


def insert(x, rng, _):
    return tf.expand_dims(x, rng.randint(x.shape.rank + 1))


def remove(x, rng, _):
    ones = [i for i, size in enumerate(x.shape.as_list()) if size == 1]
    return tf.squeeze(x, [ones[rng.randint(len(ones))]]) if ones and x.shape.rank > 1 else x


def reduce(x, rng, moved):
    """A sum over an axis without examples."""
    others = [i for i in range(x.shape.rank) if i not in moved]
    return tf.reduce_sum(x, others[rng.randint(len(others))], keepdims=rng.rand() < 0.5) if others else x


def join(x, rng, _):
    """Makes one axis of two, by what tf.shape says."""
    if x.shape.rank < 2:
        return x
    i, shape = rng.randint(x.shape.rank - 1), tf.shape(x)
    joined = [-1] if rng.rand() < 0.5 else [shape[i] * shape[i + 1]]
    return tf.reshape(x, tf.concat([shape[:i], joined, shape[i + 2:]], 0))


def divide(x, rng, moved):
    """Makes two axes of one without examples."""
    others = [i for i, size in enumerate(x.shape.as_list()) if i not in moved and size and size % 2 == 0]
    if not others or x.shape.rank > 4:
        return x
    i, shape = others[rng.randint(len(others))], tf.unstack(tf.shape(x))
    return tf.reshape(x, tf.stack(shape[:i] + [2, shape[i] // 2] + shape[i + 1:]) if rng.rand() < 0.5 else
                      shape[:i] + [2, x.shape.as_list()[i] // 2] + shape[i + 1:])


def flatten_and_back(x, _, __):
    return tf.reshape(tf.reshape(x, [-1]), tf.shape(x))


def split(x, rng, _):
    return tf.concat([x, x], rng.randint(x.shape.rank)) if x.shape.rank < 4 else tf.reverse(x, [0])


def multiply(x, rng, _):
    """A product with a matrix, from the right."""
    size = x.shape.as_list()[-1]
    return tf.matmul(x, tf.ones(x.shape.as_list()[:-2] + [size, 4], x.dtype)) if (
        x.shape.rank > 1 and None not in x.shape.as_list()[:-2] + [size] and size % BATCH) else x


def choose(x, rng, _):
    return tf.gather(x, [1, 0, 1][:x.shape.as_list()[-1] or 1], axis=x.shape.rank - 1) if (
        x.shape.as_list()[-1] or 0) > 1 and x.shape.as_list()[-1] % BATCH else x


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("seed", range(15))
def test_examples_lie_where_values_differ(seed, is_known):
    rng = np.random.RandomState(seed)
    value = np.broadcast_to(np.arange(1.0, BATCH + 1).reshape([-1, 1, 1, 1]), [BATCH, 2, 3, 4])
    given = tf.placeholder(tf.float64, [BATCH if is_known else None, 2, 3, 4])
    first_op, tensors = len(tf.get_default_graph().get_operations()), [given]
    moves = [transpose, insert, remove, reduce, join, divide, flatten_and_back, split, multiply, choose]
    moved = [0]
    for _ in range(12):
        move = moves[rng.randint(len(moves))]
        tensors.append(move(tensors[-1], rng, moved))
        moved = _differing(run(tensors[-1], {given: value}))
    layout = Layout(tf.get_default_graph().get_operations()[first_op:], [given])
    for tensor, result in zip(tensors, run(tensors, {given: value})):
        assert layout.axes(tensor) == _differing(result), (tensor.name, tensor.shape, result.shape)


def test_a_reshape_to_an_unknown_size_that_known_ones_stand_before_is_answered():
    """What tf.einsum's gradient of TensorFlow 1.15 makes, and what once was followed for ever."""
    given = tf.placeholder(tf.float64, [None, 3, 5])
    first_op = len(tf.get_default_graph().get_operations())
    flat = tf.reshape(tf.transpose(given, [1, 0, 2]), [tf.shape(given)[0], -1])
    layout = Layout(tf.get_default_graph().get_operations()[first_op:], [given])
    value = run(flat, {given: np.broadcast_to(np.arange(4.0).reshape([4, 1, 1]), [4, 3, 5])})
    assert layout.axes(flat) == _differing(value) == [0, 1]


def _differing(value):
    """Returns the axes along which an array is not constant."""
    return [i for i in range(value.ndim) if np.ptp(value, axis=i).any()]
