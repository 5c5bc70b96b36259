"""Gradients accumulated over several batches, against one step on the batch that holds them all."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests.support import build, cpus, session, set_variables

RNG = np.random.RandomState(5)
X, LABELS = RNG.randn(24, 4), RNG.randint(0, 3, 24)
OPTIMIZERS = {"momentum": lambda: tf.train.MomentumOptimizer(0.2, 0.9), "adam": lambda: tf.train.AdamOptimizer(0.05)}


def model(x, labels):
    hidden = tf.tanh(tf.matmul(x, tf.get_variable("v", [4, 5], tf.float64)))
    logits = tf.matmul(hidden, tf.get_variable("w", [5, 3], tf.float64))
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def initial_weights():
    rng = np.random.RandomState(2)
    return {"v": rng.randn(4, 5), "w": rng.randn(5, 3)}


def train(batches, optimizer, transforms=(), num_towers=2, model_fn=model):
    """Returns the trained weights, and the steps that were counted, after batches of numbers of examples."""
    with tf.Graph().as_default():
        x, labels = tf.placeholder(tf.float64, [None, 4]), tf.placeholder(tf.int64, [None])
        replicas = build(model_fn, (x, labels), num_towers)
        global_step = tf.train.get_or_create_global_step()
        train_op = towers.minimize(replicas, optimizer(), transforms=list(transforms), global_step=global_step)
        with session() as made:
            set_variables(made, initial_weights())
            for examples in batches:
                made.run(train_op, {x: X[examples], labels: LABELS[examples]})
            return made.run([tf.trainable_variables(), global_step])


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("num_towers", [1, 3])
def test_unequal_batches_train_as_the_one_that_holds_them(optimizer, num_towers):
    parts = [slice(0, 5), slice(5, 12), slice(12, 14), slice(14, 20), slice(20, 21), slice(21, 24)]
    got, steps = train(parts, OPTIMIZERS[optimizer], [towers.accumulate(3)], num_towers)
    wanted, _ = train([slice(0, 14), slice(14, 24)], OPTIMIZERS[optimizer], (), 1)
    for a, b in zip(got, wanted):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)
    assert steps == 2


def test_nothing_is_trained_between():
    got, steps = train([slice(0, 8), slice(8, 16)], OPTIMIZERS["adam"], [towers.accumulate(3)])
    for value, initial in zip(got, initial_weights().values()):
        np.testing.assert_array_equal(value, initial)
    assert steps == 0


def test_what_comes_after_acts_on_the_mean_and_what_comes_before_on_each_batch():
    halves, optimizer, clip = [slice(0, 12), slice(12, 24)], OPTIMIZERS["momentum"], towers.clip_by_value(-.01, .01)
    after, _ = train(halves, optimizer, [towers.accumulate(2), clip])
    wanted, _ = train([slice(0, 24)], optimizer, [clip])
    before, _ = train(halves, optimizer, [clip, towers.accumulate(2)])
    for a, b, other in zip(after, wanted, before):
        np.testing.assert_allclose(a, b, rtol=1e-12)
        assert np.abs(a - other).max() > 1e-5


def test_variables_keep_the_names_that_they_have_without():
    for optimizer in OPTIMIZERS.values():
        names = []
        for transforms in ([], [towers.accumulate(2)]):
            with tf.Graph().as_default():
                towers.minimize(build(model, (X, LABELS)), optimizer(), transforms=transforms)
                names.append({variable.op.name for variable in tf.global_variables()})
        assert names[1] - names[0] == {"v/accumulated_gradient", "w/accumulated_gradient", "accumulated_batches",
                                       "accumulated_weight"}
        assert not names[0] - names[1]


def test_a_checkpoint_between_goes_on_as_if_never_stopped(tmp_path):
    results = []
    for stop in (False, True):
        with tf.Graph().as_default():
            x, labels = tf.placeholder(tf.float64, [None, 4]), tf.placeholder(tf.int64, [None])
            train_op = towers.minimize(build(model, (x, labels)), OPTIMIZERS["adam"](), transforms=[towers.accumulate(3)])
            saver, made = tf.train.Saver(), session()
            set_variables(made, initial_weights())
            for i in range(6):
                made.run(train_op, {x: X[4 * i:4 * i + 4], labels: LABELS[4 * i:4 * i + 4]})
                if stop and i == 3:
                    path = saver.save(made, str(tmp_path / "model"))
                    made = session()
                    saver.restore(made, path)
            results.append(made.run(tf.trainable_variables()))
    for a, b in zip(*results):
        np.testing.assert_array_equal(a, b)


def test_slices_become_dense():
    def table_model(ids):
        table = tf.get_variable("table", [6, 2], tf.float64, tf.zeros_initializer())
        return tf.reduce_mean(tf.reduce_sum(tf.nn.embedding_lookup(table, ids), 1))

    ids = tf.placeholder(tf.int64, [None])
    train_op = towers.minimize(build(table_model, (ids,)), tf.train.GradientDescentOptimizer(1.0),
                               transforms=[towers.accumulate(2)])
    with session() as made:
        for batch in ([0, 1, 1], [1, 4, 4, 4, 5]):
            made.run(train_op, {ids: batch})
        table = made.run(tf.trainable_variables())[0]
    np.testing.assert_allclose(table, -np.repeat([[1], [3], [0], [0], [3], [1]], 2, 1) / 8, rtol=1e-12)


def test_layers_that_take_a_batch_together_are_named():
    def normalizes(x, labels):
        with tf.name_scope("norm"):
            x = tf.reshape(x, [-1, 1, 1, 4])
            x, mean, _ = tf.nn.fused_batch_norm(tf.cast(x, tf.float32), tf.ones([4]), tf.zeros([4]))
            moving = tf.get_variable("moving", [4], trainable=False)
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(moving, mean))
        with tf.name_scope("center"):
            x -= towers.all_reduce(tf.reduce_mean(x, 0, keepdims=True), "mean")
        return model(tf.cast(tf.reshape(x, [-1, 4]), tf.float64), labels)

    with pytest.warns(UserWarning, match=r"accumulate\(2\): 'center/all_reduce', 'norm' take the examples of one batch together"):
        towers.minimize(build(normalizes, (X, LABELS)), OPTIMIZERS["adam"](), transforms=[towers.accumulate(2)])


@pytest.mark.parametrize("transforms", [[towers.accumulate(1)], [towers.accumulate(2)]])
def test_a_model_without_such_layers_gets_no_warning(transforms, recwarn):
    def counts(x, labels):
        steps = tf.get_variable("steps", [], tf.int64, tf.zeros_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(steps, 1))
        return model(x, labels)

    towers.minimize(towers.TowerBuilder(cpus(2)).build(counts, (X, LABELS)), OPTIMIZERS["adam"](), transforms=transforms)
    assert not [w for w in recwarn if "accumulate" in str(w.message)]


def test_numbers_that_are_none_are_refused():
    with pytest.raises(TypeError, match="the number of batches has to be an integer, not 2.0"):
        towers.accumulate(2.0)
    with pytest.raises(TypeError, match="not True"):
        towers.accumulate(True)
    with pytest.raises(ValueError, match="the number of batches has to be 1 or more, not 0"):
        towers.accumulate(0)
