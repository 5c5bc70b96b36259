"""convert_model: what it finds, that what it makes of it trains as one tower on the whole batch, and what it refuses."""
import re
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import build, cpus, has_tf_layers, run, session, train_by
from tests.sweeps import covering
from towers.testing import assert_equals_one_batch

IS_TF1 = tf.__version__.startswith("1.")
SIZES = [1, 4, 2]


def batch_of(shape, dtype=tf.float32, seed=0):
    return (np.random.RandomState(seed).randn(*shape).astype(dtype.as_numpy_dtype),)


def variables(channels, dtype, name):
    """gamma, beta and the two moving averages of a layer written by hand."""
    with tf.variable_scope(name, reuse=tf.AUTO_REUSE, auxiliary_name_scope=False):
        makers = {"gamma": tf.ones_initializer(), "beta": tf.zeros_initializer()}
        return ([tf.get_variable(n, [channels], dtype, i) for n, i in makers.items()]
                + [tf.get_variable(n, [channels], dtype, i, trainable=False) for n, i in (
                    ("moving_mean", tf.zeros_initializer()), ("moving_variance", tf.ones_initializer()))])


def update(moving, moments):
    return [tf.assign_sub(m, tf.cast(0.1, m.dtype.base_dtype) * (m - tf.cast(new, m.dtype.base_dtype)))
            for m, new in zip(moving, moments)]


def collect(moving, moments):
    for op in update(moving, moments):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, op)


def fused(x, name, data_format="NHWC", collects=True, dtype=tf.float32):
    gamma, beta, *moving = variables(x.shape[data_format.index("C")], dtype, name)
    with tf.name_scope(name):
        y, *moments = tf.nn.fused_batch_norm(x, gamma, beta, epsilon=1e-3, data_format=data_format)
        if collects:
            collect(moving, moments)
    return y


def by_moments(x, name, axis=-1, keep_dims=True):
    """A layer written by hand, as Sonnet's is."""
    dtype = tf.float64 if x.dtype == tf.float64 else tf.float32
    gamma, beta, *moving = variables(x.shape[axis], dtype, name)
    axes = [i for i in range(x.shape.rank) if i != axis % x.shape.rank]
    with tf.name_scope(name):
        moments = tf.nn.moments(x, axes, keep_dims=keep_dims)
        shape = [-1 if i == axis % x.shape.rank else 1 for i in range(x.shape.rank)]
        scale, offset = (tf.reshape(tf.cast(v, x.dtype), shape) for v in (gamma, beta))
        y = tf.nn.batch_normalization(x, *[tf.reshape(m, shape) for m in moments], offset, scale, 1e-3)
        collect(moving, [tf.reshape(m, [-1]) for m in moments])
    return y


def by_means(x, name):
    """A layer of means and squares."""
    gamma, beta, *moving = variables(x.shape[-1], x.dtype, name)
    with tf.name_scope(name):
        axes = list(range(x.shape.rank - 1))
        mean = tf.reduce_mean(x, axes)
        centred = x - mean
        variance = tf.reduce_mean(tf.square(centred), axes)
        collect(moving, [mean, variance])
        return gamma * centred / tf.sqrt(variance + 1e-3) + beta


def by_squares(x, name):
    """Of no variables, by E[x^2] - E[x]^2."""
    with tf.name_scope(name):
        mean = tf.reduce_mean(x, [0, 1, 2])
        return (x - mean) / tf.sqrt(tf.reduce_mean(x * x, [0, 1, 2]) - mean * mean + 1e-3)


def inline(x, name):
    """A layer whose moving averages move before its output is there."""
    gamma, beta, *moving = variables(x.shape[-1], tf.float32, name)
    with tf.name_scope(name):
        y, *moments = tf.nn.fused_batch_norm(x, gamma, beta, epsilon=1e-3)
        with tf.control_dependencies(update(moving, moments)):
            y = tf.identity(y)
        with tf.control_dependencies([y]):
            return tf.nn.relu(y)


def model_of(layer, **kwargs):
    """A model function of two layers; what feeds the second one depends on the whole batch through the first one."""
    def model_fn(x):
        scale = tf.get_variable("scale", [x.shape[-1]], x.dtype, tf.constant_initializer(1.3))
        y = layer(x * scale, "bn1", **kwargs)
        y = layer(tf.sin(2 * y) + x * x, "bn2", **kwargs)
        return tf.reduce_mean(tf.cast(tf.square(tf.sin(y) - 0.3 * x), tf.float64 if x.dtype == tf.float64 else tf.float32))
    return model_fn


def assert_law(model_fn, batch, update_ops, kinds=None, sizes=(2, 5)):
    converted = tf_syncbn.convert_model(model_fn)
    assert_equals_one_batch(converted, batch, num_towers=len(sizes), sizes=sizes, update_ops=update_ops)
    assert [layer.kind for layer in converted.converted] == (["fused"] * 2 if kinds is None else kinds)


SWEPT_FIRST = pytest.mark.parametrize("update_ops", [pytest.param("first", marks=pytest.mark.sweep), "all"])


@pytest.mark.parametrize("update_ops", ["all"] + [pytest.param(policy, marks=pytest.mark.sweep) for policy in ("first", "last")])
def test_fused_layers_train_as_one_tower_does(update_ops):
    assert_law(model_of(fused), batch_of([7, 5, 4, 3]), update_ops, sizes=SIZES)


@SWEPT_FIRST
def test_fused_layers_with_channels_first_train_as_with_channels_last_in_one_tower(update_ops):
    def channels_first(x, name):
        if towers.current_tower().num_towers == 1:  # fused ops of CPU may lack the other layout
            return fused(x, name)
        return tf.transpose(fused(tf.transpose(x, [0, 3, 1, 2]), name, data_format="NCHW"), [0, 2, 3, 1])

    assert_law(model_of(channels_first), batch_of([7, 5, 4, 3]), update_ops)


@pytest.mark.skipif(IS_TF1, reason="TensorFlow 1 has no fused op for rank 5")
def test_fused_layers_of_rank_5_train_as_one_tower_does():
    def layer(x, name):
        gamma, beta, *moving = variables(3, tf.float32, name)
        y, *moments = tf.raw_ops.FusedBatchNormV3(
            x=x, scale=gamma, offset=beta, mean=[], variance=[], epsilon=1e-3, data_format="NDHWC")[:3]
        collect(moving, moments)
        return y

    assert_law(model_of(layer), batch_of([7, 2, 3, 4, 3]), "first")


@pytest.mark.skipif(IS_TF1, reason="TensorFlow 1's fused op does not average")
def test_fused_layers_that_average_themselves_train_as_one_tower_does():
    def layer(x, name):
        gamma, beta, *moving = variables(3, tf.float32, name)
        y, *averages = tf.raw_ops.FusedBatchNormV3(
            x=x, scale=gamma, offset=beta, mean=tf.identity(moving[0]), variance=tf.identity(moving[1]), epsilon=1e-3,
            exponential_avg_factor=0.1)[:3]
        for m, new in zip(moving, averages):
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(m, new))
        return y

    assert_law(model_of(layer), batch_of([7, 2, 3, 3]), "first")


@pytest.mark.parametrize("version", ["FusedBatchNorm", pytest.param("FusedBatchNormV2", marks=pytest.mark.sweep)])
def test_earlier_versions_of_the_fused_op_train_as_one_tower_does(version):
    def layer(x, name):
        gamma, beta, *moving = variables(3, tf.float32, name)
        y, *moments = getattr(tf.raw_ops, version)(x=x, scale=gamma, offset=beta, mean=[], variance=[], epsilon=1e-3)[:3]
        collect(moving, moments)
        return y

    assert_law(model_of(layer), batch_of([7, 2, 3, 3]), "first")


@pytest.mark.parametrize("shape_and_axis,keep_dims", covering([
    ([7, 3], 1), ([7, 4, 3], 2), ([7, 4, 3], 1), ([7, 2, 2, 3], 3), ([7, 3, 2, 3], 1), ([7, 2, 3, 2, 3], 4),
    ([7, 3, 3, 2, 3], 1)], [True, False], one_in=4))
def test_layers_of_moments_train_as_one_tower_does_in_float64(keep_dims, shape_and_axis):
    shape, axis = shape_and_axis
    assert_law(model_of(by_moments, axis=axis, keep_dims=keep_dims), batch_of(shape, tf.float64), "first", ["moments"] * 2)


@pytest.mark.parametrize("update_ops,shape", [
    ("all", [7, 2, 2, 3]), pytest.param("first", [7, 3], marks=pytest.mark.sweep)])
def test_layers_of_means_train_as_one_tower_does_in_float64(update_ops, shape):
    assert_law(model_of(by_means), batch_of(shape, tf.float64), update_ops, ["moments"] * 2, SIZES)


@pytest.mark.parametrize("layer, kinds", [(fused, ["fused"] * 2), (by_moments, ["moments"] * 2)])
def test_layers_of_float16_are_normalized_by_moments_of_all_towers(layer, kinds):
    x, = batch_of([7, 3, 2, 4])
    x = x.astype(np.float16)
    converted = tf_syncbn.convert_model(lambda x: layer(x, "bn"))
    y = build(converted, towers.PerTower([(x[:2],), (x[2:],)])).merged()
    wide = x.astype(np.float64)
    wanted = (wide - wide.mean((0, 1, 2))) / np.sqrt(wide.var((0, 1, 2)) + 1e-3)
    assert y.dtype == tf.float16 and converted.converted[0].kind == kinds[0]
    assert np.abs(run(y) - wanted).max() < 1e-2


@pytest.mark.parametrize("update_ops", [pytest.param("first", marks=pytest.mark.sweep), "all", "none"])
def test_inline_updates_move_once_a_step(update_ops):
    assert_law(model_of(inline), batch_of([7, 5, 4, 3]), update_ops)


@SWEPT_FIRST
def test_updates_that_are_grouped_move_once_a_step(update_ops):
    def layer(x, name):
        gamma, beta, *moving = variables(x.shape[-1], tf.float32, name)
        y, *moments = tf.nn.fused_batch_norm(x, gamma, beta, epsilon=1e-3)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.group(*update(moving, moments)))
        return y

    assert_law(model_of(layer), batch_of([7, 5, 4, 3]), update_ops)


def test_layers_whose_batch_is_unknown_are_converted():
    x, = batch_of([7, 5, 4, 3])

    def model_fn(x):
        return fused(x, "bn")

    given = tf.placeholder(tf.float32, [None, None, None, 3])
    y = build(tf_syncbn.convert_model(model_fn), (given,)).merged()
    wide = x.astype(np.float64)
    wanted = (wide - wide.mean((0, 1, 2))) / np.sqrt(wide.var((0, 1, 2)) + 1e-3)
    np.testing.assert_allclose(run(y, {given: x}), wanted, atol=1e-5)


def test_second_derivatives_of_moments_are_those_of_one_tower():
    x, = batch_of([7, 3], tf.float64)
    results = []
    # One tower's authority takes no tf.nn.moments: that stops the gradient of the mean in the variance, so TensorFlow's own
    # second derivatives are wrong.
    for layer, parts in ((by_means, [x]), (by_moments, [x[:2], x[2:]])):
        with tf.Graph().as_default():
            model_fn = tf_syncbn.convert_model(model_of(layer))
            replicas = build(model_fn, towers.PerTower([(part,) for part in parts]), len(parts))
            of = tf.trainable_variables()
            first = tf.gradients(replicas.loss, of)
            second = tf.gradients(tf.add_n([tf.reduce_sum(tf.sin(g)) for g in first]), of)
            results.append(run([first, second]))
    for one, *several in zip(*map(tf.nest.flatten, results)):
        for found in several:
            np.testing.assert_allclose(found, one, rtol=1e-9, atol=1e-12)


@tf.custom_gradient
def swish(x):
    """As tf.nn.swish: the gradient function keeps the tensor that it was given."""
    def gradient(dy):
        gate = tf.sigmoid(x)
        return dy * gate * (1 + x * (1 - gate))
    return x * tf.sigmoid(x), gradient


@pytest.mark.parametrize("way,layer", covering(["minimize", "gradients"], [fused, by_moments], one_in=2))
def test_gradient_functions_of_the_models_own_read_what_stands_for_a_layer_now(layer, way):
    kind = "fused" if layer is fused else "moments"
    model_fn, (x,) = model_of(lambda x, name: swish(layer(x, name))), batch_of([7, 5, 4, 3])
    if way == "minimize":
        assert_law(model_fn, (x,), "first", [kind] * 2)
        return
    results = []
    for parts, wrap in ([x], lambda model_fn: model_fn), ([x[:1], x[1:4], x[4:]], tf_syncbn.convert_model):
        with tf.Graph().as_default(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of update ops, for which nothing waits
            replicas = build(wrap(model_fn), towers.PerTower([(part,) for part in parts]), len(parts))
            results.append(run([replicas.loss, tf.gradients(replicas.loss, tf.trainable_variables())]))
    for one, several in zip(*map(tf.nest.flatten, results)):
        np.testing.assert_allclose(several, one, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("second", covering([by_moments, by_means, by_squares], one_in=4))
def test_a_layer_of_moments_right_behind_a_fused_one_takes_its_synced_output(second):
    def first(x):
        # With an epsilon as large as variances are, moments of what each tower normalized by itself are others.
        return tf.nn.fused_batch_norm(x, tf.ones([3]), tf.zeros([3]), epsilon=1.0)[0]

    def model_fn(x):
        scale = tf.get_variable("scale", [3], x.dtype, tf.constant_initializer(1.3))
        return tf.reduce_mean(tf.square(tf.sin(second(first(x * scale), "bn")) - 0.3))

    x, = batch_of([7, 5, 4, 3])
    assert_equals_one_batch(tf_syncbn.convert_model(model_fn), (x * np.arange(1, 8, dtype=np.float32).reshape([7, 1, 1, 1]),),
                            num_towers=2, sizes=[2, 5])


@pytest.mark.skipif(not has_tf_layers(), reason="this TensorFlow has no tf.layers")
@pytest.mark.parametrize("case,update_ops", covering([
    ({}, [7, 5, 4, 3], "fused"), ({"fused": False}, [7, 5, 4, 3], "moments"), ({}, [7, 3], "moments"),
    ({"fused": False, "axis": 1}, [7, 3, 5, 3], "moments"),
    ({"fused": False, "renorm": True, "renorm_momentum": 0.8}, [7, 5, 4, 3], "moments"),
    ({"center": False, "scale": False}, [7, 5, 4, 3], "fused")], ["all", "first"], one_in=6))
def test_tf_layers_train_as_one_tower_does(update_ops, case):
    kwargs, shape, kind = case

    def layer(x, name):
        return tf.layers.batch_normalization(x, training=True, momentum=0.9, name=name, **kwargs)

    assert_law(model_of(layer), batch_of(shape), update_ops, [kind] * 2)


def assert_stays_frozen(converted, batch):
    """Asserts that steps in inference mode leave all variables alone, on three towers, whatever memory holds.

    One tower can't be held to it: TensorFlow 1's layer, as it is, averages memory that its fused op never wrote, with weight 0,
    which comes to NaN now and then.
    """
    replicas = build(converted, batch, num_towers=3)
    updates = towers.collect_update_ops(replicas)
    leaves_nan = [tf.log(row - 2.0).op for row in tf.unstack(tf.random_uniform([64, 3]))]
    with session() as made:
        before = made.run(tf.global_variables())
        for _ in range(10):
            made.run(leaves_nan)
            made.run([replicas.loss, updates])
        np.testing.assert_equal(made.run(tf.global_variables()), before)


def without_updates(model_fn):
    def made(x):
        loss = model_fn(x)
        del tf.get_collection_ref(tf.GraphKeys.UPDATE_OPS)[:]
        return loss

    return made


@pytest.mark.skipif(not has_tf_layers(), reason="this TensorFlow has no tf.layers")
@pytest.mark.parametrize("case,mode", covering([
    ({}, [7, 5, 4, 3], "fused"), ({"fused": False}, [7, 5, 4, 3], "moments"), ({}, [7, 3], "moments"),
    ({"fused": False, "renorm": True, "renorm_momentum": 0.8}, [7, 5, 4, 3], "moments")], [True, False], one_in=4,
    also=lambda case, mode: "fused" in case))
def test_tf_layers_whose_mode_is_fed_train_as_one_tower_does_and_freeze(case, mode):
    kwargs, shape, kind = case

    def model_fn(x):
        training = tf.placeholder_with_default(mode, [], name="training")
        x *= tf.get_variable("scale", [3], tf.float32, tf.constant_initializer(1.3))
        y = tf.layers.batch_normalization(x, training=training, momentum=0.9, name="bn", **kwargs)
        return tf.reduce_mean(tf.square(tf.sin(y) - 0.3 * x))

    converted = tf_syncbn.convert_model(model_fn)
    if IS_TF1 and kind == "fused" and not mode:
        assert_stays_frozen(converted, batch_of(shape))
        converted = tf_syncbn.convert_model(without_updates(model_fn))
    assert_equals_one_batch(converted, batch_of(shape), num_towers=2, sizes=[2, 5])
    is_in_function = kind == "fused" and tf.control_flow_v2_enabled()
    assert [layer.kind for layer in converted.converted] == ([] if is_in_function else [kind])


@pytest.mark.skipif(not IS_TF1, reason="only TensorFlow 1 has tf.contrib")
@pytest.mark.parametrize("kwargs", [{}, {"fused": False}, {"updates_collections": None},
                                    {"fused": False, "updates_collections": None}])
@pytest.mark.parametrize("mode", [True, False])
def test_contrib_layers_whose_mode_is_fed_train_as_one_tower_does_and_freeze(kwargs, mode):
    def model_fn(x):
        from tensorflow.contrib import layers
        x *= tf.get_variable("scale", [3], tf.float32, tf.constant_initializer(1.3))
        y = layers.batch_norm(x, decay=0.9, is_training=tf.placeholder_with_default(mode, []), scope="bn", **kwargs)
        return tf.reduce_mean(tf.square(tf.sin(y) - 0.3 * x))

    batch = batch_of([7, 5, 4, 3])
    converted = tf_syncbn.convert_model(model_fn)
    if not kwargs and not mode:  # tf.layers' own fused layer
        assert_stays_frozen(converted, batch)
        converted = tf_syncbn.convert_model(without_updates(model_fn))
    assert_equals_one_batch(converted, batch, num_towers=2, sizes=[2, 5])


@pytest.mark.skipif(not IS_TF1, reason="only TensorFlow 1 has tf.contrib")
@pytest.mark.parametrize("update_ops,case", covering(["all", "first"], [
    ({}, [7, 5, 4, 3], "fused"), ({"fused": False}, [7, 5, 4, 3], "moments"), ({}, [7, 3], "fused"),
    ({"updates_collections": None}, [7, 5, 4, 3], "fused"),
    ({"updates_collections": None, "fused": False}, [7, 5, 4, 3], "moments"),
    ({"zero_debias_moving_mean": True}, [7, 5, 4, 3], "fused")]))
def test_contrib_layers_train_as_one_tower_does(update_ops, case):
    kwargs, shape, kind = case

    def layer(x, name):
        from tensorflow.contrib import layers
        return layers.batch_norm(x, decay=0.9, is_training=True, scope=name, **kwargs)

    assert_law(model_of(layer), batch_of(shape), update_ops, [kind] * 2)


@pytest.mark.skipif(not has_tf_layers(), reason="this TensorFlow has no Keras 2")
@SWEPT_FIRST
def test_keras_layers_train_as_one_tower_does(update_ops):
    def layer(x, name):
        made = tf.keras.layers.BatchNormalization(momentum=0.9, name=name)
        y = made(x, training=True)
        for op in made.updates:
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, op)
        return y

    assert_law(model_of(layer), batch_of([7, 5, 4, 3]), update_ops)


def test_variables_collections_and_their_order_stay_as_they_are():
    def state(model_fn):
        with tf.Graph().as_default() as graph:
            replicas = build(model_fn, batch_of([7, 5, 4, 3]))
            names = {key: [v.name for v in graph.get_collection(key)] for key in
                     (tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.TRAINABLE_VARIABLES, tf.GraphKeys.MODEL_VARIABLES)}
            return names, [v.initializer.inputs[1].op.type for v in tf.global_variables()], [
                op.name for op in towers.collect_update_ops(replicas, "first")]

    assert state(model_of(fused)) == state(tf_syncbn.convert_model(model_of(fused)))


def test_no_batch_norm_of_one_tower_is_left_in_what_is_run():
    for layer in (fused, by_moments):
        with tf.Graph().as_default():
            replicas = build(tf_syncbn.convert_model(model_of(layer)), batch_of([7, 5, 4, 3]))
            graph_def = tf.graph_util.extract_sub_graph(tf.get_default_graph().as_graph_def(), [replicas.loss.op.name])
            assert not [node for node in graph_def.node if node.op.startswith("FusedBatchNorm") and node.attr["is_training"].b]
            assert "SquaredDifference" not in [node.op for node in graph_def.node]


def test_outputs_and_collections_hold_the_synced_output():
    def model_fn(x):
        y = fused(x, "bn")
        tf.add_to_collection("endpoints", y)
        return {"loss": tf.reduce_mean(tf.square(y - 1)), "y": y, "name": "a string", "nothing": None}

    x, = batch_of([7, 5, 4, 3])
    replicas = build(tf_syncbn.convert_model(model_fn), towers.PerTower([(x[:3],), (x[3:],)]))
    outputs, collected = run([[tower.outputs["y"] for tower in replicas], tf.get_collection("endpoints")])
    wide = x.astype(np.float64)
    wanted = (wide - wide.mean((0, 1, 2))) / np.sqrt(wide.var((0, 1, 2)) + 1e-3)
    for found in (outputs, collected):
        np.testing.assert_allclose(np.concatenate(found), wanted, atol=1e-5)


def test_a_layer_applied_twice_is_converted_twice():
    def model_fn(x):
        x *= tf.get_variable("scale", [3], tf.float64, tf.constant_initializer(1.3))
        return tf.reduce_mean(tf.square(by_means(tf.sin(by_means(x, "bn")), "bn") - x))

    converted = tf_syncbn.convert_model(model_fn)
    assert_equals_one_batch(converted, batch_of([7, 3], tf.float64), num_towers=2, sizes=[2, 5])
    assert [layer.scope for layer in converted.converted] == ["bn", "bn_1"]


@pytest.mark.parametrize("policy", ["first", "all"])
def test_a_layer_applied_twice_moves_its_averages_once_after_the_other(policy):
    """TensorFlow gives the two updates no order: by itself the second one may read what the first one is about to write."""
    x, = batch_of([7, 3], tf.float64)

    def model_fn(x):
        return tf.reduce_mean(tf.square(by_moments(x, "bn"))) + tf.reduce_mean(tf.square(by_moments(tf.sin(x) + 1, "bn")))

    replicas = build(tf_syncbn.convert_model(model_fn), (x,), num_towers=3)
    updates = towers.collect_update_ops(replicas, policy)
    mean, = tf.global_variables("bn/moving_mean")
    expected = 0.9 * 0.1 * x.mean(0) + 0.1 * (np.sin(x) + 1).mean(0)
    with session() as made:
        for _ in range(20):
            made.run(mean.initializer)
            made.run([replicas.loss, updates])
            np.testing.assert_allclose(made.run(mean), expected, rtol=1e-6)  # the rate is of float32


@pytest.mark.parametrize("use_resource", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_a_layer_applied_twice_whose_updates_run_in_line_trains_as_one_tower_does(use_resource):
    def layer(x):
        with tf.variable_scope("bn", reuse=tf.AUTO_REUSE, use_resource=use_resource):
            moving = tf.get_variable("moving", [3], x.dtype, tf.zeros_initializer(), trainable=False)
        mean, variance = tf.nn.moments(x, [0])
        with tf.control_dependencies([x] * use_resource):  # a read of its own, after what the first update wrote
            update = tf.assign_sub(moving, 0.1 * (moving - mean))
        with tf.control_dependencies([update]):
            return tf.nn.batch_normalization(tf.identity(x), mean, variance, None, None, 1e-3)

    def model_fn(x):
        x *= tf.get_variable("scale", [3], x.dtype, tf.constant_initializer(1.3))
        return tf.reduce_mean(tf.square(tf.sin(layer(tf.sin(layer(x)))) - x))

    assert_law(model_fn, batch_of([7, 3], tf.float64), "first", ["moments"] * 2)


def test_a_fused_layer_of_known_channels_may_choose_its_scale_and_offset_out_of_more():
    def model_fn(x):
        makers = [("gamma", tf.ones_initializer()), ("beta", tf.zeros_initializer())]
        chosen = [tf.boolean_mask(tf.get_variable(name, [5], initializer=value), [True, False, True, False, True])
                  for name, value in makers]
        y, _, _ = tf.nn.fused_batch_norm(x, *chosen, epsilon=1e-3)
        return tf.reduce_mean(tf.square(tf.sin(y) - x))

    assert_law(model_fn, batch_of([7, 5, 4, 3]), "first", ["fused"])


@pytest.mark.parametrize("use_resource", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_an_average_of_weights_beside_a_layer_moves_once(use_resource):
    if tf.control_flow_v2_enabled() and not use_resource:
        pytest.skip("TensorFlow's own tf.cond of control flow 2 reads a ref variable that may hold nothing yet")

    def model_fn(x):
        scale = tf.get_variable("scale", [3], x.dtype, tf.constant_initializer(1.3), use_resource=use_resource)
        loss = tf.reduce_mean(tf.square(by_moments(x * scale, "bn") - x))
        with tf.control_dependencies([tf.train.ExponentialMovingAverage(0.5).apply([scale])]):
            return tf.identity(loss)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_law(model_fn, batch_of([7, 3], tf.float64), "first", ["moments"])


@pytest.mark.skipif(tf.control_flow_v2_enabled(), reason="refused there")
def test_a_layer_applied_twice_that_reads_its_averages_where_it_does_not_train_trains_as_one_tower_does():
    def layer(x):
        _, _, *moving = variables(3, x.dtype, "bn")
        moments = tf.nn.moments(x, [0])
        with tf.control_dependencies([x]):  # so that the second update reads what the first one wrote
            updates = [tf.assign_sub(m, 0.1 * (m.read_value() - new)) for m, new in zip(moving, moments)]

        def trained():
            with tf.control_dependencies(updates):
                return tf.nn.batch_normalization(x, *moments, None, None, 1e-3)

        return tf.cond(tf.placeholder_with_default(True, []), trained,
                       lambda: tf.nn.batch_normalization(x, *moving, None, None, 1e-3))

    def model_fn(x):
        x *= tf.get_variable("scale", [3], x.dtype, tf.constant_initializer(1.3))
        return tf.reduce_mean(tf.square(tf.sin(layer(tf.sin(layer(x)))) - x))

    assert_law(model_fn, batch_of([7, 3], tf.float64), "first", ["moments"] * 2)


def test_converted_layers_are_listed_and_logged(monkeypatch):
    logged = []
    monkeypatch.setattr(tf.logging, "info", lambda message, *args: logged.append(message % args))
    model_fn = tf_syncbn.convert_model(model_of(fused))
    assert model_fn.converted == [] and model_fn.__name__ == "model_fn"
    build(model_fn, batch_of([8, 5, 4, 3]))
    assert [(layer.scope, layer.shape.as_list(), layer.kind) for layer in model_fn.converted] == [
        ("bn1", [4, 5, 4, 3], "fused"), ("bn2", [4, 5, 4, 3], "fused")]
    met = [(meeting.conversion, meeting.shape.as_list(), meeting.bytes) for meeting in model_fn.meetings]
    assert met == [("moments", [7], 28)] * 2
    text, = logged
    assert text.startswith("convert_model: 2 of 2 batch norms are synced over towers:\n  bn1 (4, 5, 4, 3) (fused)\n  bn2 ")


def test_standardized_weights_are_left_alone():
    def model_fn(x):
        with tf.variable_scope("conv"):
            kernel = tf.get_variable("kernel", [3, 4])
            mean, variance = tf.nn.moments(kernel, [0])
        return tf.reduce_mean(fused(x, "bn") @ ((kernel - mean) * tf.rsqrt(variance + 1e-3)))

    converted = tf_syncbn.convert_model(model_fn)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        build(converted, batch_of([7, 5, 4, 3]))
    assert [layer.scope for layer in converted.converted] == ["bn"]


@pytest.mark.parametrize("only", ["bn2$", lambda scope: scope == "bn2"])
def test_only_chooses_layers_by_scope(only):
    x, = batch_of([7, 5, 4, 3])

    def model_fn(x):
        return [fused(x, "bn1"), fused(x, "bn2")]

    converted = tf_syncbn.convert_model(model_fn, only=only)
    replicas = build(converted, towers.PerTower([(x[:3],), (x[3:],)]))
    assert [layer.scope for layer in converted.converted] == ["bn2"]
    local, synced = run(replicas.merged())
    wide = x.astype(np.float64)
    np.testing.assert_allclose(synced, (wide - wide.mean((0, 1, 2))) / np.sqrt(wide.var((0, 1, 2)) + 1e-3), atol=1e-5)
    part = wide[:3]
    np.testing.assert_allclose(local[:3], (part - part.mean((0, 1, 2))) / np.sqrt(part.var((0, 1, 2)) + 1e-3), atol=1e-5)


def test_only_that_chooses_nothing_is_an_error():
    with pytest.raises(ValueError, match="`only` chooses none of the model's batch norms, whose scopes are 'bn1', 'bn2'"):
        build(tf_syncbn.convert_model(model_of(fused), only="resnet"), batch_of([7, 5, 4, 3]))


def in_inference_mode(x, name="bn"):
    gamma, beta, mean, variance = variables(3, tf.float32, name)
    return tf.nn.fused_batch_norm(x, gamma, beta, mean, variance, 1e-3, is_training=False)[0]


@pytest.mark.parametrize("layer", [lambda x: x, in_inference_mode, lambda x: tf_syncbn.sync_batch_norm(x, name="bn")])
def test_a_model_without_a_batch_norm_to_convert_is_converted_all_the_same(layer):
    def model_fn(x):
        y = layer(x * tf.get_variable("scale", [3], initializer=tf.ones_initializer()))
        return tf.reduce_mean(tf.square(y - tf.reduce_max(y, 0)))

    assert_law(model_fn, batch_of([7, 5, 4, 3]), "first", [])


@pytest.mark.parametrize("only, error, message", [
    ("bn(", ValueError, r"`only` is no regular expression: 'bn\(', missing \)"),
    (["bn"], TypeError, r"`only` has to be a pattern, or a function of a scope, not \['bn'\]")])
def test_what_can_not_choose_is_refused(only, error, message):
    with pytest.raises(error, match=message):
        tf_syncbn.convert_model(model_of(fused), only=only)


def test_a_model_that_is_evaluated_has_nothing_to_convert():
    converted = tf_syncbn.convert_model(in_inference_mode)
    build(converted, batch_of([7, 5, 4, 3]), training=False)
    assert converted.converted == []


def test_batch_norms_that_nothing_needs_are_left_alone():
    def model_fn(x):
        fused(tf.placeholder(tf.float32, [None, 4, 4, 3]), "unused", collects=False)
        return tf.reduce_mean(fused(x, "bn"))

    converted = tf_syncbn.convert_model(model_fn)
    build(converted, batch_of([7, 5, 4, 3]))
    assert [layer.scope for layer in converted.converted] == ["bn"]


@pytest.mark.parametrize("layer", [fused, by_moments])
def test_gradients_taken_inside_the_model_function_are_those_of_the_whole_batch(layer):
    def model_fn(x):
        x = tf.cast(x, tf.float32 if layer is fused else tf.float64)
        x *= tf.get_variable("scale", [3], x.dtype, tf.constant_initializer(1.3))
        y = layer(x, "bn")
        return tf.reduce_mean(tf.square(y)) + tf.reduce_mean(tf.square(tf.gradients(tf.reduce_sum(tf.sin(y)), x)[0]))

    assert_law(model_fn, batch_of([7, 5, 4, 3]), "first", ["fused" if layer is fused else "moments"])


def test_gradients_beside_the_batch_norms_are_none_of_its_concern():
    def model_fn(x):
        slope, = tf.gradients(tf.reduce_sum(tf.sin(x)), x)
        return tf.reduce_mean(fused(x, "bn") * slope)

    build(tf_syncbn.convert_model(model_fn), batch_of([7, 5, 4, 3]))


def test_a_batch_norm_in_a_while_loop_is_refused_by_control_flow_1_where_sizes_are_known():
    def model_fn(x):
        x *= tf.get_variable("scale", [3], initializer=tf.constant_initializer(1.3))
        return tf.reduce_mean(tf.while_loop(
            lambda i, y: i < 2, lambda i, y: (i + 1, tf.sin(fused(y, "bn", collects=False))), (0, x))[1])

    if tf.control_flow_v2_enabled():
        assert_law(model_fn, batch_of([7, 5, 4, 3]), "first", [])
        return
    with pytest.raises(ValueError, match="convert_model: the state of a tf.while_loop, 'tower_0/while.*has another size"):
        build(tf_syncbn.convert_model(model_fn), batch_of([7, 5, 4, 3]))


def of_moments_in_a_branch(x, name, training, resource=False):
    """As tflearn's layer has it: moments and updates in the branch that trains, averages in the other one."""
    with tf.variable_scope("", use_resource=resource):
        gamma, beta, mean, variance = variables(x.shape[-1], x.dtype, name)

    def trained():
        moments = tf.nn.moments(x, list(range(x.shape.rank - 1)))
        with tf.control_dependencies(update([mean, variance], moments)):
            return [tf.identity(moment) for moment in moments]

    return tf.nn.batch_normalization(
        x, *tf.cond(training, trained, lambda: [tf.identity(mean), tf.identity(variance)]), beta, gamma, 1e-3)


@pytest.mark.skipif(tf.control_flow_v2_enabled(), reason="branches are functions there, and refused")
@pytest.mark.parametrize("sizes,mode,resource", covering([[3, 4], [1, 4, 2]], [True, False], [False, True], one_in=2))
def test_moments_in_the_branch_that_trains_are_those_of_all_towers(mode, resource, sizes):
    def model_fn(x):
        training = tf.placeholder_with_default(mode, [])
        y = of_moments_in_a_branch(x * tf.get_variable("w", [3], x.dtype, tf.ones_initializer()), "bn1", training, resource)
        z = of_moments_in_a_branch(tf.nn.relu(y), "bn2", training, resource)
        return tf.reduce_mean(tf.square(tf.sin(z) - 0.3 * x))

    converted = tf_syncbn.convert_model(model_fn)
    assert_equals_one_batch(converted, batch_of([7, 5, 3], tf.float64), num_towers=len(sizes), sizes=sizes)
    assert [layer.kind for layer in converted.converted] == ["moments", "moments"]


@pytest.mark.skipif(not IS_TF1, reason="only TensorFlow 1 has tf.contrib")
@pytest.mark.skipif(tf.control_flow_v2_enabled(), reason="branches are functions there, and refused")
@pytest.mark.parametrize("kwargs, mode", covering([{}, {"zero_debias_moving_mean": True}, {"fused": False}], [True, False]))
def test_layers_that_are_made_in_both_branches_of_their_own_mode_train_as_one_tower_does(mode, kwargs):
    """As the networks for CIFAR-10 do that wrap contrib's layer in a tf.cond by the mode that the layer itself is fed."""
    def layer(x, name, training):
        from tensorflow.contrib import layers
        return tf.cond(training, *[lambda reuse=reuse: layers.batch_norm(
            x, 0.9, scale=True, is_training=training, updates_collections=None, scope=name, reuse=reuse, **kwargs)
            for reuse in (None, True)])

    def model_fn(x):
        training = tf.placeholder_with_default(mode, [])
        x *= tf.get_variable("scale", [3], tf.float32, tf.constant_initializer(1.3))
        y = layer(tf.nn.relu(layer(x, "bn1", training)), "bn2", training)
        return tf.reduce_mean(tf.square(tf.sin(y) - 0.3 * x))

    for sizes in ([3, 4], [1, 4, 2]):
        assert_equals_one_batch(tf_syncbn.convert_model(model_fn), batch_of([7, 5, 4, 3]), num_towers=len(sizes), sizes=sizes)


def mode_of(x):
    return tf.placeholder_with_default(True, [])


@pytest.mark.skipif(tf.control_flow_v2_enabled(), reason="branches are functions there, and refused")
@pytest.mark.parametrize("layers", [20, 1])
def test_batch_norms_of_what_a_branch_chooses_within_another_one_are_refused_by_name(layers):
    """A network in a branch of its own is not made anew outside, however deep it is."""
    def network(x, training):
        for _ in range(layers):
            y, *moments = tf.nn.fused_batch_norm(tf.sin(x), tf.ones([3]), tf.zeros([3]))
            x = x + tf.cond(training, lambda y=y: y, lambda z=x: tf.nn.fused_batch_norm(
                z, tf.ones([3]), tf.zeros([3]), tf.zeros([3]), tf.ones([3]), is_training=False)[0])
        moments = tf.cond(training, lambda: tf.nn.moments(x, [0, 1, 2]), lambda: (tf.zeros([3]), tf.ones([3])))
        return tf.nn.batch_normalization(x, *moments, None, None, 1e-3)

    def model_fn(x):
        training = mode_of(x)
        return tf.reduce_mean(tf.cond(mode_of(x), lambda: network(x, training), lambda: x))

    with pytest.raises(ValueError, match="would have to meet about 'tower_0/cond/.*Merge.* within a tf.cond or tf.while_loop"):
        build(tf_syncbn.convert_model(model_fn), batch_of([7, 5, 4, 3]))


@pytest.mark.skipif(tf.control_flow_v2_enabled(), reason="branches are functions there, and refused")
@pytest.mark.parametrize("dtype, of_input", [
    (tf.float64, lambda y: y), pytest.param(tf.float64, tf.identity, marks=pytest.mark.sweep),
    pytest.param(tf.float32, lambda y: tf.cast(y, tf.float64), marks=pytest.mark.sweep)])
def test_a_layer_of_moments_in_a_branch_is_that_of_all_towers(dtype, of_input):
    def model_fn(x):
        y = x * tf.get_variable("w", [3], x.dtype, tf.ones_initializer())
        y = tf.cond(tf.placeholder_with_default(True, []), lambda: tf.nn.batch_normalization(
            y, *[tf.cast(moment, dtype) for moment in tf.nn.moments(of_input(y), [0, 1])], None, None, 1e-3), lambda: y)
        return tf.reduce_mean(tf.square(tf.sin(y) - 0.3 * x))

    assert_equals_one_batch(tf_syncbn.convert_model(model_fn), batch_of([7, 5, 3], dtype), num_towers=3)


def test_a_batch_norm_in_a_function_is_that_of_all_towers():
    @tf.function(autograph=False)
    def block(x):
        return tf.nn.fused_batch_norm(x, tf.ones([3]), tf.zeros([3]))[0]

    def model_fn(x):
        return tf.reduce_mean(tf.sin(block(x * tf.get_variable("scale", [3])) + fused(x, "bn")))

    assert_law(model_fn, batch_of([7, 5, 4, 3]), "first", ["fused"])


def test_an_inline_update_in_a_branch_moves_once():
    def layer(x, name):
        with tf.variable_scope("", use_resource=tf.control_flow_v2_enabled()):
            gamma, beta, *moving = variables(3, tf.float32, name)
        y, *moments = tf.nn.fused_batch_norm(x, gamma, beta)

        def updated():
            with tf.control_dependencies(update(moving, moments)):
                return [tf.identity(m) for m in moments]

        moments = tf.cond(tf.placeholder_with_default(True, []), updated, lambda: moments)
        return y + 0 * moments[0]

    assert_law(model_of(layer), batch_of([7, 5, 4, 3]), "first")


def test_moments_of_an_unknown_number_of_channels_are_those_of_all_towers():
    def model_fn(x):
        mean, variance = tf.nn.moments(x * tf.get_variable("scale", [], x.dtype), [0])
        return tf.reduce_mean(tf.sin((x - mean) * tf.rsqrt(variance + 1e-3)))

    x = tf.placeholder_with_default(batch_of([7, 3], tf.float64)[0], [7, None])
    losses = [train_by(towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1)), replicas.loss, 3, {"scale": 1.3})[0]
              for replicas in [build(tf_syncbn.convert_model(model_fn), (x,), 3)]]
    wide = batch_of([7, 3], tf.float64)[0]
    assert losses[0][0] == pytest.approx(np.mean(np.sin((wide - 1.3 * wide.mean(0)) / np.sqrt(1.69 * wide.var(0) + 1e-3))))


@pytest.mark.skipif(not has_tf_layers() or IS_TF1, reason="this Keras has no synchronized=True")
def test_a_layer_that_would_synchronize_itself_trains_as_one_tower_does():
    def layer(x, name):
        made = tf.compat.v2.keras.layers.BatchNormalization(synchronized=True, momentum=0.9, name=name)
        y = made(x, training=True)
        for op in made.updates:
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, op)
        return y

    assert_law(model_of(layer), batch_of([7, 5, 4, 3]), "first", ["sums"] * 2)


@pytest.mark.skipif(not has_tf_layers(), reason="this TensorFlow has no tf.layers")
def test_layers_with_default_names_keep_them():
    def model_fn(x):
        with tf.name_scope("block"):
            x = tf.layers.batch_normalization(x, training=True)
        return tf.reduce_mean(tf.layers.batch_normalization(x, training=True, fused=False))

    converted = tf_syncbn.convert_model(model_fn)
    build(converted, batch_of([7, 5, 4, 3]))
    first, second = [layer.scope for layer in converted.converted]
    assert first == "block/batch_normalization" and second in ("batch_normalization", "batch_normalization_1")


def test_other_normalization_stays_as_it_is_without_a_warning():
    def model_fn(x):
        kernel = tf.get_variable("kernel", [3, 3, 3, 4])
        mean, variance = tf.nn.moments(kernel, [0, 1, 2])  # standardized weights
        x = tf.nn.conv2d(x, (kernel - mean) * tf.rsqrt(variance + 1e-3), [1, 1, 1, 1], "SAME")
        for axes in ([1, 2], [1, 2, 3], [3]):
            mean, variance = tf.nn.moments(x, axes, keep_dims=True)
            x = tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)
        return tf.reduce_mean(fused(tf.nn.l2_normalize(x, 3), "bn"))

    converted = tf_syncbn.convert_model(model_fn)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        build(converted, batch_of([7, 5, 4, 3]))
    assert [layer.scope for layer in converted.converted] == ["bn"]


@pytest.mark.parametrize("outside", [True, False])
def test_outside_of_towers_and_in_one_tower_the_model_stays_as_it_is(outside):
    def graph_def(model_fn):
        with tf.Graph().as_default() as graph:
            x = tf.constant(batch_of([7, 5, 4, 3])[0])
            if outside:
                model_fn(x)
            else:
                build(model_fn, (x,), 1)
            return graph.as_graph_def()

    assert graph_def(model_of(fused)) == graph_def(tf_syncbn.convert_model(model_of(fused)))


def test_towers_that_differ_in_batch_norms_are_named():
    def model_fn(x):
        y = fused(x, "bn1")
        return tf.reduce_mean(y if towers.current_tower().is_first else fused(y, "bn1"))

    with pytest.raises(ValueError, match="makes (other ops of a batch of another size: )?.tower_1/bn1"):
        build(tf_syncbn.convert_model(model_fn), batch_of([7, 5, 4, 3]))


def test_a_tower_of_one_example_that_loses_its_axis_is_named():
    def model_fn(x):
        return tf.reduce_mean(tf.sin(by_moments(tf.expand_dims(tf.squeeze(x), -1), "bn")))

    with pytest.raises(ValueError, match="makes other ops of a batch of another size: 'tower_1/bn/moments/mean', with 3 axes"):
        build(tf_syncbn.convert_model(model_fn), towers.PerTower([tf.ones([2, 3, 4]), tf.ones([1, 3, 4])]), 2)


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="model_fn has to be a model function, not 3"):
        tf_syncbn.convert_model(3)


def test_a_checkpoint_moves_between_the_converted_and_the_unconverted_model(tmp_path):
    path = str(tmp_path / "model")
    optimizer = tf.train.MomentumOptimizer(0.1, 0.9)
    models = [tf_syncbn.convert_model(model_of(fused)), model_of(fused)]
    saved = None
    for model_fn in (models[0], models[1], models[0]):
        with tf.Graph().as_default():
            replicas = build(model_fn, batch_of([7, 5, 4, 3]))
            train_op = towers.minimize(replicas, optimizer)
            names = {v.op.name: v for v in tf.global_variables()}
            with session() as made:
                if saved is not None:
                    tf.train.Saver().restore(made, path)
                    found = made.run(names)
                    assert set(found) == set(saved)
                    assert all(np.array_equal(found[name], saved[name]) for name in saved)
                made.run(train_op)
                saved = made.run(names)
                tf.train.Saver().save(made, path)


def test_a_model_is_converted_anew_in_each_build():
    converted = tf_syncbn.convert_model(model_of(fused))
    for num_towers in (2, 3):
        with tf.Graph().as_default():
            replicas = build(converted, batch_of([7, 5, 4, 3]), num_towers)
            loss, _, _ = train_by(towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1)), replicas.loss, 2)
            assert np.isfinite(loss).all() and len(converted.converted) == 2


def test_devices_of_layers_are_kept():
    def model_fn(x):
        with tf.device("/cpu:5"):
            return tf.reduce_mean(fused(x, "bn"))

    build(tf_syncbn.convert_model(model_fn), batch_of([7, 5, 4, 3]))
    made = [op for op in tf.get_default_graph().get_operations() if re.match("tower_1/bn/FusedBatchNorm.*/whole_batch/", op.name)]
    assert made and all(op.device.lower().endswith("cpu:5") for op in made)
    assert cpus(6)[-1] == "/cpu:5"


def test_a_mean_of_its_own_and_a_standard_deviation_train_as_one_tower_does():
    def layer(x, name):
        return (x - tf.reduce_mean(x, 0, keepdims=True)) / (tf.math.reduce_std(x, 0) + 1e-3)

    assert_law(model_of(layer), batch_of([7, 3], tf.float64), "first", ["moments"] * 2)


@pytest.mark.sweep
def test_powers_of_differences_and_of_variances_train_as_one_tower_does():
    def layer(x, name):
        mean = tf.reduce_mean(x, 0)
        return (x - mean) / (tf.reduce_mean((x - mean) ** 2, 0) + 1e-3) ** 0.5

    assert_law(model_of(layer), batch_of([7, 3], tf.float64), "first", ["moments"] * 2)


def test_batch_norms_of_noise_are_found():
    def model_fn(x):
        noise = tf.random_normal([tf.shape(x)[0], 3], dtype=tf.float64)
        return tf.reduce_mean(by_moments(noise, "generator")) + tf.reduce_mean(by_moments(x, "bn"))

    converted = tf_syncbn.convert_model(model_fn)
    build(converted, batch_of([7, 3], tf.float64))
    assert [layer.scope for layer in converted.converted] == ["generator", "bn"]


@pytest.mark.skipif(not has_tf_layers() or IS_TF1, reason="Keras 2 of TensorFlow 2 has it by the fused op")
@pytest.mark.parametrize("size", [7, 2, None])
def test_layer_normalization_stays_as_it_is(size):
    """In towers of one example too, the second of them."""
    def model_fn(x):
        y = tf.keras.layers.LayerNormalization(name="ln")(x)
        return tf.reduce_mean(fused(tf.reshape(y, [-1, 5, 4, 3]), "bn"))

    converted = tf_syncbn.convert_model(model_fn)
    build(converted, (tf.placeholder(tf.float32, [size, 5, 4, 3]),))
    assert [layer.scope for layer in converted.converted] == ["bn"]


def normalized_by_moments(x):
    return tf.nn.batch_normalization(x, *tf.nn.moments(x, [0, 1, 2]), None, None, 1e-3)


def recomputed(layer, is_known):
    """Returns a model function that lets gradients build a layer anew."""
    def model_fn(x):
        if IS_TF1:
            from tensorflow.contrib.layers import recompute_grad
        else:
            recompute_grad = tf.recompute_grad
        x *= tf.get_variable("w", [3], initializer=tf.ones_initializer())
        x = x if is_known else tf.placeholder_with_default(x, [None, 5, 4, 3])
        y = recompute_grad(lambda x: tf.sin(layer(x)))(x)
        return tf.reduce_mean(tf.square(y - x))
    return model_fn


def test_batch_norms_that_gradients_build_anew_are_those_of_all_towers_where_sizes_are_unknown():
    x, = batch_of([7, 5, 4, 3])
    losses = []
    for is_known, num_towers in ((False, 3), (True, 1)):
        with tf.Graph().as_default():
            batch = (x if is_known else tf.placeholder_with_default(x, [None, 5, 4, 3]),)
            replicas = build(tf_syncbn.convert_model(recomputed(normalized_by_moments, is_known)), batch, num_towers)
            train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1))
            losses.append(train_by(train_op, replicas.loss, 3)[0])
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize("is_known, message", [(True, "Hand the batch in with an unknown size"),
                                               (False, "makes .*, a FusedBatchNormGrad.*not linear in the gradient")])
def test_batch_norms_that_gradients_build_anew_are_refused_by_name(is_known, message):
    x, = batch_of([7, 5, 4, 3])
    batch = (x if is_known else tf.placeholder_with_default(x, [None, 5, 4, 3]),)
    model_fn = recomputed(lambda x: tf.nn.fused_batch_norm(x, tf.ones([3]), tf.zeros([3]))[0], is_known)
    with pytest.raises(ValueError, match="'tower_0/IdentityN' .*" + message):
        towers.minimize(build(tf_syncbn.convert_model(model_fn), batch), tf.train.GradientDescentOptimizer(0.1))


@pytest.mark.parametrize("layer", ["fused", "moments"])
def test_a_tape_in_the_model_function_takes_gradients_of_the_whole_batch(layer):
    def moments(x, name):
        mean, variance = tf.nn.moments(x, [0, 1, 2])
        return (x - mean) / tf.sqrt(variance + 1e-3)

    def model_fn(x):
        x *= tf.get_variable("scale", [3], x.dtype, tf.constant_initializer(1.3))
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(tf.sin({"fused": fused, "moments": moments}[layer](x, "bn")))
        return tf.reduce_mean(tape.gradient(total, x) ** 2)

    assert_law(model_fn, batch_of([7, 5, 4, 3]), "first", [layer])


def test_a_tape_that_records_the_towers_is_refused():
    with pytest.raises(ValueError, match="a tf.GradientTape records the model function"):
        with tf.GradientTape():
            build(tf_syncbn.convert_model(lambda x: tf.reduce_sum(fused(x, "bn"))), batch_of([7, 5, 4, 3]))


@pytest.mark.parametrize("only", [None, "^bn$"])
def test_moments_in_a_function_are_those_of_all_towers_or_left_out_by_only(only):
    @tf.function(autograph=False)
    def block(x):
        mean, variance = tf.nn.moments(x, [0, 1, 2])
        return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)

    def model_fn(x):
        return [block(x), fused(x, "bn")]

    x, = batch_of([7, 5, 4, 3])
    converted = tf_syncbn.convert_model(model_fn, only=only)
    found = run(build(converted, (x,)).merged())
    assert [layer.scope for layer in converted.converted] == ["bn"]
    wide, axes = x.astype(np.float64), (0, 1, 2)
    exact = (wide - wide.mean(axes)) / np.sqrt(wide.var(axes) + 1e-3)
    own = (wide[:4] - wide[:4].mean(axes)) / np.sqrt(wide[:4].var(axes) + 1e-3)
    np.testing.assert_allclose(found[1], exact, atol=1e-5)
    np.testing.assert_allclose(found[0][:4], exact[:4] if only is None else own, atol=1e-5)


@pytest.mark.parametrize("update_ops", [pytest.param("first", marks=pytest.mark.sweep), "last", pytest.param(
    "all", marks=pytest.mark.sweep)])
def test_a_group_of_updates_and_others_moves_averages_once_a_step(update_ops):
    def layer(x, name):
        gamma, beta, *moving = variables(3, tf.float32, name)
        y, *moments = tf.nn.fused_batch_norm(x, gamma, beta)
        other = tf.get_variable(name + "_other", [], initializer=tf.zeros_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.group(*update(moving, moments), tf.assign(other, 1.0)))
        return y

    assert_law(model_of(layer), batch_of([7, 5, 4, 3]), update_ops)


def test_updates_in_a_collection_of_their_own_are_tower_0s():
    def model_fn(x):
        gamma, beta, *moving = variables(3, tf.float32, "bn")
        y, *moments = tf.nn.fused_batch_norm(x, gamma, beta)
        for op in update(moving, moments):
            tf.add_to_collection("mine", op)
        return tf.reduce_mean(y)

    x, = batch_of([7, 5, 4, 3])
    build(tf_syncbn.convert_model(model_fn), (x,), 3)
    with session() as made:
        made.run(tf.get_collection("mine"))
        mean, = [v for v in tf.global_variables() if v.op.name == "bn/moving_mean"]
        np.testing.assert_allclose(made.run(mean), 0.1 * x.astype(np.float64).mean((0, 1, 2)), atol=1e-6)


@pytest.mark.parametrize("update_ops,is_inline", covering(["first", "all"], [False, True]))
def test_averages_stacked_in_one_variable_move_once_a_step(update_ops, is_inline):
    def layer(x, name):
        y, mean, variance = tf.nn.fused_batch_norm(x, tf.ones([3]), tf.zeros([3]))
        both = tf.get_variable(name, [2, 3], initializer=tf.zeros_initializer(), trainable=False)
        op = tf.assign_sub(both, 0.1 * (both - tf.stack([mean, variance])))
        if not is_inline:
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, op)
            return y
        with tf.control_dependencies([op]):
            return tf.identity(y)

    assert_law(model_of(layer), batch_of([7, 5, 4, 3]), update_ops)


def test_an_average_of_what_is_computed_of_the_batch_is_that_of_all_towers():
    def model_fn(x):
        y = by_moments(x, "bn")
        center = tf.get_variable("center", [3], tf.float64, tf.zeros_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(center, tf.reduce_mean(y ** 3, 0)))
        return tf.reduce_mean(y)

    x, = batch_of([7, 3], tf.float64)
    replicas = build(tf_syncbn.convert_model(model_fn), (x,))
    y = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-3)
    for policy in ("first", "last"):
        with session() as made:
            made.run(towers.collect_update_ops(replicas, policy))
            center, = [v for v in tf.global_variables() if v.op.name == "center"]
            np.testing.assert_allclose(made.run(center), (y ** 3).mean(0), rtol=1e-9)


def test_an_evaluation_beside_the_training_is_not_pulled_into_a_step():
    def model_fn(x):
        gamma, beta, mean, variance = variables(3, tf.float32, "bn")
        other = tf.placeholder(tf.float32, [None, 5, 4, 3])
        evaluated = tf.nn.fused_batch_norm(other, gamma, beta, mean, variance, is_training=False)[0]
        return {"loss": tf.reduce_mean(tf.square(fused(x, "bn") - 1)), "evaluated": evaluated}

    replicas = build(tf_syncbn.convert_model(model_fn), batch_of([7, 5, 4, 3]))
    train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1))
    with session() as made:
        made.run(train_op)


@pytest.mark.parametrize("training", [True, False])
def test_a_fed_mode_gives_the_output_of_that_mode(training):
    x, = batch_of([7, 5, 4, 3])
    is_training = tf.placeholder(tf.bool, [])

    def model_fn(x):
        gamma, beta, mean, variance = variables(3, tf.float32, "bn")
        return tf.cond(is_training, lambda: tf.nn.fused_batch_norm(x, gamma, beta, epsilon=1e-3)[0],
                       lambda: tf.nn.fused_batch_norm(x, gamma, beta, mean, variance, 1e-3, is_training=False)[0])

    y = build(tf_syncbn.convert_model(model_fn), (x,), 3).merged()
    axes = (0, 1, 2) if training else ()
    mean, variance = (x.mean(axes), x.var(axes)) if training else (0, 1)
    np.testing.assert_allclose(run(y, {is_training: training}), (x - mean) / np.sqrt(variance + 1e-3), atol=1e-5)


def test_inline_updates_that_the_next_batch_norm_waits_for_move_once_a_step():
    def model_fn(x):
        gamma, beta, *moving = variables(3, tf.float32, "bn1")
        y, *moments = tf.nn.fused_batch_norm(x * tf.get_variable("w", [3]), gamma, beta)
        z = tf.sin(y)
        with tf.control_dependencies(update(moving, moments)):
            z = tf.nn.fused_batch_norm(z, tf.ones([3]), tf.zeros([3]))[0]
        return tf.reduce_mean(tf.square(tf.sin(z) - x))

    assert_law(model_fn, batch_of([7, 5, 4, 3]), "first")


def test_an_exponential_moving_average_trains_as_one_tower_does():
    def layer(x, name):
        with tf.variable_scope(name):
            moments = tf.nn.moments(x, [0])
            average = tf.train.ExponentialMovingAverage(0.9)
            with tf.control_dependencies([average.apply(moments)]):
                moments = [tf.identity(m) for m in moments]
            return tf.nn.batch_normalization(x, *moments, None, None, 1e-3)

    assert_law(model_of(layer), batch_of([7, 3], tf.float64), "first", ["moments"] * 2)
