"""Kernels as graph functions: what a call adds to a graph, where it runs, and where it still works."""
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.batch_norm_oracle import normalized
from tests.kernel_machines import running_on
from tests.support import build, cpus, run, session
from tests.sweeps import covering
from towers import current_tower
from tf_syncbn.kernels.graph_function import call, call_with_gradient
from tf_syncbn.kernels.moments import split
from tf_syncbn.whole_batch import moments_over_towers

ROOT = Path(__file__).parents[2]
X = np.random.RandomState(0).randn(6, 4, 4, 3).astype(np.float32) * 2 + 1
traces = []


def scaled_sum(x, y, z, factor):
    traces.append(x.shape)
    return (x + z) * factor if y is None else (x + y + z) * factor


def only_cube(x):
    return tf.stop_gradient(x ** 3),


def cube_and_square(x):
    return x ** 3, x ** 2


def model(x):
    y = tf_syncbn.sync_batch_norm(x, name="bn")
    return {"loss": tf.reduce_mean(y ** 3), "y": y}


def test_a_call_is_one_node_and_traced_once_for_each_kind_of_arguments():
    del traces[:]
    x = tf.constant([1.0, 2.0])
    before = len(tf.get_default_graph().get_operations())
    three = call(scaled_sum, x, None, x, factor=3.0), call(scaled_sum, x, None, x, factor=3.0)
    assert len(tf.get_default_graph().get_operations()) == before + 2 and len(traces) == 1
    two = call(scaled_sum, x, x, x, factor=3.0), call(scaled_sum, x, None, x, factor=2.0)
    with tf.Graph().as_default():
        call(scaled_sum, tf.constant([1.0, 2.0]), None, tf.constant([1.0, 2.0]), factor=3.0)
    assert len(traces) == 3
    np.testing.assert_array_equal(run(three + two), [[6, 12], [6, 12], [9, 18], [4, 8]])


def test_a_call_runs_on_the_device_of_the_caller():
    x = tf.placeholder_with_default([1.0, 2.0], [2])
    with tf.device("/cpu:3"):
        y = call(scaled_sum, x, None, x, factor=5.0)
    metadata = tf.RunMetadata()
    with tf.Session(config=towers.session_config(cpus(4))) as made:
        made.run(tf.identity(y), options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), run_metadata=metadata)
    devices = {stats.device for stats in metadata.step_stats.dev_stats for node in stats.node_stats
               if " = Mul(" in node.timeline_label and "/host:" not in stats.device}
    assert devices and all(device.endswith("CPU:3") for device in devices), devices


def test_the_gradient_is_that_of_the_plain_kernel_to_any_order():
    x = tf.constant([1.0, 2.0])
    y, = call_with_gradient(only_cube, x, plain=cube_and_square)
    first = tf.gradients(y, x)[0]
    second = tf.gradients(first, x)[0]
    np.testing.assert_allclose(run([y, first, second]), [[1, 8], [3, 12], [6, 12]])


def test_variables_are_read_for_the_last_time_before_their_gradients_are_there():
    """What runs is asked, after Grappler, which moves the factor 2 through a product and loses control dependencies there."""
    def model_fn(x):
        scale = tf.get_variable("scale", [3], initializer=tf.constant_initializer(1.3))
        y = tf_syncbn.sync_batch_norm(x * scale, name="bn1")
        return tf.reduce_mean(tf.sin(tf_syncbn.sync_batch_norm(tf.sin(2 * y) + x * x, name="bn2")))

    replicas = build(model_fn, (tf.constant(X),), 3)
    train_op = towers.minimize(replicas, tf.train.MomentumOptimizer(0.05, 0.9))
    ran = tf.RunMetadata()
    with session() as made:
        made.run([replicas.loss, train_op], options=tf.RunOptions(output_partition_graphs=True), run_metadata=ran)
    nodes = {node.name: node for graph in ran.partition_graphs for node in graph.node}
    sent = {node.attr["tensor_name"].s: name for name, node in nodes.items() if node.op in ("_Send", "_HostSend")}

    def sources(name):
        received = [sent[nodes[name].attr["tensor_name"].s]] if nodes[name].op in ("_Recv", "_HostRecv") else []
        return received + [source.lstrip("^").split(":")[0] for source in nodes[name].input]

    def waits_for(name):
        found, left = set(), [name]
        while left:
            name = left.pop()
            if name not in found:
                found.add(name)
                left.extend(sources(name))
        return found

    def readers(name):
        """The ops that read a variable's memory: what passes it on may hand out that very memory."""
        for reader, node in nodes.items():
            if name in sources(reader) and "^" + name not in node.input:
                if node.op in ("Identity", "IdentityN", "Reshape", "ReadVariableOp", "_Send", "_Recv", "_HostSend", "_HostRecv"):
                    for other in readers(reader):
                        yield other
                else:
                    yield reader

    for variable in tf.trainable_variables():
        update, = [name for name, node in nodes.items() if "ApplyMomentum" in node.op and node.input[0] == variable.op.name]
        found = set(readers(variable.op.name))
        assert len(found) > 3 and found <= waits_for(update), (variable.op.name, found - waits_for(update))


def test_a_relu_becomes_part_of_a_synced_layer_where_it_does_of_an_unsynced_one():
    """Grappler makes one op of the two on TensorFlow 2 with oneDNN, which also knows the shapes that a convolution asks for."""
    def relus(layer):
        def model_fn(x):
            for name in ("first", "second"):
                x = tf.nn.conv2d(x, tf.get_variable(name, [3, 3, 3, 3]), [1, 1, 1, 1], "SAME")
                x = tf.nn.relu(layer(x, name + "_bn"))
            return tf.reduce_mean(tf.nn.conv2d(x, tf.get_variable("last", [3, 3, 3, 3]), [1, 1, 1, 1], "SAME"))

        with tf.Graph().as_default():
            replicas = build(model_fn, (tf.constant(X),), 2)
            train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.1))
            ran = tf.RunMetadata()
            with session() as made:
                made.run(train_op, options=tf.RunOptions(output_partition_graphs=True), run_metadata=ran)
            return sum(node.op == "Relu" for graph in ran.partition_graphs for node in graph.node)

    def unsynced(x, name):
        gamma, beta = tf.get_variable(name + "/gamma", [3]), tf.get_variable(name + "/beta", [3])
        return tf.nn.fused_batch_norm(x, gamma, beta)[0]

    assert relus(lambda x, name: tf_syncbn.sync_batch_norm(x, name=name)) == relus(unsynced)


def test_second_derivatives_in_float32_are_those_in_float64():
    def slopes(dtype):
        x = tf.constant(X, dtype)

        def penalty(x):
            y = tf_syncbn.sync_batch_norm(x, name="bn_" + dtype.name)
            return tf.reduce_sum(tf.square(tf.gradients(y ** 3, x)[0]))

        replicas = build(penalty, (x,), 2)
        return run(tf.gradients([tower.outputs for tower in replicas], x)[0])

    exact = slopes(tf.float64)
    assert np.abs(slopes(tf.float32) - exact).max() <= 1e-4 * np.abs(exact).max()


def written_out(x):
    """Batch norm by plain ops, whose derivatives are TensorFlow's own."""
    axes = list(range(x.shape.rank - 1))
    centred = x - tf.reduce_mean(x, axes, keepdims=True)
    return centred / tf.sqrt(tf.reduce_mean(tf.square(centred), axes, keepdims=True) + 1e-3)


def synced(x):
    with tf.variable_scope(x.dtype.name, reuse=tf.AUTO_REUSE):
        return tf_syncbn.sync_batch_norm(x, center=False, scale=False, training=True, updates_collections=(), name="bn")


def by_moments(x):
    _, mean, variance = split(moments_over_towers(x, x.shape.rank - 1, current_tower()))
    return (x - mean) / tf.sqrt(variance + 1e-3)


def slope_of_hessian(loss, x):
    hessian = tf.hessians(loss, x)[0]
    return hessian, tf.gradients(tf.sin(1e3 * hessian), x)[0]


def slope_of_inner_steps(batch_norm, x):
    def step(i, w):
        return i + 1, w - 0.1 * tf.gradients(tf.reduce_sum(tf.sin(batch_norm(x * w + x * x))), w)[0]

    first = tf.constant([0.5, 1.0, 2.0], x.dtype)
    last = tf.while_loop(lambda i, _: i < 3, step, [tf.constant(0), first])[1]
    return last, tf.gradients(last, first)[0]


def slope_of_penalties(batch_norm, x):
    def add_penalty(i, z):
        return i + 1, z + tf.reduce_sum(tf.square(tf.gradients(batch_norm(z * x + x * x) ** 3, z)[0])) / 1e4

    first = tf.constant(0.5, x.dtype)
    last = tf.while_loop(lambda i, _: i < 2, add_penalty, [tf.constant(0), first])[1]
    return last, tf.gradients(last, first)[0]


# The two that are taken beside those that show each value: a GPU's kernels for both derivatives, and by moments on this machine.
@pytest.mark.parametrize("machine,batch_norm,derivative,shape", covering(
    ["this", "gpu"], [synced, by_moments], [slope_of_penalties, slope_of_inner_steps], [[5, 3], [2, 2, 2, 3]],
    also=lambda machine, batch_norm, derivative, shape: (
        machine == "gpu" and batch_norm is synced and derivative is slope_of_penalties and len(shape) == 4
        or machine == "this" and batch_norm is synced and derivative is slope_of_inner_steps and len(shape) == 4)))
def test_derivatives_taken_in_a_loop_are_differentiated_outside_of_it(batch_norm, derivative, shape, machine):
    x = np.random.RandomState(1).randn(*shape)
    with running_on(machine, True):
        expected, got, narrow = run([derivative(written_out, tf.constant(x)), derivative(batch_norm, tf.constant(x)),
                                     derivative(batch_norm, tf.constant(x, tf.float32))])
    for exact, wide, rounded in zip(expected, got, narrow):
        np.testing.assert_allclose(wide, exact, rtol=1e-9)
        np.testing.assert_allclose(rounded, exact, rtol=1e-3)


@pytest.mark.laws
@pytest.mark.parametrize("batch_norm,num_towers", [
    pytest.param(batch_norm, num_towers, marks=(
        () if (batch_norm, num_towers) in ((by_moments, None), (synced, 2)) else pytest.mark.sweep))
    for batch_norm in (by_moments, synced) for num_towers in (None, 1, 2, 3)])
def test_the_gradient_of_hessians_is_that_of_one_batch(batch_norm, num_towers):
    def loss_of(batch_norm):
        return lambda x: tf.reduce_mean(tf.sin(2 * batch_norm(x)))

    x = tf.constant(np.random.RandomState(1).randn(5, 3))
    loss = loss_of(batch_norm)(x) if num_towers is None else build(loss_of(batch_norm), (x,), num_towers).loss
    expected, got = run([slope_of_hessian(loss_of(written_out)(x), x), slope_of_hessian(loss, x)])
    for exact, of_towers in zip(expected, got):
        np.testing.assert_allclose(of_towers, exact, atol=1e-9 * np.abs(exact).max())


class NormalizedCell:
    """A cell of `tf.nn.dynamic_rnn`."""
    state_size = output_size = 3

    def __init__(self, batch_norm):
        self.batch_norm = batch_norm

    def zero_state(self, batch_size, dtype):
        return tf.zeros([batch_size, 3], dtype)

    def __call__(self, inputs, state, scope=None):
        return [self.batch_norm(inputs + state)] * 2


def by_towers(x):
    return build(synced, (x,), 2).merged()


def loop_of(batch_norm, x):
    return tf.while_loop(lambda i, _: i < 3, lambda i, z: (i + 1, batch_norm(z * z + x)), [tf.constant(0), x])[1]


def rnn_of(batch_norm, x):
    return tf.nn.dynamic_rnn(NormalizedCell(batch_norm), tf.stack([x, x * x], 1), dtype=x.dtype)[1]


LOOPS = {"layer": (loop_of, synced, [6, 3]), "images": (loop_of, synced, [6, 2, 2, 3]), "towers": (loop_of, by_towers, [6, 3]),
         "cell": (rnn_of, synced, [6, 3])}


def check_loop(name, machine):
    loop, batch_norm, shape = LOOPS[name]
    x = np.random.RandomState(0).randn(*shape)

    def slopes(batch_norm, x):
        return tf.gradients(tf.sin(loop(batch_norm, x)), x)[0]

    with running_on(machine, True):
        exact, wide, narrow = run([slopes(written_out, tf.constant(x)), slopes(batch_norm, tf.constant(x)),
                                   slopes(batch_norm, tf.constant(x, tf.float32))])
    for slope, bound in ((wide, 1e-9), (narrow, 1e-3)):
        assert np.abs(slope - exact).max() <= bound * np.abs(exact).max(), (slope, exact)


@pytest.mark.parametrize("name,machine", [(name, "this") for name in sorted(LOOPS)] + [
    ("towers", "gpu"), pytest.param("layer", "gpu", marks=pytest.mark.sweep)])
def test_a_loop_that_holds_a_synced_layer_is_differentiated_outside_of_it(name, machine):
    if name == "towers" and tf.control_flow_v2_enabled():
        pytest.skip("towers are refused in the graph of a loop of control flow v2's own making")
    if not tf.__version__.startswith("1."):
        check_loop(name, machine)
        return
    # In a process of its own, since 1.15 would abort where it can't inline a kernel.
    program = "import tests.conftest; from %s import check_loop; check_loop(%r, %r)" % (__name__, name, machine)
    ran = subprocess.run([sys.executable, "-c", program], cwd=str(ROOT), stderr=subprocess.PIPE, universal_newlines=True)
    assert ran.returncode == 0, ran.stderr[-2000:]


def test_towers_train_inside_a_while_loop():
    def body(i, total):
        with tf.variable_scope("model", reuse=tf.AUTO_REUSE):
            replicas = build(model, (tf.constant(X) * tf.cast(i + 1, tf.float32),), 2)
        slope = tf.gradients([tower.loss for tower in replicas], tf.trainable_variables()[0])[0]
        return i + 1, total + slope

    with tf.variable_scope("model", reuse=tf.AUTO_REUSE):
        for name in ("gamma", "beta"):
            tf.get_variable("bn/" + name, [3], initializer=tf.ones_initializer() if name == "gamma" else tf.zeros_initializer())
    looped = tf.while_loop(lambda i, _: i < 3, body, [tf.constant(0), tf.zeros([3])])[1]
    # Scaling the batch changes its normalized values by epsilon's part alone.
    hats = [normalized(X * (i + 1.0), 3, 1.0, 0.0)[0] for i in range(3)]
    expected = sum((hat[:3] ** 3).mean((0, 1, 2)) + (hat[3:] ** 3).mean((0, 1, 2)) for hat in hats)
    np.testing.assert_allclose(run(looped), expected, rtol=1e-4)


def test_an_exported_training_graph_trains_as_before():
    replicas = build(model, (tf.constant(X),), 2)
    train_op = towers.minimize(replicas, tf.train.GradientDescentOptimizer(0.5))
    tf.add_to_collection("ops", train_op)
    tf.add_to_collection("ops", replicas.loss)
    exported = tf.train.export_meta_graph()

    def trained():
        train_op, loss = tf.get_collection("ops")
        with session() as made:
            for _ in range(3):
                made.run(train_op)
            return [made.run(loss)] + [made.run(v) for v in tf.global_variables()]

    before = trained()
    with tf.Graph().as_default():
        tf.train.import_meta_graph(exported)
        for a, b in zip(before, trained()):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_saved_model_of_training_and_of_evaluation_loads(tmp_path):
    for training in (True, False):
        folder = str(tmp_path / str(training))
        with tf.Graph().as_default():
            x = tf.placeholder(tf.float32, [6, 4, 4, 3])
            y = build(model, (x,), 2, training=training).merged()["y"]
            with session() as made:
                expected = made.run(y, {x: X})
                tf.saved_model.simple_save(made, folder, {"x": x}, {"y": y})
        with tf.Graph().as_default(), tf.Session(config=towers.session_config(cpus(2))) as loaded:
            tf.saved_model.load(loaded, ["serve"], folder)
            # What has no device runs on a GPU, where there is one, and rounds otherwise; elsewhere no bit differs.
            rounding = 1e-6 if tf.config.experimental.list_physical_devices("GPU") else 0
            np.testing.assert_allclose(loaded.run(y.name, {x.name: X}), expected, rtol=0, atol=rounding)


def test_nodes_a_layer_and_tower_are_few():
    def nodes(num_towers):
        with tf.Graph().as_default() as graph:
            replicas = build(model, (tf.zeros([60, 4, 4, 3]),), num_towers)
            tf.gradients([tower.loss for tower in replicas], tf.trainable_variables())
            return len(graph.get_operations())

    assert nodes(6) - nodes(3) <= 3 * 80 and nodes(12) - nodes(6) <= 6 * 80
