"""Transforms that hold back a step, in Estimators: they train as the model function without towers would on what is left."""
import functools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import cpus, has_tf_estimator, session, set_variables

pytestmark = pytest.mark.skipif(not has_tf_estimator(), reason="TensorFlow has no tf.estimator from 2.16 on")
RNG = np.random.RandomState(0)
X, IDS, LABELS = RNG.randn(13, 5), RNG.randint(0, 7, 13), RNG.randint(0, 3, 13)
MASK = RNG.rand(5, 3) < 0.5
ORDINARY = [(X[:6], IDS[:6], LABELS[:6]), (X[6:], IDS[6:], LABELS[6:]), (X, IDS, LABELS)]
OVERFLOWING = (X * np.inf, IDS, LABELS)


def loss_of(features, labels, is_synced):
    """An embedding, a regularizer, and batch norm or none."""
    initializer = tf.glorot_uniform_initializer(seed=1)
    embedding = tf.get_variable("embedding", [7, 5], tf.float64, initializer)
    weights = tf.get_variable("weights", [5, 3], tf.float64, initializer, regularizer=lambda w: 0.01 * tf.nn.l2_loss(w))
    logits = tf.matmul(features["x"] + tf.nn.embedding_lookup(embedding, features["ids"]), weights)
    if is_synced:
        logits = tf_syncbn.sync_batch_norm(logits, training=True, momentum=0.9, name="bn")
    tf.losses.add_loss(tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)))
    return tf.losses.get_total_loss()


def minimized(optimizer, loss):
    return optimizer.minimize(loss, tf.train.get_global_step())


def scaled(optimizer, loss, factors=(("weights", 2.0),)):
    """Takes gradients, makes something of them, and applies that."""
    grads, factors = optimizer.compute_gradients(loss), dict(factors)
    return optimizer.apply_gradients([(gradient if v.op.name not in factors else gradient * factors[v.op.name], v)
                                      for gradient, v in grads], tf.train.get_global_step())


def model(way, features, labels, mode, wrap=towers.TowerOptimizer, is_synced=True, optimizer=None):
    loss = loss_of(features, labels, is_synced)
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        train_op = way(wrap(optimizer or tf.train.MomentumOptimizer(0.1, 0.9)), loss)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def trained(model_fn, batches, initial=None):
    """Trains on batches in a graph of its own; returns variables by name before, and after each of the batches."""
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        fed = tf.placeholder(tf.float64, [None, 5]), tf.placeholder(tf.int64, [None]), tf.placeholder(tf.int64, [None])
        train_op = model_fn(features={"x": fed[0], "ids": fed[1]}, labels=fed[2], mode="train").train_op
        variables = {v.op.name: v for v in tf.global_variables()}
        with session() as made:
            set_variables(made, initial or {})
            found = [made.run(variables)]
            for batch in batches:
                made.run(train_op, dict(zip(fed, batch)))
                found.append(made.run(variables))
        return found


def without_towers(model_fn, batches):
    return trained(functools.partial(model_fn, wrap=lambda optimizer: optimizer), batches)


def on_towers(model_fn, batches, initial, transforms, num_towers=3, **kwargs):
    replicated = towers.replicate_model_fn(model_fn, devices=cpus(num_towers), transforms=transforms, **kwargs)
    return trained(replicated, batches, initial)


def assert_close(ours, expected):
    for name in expected:
        np.testing.assert_allclose(ours[name], expected[name], rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("num_towers", [1, 3])
@pytest.mark.parametrize("scale", [1000.0, "dynamic"])
@pytest.mark.parametrize("way", [minimized, scaled])
def test_scaled_losses_train_as_without_towers_and_steps_that_overflow_leave_nothing_behind(way, scale, num_towers):
    model_fn = functools.partial(model, way)
    initial, *expected = without_towers(model_fn, ORDINARY)
    batches = [ORDINARY[0], OVERFLOWING, ORDINARY[1], OVERFLOWING, ORDINARY[2]]
    _, first, same, second, _, third = on_towers(model_fn, batches, initial, [towers.scale_loss(scale)], num_towers)
    for ours, plain in zip((first, same, second, third), (expected[0],) + tuple(expected)):
        assert_close(ours, plain)
    assert (expected[0]["bn/moving_mean"] != initial["bn/moving_mean"]).all()
    if scale == "dynamic":
        assert first["current_loss_scale"] == 4 * third["current_loss_scale"]


@pytest.mark.parametrize("way", [minimized, scaled])
def test_masked_weights_stay_to_the_bit_and_the_others_train_as_by_masked_gradients(way):
    def masked_by_hand(features, labels, mode):
        def masked(optimizer, loss):
            return scaled(optimizer, loss, {"weights": (2.0 if way is scaled else 1.0) * MASK})
        return model(masked, features, labels, mode, wrap=lambda optimizer: optimizer)

    initial, *expected = trained(masked_by_hand, ORDINARY)
    _, *ours = on_towers(functools.partial(model, way), ORDINARY, initial, [towers.mask_gradients({"weights": MASK})])
    for each, plain in zip(ours, expected):
        assert_close(each, plain)
    np.testing.assert_array_equal(ours[-1]["weights"][~MASK], initial["weights"][~MASK])
    assert (ours[-1]["weights"][MASK] != initial["weights"][MASK]).all()


@pytest.mark.parametrize("num_towers", [1, 3])
def test_accumulated_batches_train_as_one_batch_without_towers(num_towers):
    model_fn = functools.partial(model, minimized, is_synced=False)
    initial, first, second = without_towers(model_fn, 2 * [ORDINARY[2]])
    found = on_towers(model_fn, 2 * ORDINARY[:2], initial, [towers.accumulate(2)], num_towers)
    for ours, plain in zip(found, (initial, initial, first, first, second)):
        assert_close(ours, plain)


def test_a_chain_of_all_transforms_is_applied_in_its_order():
    """A batch that overflows counts in no accumulation, and what is clipped is the mean of both batches."""
    def by_hand(features, labels, mode):
        def clipped(optimizer, loss):
            gradients, variables = zip(*optimizer.compute_gradients(loss))
            gradients, _ = tf.clip_by_global_norm([tf.convert_to_tensor(g) for g in gradients], 0.05)  # a row's slices added up
            masks = [MASK if variable.op.name == "weights" else 1.0 for variable in variables]
            grads = [(gradient * mask, variable) for gradient, mask, variable in zip(gradients, masks, variables)]
            return optimizer.apply_gradients(grads, tf.train.get_global_step())
        return model(clipped, features, labels, mode, wrap=lambda optimizer: optimizer, is_synced=False)

    initial, expected = trained(by_hand, [ORDINARY[2]])
    transforms = [towers.scale_loss("dynamic"), towers.accumulate(2), towers.clip_by_global_norm(0.05),
                  towers.mask_gradients({"weights": MASK})]
    model_fn = functools.partial(model, minimized, is_synced=False)
    found = on_towers(model_fn, [ORDINARY[0], OVERFLOWING, ORDINARY[1]], initial, transforms)
    for ours, plain in zip(found, (initial, initial, initial, expected)):
        assert_close(ours, plain)


def test_gradients_that_vanish_in_float16_are_kept_by_an_estimator_that_trains_in_two_calls(tmp_path):
    data = {"x": RNG.rand(8, 3).astype(np.float32) + 0.5}

    def model_fn(features, mode, dtype=tf.float16, wrap=towers.TowerOptimizer):
        weights = tf.get_variable("weights", [3], initializer=tf.ones_initializer())
        outputs = tf.reduce_sum(tf.cast(features["x"], dtype) * tf.cast(weights, dtype), 1)
        loss = tf.reduce_mean(tf.cast(outputs * tf.cast(1e-5, dtype), tf.float32)) * 1e-3  # under the least float16
        train_op = wrap(tf.train.GradientDescentOptimizer(1e6)).minimize(loss, tf.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    def weights_of(model_fn, name):
        config = tf.estimator.RunConfig(session_config=towers.session_config(cpus(2)))
        estimator = tf.estimator.Estimator(model_fn, str(tmp_path / name), config)
        for _ in range(2):
            estimator.train(lambda: tf.data.Dataset.from_tensor_slices(data).repeat().batch(8), steps=2)
        assert estimator.get_variable_value("global_step") == 4
        return estimator.get_variable_value("weights")

    def replicated(transforms):
        return towers.replicate_model_fn(model_fn, devices=cpus(2), transforms=transforms)

    exact = weights_of(lambda features, mode: model_fn(features, mode, tf.float32, lambda optimizer: optimizer), "exact")
    assert (weights_of(replicated([]), "vanishing") == 1).all()
    np.testing.assert_allclose(weights_of(replicated([towers.scale_loss("dynamic")]), "scaled"), exact, rtol=1e-3)
    assert (exact < 0.99).all()


def test_two_steps_of_a_model_function_can_not_be_held_back():
    def twice(optimizer, loss):
        with tf.control_dependencies([optimizer.minimize(loss)]):
            return optimizer.minimize(tf.nn.l2_loss(tf.trainable_variables()[0].read_value()))

    with pytest.raises(ValueError, match="towers.scale_loss among the transforms hold back .* for 2 steps by 2 losses"):
        on_towers(functools.partial(model, twice), [], None, [towers.scale_loss()])


@pytest.mark.parametrize("transforms", [
    [towers.accumulate(2)], [towers.scale_loss(), towers.clip_by_global_norm(1.0)],
    [towers.scale_loss(), towers.mask_gradients({"weights": MASK})]], ids=["accumulate", "clip after scale", "mask after scale"])
def test_gradients_made_only_in_steps_that_train_are_not_handed_to_a_model_function(transforms):
    with pytest.raises(ValueError, match="takes gradients by compute_gradients, in every step, and transforms"):
        on_towers(functools.partial(model, scaled, is_synced=False), [], None, transforms)


@pytest.mark.parametrize("transform", [towers.scale_loss(), towers.accumulate(2)], ids=["scale_loss", "accumulate"])
def test_learning_rate_of_a_towers_own_is_refused_where_the_step_is_held_back(transform):
    def model_fn(features, labels, mode):
        rate = tf.reduce_mean(tf.abs(features["x"]))
        return model(minimized, features, labels, mode, is_synced=False, optimizer=tf.train.GradientDescentOptimizer(rate))

    with pytest.raises(ValueError, match="is given a learning rate or another argument .* own part of the batch"):
        on_towers(model_fn, [], None, [transform])
