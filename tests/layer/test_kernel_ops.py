"""How many ops a layer starts: docs/kernels.md promises upper bounds for each strategy."""
import collections
import pathlib
import re

import pytest
import tensorflow.compat.v1 as tf

import tf_syncbn
import towers
from tests.kernel_machines import running_on
from tests.support import cpus, has_tf_layers

TABLE = (pathlib.Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
STRATEGIES = {"cudnn": ("gpu", True), "products": ("gpu", False), "cudnn_unsized": ("unknown", False),
              "onednn": ("onednn", False),
              "eigen_tf1": ("eigen of TensorFlow 1", False), "eigen_plain": ("eigen", True), "eigen": ("eigen", False)}
SMALL, LARGE = [4, 32, 32, 16], [16, 32, 32, 16]
NO_OPS = {"Const", "Identity", "IdentityN", "NoOp", "Placeholder", "StopGradient", "VariableV2", "VarHandleOp",
          "ReadVariableOp", "DeepCopy", "Bitcast"}
# What a GPU launches nothing for: other names for the same memory, where channels are a multiple of 16.
NO_KERNELS = {"Reshape", "Unpack"}


def promised(name):
    """Returns a dict from numbers of towers to the ops that the table's row of a name promises at most."""
    row, = re.findall(r"^\| `?%s`? \| (\d+) \| (\d+) \| (\d+) \|$" % re.escape(name), TABLE, re.MULTILINE)
    return dict(zip((1, 2, 4), map(int, row)))


def ops_behind(fetches):
    """Counts the ops behind tensors and ops by type, with those of the functions called; no constants, identities and reads.

    Nor bitcasts: Grappler drops each pair of them.
    """
    graph = tf.get_default_graph().as_graph_def()
    functions, counts = {f.signature.name: f for f in graph.library.function}, collections.Counter()

    def count(nodes, wanted):
        nodes, seen, left = {node.name: node for node in nodes}, set(), list(wanted)
        while left:
            name = left.pop().lstrip("^").split(":")[0]
            if name in seen or name not in nodes:
                continue
            seen.add(name)
            node = nodes[name]
            left += node.input
            called = node.attr["f"].func.name if node.op.endswith("PartitionedCall") else node.op
            if called in functions:
                count(functions[called].node_def, functions[called].ret.values())
            elif node.op not in NO_OPS:
                counts[node.op] += 1

    count(graph.node, [fetch.name for fetch in fetches])
    return counts


def ops_of_a_layer(num_towers, batch_norm, shape=LARGE, with_averages=True):
    """Counts by type the ops of a layer in training, its gradients, and its moving averages if these are asked for."""
    batch = [tuple(tf.placeholder(tf.float32, shape) for _ in range(2)) for _ in range(num_towers)]
    replicas = towers.TowerBuilder(cpus(num_towers)).build(lambda x, dy: batch_norm(x), towers.PerTower(batch))
    gradients = []
    with replicas[0].context.meetings.gradient_pass():
        for tower, (x, dy) in zip(replicas, batch):
            gradients += tf.gradients(tower.outputs, [x] + tf.trainable_variables(), dy)
    updates = towers.collect_update_ops(replicas, "first") if with_averages else []
    return ops_behind([tower.outputs for tower in replicas] + gradients + updates)


@pytest.mark.parametrize("name", sorted(STRATEGIES))
@pytest.mark.parametrize("num_towers", [1, 2, 4])
def test_a_layer_starts_no_more_ops_than_promised(name, num_towers):
    with running_on(*STRATEGIES[name]):
        ops = ops_of_a_layer(num_towers, tf_syncbn.sync_batch_norm, SMALL if name == "eigen_plain" else LARGE)
    assert sum(ops.values()) <= promised(name)[num_towers]


@pytest.mark.parametrize("num_towers", [2, 3, 4, 8])
def test_a_gpu_launches_for_a_layer_at_most_15_kernels_a_tower_and_7_once(num_towers):
    with running_on("gpu", True):
        ops = ops_of_a_layer(num_towers, tf_syncbn.sync_batch_norm, with_averages=False)
    assert sum(count for op, count in ops.items() if op not in NO_KERNELS) <= 15 * num_towers + 7
    assert not ops["ConcatV2"] and ops["Pack"] <= (num_towers > 2)  # one copy for each tensor that they join


@pytest.mark.parametrize("scale,constant_dy", [(True, True), (True, False), (False, False)])
def test_grappler_does_not_answer_on_the_cpu_what_a_gpu_saves(scale, constant_dy):
    data, ran = tf.placeholder(tf.float32, []), tf.RunMetadata()

    def model(x):
        y = tf_syncbn.sync_batch_norm(x, scale=scale, name="bn")
        return tf.gradients(y, x, tf.ones_like(x) if constant_dy else tf.fill(x.shape, data))

    with running_on("gpu", True), tf.Session() as session:
        replicas = towers.TowerBuilder(["/cpu:0"] * 2).build(model, tf.zeros(LARGE))
        session.run(tf.global_variables_initializer())
        session.run([tower.outputs for tower in replicas], {data: 1}, tf.RunOptions(output_partition_graphs=True), ran)
    kinds = {node.op.replace("_MklNative", "") for graph in ran.partition_graphs for node in graph.node}
    assert {"FusedBatchNormV2", "FusedBatchNormGradV2"} <= kinds


@pytest.mark.parametrize("num_towers", [1, 2, 4])
@pytest.mark.skipif(not has_tf_layers(), reason="this TensorFlow has no tf.layers")
def test_so_many_are_the_ops_of_a_plain_layer(num_towers):
    plain = ops_of_a_layer(num_towers, lambda x: tf.layers.batch_normalization(x, training=True, name="bn"))
    assert sum(plain.values()) == promised("tf.layers, fused")[num_towers]


def test_one_tower_on_a_gpu_starts_at_most_half_as_many_more():
    for small in (True, False):
        with tf.Graph().as_default(), running_on("gpu", small):
            ops = ops_of_a_layer(1, tf_syncbn.sync_batch_norm)
        assert sum(ops.values()) <= 1.5 * promised("tf.layers, fused")[1]
