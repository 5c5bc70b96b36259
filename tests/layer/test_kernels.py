"""The strategies of kernels: which is chosen for which layer and machine, and each against NumPy in float64."""
import itertools
import warnings
from unittest import mock

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.batch_norm_oracle import gradients, largest, normalized
from tests.kernel_machines import MACHINES, running_on
from tests.support import build, run, session
from tests.sweeps import covering
from tf_syncbn import whole_batch
from tf_syncbn.kernels import choose as choice
from tf_syncbn.kernels.choose import STRATEGIES, Machine, choose
from tf_syncbn.kernels.graph_function import call
from tf_syncbn.kernels.layer import Layer
from tf_syncbn.kernels.machines import eigen, eigen_tf1, onednn
from tf_syncbn.kernels.plain import reference
from tf_syncbn.whole_batch import machine_of

EPSILON = 1e-3
GPU, UNKNOWN, ONEDNN = Machine("GPU", 2, False), Machine(None, 2, False), Machine("CPU", 2, True)
DETERMINISTIC_GPU = Machine("GPU", 2, False, True)
EIGEN, EIGEN_TF1 = Machine("CPU", 2, False), Machine("CPU", 1, False)
# The last one is the reference itself, which others are held against.
OTHERS = [strategy for strategy in STRATEGIES if strategy.kernels is not reference]
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)


def chosen(shape, dtype, axis, machine):
    return choose(Layer(tf.TensorShape(shape), dtype, axis), machine)


@pytest.mark.parametrize("shape,dtype,axis,machine,expected", [
    ([64, 64, 64, 15], tf.float32, 3, GPU, "cudnn"), ([64, 64, 64, 16], tf.float32, 3, GPU, "products"),
    ([64, 112, 112, 64], tf.float32, 3, GPU, "products"), ([64, 112, 112, 65], tf.float32, 3, GPU, "cudnn"),
    ([64, 64, 112, 112], tf.float32, 1, GPU, "products"), ([64, 112, 112, 64], tf.float16, 3, GPU, "cudnn"),
    ([64, 8], tf.float32, 1, GPU, "cudnn"), ([64, 112, 112, 64], tf.float32, 3, DETERMINISTIC_GPU, "products"),
    ([None, 32, 32, 16], tf.float32, 3, GPU, "cudnn_unsized"), ([0, 32, 32, 16], tf.float32, 3, GPU, "cudnn_unsized"),
    ([1, 1, 1, 16], tf.float32, 3, GPU, "cudnn_unsized"), ([64, 32, 32, 16], tf.float32, 3, UNKNOWN, "cudnn_unsized"),
    ([64, 32, 32, 16], tf.float32, 3, DETERMINISTIC_GPU, "cudnn"),
    ([None, 32, 32, 16], tf.float32, 3, DETERMINISTIC_GPU, "reference"),
    ([64, 32, 32, 16], tf.float32, 3, Machine(None, 2, False, True), "reference"),
    ([64, 32, 32, 16], tf.float32, 3, ONEDNN, "onednn"), ([64, 32, 32, 16], tf.float32, 3, EIGEN_TF1, "eigen_tf1"),
    ([64, 32, 32, 16], tf.float32, 3, EIGEN, "eigen"), ([8, 8, 8, 16], tf.float32, 3, EIGEN, "eigen_plain"),
    ([None, 8, 8, 16], tf.float32, 3, EIGEN, "eigen"), ([8, 8, 8, 16], tf.float32, 3, ONEDNN, "onednn"),
    ([8, 16, 8, 8], tf.float32, 1, GPU, "cudnn"), ([8, 16, 8, 8], tf.float32, 1, UNKNOWN, "reference"),
    ([8, 16, 8, 8], tf.float32, 1, ONEDNN, "reference"), ([8, 16, 8, 8], tf.float32, 1, EIGEN, "reference"),
    ([8, 16, 8], tf.float32, 1, GPU, "reference"), ([8, 16], tf.float64, 1, GPU, "reference"),
    ([8, 16], tf.float64, 1, ONEDNN, "eigen_plain"), ([8, 16], tf.float64, 1, EIGEN_TF1, "eigen_plain"),
    ([8, 16, 8, 8], tf.float64, 1, EIGEN, "reference"), ([8, 8, 8, 16], tf.float16, 3, GPU, "cudnn"),
    ([64, 32, 32, 16], tf.bfloat16, 3, EIGEN, "eigen"), ([64, 32, 32, 16], tf.float16, 3, ONEDNN, "onednn")])
def test_the_first_strategy_that_fits_is_chosen(shape, dtype, axis, machine, expected):
    assert chosen(shape, dtype, axis, machine).name == expected


@pytest.mark.parametrize("shape,takes", [
    ([65535, 3], True), ([65536, 3], False), ([None, 3], False), ([65536, 1, 1, 3], False), ([None, None, 3], True),
    ([2, 65536, 3], True), ([2, 64, 32, 32, 3], True)])
def test_a_gpus_fused_op_gets_no_more_images_than_cudnn_takes(shape, takes):
    assert chosen(shape, tf.float32, len(shape) - 1, GPU).name.startswith("cudnn") == takes
    assert chosen(shape, tf.float32, len(shape) - 1, ONEDNN).name == "onednn"


@pytest.mark.parametrize("dtype,machine,expected", [
    (tf.float32, GPU, True), (tf.float32, ONEDNN, True), (tf.float32, EIGEN, False), (tf.float32, EIGEN_TF1, False),
    (tf.float16, GPU, True), (tf.float16, ONEDNN, False), (tf.bfloat16, GPU, False)])
def test_the_output_is_the_fused_op_itself_where_a_relu_becomes_part_of_it(dtype, machine, expected):
    layer = Layer(tf.TensorShape([64, 32, 32, 16]), dtype, 3)
    assert choose(layer, machine).as_one_op(layer, machine) == expected
    rows = Layer(tf.TensorShape([64, 16]), dtype, 1)
    assert not choose(rows, machine).as_one_op(rows, machine)


def test_a_cpu_that_stands_in_for_a_gpu_runs_no_kernels_of_a_gpu():
    seen = []

    def model(x):
        seen.append(machine_of(x + x, towers.current_tower()))
        return tf_syncbn.sync_batch_norm(x, 1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        towers.TowerBuilder(["/gpu:0"]).build(model, (tf.zeros([4, 3, 2, 2]),))
    assert (seen[0].kind == "GPU") == bool(tf.config.experimental.list_physical_devices("GPU"))


@pytest.mark.parametrize("device,of_x,kind", [(None, None, "GPU"), ("/gpu:0", None, "GPU"), ("/cpu:0", None, None),
                                              (None, "/cpu:0", None), ("/device:CPU:1", None, None)])
def test_a_layer_outside_of_towers_takes_a_gpus_kernels_unless_it_stands_on_a_cpu(device, of_x, kind):
    with tf.device(of_x):
        x = tf.placeholder(tf.float32, [4, 3, 2, 2])
    with mock.patch.object(tf.config.experimental, "list_physical_devices", lambda kind: ["a GPU"]), tf.device(device):
        assert machine_of(x, None).kind == kind


def gradient_by(kernels, dy, x, given, means, mask, values, **how):
    """Returns the sums S, T and the scale, [3, C], and the gradient, given the sums over towers [5, C] over their count."""
    sums, *scaled = kernels.gradient_sums(dy, x, *given, masked=mask is not None, **how)
    takes_shares = mask is None and any(s.kernels is kernels and s.takes_shares for s in STRATEGIES)
    times = float(values) if takes_shares else 1.0
    scaled = scaled[0] if scaled else None
    dx, = kernels.input_gradient(dy, x, *given[:3], sums[2], sums, means * times, scaled, None, mask, **how)
    return sums * [[1.0], [1.0], [times]], dx


# Each strategy has an own way of each kind of image.
@pytest.mark.parametrize("strategy", OTHERS, ids=lambda strategy: strategy.name)
@pytest.mark.parametrize("given,shape", covering(
    ["plain", "gamma", "mask"], [[6, 4, 4, 3], [40, 3], [7, 3], [0, 4, 4, 3], [5, 2, 4, 4, 3], [8, 32, 32, 48]]))
def test_kernels_compute_what_the_reference_does(strategy, given, shape):
    rng = np.random.RandomState(1)
    dy, x = (tf.constant(rng.randn(*shape), tf.float32) for _ in range(2))
    channels, axis = shape[-1], len(shape) - 1
    gamma = tf.constant(rng.rand(channels) + 0.5, tf.float32) if given == "gamma" else None
    mask = tf.constant(rng.randint(0, 2, shape[:-1] + [1]), tf.float32) if given == "mask" else None
    if strategy.name in ("cudnn", "products") and not np.prod(shape[:-1]):
        pytest.skip("not chosen for a batch without values")
    count, mean, variance = (tf.constant(part, tf.float32) for part in (
        [np.prod(shape[:-1])], rng.randn(channels) * 0.3, rng.rand(channels) + 0.5))
    how, results = {"axis": axis, "epsilon": 1e-6}, []
    means = tf.constant(rng.randn(5, channels), tf.float32)
    for kernels in (strategy.kernels, reference):
        y = kernels.normalize(x, count, mean, variance, gamma, gamma, **how)
        results.append([y, *gradient_by(kernels, dy, x, (count, mean, variance, gamma), means, mask, np.prod(shape[:-1]), **how)])
    for value, expected in zip(*run(results)):
        assert largest(value - expected) <= 1e-5 * largest(expected) if value.size else value.shape == expected.shape


@pytest.mark.parametrize("strategy", OTHERS, ids=lambda strategy: strategy.name)
@pytest.mark.parametrize("masked", [False, True])
def test_what_a_kernels_gradient_is_taken_of_computes_what_the_kernel_does(strategy, masked):
    rng, shape, how = np.random.RandomState(1), [6, 4, 4, 3], {"axis": 3, "epsilon": 1e-6}
    dy, x = (tf.constant(rng.randn(*shape), tf.float32) for _ in range(2))
    mask = tf.constant(rng.randint(0, 2, shape[:-1] + [1]), tf.float32) if masked else None
    moments = [tf.constant(part, tf.float32) for part in ([96], rng.randn(3) * 0.3, rng.rand(3) + 0.5)]
    gamma, means = tf.constant(rng.rand(3) + 0.5, tf.float32), tf.constant(rng.randn(5, 3), tf.float32)
    results = []
    for of in (strategy.kernels, strategy.plain):
        sums, *scaled = of.gradient_sums(dy, x, *moments, gamma, masked=masked, **how)
        dx, = of.input_gradient(dy, x, *moments, sums[2], sums, means, scaled[0] if scaled else None, None, mask, **how)
        results.append([dx, sums, *scaled])
    ours, plain = run(results)
    assert len(ours) <= len(plain)
    for value, expected in zip(ours, plain):
        assert largest(value - expected) <= 1e-5 * largest(expected)


@pytest.mark.parametrize("machine,small,shape_and_mean", covering(
    sorted(MACHINES), [True, False], [([12, 16, 16, 48], 2), ([512, 24], 0), ([9, 700, 5], 100), ([6, 3, 5, 7, 4], 1)],
    also=lambda machine, small, shape_and_mean: not small and len(shape_and_mean[0]) == 4 and shape_and_mean[1] == 2))
def test_layers_of_every_strategy_equal_numpy(machine, small, shape_and_mean):
    shape, mean = shape_and_mean
    if machine == "gpu" and mean > 10:
        pytest.skip("the moments of a CPU's fused op lose digits there")
    tolerance = 1e-4 if machine == "gpu" else 1e-5
    rng = np.random.RandomState(0)
    x, dy = ((rng.randn(*shape) + offset).astype(np.float32) for offset in (mean, 0.5))
    gamma, beta = rng.rand(shape[-1]) + 0.5, rng.randn(shape[-1])

    def model(x, dy):
        y = tf_syncbn.sync_batch_norm(x, epsilon=EPSILON, name="bn", gamma_initializer=tf.constant_initializer(gamma),
                                      beta_initializer=tf.constant_initializer(beta))
        return y, tf.gradients(y, [x] + tf.trainable_variables(), dy)

    with running_on(machine, small):
        replicas = build(model, (tf.constant(x), tf.constant(dy)), 2)
    outputs = run([tower.outputs for tower in replicas])
    y, dx = (np.concatenate(parts) for parts in ([y for y, _ in outputs], [d[0] for _, d in outputs]))
    d_gamma, d_beta = (sum(np.float64(d[i]) for _, d in outputs) for i in (1, 2))
    axis = len(shape) - 1
    for value, right in zip((y, dx, d_gamma, d_beta), (normalized(x, axis, gamma, beta)[0], *gradients(x, dy, axis, gamma))):
        assert largest(value - right) <= tolerance * max(mean, 1) * largest(right)


@pytest.mark.parametrize("in_a_tower,scale,center", covering([True, False], [True, False], [True, False]))
def test_one_tower_on_a_gpu_is_a_plain_batch_norm(in_a_tower, scale, center):
    rng = np.random.RandomState(0)
    x, dy = rng.randn(8, 5, 7, 6) + 3, rng.randn(8, 5, 7, 6)
    gamma = rng.rand(6) + 0.5 if scale else np.ones(6)

    def model(x, dy):
        y = tf_syncbn.sync_batch_norm(x, epsilon=EPSILON, momentum=0.75, scale=scale, center=center, training=True, name="bn",
                                      gamma_initializer=tf.constant_initializer(gamma))
        return [y] + tf.gradients(y, [x] + tf.trainable_variables(), dy)

    fed = tf.constant(x, tf.float32), tf.constant(dy, tf.float32)
    with running_on("gpu", False):
        outputs = build(model, fed, 1)[0].outputs if in_a_tower else model(*fed)
    graph = tf.get_default_graph()
    assert {op.type for op in graph.get_operations()} & {"FusedBatchNormV2", "FusedBatchNormV3"}
    assert not any(op.type == "IdentityN" for op in graph.get_operations())
    with session() as made:
        made.run(tf.global_variables_initializer())
        results = made.run(outputs)
        made.run(tf.get_collection(tf.GraphKeys.UPDATE_OPS))
        moved = made.run([v for v in tf.global_variables() if "moving" in v.name])
    dx, d_gamma, d_beta = gradients(x, dy, 3, gamma)
    y, *_ = normalized(x, 3, gamma, np.zeros(6))
    expected = [y, dx] + ([d_gamma] if scale else []) + ([d_beta] if center else [])
    for value, right in zip(results + moved, expected + [0.25 * x.mean((0, 1, 2)), 0.75 + 0.25 * x.var((0, 1, 2), ddof=1)]):
        assert largest(value - right) <= 3e-5 * largest(right)


PAIRS = [("gpu", "gpu")] + list(itertools.permutations(["gpu", "unknown", "onednn", "eigen"], 2))


@pytest.mark.parametrize("machines,sizes", covering(PAIRS, [(4, 8), (8, 4), (12, 0)], one_in=3))
def test_towers_of_a_layer_may_run_other_kernels_each(machines, sizes):
    rng = np.random.RandomState(0)
    x, dy = ((rng.randn(12, 5, 7, 6) + offset).astype(np.float32) for offset in (1, 0.5))
    gamma, beta = rng.rand(6) + 0.5, rng.randn(6)
    parts = [(tf.constant(x[rows]), tf.constant(dy[rows])) for rows in (slice(sizes[0]), slice(sizes[0], 12))]

    def model(x, dy):
        y = tf_syncbn.sync_batch_norm(x, epsilon=EPSILON, name="bn", gamma_initializer=tf.constant_initializer(gamma),
                                      beta_initializer=tf.constant_initializer(beta))
        return y, tf.gradients(y, [x] + tf.trainable_variables(), dy)

    with mock.patch.object(whole_batch, "machine_of", lambda x, tower: MACHINES[machines[tower.index]]), \
            mock.patch.object(choice, "is_small", lambda layer, *_: layer.shape[0] < 8):  # on a GPU cudnn, else products
        outputs = run([tower.outputs for tower in build(model, towers.PerTower(parts), 2)])
    y, dx = (np.concatenate(parts) for parts in ([y for y, _ in outputs], [d[0] for _, d in outputs]))
    d_gamma, d_beta = (sum(np.float64(d[i]) for _, d in outputs) for i in (1, 2))
    for value, right in zip((y, dx, d_gamma, d_beta), (normalized(x, 3, gamma, beta)[0], *gradients(x, dy, 3, gamma))):
        assert largest(value - right) <= 1e-5 * largest(right)


@pytest.mark.skipif(tf.__version__.startswith("1."), reason="this TensorFlow has no fused op of float16 on a CPU")
def test_a_towers_own_sum_of_a_float16_gradient_is_off_by_what_rounding_twice_does():
    """cuDNN rounds a tower's own gradient, whose sum is 0, before that of all towers moves it by less than a unit of many."""
    rng = np.random.RandomState(0)
    x, dy = ((rng.randn(16, 32, 32, 8) + offset).astype(np.float16) for offset in (1, 0.5))
    with running_on("gpu", True):
        replicas = build(lambda x, dy: tf.gradients(tf_syncbn.sync_batch_norm(x, epsilon=EPSILON, name="bn"), x, dy),
                         (tf.constant(x), tf.constant(dy)))
    found = np.concatenate(run([tower.outputs[0] for tower in replicas])).astype(np.float64)
    right, *_ = gradients(x.astype(np.float64), dy.astype(np.float64), 3, np.ones(8))
    assert largest(found - right) <= 2 * 2.0 ** -11 * largest(right)
    of_towers, right = (part.reshape(2, -1, 8).sum(1) for part in (found, right))
    assert largest(of_towers - right) <= 0.1 * largest(right)


@pytest.mark.parametrize("num_towers", [1, 2])
def test_a_small_epsilon_is_what_a_gpus_layer_adds(num_towers):
    x = np.random.RandomState(0).randn(8, 5, 7, 6).astype(np.float32) * 1e-3
    with running_on("gpu", True):
        replicas = build(lambda x: tf_syncbn.sync_batch_norm(x, epsilon=1e-6, name="bn"), tf.constant(x), num_towers)
    y = np.concatenate(run([tower.outputs for tower in replicas]))
    wide = x.astype(np.float64)
    right = (wide - wide.mean((0, 1, 2))) / np.sqrt(wide.var((0, 1, 2)) + 1e-6)
    assert largest(y - right) <= 1e-5 * largest(right)


@pytest.mark.parametrize("strategy,dtype", covering(
    STRATEGIES, [tf.bfloat16, tf.float16], also=lambda strategy, dtype: strategy.takes_shares and dtype == tf.bfloat16))
def test_half_precision_is_computed_in_float32_and_rounded_once(strategy, dtype):
    if strategy.takes_shares and dtype == tf.float16:
        pytest.skip("cuDNN rounds a tower's own gradient before the difference to that of all towers")
    unit = 2.0 ** (-11 if dtype == tf.float16 else -8)
    rng = np.random.RandomState(1)
    dy, x = (tf.cast(tf.constant(rng.randn(9, 5, 7, 3) + mean, tf.float32), dtype) for mean in (30, 10))
    count, mean, variance, gamma = (tf.constant(part) for part in ([315.0], [10, 11, 9.5], [1.1, 0.9, 1.3], [0.5, 1.0, 2.0]))
    wide_dy, wide_x = (tf.cast(t, tf.float32) for t in (dy, x))
    means, how = tf.constant(rng.randn(5, 3) * 3, tf.float32), {"axis": 3, "epsilon": 1e-3}

    def results(dy, x, kernels):
        y = kernels.normalize(x, count, mean, variance, gamma, gamma, **how)
        of_gradient = gradient_by(kernels, dy, x, (count, mean, variance, gamma), means, None, 315, **how)
        return [tf.cast(t, tf.float32) for t in (y, *of_gradient)]

    (y, sums, dx), (wide_y, wide_sums, wide_dx) = run([results(dy, x, strategy.kernels), results(wide_dy, wide_x, reference)])
    np.testing.assert_allclose(sums, wide_sums, rtol=1e-5)
    for a, b in ((y, wide_y), (dx, wide_dx)):
        assert (np.abs(a - b) <= unit * np.abs(b) * 1.001 + 1e-4).all()


@pytest.mark.parametrize("kernels,dtype", covering([onednn, eigen, eigen_tf1], [tf.float16, tf.bfloat16]))
def test_moments_as_it_is_cast_their_input_once(kernels, dtype):
    """Grappler moves a cast behind the reshapes that read it, where each would have one of its own."""
    with tf.device("/cpu:0"):
        x = tf.random_normal([8, 28, 28, 64], dtype=dtype)
    ran = tf.RunMetadata()
    with session() as made:
        moments = call(kernels.local_moments, x, None, axis=3)
        made.run(moments, options=tf.RunOptions(output_partition_graphs=True), run_metadata=ran)
    nodes = [node for graph in ran.partition_graphs for node in graph.node]
    assert sum(node.op == "Cast" and node.attr["SrcT"].type == dtype.as_datatype_enum for node in nodes) == 1


def ancestors_of(op):
    """Returns the ops that an op waits for, itself among them."""
    found, left = set(), [op]
    while left:
        op = left.pop()
        if op not in found:
            found.add(op)
            left += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return found


@pytest.mark.parametrize("strategy,dtype", covering(STRATEGIES, [tf.float32, tf.float16]))
def test_nothing_of_the_backward_pass_runs_in_the_forward_pass_and_is_kept(strategy, dtype):
    dy, x = tf.placeholder(dtype, [6, 4, 4, 3]), tf.placeholder(dtype, [6, 4, 4, 3])
    count, mean, variance, means = (tf.placeholder(tf.float32, shape) for shape in ([1], [3], [3], [5, 3]))
    gradient_by(strategy.kernels, dy, x, (count, mean, variance, None), means, None, 96, axis=3, epsilon=1e-3)
    for op in tf.get_default_graph().get_operations():
        if x.op in ancestors_of(op) - {op} and op.type not in ("Shape", "Const"):
            assert {dy.op, means.op} & ancestors_of(op), op


@each_strategy
def test_sums_are_products_with_ones_on_a_cpu_alone_for_a_gpu_would_round_their_inputs(strategy):
    dy, x, count, mean, variance = (tf.placeholder(tf.float32, shape) for shape in ([512, 3], [512, 3], [1], [3], [3]))
    strategy.kernels.local_moments(x, None, axis=1)
    strategy.kernels.gradient_sums(dy, x, count, mean, variance, None, masked=True, axis=1, epsilon=1e-3)
    products = [op for op in tf.get_default_graph().get_operations() if op.type == "MatMul"]
    assert bool(products) == strategy.name.startswith(("eigen", "onednn"))
