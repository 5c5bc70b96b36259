"""Where variables stand, and that it changes nothing else."""
import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.support import cpus, has_tf_layers, run, session, train_by
from towers.testing import assert_equals_one_batch

X = np.random.RandomState(2).randn(10, 4)
SIZES = {"a": [4, 8], "b": [8, 2], "c": [8], "d": [2, 20], "e": []}  # 32, 16, 8, 40 and 1 numbers


def variables():
    # In pairs: Python 3.7 keeps the order.
    return {name: tf.get_variable(name, size, tf.float64) for name, size in SIZES.items()}


def model(x):
    v = variables()
    hidden = tf_syncbn.sync_batch_norm(tf.matmul(x, v["a"]), training=True)
    out = tf.matmul(tf.matmul(tf.tanh(hidden) * v["c"], v["b"]), v["d"])
    return tf.reduce_mean(tf.square(out - v["e"]))


def number(device):
    return int(device.rpartition(":")[2])


PLACEMENTS = {
    "host": [0] * 5,
    "first": [1] * 5,
    "replicated": [1] * 5,
    "round_robin": [1, 2, 3, 1, 2],
    "balanced": [1, 2, 3, 3, 2],  # 32 | 16 | 8, then d on the least, then e
    "a function": [2, 2, 2, 2, 0],
}


def placed(name):
    return (lambda op: "/cpu:2" if op.get_attr("shape").dim else "/cpu:0") if name == "a function" else name


@pytest.mark.parametrize("placement", sorted(PLACEMENTS))
def test_variables_stand_where_they_are_placed_and_slots_beside_them(placement):
    def layered(x):
        return tf.reduce_sum([tf.reduce_sum(variable) for variable in variables().values()]) * tf.reduce_mean(x)

    builder = towers.TowerBuilder(["/cpu:1", "/cpu:2", "/cpu:3"], variable_placement=placed(placement))
    replicas = builder.build(layered, (X,))
    towers.minimize(replicas, tf.train.MomentumOptimizer(0.1, 0.9))
    device_of = {variable.op.name: number(variable.device) for variable in tf.global_variables()}
    assert [device_of[name] for name in SIZES] == PLACEMENTS[placement]
    assert [device_of[name + "/Momentum"] for name in SIZES] == PLACEMENTS[placement]
    for op in tf.get_default_graph().get_operations():
        if op.type == "VarIsInitializedOp":
            assert number(op.device) == device_of[op.inputs[0].op.name]
    sums = [op for op in replicas[1].ops if op.type == "Sum"]
    assert len(sums) == 6 and {number(op.device) for op in sums} == {2}


@pytest.mark.parametrize("placement", [
    pytest.param(name, marks=() if name in ("replicated", "round_robin") else pytest.mark.sweep) for name in sorted(PLACEMENTS)])
def test_towers_train_as_one_batch_wherever_variables_stand(placement):
    rng = np.random.RandomState(1)
    initial = {name: rng.randn(*size) for name, size in SIZES.items()}
    with tf.Graph().as_default():
        loss, step = model(X), tf.train.MomentumOptimizer(0.01, 0.9)
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS) + [loss]):
            train_op = step.minimize(loss, gate_gradients=step.GATE_GRAPH)
        losses, _, wanted = train_by(train_op, loss, 5, initial)
    with tf.Graph().as_default():
        replicas = towers.TowerBuilder(cpus(3), variable_placement=placed(placement)).build(model, (X,))
        train_op = towers.minimize(replicas, tf.train.MomentumOptimizer(0.01, 0.9))
        on_towers, _, got = train_by(train_op, replicas.loss, 5, initial)
    np.testing.assert_allclose(on_towers, losses, rtol=1e-9)
    assert sorted(got) == sorted(wanted)
    for name in wanted:
        np.testing.assert_allclose(got[name], wanted[name], rtol=1e-9, atol=1e-12, err_msg=name)


def test_balance_counts_bytes_and_goes_on_in_the_next_build():
    def small(x):
        tf.get_variable("half", [30], tf.float16)  # 60 bytes
        tf.get_variable("wide", [10], tf.float64)  # 80 bytes
        return tf.reduce_mean(x)

    def more(x):
        tf.get_variable("more", [30])
        return tf.reduce_mean(x)

    builder = towers.TowerBuilder(["/cpu:0", "/cpu:1"], variable_placement="balanced")
    builder.build(small, (X,))
    builder.build(more, (X,))
    assert [(v.op.name, number(v.device)) for v in tf.global_variables()] == [("half", 0), ("wide", 1), ("more", 0)]


def test_a_device_that_the_model_names_for_a_variable_is_kept():
    def pinned(x):
        with tf.device("/cpu:3"):
            v = tf.get_variable("v", [4], tf.float64)
        return tf.reduce_mean(x * v)

    towers.TowerBuilder(["/cpu:0", "/cpu:1"], variable_placement="round_robin").build(pinned, (X,))
    assert number(tf.global_variables()[0].device) == 3


def test_a_function_that_names_no_device_is_refused():
    builder = towers.TowerBuilder(["/cpu:0", "/cpu:1"], variable_placement=lambda op: "cpu zero")
    with pytest.raises(ValueError, match="'cpu zero' names no device|'cpu zero' is no device name"):
        builder.build(lambda x: tf.reduce_mean(x * tf.get_variable("v", [4], tf.float64)), (X,))


def test_work_that_the_model_puts_on_another_towers_device_is_named():
    def pinned(x):
        with tf.device("/cpu:0"):
            return tf.reduce_mean(tf.exp(x, name="grow"))

    with pytest.warns(UserWarning, match=r"puts ops of tower 1 on .*(cpu|CPU):0, .*stands on /cpu:1: 'tower_1/grow' among"):
        towers.TowerBuilder(cpus(3)).build(pinned, (X,))


def test_variables_on_the_host_and_the_towers_own_device_are_no_reason_to_warn(recwarn):
    def pinned(x):
        with tf.device("/cpu:0"):
            v = tf.get_variable("v", [4], tf.float64)
        with tf.device(towers.current_tower().device):
            return tf.reduce_mean(towers.all_reduce(tf.reduce_sum(x * v)))

    towers.TowerBuilder(cpus(3), aggregation_device="/cpu:5").build(pinned, (X,))
    assert not [w for w in recwarn if "puts ops of tower" in str(w.message)]


@pytest.mark.parametrize("use_resource", [False, True])
def test_an_average_of_weights_is_no_reason_to_warn(use_resource, recwarn):
    def model(x):
        v = tf.get_variable("v", [4], tf.float64, use_resource=use_resource)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.train.ExponentialMovingAverage(0.9).apply([v]))
        return tf.reduce_mean(x * v)

    towers.TowerBuilder(cpus(3)).build(model, (X,))
    assert not [w for w in recwarn if "puts ops of tower" in str(w.message)]


def test_a_checkpoint_that_the_model_initializes_from_is_no_reason_to_warn(recwarn, tmp_path):
    def model(x):
        v = tf.get_variable("v", [4], tf.float64)
        tf.train.init_from_checkpoint(path, {"v": v})
        return tf.reduce_mean(x * v)

    with tf.Graph().as_default():
        tf.get_variable("v", initializer=tf.constant([1.0, 2.0, 3.0, 4.0], tf.float64))
        with session() as made:
            path = tf.train.Saver().save(made, str(tmp_path / "model"))
    replicas = towers.TowerBuilder(cpus(3)).build(model, (X,))
    assert not [w for w in recwarn if "puts ops of tower" in str(w.message)]
    assert run(replicas.loss) == pytest.approx(np.mean(X * [1, 2, 3, 4]), rel=1e-12)


@pytest.mark.parametrize("use_resource", [False, True])
def test_each_tower_reads_a_replicated_variable_once_into_a_copy_of_its_own(use_resource):
    def reads_twice(x):
        w = tf.get_variable("w", [4], tf.float64, use_resource=use_resource)
        frozen = tf.get_variable("frozen", [4], tf.float64, trainable=False, use_resource=use_resource)
        return tf.reduce_mean(tf.sin(x * w) + w.read_value() + frozen) + 0.1 * tf.nn.l2_loss(w)

    builder = towers.TowerBuilder(["/cpu:1", "/cpu:2", "/cpu:1", "/cpu:3"], variable_placement="replicated")
    replicas = builder.build(reads_twice, (X,))
    w = tf.trainable_variables()[0]
    copies = [op for op in tf.get_default_graph().get_operations() if "/replicated/" in op.name and op.name.endswith("/w")]
    assert [(op.name, number(op.device)) for op in copies] == [("tower_1/replicated/w", 2), ("tower_3/replicated/w", 3)]
    for tower, takers in ((1, 3), (3, 3)):
        ops = set(replicas[tower].ops)
        read = [op for op in ops for tensor in op.inputs if tensor.op.type in ("Identity", "ReadVariableOp")
                and tensor.op.inputs[0].op is w.op]
        assert not read and len(copies[tower // 2].outputs[0].consumers()) == takers
    assert not [op for op in tf.get_default_graph().get_operations() if op.name.startswith("tower_1/replicated/frozen")]
    assert [variable.op.name for variable in tf.global_variables() + tf.local_variables()] == ["w", "frozen"]


def test_a_variable_that_towers_write_is_not_copied():
    def clips(x):
        w = tf.get_variable("w", [4], tf.float64)
        with tf.control_dependencies([tf.assign(w, tf.clip_by_value(w, -0.5, 0.5))]):
            return tf.reduce_mean(x * w.read_value())

    towers.TowerBuilder(cpus(2), variable_placement="replicated").build(clips, (X,))
    assert not [op for op in tf.get_default_graph().get_operations() if "/replicated/" in op.name]


@pytest.mark.parametrize("devices,named", [(["/cpu:0", "/gpu:0"], "Tower 1 on /gpu:0 .*'w'"), (["/gpu:0"] * 2, "Tower 0 "),
                                           (["/cpu:0", "/cpu:1"], None)])
@pytest.mark.parametrize("in_loop", [True, False])
def test_a_tower_that_reads_a_variable_once_for_all_steps_of_a_loop_is_named(devices, named, in_loop, recwarn):
    if tf.resource_variables_enabled():
        pytest.skip("it is read anew in each step")
    with tf.device("/cpu:0"):
        w = tf.get_variable("w", [4], tf.float64)

    def step(i):
        replicas = towers.TowerBuilder(devices).build(lambda x: tf.reduce_mean(tf.square(x * w)), (X,))
        with tf.control_dependencies([towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.125))]):
            return i + 1

    if in_loop:
        tf.while_loop(lambda i: i < 4, step, [0])
    else:
        step(0)
    messages = [str(w.message) for w in recwarn if "once for all steps" in str(w.message)]
    assert len(messages) == (named is not None and in_loop) and all(re.search(named, each) for each in messages)


@pytest.mark.parametrize("placement", ["first", "replicated"])
def test_towers_within_a_loop_read_variables_anew_in_each_step(placement):
    def model(x):
        return tf.reduce_mean(tf.square(tf.reduce_sum(x * w, 1) - 1))

    with tf.device("/cpu:0"):
        w = tf.get_variable("w", [4], tf.float64, tf.ones_initializer())

    def body(i):
        with tf.variable_scope(tf.get_variable_scope(), reuse=True):
            replicas = towers.TowerBuilder(cpus(3), variable_placement=placement).build(model, (X,))
            optimizer = tf.train.GradientDescentOptimizer(0.125)  # exact in float32
            with tf.control_dependencies([towers.minimize(replicas, optimizer)]):
                return i + 1

    steps = tf.while_loop(lambda i: i < 4, body, [0], parallel_iterations=1)
    expected = np.ones(4)
    for _ in range(4):
        expected -= 0.125 * 2 * X.T @ (X @ expected - 1) / len(X)
    with session() as made:
        made.run(steps)
        np.testing.assert_allclose(made.run(w), expected, rtol=1e-10)


@pytest.mark.skipif(not has_tf_layers(), reason="Keras 3 asks for no device")
def test_a_model_may_be_asked_for_its_present_device_by_what_is_no_op():
    """As Keras asks before it computes with channels first."""
    def model(x):
        kernel = tf.get_variable("kernel", [3, 3, 6, 4], initializer=tf.glorot_uniform_initializer(seed=0))
        x = tf.keras.backend.conv2d(tf.reshape(x, [-1, 6, 6, 3]), kernel, data_format="channels_first")
        x, *_ = tf.keras.backend.normalize_batch_in_training(x, tf.ones([4]), tf.zeros([4]), [0, 2, 3])
        return tf.reduce_mean(tf.sin(x))

    images = np.random.RandomState(0).randn(5, 6 * 6 * 3).astype(np.float32)
    assert_equals_one_batch(tf_syncbn.convert_model(model), (images,), 2)
