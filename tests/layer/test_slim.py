"""`tf_syncbn.slim.batch_norm` against contrib's where this TensorFlow has it, and against NumPy everywhere."""
import inspect

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import build, session, set_variables

try:
    from tensorflow.contrib import slim as contrib
except ImportError:
    contrib = None

needs_contrib = pytest.mark.skipif(contrib is None, reason="this TensorFlow has no tf.contrib")
X = np.random.RandomState(0).randn(7, 4, 4, 3).astype(np.float32) * 2 + 3


def results(replicas, updates, made):
    """The output of all towers, and the variables by name after the updates ran."""
    y, _ = made.run([replicas.merged(), updates])
    return y, {v.op.name: made.run(v) for v in tf.global_variables()}


@needs_contrib
def test_arguments_and_defaults_are_contribs():
    ours = inspect.signature(tf_syncbn.slim.batch_norm).parameters
    theirs = inspect.signature(contrib.batch_norm).parameters
    assert [(p.name, p.default) for p in theirs.values()] == [(p.name, p.default) for p in ours.values()][:len(theirs)]
    assert list(ours)[len(theirs):] == ["group_size"]


@needs_contrib
@pytest.mark.parametrize("shape,arguments", [
    ([7, 4, 4, 3], {}),
    ([7, 4, 4, 3], {"scale": True, "decay": 0.5, "epsilon": 0.1}),
    ([7, 4, 4, 3], {"fused": False}),
    ([7, 4, 4, 3], {"updates_collections": None}),
    ([7, 4, 4, 3], {"updates_collections": "mine"}),
    ([7, 4, 4, 3], {"batch_weights": True}),
    ([7, 4, 4, 3], {"renorm": True, "renorm_decay": 0.8, "fused": None, "scale": True}),
    ([7, 4, 4, 3], {"is_training": False}),
    ([7, 4, 3], {"fused": False}),
    ([7, 3], {}),
    ([7, 3], {"fused": False}),
], ids=str)
def test_three_towers_equal_contribs_layer_on_the_whole_batch(shape, arguments):
    x = X[:, :shape[1], :shape[2]] if len(shape) == 4 else X[:, 0, 0] if len(shape) == 2 else X[:, 0]
    weights = np.arange(7, dtype=np.float32)

    def outcome(layer, num_towers):
        def model(x, w):
            given = dict(arguments, batch_weights=w) if "batch_weights" in arguments else arguments
            return layer(x, decay=given.get("decay", 0.9), **{k: v for k, v in given.items() if k != "decay"})

        with tf.Graph().as_default():
            replicas = build(model, (x, weights), num_towers)
            with session() as made:
                if arguments.get("renorm"):
                    set_variables(made, {"BatchNorm/renorm_mean": np.array([2, 3, 4]),
                                         "BatchNorm/renorm_stddev": np.array([1, 2, 3])})
                y = made.run(replicas.merged())
                if arguments.get("updates_collections", "") is not None:
                    updates = tf.get_collection("mine") or towers.collect_update_ops(replicas)
                    assert updates or arguments.get("is_training") is False
                    made.run(updates)
                return y, {v.op.name: made.run(v) for v in tf.global_variables()}

    y, variables = outcome(contrib.batch_norm, 1)
    y_ours, variables_ours = outcome(tf_syncbn.slim.batch_norm, 3)
    np.testing.assert_allclose(y_ours, y, atol=1e-5)
    assert sorted(variables_ours) == sorted(variables)
    for name, value in variables.items():
        np.testing.assert_allclose(variables_ours[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@needs_contrib
def test_slims_train_op_of_the_global_loss_trains_as_that_of_one_tower(recwarn):
    def model(x):
        with contrib.arg_scope([contrib.conv2d], normalizer_fn=contrib.batch_norm,
                               normalizer_params={"is_training": True, "decay": 0.9},
                               weights_regularizer=contrib.l2_regularizer(0.1),
                               weights_initializer=tf.glorot_uniform_initializer(seed=1)):
            y = contrib.conv2d(contrib.conv2d(x, 4, 3), 2, 3)
        tf.losses.mean_squared_error(tf.reduce_mean(x, [1, 2])[:, :2], tf.reduce_mean(y, [1, 2]))
        return tf.losses.get_total_loss()

    def trained(loss_of):
        with tf.Graph().as_default():
            train_op = contrib.learning.create_train_op(loss_of(), tf.train.MomentumOptimizer(0.1, 0.9))
            with session() as made:
                losses = [made.run(train_op) for _ in range(4)]
                return losses, made.run({v.op.name: v for v in tf.global_variables()})

    losses, variables = trained(lambda: model(tf.constant(X)))
    of_towers = trained(lambda: build(tf_syncbn.convert_model(model), (X,), 3).loss)
    np.testing.assert_allclose(of_towers[0], losses, rtol=1e-5)
    assert of_towers[1].keys() == variables.keys() and variables["global_step"] == 4
    for name, value in variables.items():
        np.testing.assert_allclose(of_towers[1][name], value, rtol=1e-3, atol=1e-5, err_msg=name)
    assert not [w for w in recwarn if "replicas.loss" in str(w.message)]


@needs_contrib
def test_serves_as_normalizer_fn_under_arg_scope():
    batch_norm = contrib.add_arg_scope(tf_syncbn.slim.batch_norm)

    def model(x):
        with contrib.arg_scope([batch_norm], decay=0.5, scale=True):
            with contrib.arg_scope([contrib.conv2d, contrib.fully_connected], normalizer_fn=batch_norm):
                x = contrib.conv2d(x, 5, 3)
                return {"loss": tf.reduce_mean(contrib.fully_connected(contrib.flatten(x), 2) ** 2)}

    replicas = build(model, (X,), 2)
    names = {v.op.name for v in tf.global_variables()}
    assert {"Conv/BatchNorm/gamma", "fully_connected/BatchNorm/moving_variance"} <= names and "Conv/biases" not in names
    train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1))
    with session() as made:
        before = made.run(tf.global_variables())
        made.run(train_op)
        after = made.run(tf.global_variables())
    assert all((b != a).any() for b, a in zip(before, after))


def test_rank_two_stores_the_unbiased_variance_and_other_ranks_the_biased_one():
    for x, factor in ((X[:, 0, 0], 7 / 6.0), (X, 7 * 16 / (7 * 16 - 1.0)), (X[:, 0], 1.0)):
        with tf.Graph().as_default():
            replicas = build(lambda x: tf_syncbn.slim.batch_norm(x, decay=0.0), (x,), 3)
            with session() as made:
                _, variables = results(replicas, towers.collect_update_ops(replicas), made)
            expected = x.reshape(-1, 3).var(0, dtype=np.float64) * factor
            np.testing.assert_allclose(variables["BatchNorm/moving_variance"], expected, rtol=1e-5)


def test_batch_weights_weigh_examples_over_all_towers():
    weights = np.array([0.0, 1, 2, 0.5, 0, 0, 3], np.float32)
    replicas = build(lambda x, w: tf_syncbn.slim.batch_norm(x, decay=0.0, batch_weights=w, center=False), (X, weights), 3)
    with session() as made:
        y, variables = results(replicas, towers.collect_update_ops(replicas), made)
    w = weights.astype(np.float64)[:, None, None, None]
    mean = (X * w).sum((0, 1, 2)) / (w.sum() * 16)
    variance = ((X - mean) ** 2 * w).sum((0, 1, 2)) / (w.sum() * 16)
    np.testing.assert_allclose(y, (X - mean) / np.sqrt(variance + 1e-3), atol=1e-5)
    np.testing.assert_allclose(variables["BatchNorm/moving_variance"], variance, rtol=1e-5)


def test_channels_come_first_in_nchw_and_dicts_reach_the_parameters():
    def model(x):
        return tf_syncbn.slim.batch_norm(
            x, scale=True, data_format="NCHW", scope="bn", activation_fn=tf.nn.relu,
            param_initializers={"beta": tf.constant_initializer(2.0), "gamma": tf.constant_initializer(3.0)},
            param_regularizers={"gamma": tf.nn.l2_loss})

    x = X.transpose(0, 3, 1, 2)
    replicas = build(model, (x,), 2)
    assert len(tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES)) == 1
    with session() as made:
        y = made.run(replicas.merged())
    mean, variance = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
    np.testing.assert_allclose(y, np.maximum((x - mean) / np.sqrt(variance + 1e-3) * 3 + 2, 0), atol=1e-5)


def test_variables_and_outputs_get_into_further_collections():
    def model(x):
        return tf_syncbn.slim.batch_norm(x, scope="bn", outputs_collections="outputs",
                                         variables_collections={"beta": ["betas", "all"], "moving_mean": ["all"]})

    replicas = build(model, (X,), 2)
    assert [v.op.name for v in tf.get_collection("betas")] == ["bn/beta"]
    assert [v.op.name for v in tf.get_collection("all")] == ["bn/beta", "bn/moving_mean"]
    assert tf.get_collection("outputs") == [tower.outputs for tower in replicas]
    assert tf.get_collection("outputs")[0].aliases == ["bn"]


def test_training_none_follows_the_tower_and_the_layer_opens_one_scope():
    replicas = build(lambda x: tf_syncbn.slim.batch_norm(x, is_training=None), (X,), 2, training=False)
    assert not tf.get_collection(tf.GraphKeys.UPDATE_OPS)
    assert replicas[1].outputs.op.name == "tower_1/BatchNorm/output"
    assert not [op for op in tf.get_default_graph().get_operations() if "BatchNorm/BatchNorm" in op.name]


@pytest.mark.parametrize("arguments,message", [
    ({"zero_debias_moving_mean": True}, "does not support zero_debias_moving_mean"),
    ({"adjustment": lambda shape: (1, 0)}, "does not support adjustment"),
    ({"data_format": "NDHWC"}, "data_format is 'NHWC' or 'NCHW', not 'NDHWC'"),
    ({"param_initializers": {"bias": 1}}, "param_initializers has the keys beta, gamma, moving_mean, moving_variance, not bias"),
    ({"param_regularizers": {"moving_mean": 1}}, "param_regularizers has the keys beta, gamma, not moving_mean"),
    ({"batch_weights": np.ones([7, 1], np.float32)}, r"batch_weights has a weight for each example, shape \[b\]"),
    ({"batch_weights": np.ones([6], np.float32)}, "mask has to broadcast"),
])
def test_refuses_by_name_what_it_does_not_support(arguments, message):
    with pytest.raises(ValueError, match=message):
        tf_syncbn.slim.batch_norm(tf.constant(X), **arguments)
