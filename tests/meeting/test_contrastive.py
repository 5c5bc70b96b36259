"""Contrastive losses: each row of a tower against the rows of all towers, as one tower on the whole batch has them."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import build, run, session
from tests.sweeps import covering
from towers.testing import assert_equals_one_batch

SPLITS = [(2, None), (3, [1, 5, 2]), (4, [3, 1, 1, 3])]


def encoder(x, scope, is_synced):
    """Two layers, the same variables for all that is encoded in a scope."""
    with tf.variable_scope(scope, reuse=tf.AUTO_REUSE):
        hidden = tf.matmul(x, tf.get_variable("hidden", [x.shape[1], 6], x.dtype, tf.glorot_uniform_initializer(seed=1)))
        if is_synced:
            hidden = tf_syncbn.sync_batch_norm(hidden, name="bn")
        return tf.matmul(tf.tanh(hidden), tf.get_variable("out", [6, 4], x.dtype, tf.glorot_uniform_initializer(seed=2)))


def nt_xent(a, b, temperature=0.5):
    """SimCLR's loss of two views: the mean over the rows of this tower, against the rows of all."""
    a, b = tf.nn.l2_normalize(a, 1), tf.nn.l2_normalize(b, 1)
    all_a, first = towers.all_gather(a, with_offset=True)
    all_b, own = towers.all_gather(b), first + tf.range(tf.shape(a)[0])
    itself = 1e9 * tf.one_hot(own, tf.shape(all_a)[0], dtype=a.dtype)

    def loss(rows, others, same):
        against_same = tf.matmul(rows, same, transpose_b=True) / temperature - itself
        logits = tf.concat([tf.matmul(rows, others, transpose_b=True) / temperature, against_same], 1)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=own, logits=logits))

    return (loss(a, all_b, all_a) + loss(b, all_a, all_b)) / 2


def nt_xent_by_numpy(a, b, temperature=0.5):
    """By the paper: for each of 2n rows, minus the log of its partner's share among all rows but itself."""
    z = np.concatenate([a, b])
    z /= np.sqrt((z ** 2).sum(1, keepdims=True))
    n, similar = len(a), z @ z.T / temperature
    losses = []
    for i in range(2 * n):
        others = [similar[i, k] for k in range(2 * n) if k != i]
        losses.append(np.log(np.exp(others).sum()) - similar[i, (i + n) % (2 * n)])
    return np.mean(losses)


def views(count=8):
    rng = np.random.RandomState(0)
    x = rng.randn(count, 5)
    return x + 0.3 * rng.randn(count, 5), x + 0.3 * rng.randn(count, 5)


@pytest.mark.parametrize("is_synced,split", covering([True, False], SPLITS))
def test_nt_xent_trains_as_one_tower_on_the_whole_batch(split, is_synced):
    def model_fn(a, b):
        return nt_xent(encoder(a, "f", is_synced), encoder(b, "f", is_synced))

    assert_equals_one_batch(model_fn, views(), *split)


@pytest.mark.parametrize("num_towers, sizes", SPLITS)
def test_nt_xent_of_towers_is_that_of_the_paper(num_towers, sizes):
    a, b = views()
    ends = np.cumsum(sizes or [8 // num_towers] * num_towers)
    parts = [(a[start:end], b[start:end]) for start, end in zip([0] + list(ends), ends)]
    ours = run(build(nt_xent, towers.PerTower(parts), num_towers).loss)
    np.testing.assert_allclose(ours, nt_xent_by_numpy(a, b), rtol=1e-12)


def test_nt_xent_gradient_of_towers_is_that_of_numpy_differences():
    a, b = views(6)
    step = 1e-6

    def model_fn(a, b):
        return nt_xent(a * tf.get_variable("scale", [5], tf.float64, tf.ones_initializer()), b)

    replicas = build(model_fn, towers.PerTower([(a[:1], b[:1]), (a[1:], b[1:])]))
    grads = towers.compute_gradients(replicas, tf.train.GradientDescentOptimizer(1.0))
    (gradient, _), = towers.average_gradients(replicas, grads)
    expected = [(nt_xent_by_numpy(a * (1 + d), b) - nt_xent_by_numpy(a * (1 - d), b)) / (2 * step) for d in step * np.eye(5)]
    np.testing.assert_allclose(run(gradient), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("is_synced,split", covering([False, True], SPLITS))
def test_loss_of_two_encoders_trains_as_one_tower_on_the_whole_batch(split, is_synced):
    def model_fn(images, texts):
        images, texts = encoder(images, "images", is_synced), encoder(texts, "texts", is_synced)
        images, texts = tf.nn.l2_normalize(images, 1), tf.nn.l2_normalize(texts, 1)
        scale = tf.exp(tf.get_variable("log_scale", [], tf.float64, tf.constant_initializer(0.7)))
        all_images, first = towers.all_gather(images, with_offset=True)
        own, losses = first + tf.range(tf.shape(images)[0]), []
        for rows, of_all in ((images, towers.all_gather(texts)), (texts, all_images)):
            logits = scale * tf.matmul(rows, of_all, transpose_b=True)
            losses.append(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=own, logits=logits))
        return tf.reduce_mean(losses)

    assert_equals_one_batch(model_fn, views(), *split)


def test_labels_that_count_from_zero_in_each_tower_break_the_law():
    def model_fn(a, b):
        a, b = encoder(a, "f", False), encoder(b, "f", False)
        logits = tf.matmul(a, towers.all_gather(b), transpose_b=True)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tf.range(tf.shape(a)[0]), logits=logits))

    with pytest.raises(AssertionError, match="do not train as one"):
        assert_equals_one_batch(model_fn, views())


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("sizes", [[2, 2, 2], [3, 1, 2], [1, 0, 4], [0, 2, 1]])
def test_offset_is_the_first_row_of_the_towers_own_part(sizes, is_known):
    rows = np.arange(2.0 * sum(sizes)).reshape([-1, 2])
    ends = np.cumsum(sizes)
    parts = [rows[end - size:end] for size, end in zip(sizes, ends)]
    if not is_known:
        parts = [tf.placeholder_with_default(part, [None, 2]) for part in parts]
    replicas = build(lambda x: towers.all_gather(x, with_offset=True), towers.PerTower(parts), len(sizes))
    for size, end, (of_all, first) in zip(sizes, ends, run([tower.outputs for tower in replicas])):
        np.testing.assert_array_equal(of_all, rows)
        assert first == end - size and first.dtype == np.int32


def test_offset_is_zero_outside_of_towers_and_in_one_tower():
    x = np.ones([3, 2])
    of_all, first = run(towers.all_gather(x, with_offset=True))
    assert first == 0 and of_all.shape == (3, 2)
    assert run(build(lambda x: towers.all_gather(x, with_offset=True), (x,), 1)[0].outputs)[1] == 0


def test_offset_has_a_known_shape_and_no_gradient():
    def model_fn(x):
        of_all, first = towers.all_gather(x, with_offset=True)
        assert first.shape.rank == 0 and first.dtype == tf.int32
        assert tf.gradients(tf.cast(first, tf.float64), x) == [None]
        return tf.reduce_sum(of_all)

    build(model_fn, (np.ones([4, 2]),))


def test_a_variable_written_by_the_offset_is_written_by_each_tower_in_their_order():
    """A write that depends on the offset is no write that all towers have in common."""
    def model_fn(x):
        _, first = towers.all_gather(x, with_offset=True)
        total = tf.get_variable("total", [], tf.int32, tf.zeros_initializer(), trainable=False)
        with tf.control_dependencies([tf.assign_add(total, first + 1)]):
            return tf.reduce_mean(x)

    with pytest.warns(UserWarning, match="total"):
        replicas = build(model_fn, (np.ones([6, 2]),), 3)
    with tf.variable_scope("", reuse=True):
        total = tf.get_variable("total", [], tf.int32)
    with session() as made:
        made.run(replicas.loss)
        assert made.run(total) == (0 + 1) + (2 + 1) + (4 + 1)
