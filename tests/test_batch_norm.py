"""sync_batch_norm against NumPy in float64: values, gradients, moving averages, and what it refuses."""
import hypothesis
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from hypothesis import strategies as st

import tf_syncbn
import towers
from tests.support import build, has_tf_layers, run, session, train_by

EPSILON, MOMENTUM = 1e-3, 0.9


def weighted_sum(x, weights):
    """Sums over all axes but the last."""
    return (x * weights[..., None]).sum(tuple(range(x.ndim - 1)))


def normalized(x, axis, gamma, beta, weights=None, groups=None):
    """Batch norm of the whole batch in float64: y, and mean and variance of the whole batch with its count.

    `groups` divides the batch: each part is normalized by its own moments.
    """
    x = np.moveaxis(np.asarray(x, np.float64), axis, -1)
    weights = np.ones(x.shape[:-1]) if weights is None else np.broadcast_to(weights, x.shape[:-1]).astype(np.float64)

    def moments(x, w):
        count = w.sum()
        mean = weighted_sum(x, w) / max(count, 1e-300)
        return mean, weighted_sum((x - mean) ** 2, w) / max(count, 1e-300), count

    parts = []
    for part, w in zip(np.split(x, groups or []), np.split(weights, groups or [])):
        mean, variance, _ = moments(part, w)
        parts.append((part - mean) / np.sqrt(variance + EPSILON) * gamma + beta)
    mean, variance, count = moments(x, weights)
    return np.moveaxis(np.concatenate(parts), -1, axis), mean, variance, count


def gradients(x, dy, axis, gamma, weights=None, groups=None):
    """The gradients of sum(y dy) by x, gamma and beta in float64: the textbook's formula, with weights."""
    x, dy = (np.moveaxis(np.asarray(a, np.float64), axis, -1) for a in (x, dy))
    weights = np.ones(x.shape[:-1]) if weights is None else np.broadcast_to(weights, x.shape[:-1]).astype(np.float64)
    dxs, d_gamma, d_beta = [], 0, 0
    for part, d, w in zip(*(np.split(a, groups or []) for a in (x, dy, weights))):
        count = max(w.sum(), 1e-300)
        mean = weighted_sum(part, w) / count
        inverse = 1 / np.sqrt(weighted_sum((part - mean) ** 2, w) / count + EPSILON)
        hat = (part - mean) * inverse
        axes = tuple(range(part.ndim - 1))
        s, t = d.sum(axes), (d * hat).sum(axes)
        dxs.append(gamma * inverse * (d - w[..., None] * (s + hat * t) / count))
        d_gamma, d_beta = d_gamma + t, d_beta + s
    return np.moveaxis(np.concatenate(dxs), -1, axis), d_gamma, d_beta


def largest(a):
    return np.abs(a).max() if np.size(a) else 0.0


@st.composite
def cases(draw):
    rank = draw(st.integers(2, 5))
    axis = draw(st.integers(1, rank - 1))
    num_towers = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(0, 4), min_size=num_towers, max_size=num_towers).filter(lambda s: sum(s) > 0))
    shape = [sum(sizes)] + [draw(st.integers(1, 4)) for _ in range(rank - 1)]
    shape[axis] = draw(st.sampled_from([1, 3, 7, 64]))
    return {
        "shape": shape, "axis": axis - draw(st.sampled_from([0, rank])), "sizes": sizes,
        "dtype": draw(st.sampled_from([tf.float64, tf.float64, tf.float32, tf.float16, tf.bfloat16])),
        "mask": draw(st.sampled_from([None, None, "bool", "weights", "examples"])),
        "group_size": draw(st.sampled_from([None] + [g for g in range(1, num_towers + 1) if num_towers % g == 0])),
        "center": draw(st.booleans()), "scale": draw(st.booleans()),
        "offset": draw(st.sampled_from([0.0, 1.0, 10.0])), "seed": draw(st.integers(0, 10**6)),
        "known": draw(st.booleans())}


def make_mask(rng, kind, shape, axis):
    positions = [n for i, n in enumerate(shape) if i != axis]
    if kind == "bool":
        return rng.rand(*positions) < 0.7
    if kind == "weights":
        return rng.rand(*positions)
    if kind == "examples":
        return (rng.rand(*positions[:1]) < 0.7).reshape([-1] + [1] * (len(positions) - 1))
    return None


@hypothesis.given(cases())
def test_values_gradients_and_moving_averages_equal_numpy(case):
    rng = np.random.RandomState(case["seed"])
    axis = case["axis"] % len(case["shape"])
    channels = case["shape"][axis]
    dtype = case["dtype"]
    x = (case["offset"] + rng.randn(*case["shape"])) * 2
    mask = make_mask(rng, case["mask"], case["shape"], axis)
    ends = np.cumsum(case["sizes"])[:-1]
    dy = rng.randn(*case["shape"])
    gamma, beta = rng.rand(channels) + 0.5, rng.randn(channels)
    stored = tf.float64 if dtype == tf.float64 else tf.float32

    with tf.Graph().as_default():
        # What each tower is given, rounded to its dtype before NumPy sees it.
        rounded = [tf.cast(tf.constant(a), dtype) for a in (x, dy)]
        fed = [tf.placeholder_with_default(a, case["shape"] if case["known"] else [
            n if i == axis else None for i, n in enumerate(case["shape"])]) for a in rounded]

        def model(x, dy, mask):
            y = tf_syncbn.sync_batch_norm(
                x, case["axis"], MOMENTUM, EPSILON, case["center"], case["scale"], name="bn", mask=mask,
                group_size=case["group_size"], gamma_initializer=tf.constant_initializer(gamma),
                beta_initializer=tf.constant_initializer(beta))
            assert y.dtype == dtype and y.shape.as_list() == x.shape.as_list()
            return y, tf.reduce_sum(tf.cast(y, stored) * tf.cast(dy, stored)), x

        masks = [None] * len(case["sizes"]) if mask is None else np.split(mask, ends)
        parts = [(px, pd, pm) for px, pd, pm in zip(tf.split(fed[0], case["sizes"]), tf.split(fed[1], case["sizes"]), masks)]
        current = iter(parts)
        replicas = build(lambda: model(*next(current)), lambda context: (), len(parts))
        affine = [v for v in tf.trainable_variables()]
        assert [v.dtype.base_dtype for v in tf.global_variables()] == [stored] * len(tf.global_variables())
        # Every tower's loss in one call: the gradients of all inputs and of the variables' whole.
        total = tf.add_n([tower.outputs[1] for tower in replicas])
        dx = tf.gradients(total, [tower.outputs[2] for tower in replicas])
        d_affine = tf.gradients(total, affine) if affine else []
        # What the moving averages are does not depend on the gradients.
        updates = towers.collect_update_ops(replicas, "first")
        with session() as made:
            ys, xs, dxs, d_affine, x_given, dy_given, _ = made.run(
                [[tf.cast(t.outputs[0], stored) for t in replicas], rounded, [tf.cast(d, stored) for d in dx], d_affine,
                 tf.cast(rounded[0], tf.float64), tf.cast(rounded[1], tf.float64), updates])
            moving = made.run({v.op.name: v for v in tf.global_variables()})
    del xs
    gamma, beta = gamma if case["scale"] else np.ones(channels), beta if case["center"] else np.zeros(channels)
    group = case["group_size"] or len(parts)
    groups = np.cumsum([sum(case["sizes"][i:i + group]) for i in range(0, len(parts), group)])[:-1].tolist()
    y, mean, variance, count = normalized(x_given, axis, gamma, beta, mask, groups)
    dx, d_gamma, d_beta = gradients(x_given, dy_given, axis, gamma, mask, groups)
    expected = [d_gamma] * case["scale"] + [d_beta] * case["center"]
    # A float16 result is off by its own rounding; the variance of few values may be near epsilon and its inverse large.
    values = np.prod(case["shape"]) // channels // max(len(groups) + 1, 1)
    tolerance = {tf.float64: 1e-9, tf.float32: 1e-5, tf.float16: 2e-3, tf.bfloat16: 1.6e-2}[dtype]
    y_ours, dx_ours = np.concatenate(ys), np.concatenate(dxs)
    assert np.isfinite(y_ours).all() and np.isfinite(dx_ours).all()
    assert (moving["bn/moving_variance"] >= 0).all()
    if values < 8 * max(len(case["sizes"]), 2) and dtype != tf.float64 or mask is not None and dtype != tf.float64:
        return  # too few values a channel for a bound of this dtype
    assert largest(y_ours - y) <= tolerance * max(largest(y), 1)
    assert largest(dx_ours - dx) <= tolerance * max(largest(dx), largest(dy_given), 1)
    for ours, theirs in zip(d_affine, expected):
        assert largest(ours - theirs) <= tolerance * max(largest(theirs), largest(dy_given) * 10, 1)
    fused_axes = {4: (1, 3)} if tf.__version__.startswith("1.") else {4: (1, 3), 5: (1, 4)}
    unbiased = axis in fused_axes.get(len(case["shape"]), ()) and dtype != tf.float64
    stored_variance = variance * (count / max(count - 1, 1) if unbiased else 1)
    keep = MOMENTUM if count > 0 else 1.0
    wanted = {"bn/moving_mean": (1 - keep) * mean, "bn/moving_variance": keep + (1 - keep) * stored_variance}
    for name, value in wanted.items():
        assert largest(moving[name] - value) <= tolerance * max(largest(value), 1), name


@pytest.mark.parametrize("shape,axis,mean_over_std", [
    (shape, axis, ratio) for ratio in (1e2, 1e4) for shape, axis in (
        ([1000000, 1], -1), ([1000000, 3], -1), ([20000, 64], -1), ([40, 64, 20, 20], 1), ([10, 100, 100, 3], -1),
        ([50, 1, 200, 100], 1))] + [([1000000, 64], -1, 1e4)])
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
    assert largest(run(replicas.merged) - y) < 2e-3  # one unit in the last place of x is 1e-3 standard deviations


@pytest.mark.parametrize("count", [1, 2])
def test_one_value_a_tower_is_legal(count):
    x = np.array([[1.0, 2.0], [3.0, 7.0]])[:count]
    replicas = build(lambda x: tf_syncbn.sync_batch_norm(x), (x,), count)
    np.testing.assert_allclose(run(replicas.merged), normalized(x, 1, 1.0, 0.0)[0], atol=1e-12)


def test_constant_channel_gives_beta_and_no_nan():
    x = np.full([6, 2], 1e4, np.float32)

    def model(x):
        y = tf_syncbn.sync_batch_norm(x, beta_initializer=tf.constant_initializer(3.0), momentum=0.0)
        return y, tf.gradients(tf.reduce_sum(y ** 2), x)[0]

    replicas = build(model, (x,), 2)
    with session() as made:
        y, dx = made.run(replicas.merged)
        made.run(towers.collect_update_ops(replicas))
        variance = made.run(tf.global_variables()[-1])
    np.testing.assert_allclose(y, 3.0, atol=1e-5)
    assert np.isfinite(dx).all() and (variance >= 0).all()


def test_epsilon_is_added_to_the_variance_and_no_floor_under_it():
    x = np.array([[0.0], [0.2]])  # variance 0.01, less than epsilon
    replicas = build(lambda x: tf_syncbn.sync_batch_norm(x, epsilon=0.03), (x,), 2)
    np.testing.assert_allclose(run(replicas.merged), (x - 0.1) / np.sqrt(0.01 + 0.03))


def test_nothing_counted_leaves_the_moving_averages_as_they_are():
    replicas = build(lambda x: tf_syncbn.sync_batch_norm(x, mask=tf.zeros([2])), (np.ones([4, 3], np.float32),), 2)
    with session() as made:
        y, _ = made.run([replicas.merged, towers.collect_update_ops(replicas)])
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
        y = made.run(replicas.merged)
        made.run(towers.collect_update_ops(replicas))
        mean, variance = made.run(tf.global_variables()[-2:])
    np.testing.assert_allclose(y, normalized(x, 1, 1.0, 0.0, groups=[2, 4, 6])[0], atol=1e-12)
    np.testing.assert_allclose(mean, x.mean(0), atol=1e-12)
    np.testing.assert_allclose(variance, x.var(0), atol=1e-12)


def numerical_gradient(f, x, step=1e-5):
    result = np.zeros_like(x)
    for i in np.ndindex(*x.shape):
        moved = x.copy()
        moved[i] += step
        above = f(moved)
        moved[i] -= 2 * step
        result[i] = (above - f(moved)) / (2 * step)
    return result


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
    y, dx = run([replicas.merged, tf.gradients(replicas.merged, constant)[0]])
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
    ours = run([trained.merged, frozen.merged])
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
@pytest.mark.parametrize("shape,axis,dtype", [
    ([4, 5, 5, 3], -1, np.float32), ([4, 3, 5], -1, np.float32), ([8, 3], -1, np.float32), ([8, 3], -1, np.float64),
    ([4, 3, 5], 1, np.float64), ([2, 3, 4, 5, 6], -1, np.float32)])
def test_moving_averages_and_variables_are_those_of_tf_layers(shape, axis, dtype):
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
    train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1), "none")
    _, before, after = train_by(train_op, replicas.loss, 1)
    assert [before["bn/" + name][0] for name in ("gamma", "beta", "moving_mean", "moving_variance")] == [2, 3, 4, 5]
    assert (after["bn/gamma"] == 0.5).all()


def test_reuse_applies_one_layer_twice():
    def model(x):
        y = tf_syncbn.sync_batch_norm(x, name="bn")
        return tf_syncbn.sync_batch_norm(2 * y + 1, name="bn", reuse=True)

    replicas = build(model, (np.random.randn(4, 3),), 2)
    assert len(tf.global_variables()) == 4
    assert np.isfinite(run(replicas.merged)).all()


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
                made.run(replicas.merged)
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
    assert replicas.merged.dtype == tf.float16
    assert largest(run(replicas.merged) - normalized(x, 1, 1.0, 0.0)[0]) < 2e-3


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


@pytest.mark.parametrize("num_towers", [0, 1, 3])
def test_layer_applied_twice_moves_its_averages_twice_in_order(num_towers):
    x = np.random.RandomState(0).randn(6, 3) + 2

    def model(x):
        first = tf_syncbn.sync_batch_norm(x, momentum=MOMENTUM, training=True, name="bn")
        second = tf_syncbn.sync_batch_norm(x * 3 + 1, momentum=MOMENTUM, training=True, name="bn", reuse=True)
        return first + second

    if num_towers:
        updates = towers.collect_update_ops(build(model, (x,), num_towers))
    else:
        model(tf.constant(x))
        updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
    moving = tf.global_variables()[-2]
    with session() as made:
        for _ in range(50):
            made.run(moving.initializer)
            made.run(updates)
            expected = MOMENTUM * (1 - MOMENTUM) * x.mean(0) + (1 - MOMENTUM) * (3 * x + 1).mean(0)
            np.testing.assert_allclose(made.run(moving), expected, rtol=1e-9)


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
    np.testing.assert_allclose(run(replicas.merged)[mask > 0], normalized(kept, 1, 1.0, 0.0)[0], atol=1e-12)


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
