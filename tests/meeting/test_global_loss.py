"""The gradient of the global loss: exact to any order, and never in silence without the towers' update ops."""
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import build, run, session

X = np.random.RandomState(0).randn(6, 3)
WORDS = r"The gradient of replicas.loss \('global_loss/loss'\) is taken and nothing waits for the update ops of its towers, " \
        r"'tower_0/.* among them.*never updated. Use towers.minimize\(replicas, optimizer\), or.*collect_update_ops"


def sgd():
    return tf.train.GradientDescentOptimizer(0.1)


def plain(x):
    """An ordinary moving average, as tf.layers and slim keep it."""
    mean = tf.get_variable("mean", [3], tf.float64, tf.zeros_initializer(), trainable=False)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(mean, 0.9 * mean + 0.1 * tf.reduce_mean(x, 0)))
    w = tf.get_variable("w", [3], tf.float64, tf.ones_initializer())
    return tf.reduce_mean(tf.sin(x * w) ** 3)


def synced(x):
    w = tf.get_variable("w", [3], tf.float64, tf.ones_initializer())
    return tf.reduce_mean(tf.sin(tf_syncbn.sync_batch_norm(x * w + x ** 2)) ** 3)


@pytest.fixture
def silent():
    """Makes every warning of ours an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning, message="(?s).*(replicas|towers)")
        yield


@pytest.mark.parametrize("model", [plain, synced])
@pytest.mark.parametrize("num_towers", [1, 2])
def test_training_by_the_global_loss_alone_is_warned_of_once_where_it_is_written(model, num_towers):
    replicas = build(model, (X,), num_towers)
    with pytest.warns(UserWarning, match=WORDS) as warned:
        sgd().minimize(replicas.loss)
        sgd().minimize(replicas.loss)
    assert [w.filename for w in warned if "replicas.loss" in str(w.message)] == [__file__]


def test_gradients_by_hand_are_warned_of():
    replicas = build(plain, (X,))
    with pytest.warns(UserWarning, match=WORDS):
        tf.gradients(3 * replicas.loss ** 2, tf.trainable_variables())


def under(updates):
    def train(replicas):
        with tf.control_dependencies(updates(replicas)):
            return sgd().minimize(replicas.loss)
    return train


def through_a_barrier(replicas):
    """As slim.learning.create_train_op does."""
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        barrier = tf.no_op()
    with tf.control_dependencies([barrier]):
        loss = tf.identity(replicas.loss)
    return sgd().minimize(loss), loss


def scaled_under_updates(replicas):
    with tf.control_dependencies(towers.collect_update_ops(replicas)):
        return tf.gradients(replicas.loss, tf.trainable_variables(), grad_ys=tf.constant(2.0, tf.float64))


def after_minimize(replicas):
    train_op = towers.minimize(replicas, sgd())
    tf.gradients(replicas.loss, tf.trainable_variables())
    return train_op


@pytest.mark.parametrize("model", [plain, synced])
@pytest.mark.parametrize("train", [
    under(towers.collect_update_ops), under(lambda replicas: tf.get_collection(tf.GraphKeys.UPDATE_OPS)),
    under(lambda replicas: [tf.group(*towers.collect_update_ops(replicas, "last"))]), through_a_barrier, scaled_under_updates,
    after_minimize, lambda replicas: towers.minimize(replicas, sgd())])
def test_training_that_runs_the_update_ops_passes_in_silence(model, train, silent):
    replicas = build(model, (X,))
    train_op = train(replicas)
    with session() as made:
        moving = [v for v in tf.global_variables() if v not in tf.trainable_variables()]
        before = made.run(moving)
        made.run(train_op)
        assert all((old != new).any() for old, new in zip(before, made.run(moving)))


def test_loss_that_waits_for_its_updates_passes_in_silence(silent):
    def model(x):
        loss = plain(x)
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            return tf.identity(loss)

    with pytest.warns(UserWarning, match="Each tower writes the variable"):
        replicas = build(model, (X,))
    sgd().minimize(replicas.loss)


@pytest.mark.parametrize("model,training", [
    (lambda x: tf.reduce_mean(x * tf.get_variable("w", [3], tf.float64)), True), (synced, False)])
def test_loss_of_towers_without_update_ops_passes_in_silence(model, training, silent):
    replicas = build(model, (X,), training=training)
    assert "_gradient_op_type" not in replicas.loss.op.node_def.attr
    sgd().minimize(replicas.loss)


@pytest.mark.filterwarnings("ignore:The gradient of replicas.loss")
@pytest.mark.parametrize("model", [plain, synced])
def test_value_and_derivatives_of_any_order_are_exact(model):
    replicas = build(model, towers.PerTower([(X[:1],), (X[1:],)]))
    by_hand = sum(tower.weight * tower.loss for tower in replicas)
    w, = [v for v in tf.trainable_variables() if v.op.name == "w"]
    derivatives = []
    for loss in (replicas.loss, by_hand):
        orders = [loss]
        for _ in range(3):
            orders.append(tf.gradients(tf.reduce_sum(orders[-1] ** 2), w)[0])
        derivatives.append(orders)
    for ours, expected in zip(*run(derivatives)):
        np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-12)


def test_gradient_in_an_imported_graph_is_as_it_was(silent):
    replicas = build(plain, (X,))
    tf.add_to_collection("loss", replicas.loss)
    meta_graph = tf.train.export_meta_graph()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = run(tf.gradients(replicas.loss, tf.trainable_variables()))
    with tf.Graph().as_default():
        tf.train.import_meta_graph(meta_graph)
        loss, = tf.get_collection("loss")
        np.testing.assert_array_equal(run(tf.gradients(loss, tf.trainable_variables())), expected)
