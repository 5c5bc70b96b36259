"""recalibrate: exact moments of batches in the moving averages, and nothing else changed."""
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import build, cpus, has_tf_layers, session
from tests.sweeps import covering
from tests.conversion.test_conversion import by_moments, fused, inline, model_of

K, ROWS = 5, 7


def batches(shape=(4, 3, 2), count=K):
    rng = np.random.RandomState(0)
    return [(rng.randn(ROWS, *shape) * [1, 10] + [3, -100 - 20 * k]).astype(np.float32) for k in range(count)]


def fed(model_fn, num_towers=2, **kwargs):
    """Builds towers on a placeholder; returns them and a function of the batch's number that feeds it."""
    x = tf.placeholder(tf.float32, [None, 4, 3, 2])
    data = batches()
    return build(model_fn, (x,), num_towers, **kwargs), lambda number: {x: data[number]}


def synced(x, name="bn", **kwargs):
    return tf_syncbn.sync_batch_norm(x, momentum=0.9, name=name, **kwargs)


def values_of_all(made):
    return made.run({v.op.name: v for v in tf.global_variables()})


def pooled(data):
    """Mean and unbiased variance of all values, float64."""
    wide = np.concatenate(data).astype(np.float64).reshape([-1, 2])
    return wide.mean(0), wide.var(0, ddof=1)


@pytest.mark.parametrize("model_fn,num_towers", covering([
    lambda x: synced(x), lambda x: synced(x, updates_collections=None),
    tf_syncbn.convert_model(lambda x: fused(x, "bn")), tf_syncbn.convert_model(lambda x: inline(x, "bn"))], [3, 1],
    also=lambda model_fn, num_towers: num_towers == 3))
def test_moments_equal_numpys_over_the_same_batches(model_fn, num_towers):
    replicas, feed = fed(model_fn, num_towers)
    with session() as made:
        found = tf_syncbn.recalibrate(made, replicas, K, feed)
        stored = values_of_all(made)
    mean, variance = pooled(batches())
    for name, wanted in (("bn/moving_mean", mean), ("bn/moving_variance", variance)):
        np.testing.assert_allclose(found[name], wanted, rtol=1e-6)
        np.testing.assert_allclose(stored[name], wanted, rtol=1e-6)
    assert set(found) == {"bn/moving_mean", "bn/moving_variance"}


@pytest.mark.parametrize("num_towers", [pytest.param(1, marks=pytest.mark.sweep), 2])
def test_layers_of_moments_take_the_biased_variance(num_towers):
    replicas, feed = fed(tf_syncbn.convert_model(lambda x: by_moments(x, "bn")), num_towers)
    with session() as made:
        found = tf_syncbn.recalibrate(made, replicas, K, feed)
    wide = np.concatenate(batches()).astype(np.float64).reshape([-1, 2])
    np.testing.assert_allclose(found["bn/moving_variance"], wide.var(0), rtol=1e-6)


def test_later_layers_see_what_training_would_and_uneven_batches_weigh_by_their_size():
    x = tf.placeholder(tf.float32, [None, 4, 3, 2])
    data = [batch[:size] for batch, size in zip(batches(), (7, 2, 5, 3, 6))]
    replicas = build(lambda x: synced(tf.sin(synced(x, "bn1")), "bn2"), (x,), 2)
    with session() as made:
        found = tf_syncbn.recalibrate(made, replicas, K, lambda number: {x: data[number]})
    seen = []
    for batch in data:
        wide = batch.astype(np.float64)
        axes = (0, 1, 2)
        seen.append(np.sin((wide - wide.mean(axes)) / np.sqrt(wide.var(axes) + 1e-3)))
    for layer, inputs in (("bn1", data), ("bn2", seen)):
        mean, variance = pooled(inputs)
        np.testing.assert_allclose(found[layer + "/moving_mean"], mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found[layer + "/moving_variance"], variance, rtol=1e-5)


def test_every_other_variable_stays_as_it_is():
    def model_fn(x):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(
            tf.get_variable("steps", [], initializer=tf.zeros_initializer(), trainable=False), 1.0))
        return tf.reduce_mean(synced(x * tf.get_variable("w", [2])) ** 2)

    replicas, feed = fed(model_fn)
    towers.minimize(replicas, tf.train.MomentumOptimizer(0.1, 0.9))
    with session() as made:
        before = values_of_all(made)
        found = tf_syncbn.recalibrate(made, replicas, K, feed)
        after = values_of_all(made)
    assert set(found) == {"bn/moving_mean", "bn/moving_variance"} and "w/Momentum" in after
    for name in set(after) - set(found):
        np.testing.assert_array_equal(before[name], after[name])
    assert all((before[name] != after[name]).all() for name in found)


def test_inline_updates_of_layers_left_out_change_nothing():
    replicas, feed = fed(tf_syncbn.convert_model(lambda x: fused(inline(x, "bn1"), "bn2"), only="bn2"))
    with session() as made:
        before = values_of_all(made)
        found = tf_syncbn.recalibrate(made, replicas, K, feed)
        after = values_of_all(made)
    assert set(found) == {"bn2/moving_mean", "bn2/moving_variance"}
    for name in set(after) - set(found):
        np.testing.assert_array_equal(before[name], after[name])


def test_masked_positions_and_empty_batches_count_nothing():
    x, mask = tf.placeholder(tf.float32, [None, 4, 3, 2]), tf.placeholder(tf.bool, [None, 4, 3])
    replicas = build(lambda x, mask: synced(x, mask=mask), (x, mask), 2)
    data, rng = batches(), np.random.RandomState(1)
    masks = [rng.rand(ROWS, 4, 3) > 0.4 for _ in data[:-1]] + [np.zeros([ROWS, 4, 3], bool)]
    with session() as made:
        found = tf_syncbn.recalibrate(made, replicas, K, lambda number: {x: data[number], mask: masks[number]})
        before = values_of_all(made)
        assert tf_syncbn.recalibrate(made, replicas, 1, {x: data[0], mask: masks[-1]}) == {}
        after = values_of_all(made)
    mean, variance = pooled([batch[valid] for batch, valid in zip(data, masks)])
    np.testing.assert_allclose(found["bn/moving_mean"], mean, rtol=1e-6)
    np.testing.assert_allclose(found["bn/moving_variance"], variance, rtol=1e-6)
    assert all((before[name] == after[name]).all() for name in before)


def test_a_layer_applied_twice_takes_the_moments_of_both():
    def model_fn(x):
        return synced(x, "bn") + synced(2 * x, "bn", reuse=True)

    replicas, feed = fed(model_fn)
    with session() as made:
        found = tf_syncbn.recalibrate(made, replicas, K, feed)
    mean, _ = pooled(batches() + [2 * batch for batch in batches()])
    np.testing.assert_allclose(found["bn/moving_mean"], mean, rtol=1e-6)


def test_renormalized_layers_take_standard_deviations_too():
    replicas, feed = fed(lambda x: synced(x, renorm=True))
    with session() as made:
        found = tf_syncbn.recalibrate(made, replicas, K, feed)
    wide = np.concatenate(batches()).astype(np.float64).reshape([-1, 2])
    wanted = {"moving_mean": wide.mean(0), "moving_variance": wide.var(0), "renorm_mean": wide.mean(0),
              "moving_stddev": np.sqrt(wide.var(0) + 1e-3), "renorm_stddev": np.sqrt(wide.var(0) + 1e-3)}
    assert set(found) == {"bn/" + name for name in wanted}
    for name in wanted:
        np.testing.assert_allclose(found["bn/" + name], wanted[name], rtol=1e-6)


def test_layers_outside_of_towers_are_recalibrated_without_towers():
    x = tf.placeholder(tf.float32, [None, 4, 3, 2])
    synced(x, training=True)
    with session() as made:
        found = tf_syncbn.recalibrate(made, None, K, lambda number: {x: batches()[number]})
    np.testing.assert_allclose(found["bn/moving_mean"], pooled(batches())[0], rtol=1e-6)


@pytest.mark.skipif(not has_tf_layers(), reason="this TensorFlow has no tf.layers")
@pytest.mark.parametrize("kwargs, unbiased", [({}, True), ({"fused": False}, False)])
def test_converted_tf_layers_are_recalibrated(kwargs, unbiased):
    replicas, feed = fed(tf_syncbn.convert_model(
        lambda x: tf.layers.batch_normalization(x, training=True, name="bn", **kwargs)))
    with session() as made:
        found = tf_syncbn.recalibrate(made, replicas, K, feed)
    wide = np.concatenate(batches()).astype(np.float64).reshape([-1, 2])
    np.testing.assert_allclose(found["bn/moving_mean"], wide.mean(0), rtol=1e-6)
    np.testing.assert_allclose(found["bn/moving_variance"], wide.var(0, ddof=int(unbiased)), rtol=1e-6)


def test_a_model_with_stale_moving_averages_regains_its_accuracy():
    rng = np.random.RandomState(0)
    labels = rng.randint(0, 3, 240)
    images = (rng.randn(240, 6) + 2 * np.eye(3)[labels].repeat(2, 1) * [1, -1, 1, -1, 1, -1] + 30).astype(np.float32)

    def model_fn(x, labels):
        w = tf.get_variable("w", [6, 8], None, tf.glorot_uniform_initializer(seed=5))
        h = tf_syncbn.sync_batch_norm(tf.matmul(x, w), momentum=0.9999, name="bn")
        logits = tf.matmul(tf.nn.relu(h), tf.get_variable("v", [8, 3], None, tf.glorot_uniform_initializer(seed=2)))
        right = tf.cast(tf.equal(tf.argmax(logits, 1, output_type=tf.int32), labels), tf.float32)
        return {"loss": tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)),
                "accuracy": tf.reduce_mean(right)}

    batch = (tf.constant(images), tf.constant(labels.astype(np.int32)))
    tf.set_random_seed(1)
    replicas = build(model_fn, batch, 3)
    train_op = towers.minimize(replicas, tf.train.MomentumOptimizer(0.3, 0.9))
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
        accuracy = build(model_fn, batch, 3, training=False).merged()["accuracy"]
    with session() as made:
        for _ in range(40):
            made.run(train_op)
        stale, training = made.run([accuracy, replicas.merged()["accuracy"]])
        tf_syncbn.recalibrate(made, replicas, 1)
        regained = made.run(accuracy)
    assert stale < 0.6 and training > 0.9 and regained > training - 0.02


def test_input_that_ends_early_changes_nothing():
    data = tf.data.Dataset.from_tensor_slices(np.stack(batches()[:3]))
    batch = tf.data.make_one_shot_iterator(data).get_next()
    replicas = build(lambda x: synced(x, updates_collections=None), (batch,))
    with session() as made:
        before = values_of_all(made)
        with pytest.raises(ValueError, match="the input ended after 3 of 5 batches; no moving average was changed"):
            tf_syncbn.recalibrate(made, replicas, K)
        after = values_of_all(made)
    assert all((before[name] == after[name]).all() for name in before)


def test_moments_that_are_not_finite_change_nothing():
    replicas, feed = fed(synced)
    with session() as made:
        before = values_of_all(made)
        with pytest.raises(ValueError, match="the moments of 'bn' are not finite; no moving average was changed"):
            tf_syncbn.recalibrate(made, replicas, 1, {k: v * np.inf for k, v in feed(0).items()})
        after = values_of_all(made)
    assert all((before[name] == after[name]).all() for name in before)


def test_nothing_to_recalibrate_is_an_error():
    replicas, _ = fed(synced, training=False)
    with session() as made:
        with pytest.raises(ValueError, match="finds no layers with moving averages in these towers: build them with"):
            tf_syncbn.recalibrate(made, replicas, 1)
        with pytest.raises(ValueError, match="finds no layers with moving averages in the graph outside of towers"):
            tf_syncbn.recalibrate(made, None, 1)


@pytest.mark.parametrize("num_batches", [0, -1, 2.5, None])
def test_a_number_of_batches_that_is_none_is_refused(num_batches):
    with pytest.raises(ValueError, match="averages over 1 batch or more, not"):
        tf_syncbn.recalibrate(None, None, num_batches)


def test_arguments_in_another_order_are_refused():
    replicas, feed = fed(synced)
    with session() as made:
        with pytest.raises(TypeError, match="takes a session and the towers, or None, not Towers.* and <.*Session"):
            tf_syncbn.recalibrate(replicas, made, 1, feed)


@pytest.mark.parametrize("use_resource", [False, True])
def test_variables_that_start_from_a_checkpoint_are_set(use_resource, tmp_path):
    with tf.variable_scope("", use_resource=use_resource):
        replicas, feed = fed(synced)
    with session() as made:
        path = tf.train.Saver().save(made, str(tmp_path / "model"))
    tf.train.init_from_checkpoint(path, {"/": "/"})
    with session() as made:
        found = tf_syncbn.recalibrate(made, replicas, K, feed)
        assert found.keys() == {"bn/moving_mean", "bn/moving_variance"}
        stored = values_of_all(made)
    np.testing.assert_allclose(stored["bn/moving_mean"], pooled(batches())[0], rtol=1e-6)


@pytest.mark.skipif(not has_tf_layers(), reason="this TensorFlow has no tf.layers")
@pytest.mark.parametrize("num_towers", [pytest.param(1, marks=pytest.mark.sweep), 2])
def test_layers_that_update_inside_a_cond_are_recalibrated(num_towers):
    training = tf.placeholder_with_default(True, [])
    replicas, feed = fed(tf_syncbn.convert_model(lambda x: tf.layers.batch_normalization(
        x, training=training, momentum=0.9, fused=False, name="bn")), num_towers)
    with session() as made:
        found = tf_syncbn.recalibrate(made, replicas, K, feed)
    wide = np.concatenate(batches()).astype(np.float64).reshape([-1, 2])
    assert found.keys() == {"bn/moving_mean", "bn/moving_variance"}
    np.testing.assert_allclose(found["bn/moving_mean"], wide.mean(0), rtol=1e-6)
    np.testing.assert_allclose(found["bn/moving_variance"], wide.var(0), rtol=1e-6)


@pytest.mark.skipif(not tf.__version__.startswith("1."), reason="only TensorFlow 1 has tf.contrib")
@pytest.mark.parametrize("kwargs", [{}, {"updates_collections": None}, {"fused": False, "updates_collections": None}])
def test_contrib_layers_whose_mode_is_fed_are_recalibrated(kwargs):
    def model_fn(x):
        from tensorflow.contrib import layers
        return layers.batch_norm(x, is_training=tf.placeholder_with_default(True, []), scope="bn", **kwargs)

    replicas, feed = fed(tf_syncbn.convert_model(model_fn))
    with session() as made:
        found = tf_syncbn.recalibrate(made, replicas, K, feed)
    np.testing.assert_allclose(found["bn/moving_mean"], pooled(batches())[0], rtol=1e-6)


def test_moments_that_feed_more_than_two_averages_are_refused_by_name():
    def model_fn(x):
        y, *moments = tf.nn.fused_batch_norm(x, tf.ones([2]), tf.zeros([2]))
        for name, moment in zip(("mean", "variance", "slow_mean"), moments + moments):
            variable = tf.get_variable(name, [2], initializer=tf.zeros_initializer(), trainable=False)
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_sub(variable, 0.1 * (variable - moment)))
        return y

    replicas, _ = fed(tf_syncbn.convert_model(model_fn))
    with session() as made:
        with pytest.raises(ValueError, match="feed mean, slow_mean, variance, and which of them averages what is unknown"):
            tf_syncbn.recalibrate(made, replicas, 1)


def test_layers_without_moving_averages_are_passed_over():
    replicas, feed = fed(lambda x: synced(synced(x, "bn1", updates_collections=()), "bn2"))
    with session() as made:
        assert set(tf_syncbn.recalibrate(made, replicas, 1, feed(0))) == {"bn2/moving_mean", "bn2/moving_variance"}


def test_whole_models_are_recalibrated_by_layers():
    replicas, feed = fed(tf_syncbn.convert_model(model_of(fused)))
    with session() as made:
        found = tf_syncbn.recalibrate(made, replicas, K, feed)
    assert set(found) == {"bn%d/moving_%s" % (i, m) for i in (1, 2) for m in ("mean", "variance")}


def test_session_of_another_graph_than_the_towers_is_named():
    with tf.Graph().as_default():
        replicas = build(lambda x: tf_syncbn.sync_batch_norm(x), (tf.ones([4, 3]),))
    with session() as made:
        with pytest.raises(ValueError, match="recalibrate: the towers were built in another graph than.*as_default"):
            tf_syncbn.recalibrate(made, replicas, 1)
    with tf.Session(graph=replicas[0].outputs.graph, config=towers.session_config(cpus(2))) as made:
        with made.graph.as_default():
            made.run(tf.global_variables_initializer())
        assert tf_syncbn.recalibrate(made, replicas, 1)  # whatever the default graph is
