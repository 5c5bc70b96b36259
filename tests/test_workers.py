"""Several processes train as one: worker processes on loopback, held against one process without our code."""
import contextlib
import json
import re
import socket

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests import worker_programs
from tests.batch_norm_oracle import gradients, largest, normalized
from tests.conftest import BEHAVIOUR
from tests.processes import cluster, run_workers, started
from tests.support import cpus, session, train_by, train_plainly


pytestmark = pytest.mark.xdist_group("workers")  # they share trainings
once = pytest.mark.skipif(BEHAVIOUR == "graph", reason="no behaviour of TensorFlow has a part in it")


def saved(path):
    """Returns what a worker saved, a dict of arrays."""
    with np.load(str(path)) as arrays:
        return {name.replace("|", "/"): arrays[name] for name in arrays.files}


def succeed(results):
    for status, output in results:
        assert status == 0, output


def assert_equal(found, expected, tolerance):
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


# Each case: which model, a list over workers of their towers' batches, whether sizes are known, and the update ops. Those of one
# number of workers run in the same processes, since most of the time is TensorFlow's import.
CASES = {
    2: {"one_each": ("whole", [[5], [2]], True, "first"), "two_each": ("whole", [[3, 1], [4, 2]], True, "first"),
        "unequal": ("whole", [[4], [3, 2]], True, "first"), "first": ("split", [[3, 1], [4, 2]], True, "first"),
        "last": ("split", [[3, 1], [4, 2]], True, "last")},
    3: {"unknown": ("whole", [[2], [5], [1]], False, "first"), "empty": ("whole", [[3, 0], [4, 2], [1, 2]], False, "first")}}
WHOLE = [(count, name) for count, cases in CASES.items() for name, case in cases.items() if case[0] == "whole"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns a function of a number of workers that returns the folder where their cases were saved."""
    folders = {}

    def run(count):
        if count not in folders:
            folders[count] = tmp_path_factory.mktemp("trained")
            succeed(run_workers(count, "train", folders[count], json.dumps(CASES[count])))
        return folders[count]
    return run


@pytest.mark.parametrize("count,name", WHOLE)
def test_workers_train_as_one_tower_on_the_whole_batch(trained, count, name):
    sizes = sum(CASES[count][name][1], [])
    ends = [[saved(trained(count) / ("%s_%d_%d.npz" % (name, rank, turn))) for turn in range(3)] for rank in range(count)]
    for of_worker in ends:
        for variable in set(of_worker[0]) - {"index"}:
            for end in of_worker[:2]:  # another session, too
                np.testing.assert_array_equal(end[variable], ends[0][0][variable], variable)
            np.testing.assert_array_equal(of_worker[2][variable], ends[0][2][variable], variable)
        # Five steps in one call. Not to the bit: in a loop Grappler of TensorFlow 1.15 may make (x gamma) r of x (gamma r), the
        # product of three factors of one tower's batch norm. Which it makes depends on addresses in memory.
        many = {variable: value for variable, value in of_worker[2].items() if variable != "index"}
        assert_equal(of_worker[0], many, 1e-9)
    assert np.concatenate([end[0]["index"] for end in ends]).tolist() == list(range(len(sizes)))
    assert ends[0][0]["weight"] == sum(sizes)
    # One tower on the whole batch: outside of towers the layer is plain batch norm, and nothing crosses.
    outputs = worker_programs.model()(*map(tf.constant, worker_programs.examples(sum(sizes))))
    losses, _, after = train_plainly(outputs["loss"], tf.train.MomentumOptimizer(0.01, 0.9), 5)
    assert set(after) | {"losses", "weight", "index"} == set(ends[0][0])
    assert_equal(ends[0][0], dict(after, losses=losses), 1e-9)


def test_a_layer_by_a_gpus_kernels_is_that_of_all_workers_towers(tmp_path):
    succeed(run_workers(2, "gpu_layer", tmp_path))
    x, dy = worker_programs.images_and_slopes()
    parts = [saved(tmp_path / ("gpu_%d.npz" % rank)) for rank in range(2)]
    found = [np.concatenate([part[name] for part in parts]) for name in ("y", "dx")]
    found += [sum(part[name] for part in parts) for name in ("d_gamma", "d_beta")]
    for value, right in zip(found, (normalized(x, 3, 1.0, 0.0)[0], *gradients(x, dy, 3, np.ones(6)))):
        assert largest(value - right) <= 1e-5 * largest(right)


@pytest.mark.parametrize("update_ops", ["first", "last"])
def test_two_workers_with_two_towers_are_four_towers(trained, update_ops):
    x, labels = worker_programs.examples(10)
    ends = np.cumsum([0, 3, 1, 4, 2])
    batch = towers.PerTower([(x[a:b], labels[a:b]) for a, b in zip(ends, ends[1:])])
    replicas = towers.TowerBuilder(cpus(4)).build(worker_programs.split_model(), batch)
    train_op = towers.minimize(replicas, tf.train.MomentumOptimizer(0.01, 0.9), update_ops)
    losses, _, after = train_by(train_op, replicas.loss, 5)
    for rank in range(2):
        assert_equal(saved(trained(2) / ("%s_%d_0.npz" % (update_ops, rank))), dict(after, losses=losses), 1e-12)
    assert np.abs(after["average"]).max() > 0.01 and np.abs(after["u"] - 1).max() > 0.01  # both were written


@once
@pytest.mark.parametrize("way", ["compute", "apply"])
def test_a_graph_without_towers_trains_as_on_the_whole_batch(tmp_path, way):
    succeed(run_workers(2, "plain", tmp_path, way))
    loss = worker_programs.plain_loss(tf.constant(worker_programs.examples(12)[0]))
    optimizer, step = tf.train.AdamOptimizer(0.01), tf.train.get_or_create_global_step()
    pairs = optimizer.compute_gradients(loss)
    gradients = [gradient for gradient, _ in pairs]
    if way == "compute":
        gradients, _ = tf.clip_by_global_norm(gradients, 0.05)
    _, _, after = train_by(optimizer.apply_gradients(zip(gradients, [v for _, v in pairs]), step), loss, 3)
    for rank in range(2):
        assert_equal(saved(tmp_path / ("%d.npz" % rank)), after, 1e-9)
    checkpoint = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(tmp_path / "checkpoints")))
    assert checkpoint.get_tensor("global_step") == 3 and set(checkpoint.get_variable_to_shape_map()) == set(after)


@once
def test_tensors_are_summed_over_three_workers_with_their_gradients(tmp_path):
    succeed(run_workers(3, "reductions", tmp_path))
    for rank in range(3):
        found = saved(tmp_path / ("%d.npz" % rank))
        for dtype in ("float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8"):
            np.testing.assert_array_equal(found[dtype], [6, 12], dtype)
        assert found["mean"] == 2
        # Each worker's part of the derivative meets the others': of (1 + 2 + 3) s^2, and of three times s^3, by each x.
        assert found["gradient"] == 6 * 2 * 6 and found["second"] == 3 * 3 * 6 * 6
        assert (found["of_fed"] == np.full([2, 3], 6)).all() and (found["of_other"] == np.full([3, 3], 6)).all()
        assert re.search(r"Placeholder:0 is of another shape in another worker, so they have no sum. Here its shape is.*%s"
                         % ("3 2" if rank == 2 else "2 3"), str(found["refused"]), re.DOTALL)
        told = json.loads(str(found["told"]))
        assert [each["rank"] for each in told] == [0, 1, 2] and [len(each["long"]) for each in told] == [5, 10, 15]


REFUSED = dict([
    ("forget", "Every worker began with variables of its own"),
    ("exchange", "Workers differ in their exchanges: worker 0 has 0 of them and worker 1 has 1. Where they first differ, at "
                 "number 0, worker 0 has no more and worker 1 \"all_reduce sum 'all_reduce' of float64"),
    ("variable", r"Workers differ in their gradients: .* at number 1, worker 0 has 'b0, .*' and worker 1 'b1, "),
    ("momentum", "Workers differ in their exchanges: .*momentum 0.9.*momentum 0.91"),
    ("gradients", "Workers differ in their gradients: worker 0 has 2 of them and worker 1 has 1. "),
    ("state", "Every worker would write another value into the variable 'state'"),
    ("random", "Every worker would write another value into the variable 'state'"),
    ("all", "The updates of several workers' towers can't run one after the other, and 'average' is updated by each tower alone"),
    ("loss", "The gradient of replicas.loss .* is taken, and with several workers it is that of this worker's towers alone"),
])


@once
def test_what_differs_or_is_forgotten_is_refused_in_every_worker():
    for status, output in run_workers(2, "fail", " ".join(REFUSED)):
        assert status == 0, output
        for what, message in REFUSED.items():
            assert re.search("^%s is refused: .*%s" % (what, message), output, re.MULTILINE), (what, output)


@once
def test_variables_that_drift_apart_and_draws_that_are_the_same_are_named(tmp_path):
    for rank, (status, output) in enumerate(run_workers(2, "drift", tmp_path)):
        assert status == 0, output
        warned, = re.findall("^warned (.*)$", output, re.MULTILINE)
        assert re.match(r"\[\[.Every worker draws the same random numbers at 'tower_0/dropout/.*\(seed \+ workers.rank\)\..\], "
                        r"\[\], \[\]\]", warned), output
        assert "refused: Workers have other values of the variable 'v': worker 1's are not worker 0's." in output


@once
def test_a_chief_that_never_comes_and_a_port_that_is_taken_are_one_sentence():
    config = cluster(2)[1]
    chief, port = config["cluster"]["worker"][0], int(config["cluster"]["worker"][1].rpartition(":")[2])
    with started([config], "connect", 2) as (process,):
        output = process.communicate(timeout=60)[0]
    assert "refused: Worker 1 (localhost:%d) waited 2 seconds for worker 0 (%s), which has ended, or never began" % (
        port, chief) in output and "Traceback" not in output
    with contextlib.closing(socket.socket(socket.AF_INET6)) as taken:
        taken.bind(("::", port))
        taken.listen(1)
        with started([config], "connect", 2) as (process,):
            output = process.communicate(timeout=60)[0]
    assert "refused: The server of worker 1 (localhost:%d) can't be started: its port is taken" % port in output, output


@once
def test_a_worker_late_by_half_the_time_limit_is_waited_for():
    for status, output in run_workers(2, "connect", 12, 6):
        assert status == 0 and "connected to [0, 1]" in output, output


def test_one_worker_alone_needs_no_server():
    workers = towers.workers.connect()
    assert (workers.rank, workers.size, workers.local_rank, workers.is_chief, workers.target) == (0, 1, 0, True, "")
    x = tf.constant([1.0, 2.0])
    loss = tf.reduce_sum(workers.all_reduce(x) * tf.get_variable("w", [2], initializer=tf.ones_initializer()))
    train_op = workers.optimizer(tf.train.GradientDescentOptimizer(0.5)).minimize(loss)
    replicas = towers.TowerBuilder(cpus(2), workers=workers).build(lambda x: tf.reduce_mean(x), x)
    with workers.session(config=tf.ConfigProto(device_count={"CPU": 2})) as made:
        made.run(tf.global_variables_initializer())
        made.run(workers.broadcast_variables())
        made.run(train_op)
        assert made.run(tf.trainable_variables()[0]).tolist() == [0.5, 0]
        assert made.run(replicas.loss) == 1.5
    assert workers.tell_all([1]) == [[1]]
    with session() as plain_session:
        plain_session.run(train_op)
