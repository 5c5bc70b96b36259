"""sync_batch_norm against NumPy in float64: values, gradients, moving averages, and what it refuses."""
import functools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.batch_norm_oracle import EPSILON, gradients, largest, normalized, numerical_gradient
from tests.kernel_machines import MACHINES, running_on
from tests.support import build, has_tf_layers, run, session, train_by
from tests.sweeps import covering

MOMENTUM = 0.9


@pytest.mark.parametrize("shape,axis,mean_over_std", [
    ([1000000, 3], -1, 1e4), ([20000, 64], -1, 1e4), ([40, 64, 20, 20], 1, 1e4), ([10, 100, 100, 3], -1, 1e4)] + [
        pytest.param(shape, axis, ratio, marks=pytest.mark.sweep) for shape, axis, ratio in [
            ([1000000, 1], -1, 1e4), ([50, 1, 200, 100], 1, 1e4), ([1000000, 64], -1, 1e4), ([1000000, 1], -1, 1e2),
            ([1000000, 3], -1, 1e2), ([20000, 64], -1, 1e2), ([40, 64, 20, 20], 1, 1e2), ([10, 100, 100, 3], -1, 1e2),
            ([50, 1, 200, 100], 1, 1e2)]])
def test_variance_survives_large_means_in_float32(shape, axis, mean_over_std):
    x = np.random.RandomState(0).randn(*shape).astype(np.float32)
    x *= 3
    x += 3 * mean_over_std

    def model(x):
        return tf.reduce_sum(tf_syncbn.sync_batch_norm(x, axis, momentum=0.0, name="bn")[:1])

    placeholder = tf.placeholder(tf.float32, shape)
    replicas = build(model, (placeholder,), 3)
    updates = towers.collect_update_ops(replicas)
    with session() as made:
        made.run([updates, replicas.loss], {placeholder: x})
        mean, variance = (made.run(v) for v in tf.global_variables()[-2:])
    axes = tuple(i for i in range(len(shape)) if i != axis % len(shape))
    expected = x.var(axes, dtype=np.float64)
    assert (variance > 0).all() and np.isfinite(variance).all()
    assert np.abs(variance / expected - 1).max() <= 1e-3
    np.testing.assert_allclose(mean, x.mean(axes, dtype=np.float64), rtol=1e-6)


def test_output_at_mean_over_std_of_1e4_is_as_good_as_float32_inputs_allow():
    x = (1e4 + np.random.RandomState(0).randn(4000, 3)).astype(np.float32)
    replicas = build(lambda x: tf_syncbn.sync_batch_norm(x), (x,), 2)
    y, _, _, _ = normalized(x, 1, 1.0, 0.0)
    assert largest(run(replicas.merged()) - y) < 2e-3  # one unit in the last place of x is 1e-3 standard deviations


@pytest.mark.parametrize("count", [1, 2])
def test_one_value_a_tower_is_legal(count):
    x = np.array([[1.0, 2.0], [3.0, 7.0]])[:count]
    replicas = build(lambda x: tf_syncbn.sync_batch_norm(x), (x,), count)
    np.testing.assert_allclose(run(replicas.merged()), normalized(x, 1, 1.0, 0.0)[0], atol=1e-12)


def test_constant_channel_gives_beta_and_no_nan():
    x = np.full([6, 2], 1e4, np.float32)

    def model(x):
        y = tf_syncbn.sync_batch_norm(x, beta_initializer=tf.constant_initializer(3.0), momentum=0.0)
        return y, tf.gradients(tf.reduce_sum(y ** 2), x)[0]

    replicas = build(model, (x,), 2)
    with session() as made:
        y, dx = made.run(replicas.merged())
        made.run(towers.collect_update_ops(replicas))
        variance = made.run(tf.global_variables()[-1])
    np.testing.assert_allclose(y, 3.0, atol=1e-5)
    assert np.isfinite(dx).all() and (variance >= 0).all()


def test_epsilon_is_added_to_the_variance_and_no_floor_under_it():
    x = np.array([[0.0], [0.2]])  # variance 0.01, less than epsilon
    replicas = build(lambda x: tf_syncbn.sync_batch_norm(x, epsilon=0.03), (x,), 2)
    np.testing.assert_allclose(run(replicas.merged()), (x - 0.1) / np.sqrt(0.01 + 0.03))


@pytest.mark.parametrize("epsilon,training", covering([0.0, 1e-6, 1.001e-5], [True, False]))
def test_small_epsilons_count_as_they_are(epsilon, training):
    x = (np.random.RandomState(0).randn(64, 2, 2, 3) * 1e-3).astype(np.float32)
    replicas = build(lambda x: tf_syncbn.sync_batch_norm(
        x, epsilon=epsilon, moving_variance_initializer=tf.constant_initializer(1e-6)), (x,), 2, training=training)
    exact = x.astype(np.float64)
    mean, variance = (exact.mean((0, 1, 2)), exact.var((0, 1, 2))) if training else (0, 1e-6)
    y = (exact - mean) / np.sqrt(variance + epsilon)
    assert largest(run(replicas.merged()) - y) <= 1e-5 * largest(y)


def test_nothing_counted_leaves_the_moving_averages_as_they_are():
    replicas = build(lambda x: tf_syncbn.sync_batch_norm(x, mask=tf.zeros([2])), (np.ones([4, 3], np.float32),), 2)
    with session() as made:
        y, _ = made.run([replicas.merged(), towers.collect_update_ops(replicas)])
        mean, variance = made.run(tf.global_variables()[-2:])
    assert np.isfinite(y).all() and (mean == 0).all() and (variance == 1).all()


def test_masked_positions_do_not_count_and_their_gradient_does():
    rng = np.random.RandomState(0)
    x, dy, mask = rng.randn(6, 4, 4, 3), rng.randn(6, 4, 4, 3), rng.rand(6, 4, 4) < 0.5
    constant = tf.constant(x)
    replicas = build(lambda x, dy, mask: tf.reduce_sum(dy * tf_syncbn.sync_batch_norm(x, mask=mask)), (constant, dy, mask), 3)
    total = tf.add_n([tower.loss for tower in replicas])
    np.testing.assert_allclose(run(tf.gradients(total, constant)[0]), gradients(x, dy, 3, np.ones(3), mask)[0], atol=1e-12)


def test_group_of_one_tower_is_ordinary_batch_norm_and_moving_averages_are_the_whole_batchs():
    x = np.random.RandomState(0).randn(8, 3) * 3 + 1
    replicas = build(lambda x: tf_syncbn.sync_batch_norm(x, momentum=0.0, group_size=1), (x,), 4)
    with session() as made:
        y = made.run(replicas.merged())
        made.run(towers.collect_update_ops(replicas))
        mean, variance = made.run(tf.global_variables()[-2:])
    np.testing.assert_allclose(y, normalized(x, 1, 1.0, 0.0, groups=[2, 4, 6])[0], atol=1e-12)
    np.testing.assert_allclose(mean, x.mean(0), atol=1e-12)
    np.testing.assert_allclose(variance, x.var(0), atol=1e-12)


@pytest.mark.parametrize("mask", [False, True])
def test_second_derivatives_equal_differences_of_numpys_first(mask):
    rng = np.random.RandomState(0)
    x, gamma, direction = rng.randn(5, 2), np.array([0.7, 1.3]), rng.randn(5, 2)
    weights = rng.rand(5) if mask else None

    def slope_norm(x):  # | d sum(y^3 / 3) / dx |^2 in NumPy
        y = normalized(x, 1, gamma, 0.0, weights)[0]
        return (direction * gradients(x, y ** 2, 1, gamma, weights)[0]).sum()

    constant = tf.constant(x)

    def model(x, direction, weights):
        y = tf_syncbn.sync_batch_norm(x, center=False, gamma_initializer=tf.constant_initializer(gamma),
                                      mask=weights if mask else None)
        return tf.reduce_sum(direction * tf.gradients(tf.reduce_sum(y ** 3) / 3, x)[0])

    replicas = build(model, (constant, direction, np.zeros(5) if weights is None else weights), 2)
    second = tf.gradients(tf.add_n([tower.loss for tower in replicas]), constant)[0]
    np.testing.assert_allclose(run(second), numerical_gradient(slope_norm, x), rtol=1e-6, atol=1e-7)


def test_training_false_normalizes_with_moving_averages_and_passes_frozen_gradients():
    x = np.random.RandomState(0).randn(6, 3)
    constant = tf.constant(x)

    def model(x):
        return tf_syncbn.sync_batch_norm(x, training=False, moving_mean_initializer=tf.constant_initializer(2.0),
                                         moving_variance_initializer=tf.constant_initializer(4.0))

    replicas = build(model, (constant,), 2)
    assert towers.collect_update_ops(replicas, "all") == []
    assert not [op for op in tf.get_default_graph().get_operations() if "exchange" in op.name]
    y, dx = run([replicas.merged(), tf.gradients(replicas.merged(), constant)[0]])
    np.testing.assert_allclose(y, (x - 2) / np.sqrt(4 + EPSILON))
    np.testing.assert_allclose(dx, np.full_like(x, 1 / np.sqrt(4 + EPSILON)))


@pytest.mark.parametrize("flag", [True, False])
def test_training_as_a_tensor_equals_training_as_a_bool(flag):
    x, dy = np.random.RandomState(0).randn(2, 6, 3)
    results = []
    for training in (flag, tf.placeholder_with_default(flag, [])):
        constant = tf.constant(x)
        name = "bn%d" % len(results)
        replicas = build(lambda x, dy: tf.reduce_sum(dy * tf_syncbn.sync_batch_norm(
            x, momentum=MOMENTUM, training=training, name=name, moving_mean_initializer=tf.constant_initializer(0.5))),
            (constant, dy), 2)
        total = tf.add_n([tower.loss for tower in replicas])
        wanted = [total] + tf.gradients(total, [constant] + tf.trainable_variables()[-2:])
        updates = towers.collect_update_ops(replicas)
        with session() as made:
            values = made.run(wanted)
            made.run(updates)
            results.append(values + made.run(tf.global_variables()[-2:]))
    for ours, theirs in zip(*results):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)


def test_training_none_takes_the_builders():
    x = np.random.RandomState(0).randn(6, 3)
    trained = build(lambda x: tf_syncbn.sync_batch_norm(x, name="a"), (x,), 2)
    frozen = build(lambda x: tf_syncbn.sync_batch_norm(x, name="b"), (x,), 2, training=False)
    ours = run([trained.merged(), frozen.merged()])
    np.testing.assert_allclose(ours[0], normalized(x, 1, 1.0, 0.0)[0], atol=1e-12)
    np.testing.assert_allclose(ours[1], x / np.sqrt(1 + EPSILON), atol=1e-12)


def test_outside_of_towers_it_is_plain_batch_norm():
    x, dy = np.random.RandomState(0).randn(2, 6, 3)
    constant = tf.constant(x)
    y = tf_syncbn.sync_batch_norm(constant, training=True, momentum=0.0)
    with session() as made:
        ours, dx, _ = made.run([y, tf.gradients(y, constant, dy)[0], tf.get_collection(tf.GraphKeys.UPDATE_OPS)])
        mean, variance = made.run(tf.global_variables()[-2:])
    np.testing.assert_allclose(ours, normalized(x, 1, 1.0, 0.0)[0], atol=1e-12)
    np.testing.assert_allclose(dx, gradients(x, dy, 1, np.ones(3))[0], atol=1e-12)
    np.testing.assert_allclose(mean, x.mean(0), atol=1e-12)
    np.testing.assert_allclose(variance, x.var(0), atol=1e-12)


@pytest.mark.skipif(not has_tf_layers(), reason="this TensorFlow has no tf.layers")
@pytest.mark.parametrize("case", covering([
    ([4, 5, 5, 3], -1, np.float32), ([4, 3, 5], -1, np.float32), ([8, 3], -1, np.float32), ([8, 3], -1, np.float64),
    ([4, 3, 5], 1, np.float64), ([2, 3, 4, 5, 6], -1, np.float32)], one_in=2))
def test_moving_averages_and_variables_are_those_of_tf_layers(case):
    shape, axis, dtype = case
    x = (np.random.RandomState(0).randn(*shape) * 2 + 1).astype(dtype)
    stored = []
    for layer in (tf.layers.batch_normalization, tf_syncbn.sync_batch_norm):
        with tf.Graph().as_default():
            y = layer(tf.constant(x), axis=axis, momentum=MOMENTUM, training=True)
            updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
            with session() as made:
                y, _ = made.run([y, updates])
                stored.append((y, {v.name: made.run(v) for v in tf.global_variables()},
                               [v.name for v in tf.trainable_variables()]))
    theirs, ours = stored
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-4, atol=1e-5)
    assert list(ours[1]) == list(theirs[1]) and ours[2] == theirs[2]
    for name in theirs[1]:
        np.testing.assert_allclose(ours[1][name], theirs[1][name], rtol=1e-4, atol=1e-6, err_msg=name)
        assert ours[1][name].dtype == theirs[1][name].dtype


def layer_variables(**kwargs):
    with tf.Graph().as_default():
        build(lambda x: tf_syncbn.sync_batch_norm(x, name="bn", **kwargs), (np.ones([4, 3], np.float32),), 2)
        return {key: [v.op.name for v in tf.get_collection(key)] for key in (
            tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.TRAINABLE_VARIABLES, tf.GraphKeys.MODEL_VARIABLES,
            tf.GraphKeys.REGULARIZATION_LOSSES)}


def test_variables_are_in_the_collections_that_users_expect():
    everything = ["bn/gamma", "bn/beta", "bn/moving_mean", "bn/moving_variance"]
    made = layer_variables()
    assert made["variables"] == everything and made["model_variables"] == everything
    assert made["trainable_variables"] == everything[:2]
    assert layer_variables(trainable=False)["trainable_variables"] == []
    assert layer_variables(center=False)["trainable_variables"] == ["bn/gamma"]
    assert layer_variables(scale=False)["trainable_variables"] == ["bn/beta"]
    assert len(layer_variables(gamma_regularizer=tf.nn.l2_loss, beta_regularizer=tf.nn.l2_loss)["regularization_losses"]) == 2


def test_initializers_and_constraints_reach_the_variables():
    def model(x):
        return tf.reduce_mean(tf_syncbn.sync_batch_norm(
            x, name="bn", gamma_initializer=tf.constant_initializer(2.0), beta_initializer=tf.constant_initializer(3.0),
            moving_mean_initializer=tf.constant_initializer(4.0), moving_variance_initializer=tf.constant_initializer(5.0),
            gamma_constraint=lambda gamma: tf.minimum(gamma, 0.5)))

    replicas = build(model, (np.random.randn(4, 3).astype(np.float32),), 2)
    train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1), update_ops="none")
    _, before, after = train_by(train_op, replicas.loss, 1)
    assert [before["bn/" + name][0] for name in ("gamma", "beta", "moving_mean", "moving_variance")] == [2, 3, 4, 5]
    assert (after["bn/gamma"] == 0.5).all()


def test_reuse_applies_one_layer_twice():
    def model(x):
        y = tf_syncbn.sync_batch_norm(x, name="bn")
        return tf_syncbn.sync_batch_norm(2 * y + 1, name="bn", reuse=True)

    replicas = build(model, (np.random.randn(4, 3),), 2)
    assert len(tf.global_variables()) == 4
    assert np.isfinite(run(replicas.merged())).all()


def test_default_names_count_as_those_of_tf_layers():
    build(lambda x: tf_syncbn.sync_batch_norm(tf_syncbn.sync_batch_norm(x)), (np.ones([4, 3], np.float32),), 2)
    assert {v.op.name.split("/")[0] for v in tf.global_variables()} == {"batch_normalization", "batch_normalization_1"}


def test_updates_collections():
    def build_with(collections):
        with tf.Graph().as_default():
            replicas = build(lambda x: tf_syncbn.sync_batch_norm(x, momentum=0.0, updates_collections=collections),
                             (2 + np.zeros([4, 3], np.float32),), 2)
            counts = [len(tf.get_collection(key)) for key in (tf.GraphKeys.UPDATE_OPS, "mine")]
            with session() as made:
                made.run(replicas.merged())
                return counts, made.run(tf.global_variables()[-2])[0]

    assert build_with(tf.GraphKeys.UPDATE_OPS) == ([2, 0], 0)
    assert build_with("mine") == ([0, 2], 0)
    assert build_with(["mine", tf.GraphKeys.UPDATE_OPS]) == ([2, 2], 0)
    assert build_with(()) == ([0, 0], 0)
    assert build_with(None) == ([0, 0], 2)  # inline: running the output is enough


def test_momentum_may_be_a_tensor():
    replicas = build(lambda x: tf_syncbn.sync_batch_norm(x, momentum=tf.constant(0.25)), (np.full([4, 3], 2, np.float32),), 2)
    with session() as made:
        made.run(towers.collect_update_ops(replicas))
        np.testing.assert_allclose(made.run(tf.global_variables()[-2]), 1.5)


def test_float16_from_a_custom_getter_computes_in_float32():
    def half(getter, *args, **kwargs):
        return tf.cast(getter(*args, **kwargs), tf.float16)

    x = np.random.RandomState(0).randn(8, 3).astype(np.float16)
    with tf.variable_scope("", custom_getter=lambda getter, name, *a, **k: (
            half if "gamma" in name or "beta" in name else lambda g, *b, **c: g(*b, **c))(getter, name, *a, **k)):
        replicas = build(lambda x: tf_syncbn.sync_batch_norm(x), (x,), 2)
    assert replicas.merged().dtype == tf.float16
    assert largest(run(replicas.merged()) - normalized(x, 1, 1.0, 0.0)[0]) < 2e-3


@pytest.mark.parametrize("inputs,kwargs,error,message", [
    (lambda: tf.zeros([4, 3], tf.int32), {}, TypeError, "normalizes floating point tensors.*is int32"),
    (lambda: tf.placeholder(tf.float32), {}, ValueError, "needs inputs of known rank"),
    (lambda: tf.zeros([4]), {}, ValueError, "rank, 2 or more"),
    (lambda: tf.placeholder(tf.float32, [4, None]), {}, ValueError, "known number of channels"),
    (lambda: tf.zeros([4, 3]), {"axis": 2}, ValueError, "axis is an int from -2 to 1 for inputs of rank 2, not 2"),
    (lambda: tf.zeros([4, 3]), {"axis": [1]}, ValueError, r"not \[1\]"),
    (lambda: tf.zeros([4, 3]), {"training": None}, ValueError, "stands outside of towers.*give it training=True"),
    (lambda: tf.zeros([4, 3]), {"training": "yes"}, TypeError, "training is a bool or a scalar bool tensor, not 'yes'"),
    (lambda: tf.zeros([4, 3]), {"training": 0.5}, TypeError, "training is a bool"),
    (lambda: tf.zeros([4, 3]), {"momentum": 1.5}, ValueError, "momentum is between 0 and 1, not 1.5"),
    (lambda: tf.zeros([4, 3]), {"epsilon": -1.0}, ValueError, "epsilon is 0 or more, not -1.0"),
    (lambda: tf.zeros([4, 3]), {"group_size": 0}, ValueError, "group_size has to be an int that divides"),
    (lambda: tf.zeros([4, 3]), {"mask": np.ones([5])}, ValueError, "mask has to broadcast to the inputs without their channels"),
    (lambda: tf.zeros([4, 3]), {"mask": np.ones([2, 4])}, ValueError, "mask has to broadcast"),
    (lambda: tf.zeros([4, 3]), {"mask": np.array(["a"])}, TypeError, "a mask is bool or weights"),
])
def test_bad_input_is_refused_by_the_layers_name(inputs, kwargs, error, message):
    kwargs = dict({"training": True}, **kwargs)
    with pytest.raises(error, match="sync_batch_norm 'outer/bn'.*" + message):
        with tf.variable_scope("outer"):
            tf_syncbn.sync_batch_norm(inputs(), name="bn", **kwargs)


def test_training_tensor_of_another_dtype_and_group_that_does_not_divide_are_refused():
    with pytest.raises(TypeError, match="training is a scalar bool; .* is float32"):
        tf_syncbn.sync_batch_norm(tf.zeros([4, 3]), training=tf.constant(1.0))
    with pytest.raises(ValueError, match="divides the number of towers, 3; it is 2"):
        build(lambda x: tf_syncbn.sync_batch_norm(x, group_size=2), (np.zeros([6, 3]),), 3)


def test_towers_with_another_number_of_channels_are_named():
    def model(x):
        return tf_syncbn.sync_batch_norm(x[:, :2 + towers.current_tower().index], name="bn", reuse=tf.AUTO_REUSE)

    with pytest.raises(ValueError, match="bn"):
        build(model, (np.zeros([4, 3], np.float32),), 2)


def test_backward_keeps_the_input_and_two_vectors():
    x = tf.constant(np.random.randn(8, 4, 4, 3))
    replicas = build(lambda x: tf.reduce_sum(tf_syncbn.sync_batch_norm(x, name="bn") ** 2), (x,), 2)
    forward = set(tf.get_default_graph().get_operations())
    gradient = tf.gradients(replicas.loss, x)[0]
    kept = set()
    for op in set(tf.get_default_graph().get_operations()) - forward:
        kept |= {t for t in op.inputs if t.op in forward and "/bn/" in t.name and (t.shape.num_elements() or 0) > 3}
    large = {t for t in kept if t.shape.num_elements() >= 4 * 4 * 4 * 3}
    # y (of the squares) and the layer's input, nothing the layer made besides.
    assert len({t.name.split("/")[0] for t in large}) == 2
    assert all("with_gradient" in t.name or "inputs" in t.name or "Cast" in t.name or "output" in t.name for t in large)
    assert gradient is not None


@pytest.mark.parametrize("num_towers,updates_collections", covering([0, 1, 3], [tf.GraphKeys.UPDATE_OPS, None]))
def test_layer_applied_twice_moves_its_averages_twice_in_order(num_towers, updates_collections):
    x = np.random.RandomState(0).randn(6, 3) + 2

    def model(x):
        layer = functools.partial(tf_syncbn.sync_batch_norm, momentum=MOMENTUM, training=True, name="bn",
                                  updates_collections=updates_collections)
        return layer(x) + layer(x * 3 + 1, reuse=True)

    if num_towers:
        replicas = build(model, (x,), num_towers)
        updates = towers.collect_update_ops(replicas) + [replicas[0].outputs]
    else:
        updates = [model(tf.constant(x))] + tf.get_collection(tf.GraphKeys.UPDATE_OPS)
    moving = tf.global_variables()[-2]
    with session() as made:
        for _ in range(20):
            made.run(moving.initializer)
            made.run(updates)
            expected = MOMENTUM * (1 - MOMENTUM) * x.mean(0) + (1 - MOMENTUM) * (3 * x + 1).mean(0)
            np.testing.assert_allclose(made.run(moving), expected, rtol=1e-9)


@pytest.mark.parametrize("fused,unbiased,corrected", [(None, None, True), (True, None, True), (False, None, False),
                                                      (False, True, True), (True, False, False)])
def test_a_layer_that_is_not_fused_stores_the_biased_variance_unless_told_otherwise(fused, unbiased, corrected):
    x = np.random.RandomState(5).randn(4, 2, 2, 3).astype(np.float32)
    replicas = build(lambda x: tf_syncbn.sync_batch_norm(x, momentum=0.0, fused=fused, unbiased=unbiased, name="bn"), (x,), 2)
    moving, = [v for v in tf.global_variables() if v.op.name == "bn/moving_variance"]
    with session() as made:
        made.run(towers.collect_update_ops(replicas))
        biased = x.var((0, 1, 2), dtype=np.float64)
        np.testing.assert_allclose(made.run(moving), biased * (16 / 15 if corrected else 1), rtol=1e-5)


def test_evaluation_through_a_training_tensor_never_poisons_the_moving_averages():
    x = np.full([4, 3], 1e30, np.float32)
    replicas = build(lambda x: tf_syncbn.sync_batch_norm(x, training=tf.constant(False)), (x,), 2)
    with session() as made:
        made.run(towers.collect_update_ops(replicas))
        mean, variance = made.run(tf.global_variables()[-2:])
    assert (mean == 0).all() and (variance == 1).all()


def test_nan_in_masked_padding_counts_in_no_moment():
    x = np.random.RandomState(0).randn(6, 3)
    x[1] = np.nan
    mask = np.array([1, 0, 1, 1, 1, 1.0])
    replicas = build(lambda x, mask: tf_syncbn.sync_batch_norm(x, mask=mask), (x, mask), 2)
    kept = x[mask > 0]
    np.testing.assert_allclose(run(replicas.merged())[mask > 0], normalized(kept, 1, 1.0, 0.0)[0], atol=1e-12)


def test_forward_pass_built_anew_in_the_backward_pass_is_refused_by_name():
    @tf.RegisterGradient("Recompute%s" % id(build))
    def recompute(op, dy, _):
        y = tf_syncbn.sync_batch_norm(op.inputs[0], training=True, name="bn", reuse=True)
        return tf.gradients(y, op.inputs[0], dy)[0], None

    def model(x):
        x = x * tf.get_variable("w", [3], tf.float64)
        tf_syncbn.sync_batch_norm(x, name="bn")
        with tf.get_default_graph().gradient_override_map({"IdentityN": "Recompute%s" % id(build)}):
            return tf.reduce_mean(tf.identity_n([x, x])[0] ** 2)

    replicas = build(model, (np.ones([4, 3]),), 2)
    with pytest.raises(ValueError, match="sync_batch_norm .* is called while gradients of towers are built"):
        towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1))


def test_eager_execution_is_refused(monkeypatch):
    monkeypatch.setattr(tf, "executing_eagerly", lambda: True)
    with pytest.raises(RuntimeError, match="eager execution is on"):
        tf_syncbn.sync_batch_norm(np.ones([4, 3], np.float32), training=True)


def kept_for_backward(ops_before, ops_after):
    """Returns the tensors of the forward pass that ops of the backward pass read, what only passes them on left out."""
    def source(tensor):
        while tensor.op.type in ("Identity", "IdentityN", "Bitcast"):
            tensor = tensor.op.inputs[tensor.op.outputs.index(tensor)]
        return tensor
    forward = set(ops_before)
    # tf.gradients makes zeros for outputs that nobody uses; those that nobody reads never run.
    backward = [op for op in ops_after if op not in forward and (op.type != "ZerosLike" or op.outputs[0].consumers())]
    return {source(tensor) for op in backward for tensor in op.inputs if tensor.op in forward}


@pytest.mark.parametrize("dtype,axis", covering([tf.float32, tf.float16, tf.float64], [3, 1]))
def test_backward_pass_keeps_the_input_and_vectors_alone(dtype, axis):
    x = tf.placeholder(dtype, [6, 8, 8, 8])
    replicas = build(lambda x: (tf_syncbn.sync_batch_norm(x, axis), x), (x,), 2)
    graph = tf.get_default_graph()
    before = graph.get_operations()
    tf.gradients([tower.outputs[0] for tower in replicas], [tower.outputs[1] for tower in replicas] + tf.trainable_variables(),
                 [tf.placeholder(dtype, [3, 8, 8, 8]) for _ in range(2)])
    large = [t for t in kept_for_backward(before, graph.get_operations()) if t.shape.num_elements() > 3 * 8 + 1]
    assert {t.dtype for t in large} == {dtype} and len(large) == 2, large  # each tower's part of x, in its own dtype


def test_towers_of_unlike_heights_and_widths_count_their_positions():
    rng = np.random.RandomState(0)
    shapes = [(2, 3, 4, 3), (1, 7, 2, 3), (3, 1, 1, 3)]
    xs, dys = ([rng.randn(*shape) * 2 + 1 for shape in shapes] for _ in range(2))
    parts = towers.PerTower([(tf.constant(x),) for x in xs])
    replicas = towers.TowerBuilder(["/cpu:0"] * 3).build(lambda x: (tf_syncbn.sync_batch_norm(x), x), parts)
    slopes = tf.gradients([tower.outputs[0] for tower in replicas], [tower.outputs[1] for tower in replicas],
                          [tf.constant(dy) for dy in dys])
    rows, d_rows = (np.concatenate([a.reshape(-1, 3) for a in arrays]) for arrays in (xs, dys))
    y, dx = normalized(rows, 1, 1.0, 0.0)[0], gradients(rows, d_rows, 1, 1.0)[0]
    ys, dxs = run([[tower.outputs[0] for tower in replicas], slopes])
    np.testing.assert_allclose(np.concatenate([a.reshape(-1, 3) for a in ys]), y, atol=1e-9)
    np.testing.assert_allclose(np.concatenate([a.reshape(-1, 3) for a in dxs]), dx, atol=1e-9)


@pytest.mark.parametrize("dtype,machine", [
    pytest.param(dtype, machine, marks=(
        () if (dtype, machine) in ((tf.float16, "gpu"), (tf.bfloat16, None)) else pytest.mark.sweep))
    for dtype in (tf.float16, tf.bfloat16) for machine in [None] + sorted(MACHINES)])
def test_float16_and_bfloat16_gradients_are_rid_of_what_the_moments_take_away(machine, dtype):
    """Parts of a gradient that are added up after they were rounded lose what is small beside them, always to the same side."""
    rng = np.random.RandomState(0)
    x, dy = (tf.cast(tf.constant(rng.randn(128, 28, 28, 16), tf.float32), dtype) for _ in range(2))

    def model(x, dy):
        gamma = tf.constant_initializer(1.37)
        return tf.gradients(tf_syncbn.sync_batch_norm(x, epsilon=EPSILON, gamma_initializer=gamma), x, dy)[0]

    with running_on(machine, False):
        replicas = build(model, (x, dy), 2)
    x, dy, dx = (np.float64(a).reshape(-1, 16) for a in run([tf.cast(t, tf.float32) for t in (x, dy, replicas.merged())]))
    hat, scale = normalized(x, 1, 1.0, 0.0)[0], 1.37 / np.sqrt(x.var(0) + EPSILON)
    for part in (1, hat):
        assert np.square((dx * part).sum(0)).mean() <= 0.01 ** 2 * np.square((scale * dy * part).sum(0)).mean()


@pytest.mark.parametrize("shape_and_axis,dtype", covering([
    ([12, 9, 7, 5], 3), ([12, 32, 32, 48], 3), ([12, 5, 9, 7], 1), ([12, 9, 5], 2), ([12, 2, 3, 4, 5], 4), ([70000, 3], 1),
    ([2, 35000, 3], 2), ([4, 70, 20, 50, 3], 4), ([70000, 1, 1, 3], 3)], [tf.float32, tf.float16, tf.bfloat16], one_in=2,
    also=lambda shape_and_axis, dtype: shape_and_axis[0] == [12, 32, 32, 48]))
def test_layers_on_this_machines_own_device_equal_numpy(dtype, shape_and_axis):
    shape, axis = shape_and_axis
    rng = np.random.RandomState(0)
    if dtype == tf.bfloat16 and tf.__version__.startswith("1."):
        pytest.skip("NumPy knows little of TensorFlow 1.15's bfloat16")
    x, dy = ((rng.randn(*shape) + mean).astype(dtype.as_numpy_dtype) for mean in (2, 0))
    gamma, beta = rng.rand(shape[axis]) + 0.5, rng.randn(shape[axis])

    def model(x, dy):
        x = -x  # on the tower's device; a batch's parts are the host's
        y = tf_syncbn.sync_batch_norm(x, axis, epsilon=EPSILON, name="bn", gamma_initializer=tf.constant_initializer(gamma),
                                      beta_initializer=tf.constant_initializer(beta))
        return y, tf.gradients(y, [x] + tf.trainable_variables(), dy)

    def frozen(x):
        return tf_syncbn.sync_batch_norm(x, axis, epsilon=EPSILON, training=False, name="frozen")

    device = towers.find_devices()[0]
    replicas = towers.TowerBuilder([device] * 2).build(model, (tf.constant(-x), tf.constant(dy)))
    with tf.device(device):
        unchanged = frozen(tf.constant(x))
    with session() as made:
        outputs, unchanged = made.run([[tower.outputs for tower in replicas], unchanged])
    y, dx = (np.concatenate(parts) for parts in ([y for y, _ in outputs], [d[0] for _, d in outputs]))
    d_gamma, d_beta = (sum(np.float64(d[i]) for _, d in outputs) for i in (1, 2))
    expected = gradients(x, dy, axis, gamma)
    tolerance, of_terms = {tf.float32: 1e-5, tf.float16: 2e-3, tf.bfloat16: 1.6e-2}[dtype], 0.0
    if "gpu" in device and dtype == tf.float32:  # cuDNN adds up as many numbers in float32 as there are
        tolerance, of_terms = 2e-5, 1e-7
    pairs = [(y, normalized(x, axis, gamma, beta)[0]), (unchanged, np.float64(x) / np.sqrt(1 + EPSILON)), (dx, expected[0])]
    for value, right in pairs:
        assert largest(value - right) <= tolerance * largest(right)
    for value, right in zip((d_gamma, d_beta), expected[1:]):
        assert largest(value - right) <= tolerance * largest(right) + of_terms * np.abs(np.float64(dy)).sum() / len(right)


@pytest.mark.skipif(not tf.config.experimental.list_physical_devices("GPU"), reason="TensorFlow sees no GPU here")
def test_large_means_survive_on_a_gpu():
    x = (np.random.RandomState(0).randn(64, 32, 32, 8) + 1e4).astype(np.float32)
    replicas = towers.TowerBuilder(["/gpu:0"] * 2).build(
        lambda x: tf.reduce_sum(tf_syncbn.sync_batch_norm(x, momentum=0.0)[:1]), (x,))
    with session() as made:
        made.run([towers.collect_update_ops(replicas), replicas.loss])
        variance = made.run(tf.global_variables()[-1])
    assert np.abs(variance / x.var((0, 1, 2), dtype=np.float64) - 1).max() <= 1e-3
