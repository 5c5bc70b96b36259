"""The example on several workers: as on one, stopped together, and killed at any moment."""
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from examples.cifar10 import data, train
from examples.training.order import rows_of_part
from tests.examples import steps_of_training
from towers.launch import free_ports

pytestmark = pytest.mark.xdist_group("train_workers")  # they share trainings
ROOT = str(Path(__file__).parent.parent.parent)
LAUNCH = [ROOT + "/towers/launch.py", "-n", "2"]  # as a file: it imports no TensorFlow
STEPS = ["-m", "tests.examples.steps_of_training"]
SMALL = ["--depth", "8", "--batch-size", "10"]  # four towers have 3, 3, 2 and 2


def command(arguments, **environment):
    """Starts a Python of its own."""
    environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3", **environment)
    return subprocess.Popen([sys.executable] + arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            universal_newlines=True, env=environment)


def workers_of(launcher):
    """The processes that a launcher started and that run, by their numbers."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rsplit(")", 1)[1].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == launcher.pid and state != "Z":
            found.append(int(stat.parent.name))
    return sorted(found)


def newest(train_dir):
    """The step of the newest checkpoint."""
    return max([int(path.name.split("-")[1].split(".")[0]) for path in train_dir.glob("*.index")] or [0])


def history(train_dir):
    """The records of the epochs, without what another order of sums may change."""
    records = json.loads((train_dir / "history.json").read_text())
    losses = np.array([[record.pop("train_loss"), record.pop("train_accuracy")] for record in records])
    return losses, records


def on_one_worker_of(network, folder):
    """The folder of a training of twelve steps, three epochs, of four towers on one worker, with its losses."""
    assert steps_of_training.run(str(folder / "losses"), "float64", SMALL + [
        "--steps", "12", "--num-towers", "4", "--train-dir", str(folder)], network) == 0
    return folder


@pytest.fixture(scope="module")
def on_one_worker(tmp_path_factory):
    return on_one_worker_of("of one layer", tmp_path_factory.mktemp("one"))


@pytest.mark.laws
@pytest.mark.parametrize("network,moments", [
    ("of one layer", ["saving"]), pytest.param("of one layer", ["start", "saving"], marks=pytest.mark.sweep),
    pytest.param("of one layer", [], marks=pytest.mark.sweep), pytest.param("whole", [], marks=pytest.mark.sweep)])
def test_two_workers_of_two_towers_train_as_one_of_four_and_so_they_do_killed_at_start_and_in_training(
        request, tmp_path_factory, tmp_path, network, moments):
    until = tmp_path_factory.mktemp("killed") / "all"  # so that none has ended before it is killed
    process = command(LAUNCH + ["--restarts", "2", "--grace", "1"] + STEPS + [str(tmp_path / "losses"), "float64"] + SMALL + [
        "--steps", "12", "--num-towers", "2", "--save-every", "1", "--train-dir", str(tmp_path)], TOWERS_TEST_NETWORK=network,
                      TOWERS_TEST_UNTIL=str(until))
    try:
        kill(process, moments, tmp_path)
        until.write_text("")
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, out + err
    one = on_one_worker_of(network, tmp_path_factory.mktemp("whole")) if network == "whole" else request.getfixturevalue(
        "on_one_worker")
    assert err.count("was killed by SIGKILL; starting all again") == len(moments)
    first = int(re.search(r"\[0\] Going on from step (\d+),", out).group(1)) if moments else 0
    assert 4 * bool(moments) <= first < 12 and newest(tmp_path) == 12
    losses, expected = (json.loads((folder / "losses").read_text()) for folder in (tmp_path, one))
    np.testing.assert_allclose(losses, expected[first:], rtol=1e-11)
    np.testing.assert_allclose(history(tmp_path)[0], history(one)[0], rtol=1e-11)
    assert history(tmp_path)[1] == history(one)[1]  # the test accuracies too, each worker having a part of the images
    assert "[0] Training a ResNet-8 on generated images (not CIFAR-10): 4 towers of 2 workers, batch 10, synced" in out
    assert moments or "[1]" not in out and "Traceback" not in err
    assert {path.name.split(".")[0] for path in tmp_path.iterdir()} == {
        "checkpoint", "curve", "events", "history", "losses", "model", "results", "settings", "sums"}
    assert 1 <= len(list(tmp_path.glob("events*"))) <= 1 + len(moments) and not list(tmp_path.glob("*.tmp"))
    assert json.loads((tmp_path / "results.json").read_text())["settings"]["num_workers"] == 2
    saved, alone = (tf.train.load_checkpoint(str(folder / "model.ckpt-12")) for folder in (tmp_path, one))
    assert saved.get_variable_to_shape_map() == alone.get_variable_to_shape_map()
    for name in alone.get_variable_to_shape_map():
        np.testing.assert_allclose(saved.get_tensor(name), alone.get_tensor(name), rtol=1e-9, atol=1e-12)


def kill(launcher, moments, train_dir):
    """Kills one of two workers in turn at each of several moments, "start" or "saving"."""
    rng, started, killed = random.Random(0), time.time(), []
    for moment in moments:
        while len(workers_of(launcher)) < 2 or set(workers_of(launcher)) & set(killed):
            time.sleep(0.1)
            assert launcher.poll() is None and time.time() - started < 120
        if moment == "start":
            time.sleep(rng.uniform(0, 3))
        while moment == "saving" and newest(train_dir) < 5:
            time.sleep(0.002 if newest(train_dir) == 4 else 0.05)
            assert launcher.poll() is None and time.time() - started < 120
        running = workers_of(launcher)
        os.kill(rng.choice(running), signal.SIGKILL)
        killed += running


@pytest.mark.laws
@pytest.mark.once
@pytest.mark.parametrize("number,to", [
    pytest.param(signal.SIGINT, "all", marks=pytest.mark.sweep), (signal.SIGTERM, "worker 1")])
def test_a_signal_stops_all_at_the_same_step(tmp_path, number, to):
    process = command(LAUNCH + STEPS + [str(tmp_path / "losses"), "float32"] + SMALL + [
        "--steps", "100000", "--save-every", "1000000", "--train-dir", str(tmp_path)], TOWERS_TEST_SLOWLY="0.1")
    while newest(tmp_path) < 5:  # an epoch
        time.sleep(0.1)
        assert process.poll() is None
    if to == "all":
        process.send_signal(number)
    else:
        os.kill(max(workers_of(process)), number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, out + err
    step = int(re.search(r"\[0\] Interrupted; step (\d+) is saved in", out).group(1))
    assert step == newest(tmp_path) >= 5 and "Traceback" not in err and "waited" not in err


@pytest.mark.laws
@pytest.mark.once
@pytest.mark.parametrize("arguments,message", [
    pytest.param(["--batch-size", "3", "--num-towers", "2"], "A batch of 3 is too small for 4 towers", marks=pytest.mark.sweep),
    pytest.param(["--data-dir", "/nonexistent"], "There is no folder /nonexistent", marks=pytest.mark.sweep),
    (["--train-dir", "/proc"], "/proc/settings.json can't be written")])
def test_bad_input_ends_all_workers_in_one_sentence_and_is_not_tried_again(tmp_path, arguments, message):
    process = command(LAUNCH + ["--restarts", "3", "--grace", "1"] + STEPS + [str(tmp_path / "losses"), "float32"] + SMALL + [
        "--train-dir", str(tmp_path / "new")] + arguments)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2 and "error: " + message in err, err
    assert "Traceback" not in err and "starting all again" not in err and not (tmp_path / "new").exists()


def test_a_worker_alone_without_the_others_says_so(tmp_path, monkeypatch, capsys):
    config = {"cluster": {"worker": ["localhost:1"]}, "task": {"type": "worker", "index": 3}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert train.main(["--train-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: TF_CONFIG says that this process is task 3 of 'worker', which has 1.")
    config["task"]["type"] = "evaluator"
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert train.main(["--train-dir", str(tmp_path)]) == 2
    assert "this process evaluates: the command that evaluates does, once for all" in capsys.readouterr().err


@pytest.mark.laws
@pytest.mark.once
def test_a_worker_that_nobody_joins_ends_with_a_status_that_is_tried_again(tmp_path):
    config = {"cluster": {"worker": ["localhost:%d" % port for port in free_ports(2)]}, "task": {"type": "worker", "index": 0}}
    process = command(["-m", "examples.cifar10.train", "--train-dir", str(tmp_path)], TF_CONFIG=json.dumps(config),
                      TOWERS_TIME_LIMIT="1")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in err
    assert re.search(r"error: Worker 0 \(localhost:\d+\) waited 1 seconds for worker 1 \(localhost:\d+\), which has ended", err)


@pytest.mark.parametrize("batch_size,parts,towers_a_part", [(16, 2, 2), (10, 2, 2), (11, 3, 2), (7, 2, 3), (9, 1, 4), (5, 5, 1)])
def test_rows_of_a_part_are_those_of_its_towers(batch_size, parts, towers_a_part):
    of_towers = np.array_split(np.arange(batch_size), parts * towers_a_part)  # the first ones take what does not divide
    for part in range(parts):
        rows = np.concatenate(of_towers[part * towers_a_part:(part + 1) * towers_a_part])
        first, end = rows_of_part(batch_size, part, parts, towers_a_part)
        np.testing.assert_array_equal(np.arange(first, end), rows)


def test_parts_of_a_pipeline_have_the_rows_of_the_whole_batches_augmented_alike():
    source = data.generate(50, 10).train
    whole = data.Pipeline(source, 16, True, 3)
    parts = [data.Pipeline(source, 16, True, 3, rows) for rows in ((0, 9), (9, 16))]
    with tf.Session() as session:
        for epoch, skip in ((0, 0), (1, 2)):
            for pipeline in [whole] + parts:
                pipeline.start(session, epoch, skip)
            for _ in range(3 - skip):
                (images, labels), *of_parts = session.run([whole.batch] + [part.batch for part in parts])
                np.testing.assert_array_equal(images, np.concatenate([of_part[0] for of_part in of_parts]))
                np.testing.assert_array_equal(labels, np.concatenate([of_part[1] for of_part in of_parts]))
