"""Whose update ops run, in what order, and before what."""
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import build, cpus, has_tf_layers, run, session, train_by
from tests.sweeps import covering
from towers.graph.walk import ancestors
from towers.state.update_ops import collect_update_ops
from towers.testing import assert_equals_one_batch

X = (3 + 2 * np.random.RandomState(0).randn(12, 4)).astype(np.float32)
DECAY = 0.8


@pytest.fixture(params=["ref", "resource"])
def resource(request):
    """Runs a test with variables of both kinds."""
    return request.param == "resource"


def ordinary(resource, mean_of=lambda x: tf.reduce_mean(x, 0)):
    """A model with an ordinary moving average of its batch's mean."""
    def model(x):
        with tf.variable_scope("layer", use_resource=resource):
            w = tf.get_variable("w", [4], initializer=tf.ones_initializer())
            moving = tf.get_variable("moving", [4], initializer=tf.ones_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_sub(moving, (moving - mean_of(x)) * (1 - DECAY)))
        return tf.reduce_mean((x * w) ** 2)
    return model


def moving_average(policy, num_towers, steps):
    """The moving average as NumPy has it."""
    means = [part.mean(0, dtype=np.float64) for part in np.array_split(X, num_towers)]
    chosen = {"first": means[:1], "last": means[-1:], "all": means, "none": []}[policy]
    m = np.ones(4)
    for _ in range(steps):
        for mean in chosen:
            m = DECAY * m + (1 - DECAY) * mean
    return m


@pytest.mark.parametrize("policy,num_towers,resource", covering(
    ["first", "all", "last", "none"], [1, 3, 2], [True, False],
    also=lambda policy, num_towers, resource: policy == "all" and num_towers == 2 and resource))
def test_moving_average_of_every_policy_equals_numpy(policy, num_towers, resource):
    replicas = build(ordinary(resource), (X,), num_towers)
    train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.01), update_ops=policy)
    _, _, after = train_by(train_op, replicas.loss, 7)
    np.testing.assert_allclose(after["layer/moving"], moving_average(policy, num_towers, 7), rtol=1e-5)


def test_all_towers_updates_are_equal_run_to_run(resource):
    replicas = build(ordinary(resource), (X,), 6)
    updates = collect_update_ops(replicas, "all")
    moving, = [v for v in tf.global_variables() if v.op.name == "layer/moving"]
    with session() as made:
        seen = set()
        for _ in range(60):
            made.run(moving.initializer)
            made.run(updates)
            seen.add(made.run(moving).tobytes())
    assert len(seen) == 1


def test_all_towers_updates_of_tf_layers_equal_numpy():
    if not has_tf_layers():
        pytest.skip("this TensorFlow has no tf.layers")

    def model(x):
        return tf.reduce_mean(tf.layers.batch_normalization(x, momentum=DECAY, training=True, name="bn") ** 2)

    replicas = build(model, (X,), 3)
    train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.01), update_ops="all")
    _, _, after = train_by(train_op, replicas.loss, 5)
    mean, variance = np.zeros(4), np.ones(4)
    for _ in range(5):
        for part in np.array_split(X.astype(np.float64), 3):
            mean = DECAY * mean + (1 - DECAY) * part.mean(0)
            variance = DECAY * variance + (1 - DECAY) * part.var(0)
    np.testing.assert_allclose(after["bn/moving_mean"], mean, rtol=1e-4)
    np.testing.assert_allclose(after["bn/moving_variance"], variance, rtol=1e-4)


def test_policy_all_does_not_make_towers_wait_for_one_another(resource):
    replicas = build(ordinary(resource), (X,), 2)
    collect_update_ops(replicas, "all")
    assert not [op for op in ancestors([replicas[1].loss]) if op.name.startswith("tower_0/")]


@pytest.mark.parametrize("policy,updates", [("first", 1), ("all", 1), ("last", 1), ("none", 0)])
def test_sync_batch_norm_updates_once_a_step_under_every_policy_but_none(policy, updates):
    def model(x):
        return tf.reduce_mean(tf_syncbn.sync_batch_norm(x, momentum=DECAY, name="bn") ** 3)

    replicas = build(model, (X,), 3)
    assert len(collect_update_ops(replicas, policy)) == 2 * updates
    train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.0), update_ops=policy)
    _, _, after = train_by(train_op, replicas.loss, 4)
    kept = DECAY ** (4 * updates)
    np.testing.assert_allclose(after["bn/moving_mean"], (1 - kept) * X.mean(0, dtype=np.float64), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after["bn/moving_variance"], kept + (1 - kept) * X.var(0, dtype=np.float64), rtol=1e-5)


def test_shared_update_of_anyone_runs_once():
    def model(x):
        counter = tf.get_variable("counter", [], initializer=tf.zeros_initializer(), trainable=False)
        towers.current_tower().add_update(tf.assign_add(counter, 1.0), shared=True)
        return tf.reduce_mean(x * tf.get_variable("w", [4]))

    replicas = build(model, (X,), 3)
    train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1), update_ops="last")
    assert train_by(train_op, replicas.loss, 5)[2]["counter"] == 5


@pytest.mark.parametrize("num_towers", [1, 2])
def test_update_ops_run_before_gradients_are_averaged(num_towers):
    devices = ["/cpu:0", "/cpu:1"][:num_towers]
    replicas = towers.TowerBuilder(devices, aggregation_device="/cpu:1").build(ordinary(False), (X,))
    grads = towers.average_gradients(replicas, towers.compute_gradients(replicas, tf.train.GradientDescentOptimizer(1.0)))
    assert {op for op in ancestors([grads[0][0]]) if op.type.startswith("AssignSub")}
    assert grads[0][0].device.lower().endswith("cpu:1")
    moving, = [v for v in tf.global_variables() if v.op.name == "layer/moving"]
    with session() as made:
        made.run(grads[0][0])
        np.testing.assert_allclose(made.run(moving), moving_average("first", num_towers, 1), rtol=1e-5)


@pytest.mark.parametrize("given", ["last", [], list] + [
    pytest.param(policy, marks=pytest.mark.sweep) for policy in ("first", "none")])
def test_update_ops_are_a_policy_or_a_list_wherever_they_stand(given):
    def moved(step):
        with tf.Graph().as_default():
            replicas = build(ordinary(False), (X,), 2)
            own = replicas[0].update_ops if given is list else given
            fetch = step(replicas, tf.train.GradientDescentOptimizer(0.0), own)
            moving, = [v for v in tf.global_variables() if v.op.name == "layer/moving"]
            with session() as made:
                made.run(fetch)
                return made.run(moving)

    whole = moved(lambda replicas, optimizer, own: towers.minimize(replicas, optimizer, update_ops=own))
    in_parts = moved(lambda replicas, optimizer, own: towers.average_gradients(
        replicas, towers.compute_gradients(replicas, optimizer), own)[0][0])
    policy = "first" if given is list else given or "none"
    np.testing.assert_allclose(whole, moving_average(policy, 2, 1), rtol=1e-5)
    np.testing.assert_array_equal(in_parts, whole)


def test_a_list_of_all_towers_updates_runs_one_after_the_other(resource):
    """As `tf.get_collection(tf.GraphKeys.UPDATE_OPS)` holds them; before, they raced."""
    replicas = build(ordinary(resource), (X,), 6)
    updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
    assert len(updates) == 6
    train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.01), update_ops=updates)
    _, _, after = train_by(train_op, replicas.loss, 7)
    np.testing.assert_allclose(after["layer/moving"], moving_average("all", 6, 7), rtol=1e-5)


def test_variables_in_the_place_of_update_ops_are_refused_by_the_argument_that_was_meant(resource):
    replicas, optimizer = build(ordinary(resource), (X,), 2), tf.train.GradientDescentOptimizer(1.0)
    with pytest.raises(TypeError, match="not the variable 'layer/w:0'. Were variables to train meant, var_list=?"):
        towers.minimize(replicas, optimizer, update_ops=tf.trainable_variables())
    with pytest.raises(TypeError, match="not the variable 'global_step:0'. Was it meant as global_step=?"):
        towers.minimize(replicas, optimizer, update_ops=tf.train.get_or_create_global_step())
    with pytest.raises(TypeError, match="positional argument"):
        towers.minimize(replicas, optimizer, tf.trainable_variables())


def test_update_ops_that_are_none_are_refused():
    replicas = build(ordinary(False), (X,), 2)
    with pytest.raises(TypeError, match="An update op is an operation or a tensor, not 'first'"):
        towers.minimize(replicas, tf.train.GradientDescentOptimizer(1.0), update_ops=["first"])


@pytest.mark.parametrize("policy", ["tower_0", None, True])
def test_unknown_policy_is_refused(policy):
    with pytest.raises(ValueError, match="is one of 'first', 'all', 'last', 'none', not"):
        collect_update_ops(build(ordinary(False), (X,), 2), policy)


def test_update_op_inside_cond_is_refused_by_name():
    def model(x):
        moving = tf.get_variable("moving", [4], trainable=False, use_resource=True)
        flag = tf.placeholder_with_default(True, [])

        def update():
            op = tf.assign_sub(moving, moving - tf.reduce_mean(x, 0))
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, op)
            return tf.constant(1.0)
        return tf.reduce_mean(x) * tf.cond(flag, update, lambda: tf.constant(1.0))

    replicas = build(model, (X,), 2)
    if not replicas[0].update_ops:
        pytest.skip("control flow v2 keeps a branch's collections to itself, so nothing wrong can be collected")
    with pytest.raises(ValueError, match="stands inside a tf.cond or tf.while_loop"):
        collect_update_ops(replicas)


def test_an_update_that_is_the_result_of_a_cond_runs_where_the_cond_says():
    def model(x):
        moving = tf.get_variable("moving", [4], initializer=tf.zeros_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.cond(
            flag, lambda: tf.identity(tf.assign_add(moving, tf.ones_like(x[0]))), lambda: tf.identity(moving)))
        return tf.reduce_mean(x * tf.get_variable("w", [4]))

    flag = tf.placeholder(tf.bool, [])
    replicas = build(model, (X,), 2)
    with pytest.raises(ValueError, match="can't run one after the other: 'tower_0/.*cond.*' stands inside a tf.cond."):
        collect_update_ops(replicas, "all")
    train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1), update_ops="first")
    with session() as made:
        for value, wanted in ((True, 1), (False, 1), (True, 2)):
            made.run(train_op, {flag: value})
            np.testing.assert_array_equal(made.run(tf.global_variables()[0]), [wanted] * 4)


@pytest.mark.parametrize("policy", ["first", "all"])
def test_an_update_may_need_the_result_of_a_loop(policy):
    def model(x):  # a recurrent network before a batch norm is such a model
        moving = tf.get_variable("moving", [4], initializer=tf.zeros_initializer(), trainable=False)
        doubled = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, 2 * y), [tf.constant(0), tf.reduce_mean(x, 0)])[1]
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(moving, doubled))
        return tf.reduce_mean(x * tf.get_variable("w", [4]))

    replicas = build(model, (np.ones([4, 4], np.float32),), 2)
    train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1), update_ops=policy)
    with session() as made:
        made.run(train_op)
        np.testing.assert_array_equal(made.run(tf.global_variables()[0]), [8 * len(replicas) ** (policy == "all")] * 4)


@pytest.mark.parametrize("use_resource", [False, True])
def test_all_towers_updates_that_read_inside_a_cond_run_one_after_the_other(use_resource):
    def model(x):
        moving = tf.get_variable("moving", [4], initializer=tf.zeros_initializer(), trainable=False, use_resource=use_resource)
        doubled = tf.cond(flag, lambda: 2 * moving, lambda: tf.zeros([4]))
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(moving, doubled + tf.reduce_mean(x)))
        return tf.reduce_mean(x * tf.get_variable("w", [4]))

    flag = tf.placeholder_with_default(True, [])
    replicas = build(model, towers.PerTower([(np.full([2, 4], i, np.float32),) for i in (1, 10, 100)]), 3)
    updates = collect_update_ops(replicas, "all")
    with session() as made:
        for wanted in (2 * (2 * 1 + 10) + 100, 2 * (2 * (2 * 124 + 1) + 10) + 100):
            made.run(updates)
            np.testing.assert_array_equal(made.run(tf.global_variables()[0]), [wanted] * 4)


def test_updates_that_the_outputs_wait_for_run_in_the_order_of_the_towers(resource):
    def model(x):
        loss = ordinary(resource)(x)
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            return tf.identity(loss)

    for policy in ("first", "all"):
        with tf.Graph().as_default():
            with pytest.warns(UserWarning, match="writes the variable 'layer/moving' by what it computed of its own batch"):
                replicas = build(model, (X,), 3)
            train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.01), update_ops=policy)
            _, _, after = train_by(train_op, replicas.loss, 7)
            np.testing.assert_allclose(after["layer/moving"], moving_average("all", 3, 7), rtol=1e-5)


def test_moving_statistics_that_no_update_reaches_are_said():
    def model(x):
        moving = tf.get_variable("moving", [4], trainable=False)
        tf.assign_sub(moving, moving - tf.reduce_mean(x, 0))
        return tf.reduce_mean(x * tf.get_variable("w", [4]))

    replicas = build(model, (X,), 2)
    with pytest.warns(UserWarning, match="update moving, and nothing runs them.*layer.updates"):
        towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1))


def test_an_update_that_no_tower_made_is_said_by_name():
    builder = towers.TowerBuilder(cpus(2))
    replicas = builder.build(ordinary(False), (X,))
    average = tf.train.ExponentialMovingAverage(0.9).apply(tf.trainable_variables())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collect_update_ops(replicas)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, average)
    with pytest.warns(towers.TowersWarning, match="UPDATE_OPS holds 'ExponentialMovingAverage', which no tower made"):
        towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1), update_ops=[average])


def test_nothing_is_said_of_models_whose_updates_are_collected():
    def model(x):
        y = tf_syncbn.sync_batch_norm(x)
        return {"loss": tf.reduce_mean(y ** 2) + ordinary(False)(x), "metric": tf.metrics.mean(y)}

    replicas = build(model, (X,), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        towers.minimize(replicas, tf.train.AdamOptimizer())


def test_update_devices_do_not_depend_on_the_tower():
    replicas = towers.TowerBuilder(cpus(2)).build(lambda x: tf.reduce_mean(tf_syncbn.sync_batch_norm(x) ** 2), (X,))
    run(towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1), update_ops="all"))


@pytest.mark.skipif(not has_tf_layers(), reason="this TensorFlow has Keras 3, which has no graph mode")
def test_keras_batch_norm_whose_updates_nobody_collected_is_said_by_name():
    def model(x, collect):
        layer = tf.keras.layers.BatchNormalization(name="keras_bn")
        y = layer(x, training=True)
        for update in layer.updates if collect else ():
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
        return tf.reduce_mean(y ** 2)

    with tf.Graph().as_default():
        with pytest.warns(UserWarning, match="keras_bn/moving_mean.*layer.updates"):
            towers.collect_update_ops(build(lambda x: model(x, False), (X,), 2))
    assert len(towers.collect_update_ops(build(lambda x: model(x, True), (X,), 2))) == 2


def test_updates_that_wait_for_one_another_across_towers_are_refused():
    def model(x):
        moving = tf.get_variable("moving", [4], trainable=False)
        update = tf.assign_sub(moving, towers.all_reduce(tf.reduce_mean(x, 0) - moving) + x[0])
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
        return tf.reduce_mean(x)

    replicas = build(model, (X,), 3)
    with pytest.raises(ValueError, match="earlier tower's update waits for"):
        collect_update_ops(replicas, "all")


def centers(update, grouped=False):
    """A model whose loss reads a variable that an update op writes."""
    def model(x):
        y = tf.tanh(x * tf.get_variable("w", [4], x.dtype, tf.ones_initializer()))
        center = tf.get_variable("center", [4], x.dtype, tf.zeros_initializer(), trainable=False)
        assigned = tf.assign_sub(center, 0.5 * (center - update(tf.stop_gradient(y))))
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.group(assigned) if grouped else assigned)
        return tf.reduce_mean((y - center) ** 2)
    return model


def mean_of_all(y):
    return towers.all_reduce(tf.reduce_sum(y, 0)) / towers.all_reduce(tf.cast(tf.shape(y)[0], y.dtype))


@pytest.mark.parametrize("policy,grouped", covering(["first", "last"], [False, True]))
def test_an_update_of_one_tower_alone_that_the_loss_reads_is_said(policy, grouped):
    model = centers(lambda y: tf.reduce_mean(y, 0), grouped)
    with pytest.warns(UserWarning, match="writes the variable 'center' .* and the loss reads it"):
        with pytest.raises(AssertionError):
            assert_equals_one_batch(model, (np.float64(X),), 2, update_ops=policy, steps=3)


def behind_what_the_loss_waits_for(x):
    count = tf.get_variable("count", [], trainable=False, initializer=tf.zeros_initializer())
    with tf.control_dependencies([tf.assign_add(count, 1.0)]):
        x = x * tf.sqrt(1 + count.read_value())
    moving = tf.get_variable("moving", [4], initializer=tf.zeros_initializer(), trainable=False)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_sub(moving, 0.1 * (moving - tf.reduce_mean(x, 0))))
    return tf.reduce_mean(x ** 2 * tf.get_variable("w", [4]))


def chosen_by_a_placeholder(x):
    moving = tf.get_variable("moving", [4], initializer=tf.zeros_initializer(), trainable=False)
    mean = tf.reduce_mean(x, 0)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_sub(moving, 0.1 * (moving - mean)))
    used = tf.cond(tf.placeholder_with_default(True, []), lambda: mean, lambda: tf.identity(moving))
    return tf.reduce_mean((x - used) ** 2 * tf.get_variable("w", [4]))


@pytest.mark.parametrize("model, num_towers, policy", [
    (centers(mean_of_all), 3, "first"), (centers(lambda y: tf.reduce_mean(y, 0)), 1, "first"), (ordinary(False), 3, "first"),
    (chosen_by_a_placeholder, 3, "first"), (behind_what_the_loss_waits_for, 3, "first"),
    (centers(lambda y: tf.reduce_mean(y, 0)), 3, "none")])
def test_updates_of_all_towers_and_of_what_no_loss_reads_pass_in_silence(model, num_towers, policy):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The update op")
        collect_update_ops(build(model, (X,), num_towers), policy)
