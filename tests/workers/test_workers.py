"""Several processes train as one: worker processes on loopback, held against one process without our code."""
import json
import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from tests import worker_programs
from tests.batch_norm_oracle import gradients, largest, normalized
from tests.conftest import BEHAVIOUR
from tests.processes import cluster, run_in, run_workers
from tests.support import cpus, session, train_by, train_plainly


pytestmark = pytest.mark.xdist_group("workers")  # they share trainings
once = pytest.mark.skipif(BEHAVIOUR == "graph", reason="no behaviour of TensorFlow has a part in it")


def saved(path):
    """Returns what a worker saved, a dict of arrays."""
    with np.load(str(path)) as arrays:
        return {name.replace("|", "/"): arrays[name] for name in arrays.files}


def assert_equal(found, expected, tolerance):
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


# Each case: which model, a list over workers of their towers' batches, whether sizes are known, and the update ops.
CASES = {
    "two": {"unequal": ("whole", [[4], [3, 2]], True, "first"), "last": ("split", [[3, 1], [4, 2]], True, "last")},
    "three": {"empty": ("whole", [[3, 0], [4], [1, 2]], False, "first")},
    "two as many": {"one_each": ("whole", [[5], [2]], True, "first"), "two_each": ("whole", [[3, 1], [4, 2]], True, "first"),
                    "first": ("split", [[3, 1], [4, 2]], True, "first")}}
IN_SWEEP = "two as many"
WHOLE = [pytest.param(group, name, marks=pytest.mark.sweep if group == IN_SWEEP else ())
         for group, cases in CASES.items() for name, case in cases.items() if case[0] == "whole"]
REFUSED = dict([  # in this order: worker 1 has more graphs than worker 0 after the second
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
# What else the workers of a group run after they have trained its cases; the last is what no behaviour has a part in.
BESIDE = {"two": ([["gpu_layer"]], [["plain", "compute"], ["plain", "apply"], ["drift"], ["fail", list(REFUSED)]]),
          "three": ([], [["reductions"]]), "two as many": ([], [])}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Returns a function of a group that returns the folder where its workers saved what they found, and what each said."""
    found = {}

    def run(group):
        if group not in found:
            folder = tmp_path_factory.mktemp("ran")
            found[group] = folder, None  # what has failed is not run anew
            (_, first, *_), *_ = CASES[group].values()
            always, else_once = BESIDE[group]
            programs = [["train", CASES[group]]] + always + (else_once if BEHAVIOUR != "graph" else [])
            results = run_workers(len(first), "several", folder, json.dumps(programs))
            assert not any(status for status, _ in results), "\n".join(output for _, output in results)
            found[group] = folder, [output for _, output in results]
        assert found[group][1], "The workers of this group have failed in the first test of it."
        return found[group]
    return run


@pytest.mark.parametrize("group,name", WHOLE)
def test_workers_train_as_one_tower_on_the_whole_batch(ran, group, name):
    _, of_workers, known, _ = CASES[group][name]
    sizes, folder = sum(of_workers, []), ran(group)[0]
    ends = [[saved(folder / ("%s_%d_%d.npz" % (name, rank, turn))) for turn in range(3 if known else 2)]
            for rank in range(len(of_workers))]
    for of_worker in ends:
        for variable in set(of_worker[0]) - {"index"}:
            for end in of_worker[:2]:  # another session, too
                np.testing.assert_array_equal(end[variable], ends[0][0][variable], variable)
            for many, of_first in zip(of_worker[2:], ends[0][2:]):
                np.testing.assert_array_equal(many[variable], of_first[variable], variable)
        # All steps in one call. Not to the bit: in a loop Grappler of TensorFlow 1.15 may make (x gamma) r of x (gamma r), the
        # product of three factors of one tower's batch norm. Which it makes depends on addresses in memory.
        for many in of_worker[2:]:
            assert_equal(of_worker[0], {variable: value for variable, value in many.items() if variable != "index"}, 1e-9)
    assert np.concatenate([end[0]["index"] for end in ends]).tolist() == list(range(len(sizes)))
    assert ends[0][0]["weight"] == sum(sizes)
    # One tower on the whole batch: outside of towers the layer is plain batch norm, and nothing crosses.
    outputs = worker_programs.model()(*map(tf.constant, worker_programs.examples(sum(sizes))))
    losses, _, after = train_plainly(outputs["loss"], tf.train.MomentumOptimizer(0.01, 0.9), worker_programs.STEPS)
    assert set(after) | {"losses", "weight", "index"} == set(ends[0][0])
    assert_equal(ends[0][0], dict(after, losses=losses), 1e-9)


def test_a_layer_by_a_gpus_kernels_is_that_of_all_workers_towers(ran):
    folder, (x, dy) = ran("two")[0], worker_programs.images_and_slopes()
    parts = [saved(folder / ("gpu_%d.npz" % rank)) for rank in range(2)]
    found = [np.concatenate([part[name] for part in parts]) for name in ("y", "dx")]
    found += [sum(part[name] for part in parts) for name in ("d_gamma", "d_beta")]
    for value, right in zip(found, (normalized(x, 3, 1.0, 0.0)[0], *gradients(x, dy, 3, np.ones(6)))):
        assert largest(value - right) <= 1e-5 * largest(right)


@pytest.mark.parametrize("group,update_ops", [("two", "last"), pytest.param(IN_SWEEP, "first", marks=pytest.mark.sweep)])
def test_two_workers_with_two_towers_are_four_towers(ran, group, update_ops):
    x, labels = worker_programs.examples(10)
    ends = np.cumsum([0, 3, 1, 4, 2])
    batch = towers.PerTower([(x[a:b], labels[a:b]) for a, b in zip(ends, ends[1:])])
    replicas = towers.TowerBuilder(cpus(4)).build(worker_programs.split_model(), batch)
    train_op = towers.minimize(replicas, tf.train.MomentumOptimizer(0.01, 0.9), update_ops=update_ops)
    losses, _, after = train_by(train_op, replicas.loss, worker_programs.STEPS)
    for rank in range(2):
        assert_equal(saved(ran(group)[0] / ("%s_%d_0.npz" % (update_ops, rank))), dict(after, losses=losses), 1e-12)
    assert np.abs(after["average"]).max() > 0.01 and np.abs(after["u"] - 1).max() > 0.01  # both were written


@once
@pytest.mark.parametrize("way", ["compute", "apply"])
def test_a_graph_without_towers_trains_as_on_the_whole_batch(ran, way):
    folder = ran("two")[0]
    loss = worker_programs.plain_loss(tf.constant(worker_programs.examples(12)[0]))
    optimizer, step = tf.train.AdamOptimizer(0.01), tf.train.get_or_create_global_step()
    pairs = optimizer.compute_gradients(loss)
    gradients = [gradient for gradient, _ in pairs]
    if way == "compute":
        gradients, _ = tf.clip_by_global_norm(gradients, 0.05)
    _, _, after = train_by(optimizer.apply_gradients(zip(gradients, [v for _, v in pairs]), step), loss, 3)
    for rank in range(2):
        assert_equal(saved(folder / ("%s_%d.npz" % (way, rank))), after, 1e-9)
    checkpoint = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(folder / way)))
    assert checkpoint.get_tensor("global_step") == 3 and set(checkpoint.get_variable_to_shape_map()) == set(after)


@pytest.mark.laws
@once
def test_tensors_are_summed_over_three_workers_with_their_gradients(ran):
    for rank in range(3):
        found = saved(ran("three")[0] / ("reductions_%d.npz" % rank))
        for dtype in ("float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8"):
            np.testing.assert_array_equal(found[dtype], [6, 12], dtype)
        assert found["mean"] == 2
        # Each worker's part of the derivative meets the others': of (1 + 2 + 3) s^2, and of three times s^3, by each x.
        assert found["gradient"] == 6 * 2 * 6 and found["second"] == 3 * 3 * 6 * 6
        # The largest are the third worker's first and the first one's second number, and the smallest the other way round.
        np.testing.assert_array_equal([found["max"], found["min"]], [[3, 3, 1], [1, 1, 1]])
        assert (found["max gradient"], found["min gradient"]) == [(-36, 12), (0, 0), (36, -12)][rank]
        assert (found["of_fed"] == np.full([2, 3], 6)).all() and (found["of_other"] == np.full([3, 3], 6)).all()
        assert re.search(r"Placeholder:0 is of another shape in another worker, so they have no sum. Here its shape is.*%s"
                         % ("3 2" if rank == 2 else "2 3"), str(found["refused"]), re.DOTALL)
        told = json.loads(str(found["told"]))
        assert [each["rank"] for each in told] == [0, 1, 2] and [len(each["long"]) for each in told] == [5, 10, 15]


@once
def test_what_differs_or_is_forgotten_is_refused_in_every_worker(ran):
    for output in ran("two")[1]:
        for what, message in REFUSED.items():
            assert re.search("^%s is refused: .*%s" % (what, message), output, re.MULTILINE), (what, output)


@once
def test_variables_that_drift_apart_and_draws_that_are_the_same_are_named(ran):
    for output in ran("two")[1]:
        warned, = re.findall("^warned (.*)$", output, re.MULTILINE)
        assert re.match(r"\[\[.Every worker draws the same random numbers at 'tower_0/dropout/.*\(seed \+ workers.rank\)\..\], "
                        r"\[\], \[\]\]", warned), output
        assert "refused: Workers have other values of the variable 'v': worker 1's are not worker 0's." in output


@pytest.mark.laws
@once
def test_a_chief_that_never_comes_and_a_port_that_is_taken_are_one_sentence():
    config = cluster(2)[1]
    addresses = config["cluster"]["worker"]
    (status, output), = run_in([config], "connect_in_vain")
    assert status == 0 and "Traceback" not in output, output
    assert "refused: The server of worker 1 (%s) can't be started: its port is taken" % addresses[1] in output, output
    assert "refused: Worker 1 (%s) waited 1 seconds for worker 0 (%s), which has ended, or never began" % (
        addresses[1], addresses[0]) in output, output


@pytest.mark.laws
@once
def test_workers_that_come_late_are_waited_for(ran):
    first, *others = [float(re.search("^waited (.*)$", output, re.MULTILINE).group(1)) for output in ran("three")[1]]
    assert max(others) < first


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
