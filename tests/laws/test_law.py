"""The product: N towers train as one tower on the whole batch would."""
import os

import hypothesis
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from hypothesis import strategies as st

import tf_syncbn
import towers
from tests.support import build, images_and_labels, run, train_by, train_plainly
from tests.sweeps import covering
from towers.testing import assert_equals_one_batch

POLICIES = ["first", "all", "last", "none"]
SPLITS = [(1, None), (2, None), (2, [9, 3]), (3, None), (3, [1, 7, 4]), (5, None), (5, [1, 1, 2, 7, 1])]


def convolutional(images, labels):
    """Two convolutions with sync batch norm, ranks 4 and 2."""
    dtype = images.dtype
    x = images
    for i in range(2):
        kernel = tf.get_variable("kernel%d" % i, [3, 3, x.shape[-1], 4], dtype, tf.glorot_uniform_initializer(seed=i))
        x = tf_syncbn.sync_batch_norm(tf.nn.conv2d(x, kernel, [1, 1, 1, 1], "SAME"), momentum=0.9, name="bn%d" % i)
        x = tf.nn.relu(x)
    weights = tf.get_variable("weights", [4, 4], dtype, tf.glorot_uniform_initializer(seed=7))
    bias = tf.get_variable("bias", [4], dtype, tf.zeros_initializer())
    logits = tf_syncbn.sync_batch_norm(tf.matmul(tf.reduce_mean(x, [1, 2]), weights) + bias, momentum=0.9, name="bn_logits")
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


@pytest.mark.parametrize("split,policy", covering(SPLITS, POLICIES, one_in=2))
def test_float64_trains_as_one_batch_within_1e_9(split, policy):
    assert_equals_one_batch(convolutional, images_and_labels(np.float64), *split, policy)


def test_one_tower_trains_as_tensorflow_does_without_towers():
    batch = images_and_labels(np.float64)

    def model(images, labels):
        kernel = tf.get_variable("kernel", [3, 3, 3, 4], tf.float64, tf.glorot_uniform_initializer(seed=3))
        x = tf.nn.conv2d(images, kernel, [1, 1, 1, 1], "SAME")
        x = tf.nn.relu(tf_syncbn.sync_batch_norm(x, training=True))
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=tf.reduce_mean(x, [1, 2])))

    with tf.Graph().as_default():
        losses, before, after = train_plainly(model(*map(tf.constant, batch)), tf.train.MomentumOptimizer(0.1, 0.9), 5)
    for num_towers in (1, 3):
        with tf.Graph().as_default():
            replicas = build(model, batch, num_towers)
            train_op = towers.minimize(replicas, tf.train.MomentumOptimizer(0.1, 0.9))
            ours = train_by(train_op, replicas.loss, 5, before)
        np.testing.assert_allclose(ours[0], losses, rtol=1e-12)
        assert set(ours[2]) == set(after)
        for name in after:
            np.testing.assert_allclose(ours[2][name], after[name], rtol=1e-10, atol=1e-12, err_msg=name)


def everything(batch):
    """What the law has to survive: all_reduce, second derivatives, IndexedSlices, an unused variable, a scalar."""
    x, ids, rate = batch["x"], batch["ids"], batch["rate"]
    initializer = tf.glorot_uniform_initializer(seed=2)
    embedding = tf.get_variable("embedding", [7, 5], tf.float64, initializer)
    tf.get_variable("unused", [3], tf.float64, initializer)
    weights = tf.get_variable("weights", [5, 4], tf.float64, initializer, regularizer=lambda w: 0.01 * tf.nn.l2_loss(w))
    scale = tf.Variable(np.linspace(0.5, 1.5, 4), name="scale")
    h = tf_syncbn.sync_batch_norm(tf.matmul(x + tf.nn.embedding_lookup(embedding, ids), weights), name="bn")
    whole = towers.all_reduce(tf.reduce_sum(h, 0)) / towers.all_reduce(tf.cast(tf.shape(h)[0], tf.float64))
    h = tf.tanh(h * scale + whole ** 2)
    critic = tf.reduce_sum(h * tf.sin(h), 1)
    slopes = tf.gradients(critic, x)[0]
    tf.losses.add_loss(tf.reduce_mean(tf.square(tf.sqrt(tf.reduce_sum(slopes ** 2, 1)) - 1)) * rate)
    tf.losses.add_loss(tf.reduce_mean(critic))
    return tf.losses.get_total_loss()


@pytest.mark.laws
@pytest.mark.parametrize("num_towers,sizes", [
    (3, [2, 8, 1]), pytest.param(2, None, marks=pytest.mark.sweep), pytest.param(5, None, marks=pytest.mark.sweep)])
def test_law_holds_for_all_reduce_gradient_penalty_embedding_unused_variable_and_total_loss(num_towers, sizes):
    rng = np.random.RandomState(4)
    batch = {"x": rng.randn(11, 5), "ids": rng.randint(0, 7, 11), "rate": np.float64(0.3)}
    found = assert_equals_one_batch(everything, batch, num_towers, sizes)
    assert max(found.loss, found.gradients, found.variables) < 1e-9


@pytest.mark.laws
@hypothesis.settings(max_examples=int(os.environ.get("HYPOTHESIS_CASES", 5)))
@hypothesis.given(data=st.data())
def test_law_holds_for_any_split(data):
    count = data.draw(st.integers(2, 9))
    num_towers = data.draw(st.integers(1, min(count, 4)))
    cuts = sorted(data.draw(st.lists(st.integers(1, count - 1), unique=True, min_size=num_towers - 1, max_size=num_towers - 1)))
    sizes = [int(n) for n in np.diff([0] + cuts + [count])]
    x = np.random.RandomState(data.draw(st.integers(0, 99))).randn(count, 3)

    def model(x):
        weights = tf.get_variable("weights", [3, 2], tf.float64, tf.glorot_uniform_initializer(seed=1))
        y = tf_syncbn.sync_batch_norm(tf.matmul(x, weights))
        return tf.reduce_mean(tf.square(tf.sin(y) - x[:, :2]))

    assert_equals_one_batch(model, (x,), num_towers, sizes, data.draw(st.sampled_from(POLICIES)), steps=2)


def test_weight_in_the_outputs_replaces_the_number_of_examples():
    rng = np.random.RandomState(0)
    x, valid = rng.randn(10, 3), (rng.rand(10) < 0.6).astype(np.float64)

    def model(x, valid):
        weights = tf.get_variable("weights", [3, 1], tf.float64, tf.glorot_uniform_initializer(seed=1))
        losses = tf.square(tf.matmul(tf_syncbn.sync_batch_norm(x), weights)[:, 0] - 1)
        return {"loss": tf.reduce_sum(losses * valid) / tf.reduce_sum(valid), "weight": tf.reduce_sum(valid)}

    assert_equals_one_batch(model, (x, valid), 3)


def test_empty_tower_counts_nothing_though_its_loss_is_nan():
    x = np.random.RandomState(0).randn(3, 4)

    def model(x):
        weights = tf.get_variable("weights", [4, 2], tf.float64, tf.glorot_uniform_initializer(seed=1))
        scale = tf.get_variable("scale", [], tf.float64, tf.ones_initializer())
        y = tf_syncbn.sync_batch_norm(tf.matmul(x, weights), training=True)
        return tf.reduce_mean(tf.sin(y) * y) * scale

    with tf.Graph().as_default():
        expected = train_plainly(model(tf.constant(x)), tf.train.MomentumOptimizer(0.1, 0.9), 3)
    for static in (True, False):
        with tf.Graph().as_default():
            if static:
                batch = towers.PerTower([(x[:2],), (x[2:2],), (x[2:],)])
            else:
                batch = (tf.placeholder_with_default(x, [None, 4]),)
            replicas = build(model, batch, 3 if static else 5)
            train_op = towers.minimize(replicas, tf.train.MomentumOptimizer(0.1, 0.9))
            ours = train_by(train_op, replicas.loss, 3, expected[1])
        np.testing.assert_allclose(ours[0], expected[0], rtol=1e-12)
        for name in expected[2]:
            np.testing.assert_allclose(ours[2][name], expected[2][name], rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.filterwarnings("ignore:The gradient of replicas.loss")
def test_gradients_of_towers_in_any_order_twice_and_of_their_sum_agree():
    x = np.random.RandomState(0).randn(6, 4)

    def model(x):
        weights = tf.get_variable("weights", [4, 2], tf.float64, tf.glorot_uniform_initializer(seed=1))
        return tf.reduce_mean(tf.sin(tf_syncbn.sync_batch_norm(tf.matmul(x, weights), training=True)) ** 3)

    replicas = build(model, (x,), 3)
    weights, = [v for v in tf.trainable_variables() if v.op.name == "weights"]
    with tf.variable_scope("", reuse=True):
        expected = tf.gradients(model(tf.constant(x)), weights)[0]
    backwards = [tf.gradients(replicas[i].loss, weights)[0] for i in (2, 0, 1)]
    again = [tf.gradients(replicas[i].loss, weights)[0] for i in (1, 2, 0)]
    of_sum = tf.gradients(replicas.loss, weights)[0]
    with_towers = [pairs[0][0] for pairs in towers.compute_gradients(replicas, tf.train.GradientDescentOptimizer(1.0), [weights])]
    results = run([expected, tf.add_n(backwards) / 3, tf.add_n(again) / 3, of_sum, tf.add_n(with_towers) / 3])
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=1e-10, atol=1e-14)


@pytest.mark.laws
def test_tower_whose_weight_is_zero_though_it_has_rows_counts_nothing():
    rng = np.random.RandomState(0)
    x, valid = rng.randn(9, 3), np.array([1, 1, 1, 0, 0, 0, 1, 0, 1.0])

    def model(x, valid):
        weights = tf.get_variable("weights", [3, 2], tf.float64, tf.glorot_uniform_initializer(seed=1))
        y = tf_syncbn.sync_batch_norm(tf.matmul(tf_syncbn.sync_batch_norm(x), weights))
        y += 0.1 * towers.all_reduce(tf.reduce_sum(y ** 2, 0))
        losses = tf.reduce_sum(y ** 2, 1)
        return {"loss": tf.div_no_nan(tf.reduce_sum(losses * valid), tf.reduce_sum(valid)), "weight": tf.reduce_sum(valid)}

    assert_equals_one_batch(model, (x, valid), 3, [3, 3, 3])


# In float32 towers may differ by as much as the order of sums does, which is most where their sizes do.
@pytest.mark.laws
@pytest.mark.parametrize("split,policy", [
    pytest.param(split, policy, marks=() if (split, policy) == ((3, [1, 7, 4]), "first") else pytest.mark.sweep)
    for split in SPLITS for policy in POLICIES])
def test_float32_law_holds_for_every_split_and_policy(split, policy):
    assert_equals_one_batch(convolutional, images_and_labels(np.float32), *split, policy)


def test_law_holds_where_towers_differ_in_height_and_width():
    rng = np.random.RandomState(0)
    parts = [rng.randn(2, 4, 5, 3), rng.randn(1, 7, 2, 3)]
    replicas = build(lambda x: tf_syncbn.sync_batch_norm(x), towers.PerTower(parts), 2)
    rows = np.concatenate([part.reshape(-1, 3) for part in parts])
    for ours, part in zip(run([tower.outputs for tower in replicas]), parts):
        np.testing.assert_allclose(ours, (part - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-3), atol=1e-12)
