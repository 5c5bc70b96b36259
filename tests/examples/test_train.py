"""The example from the command line: it trains, resumes, survives being killed, and refuses bad input in one sentence."""
import contextlib
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from examples.cifar10 import data, evaluate, train
from examples.cifar10 import model as resnets
from examples.cifar10.model import resnet
from examples.cifar10.task import MEASURES
from examples.segmentation import train as segmentation
from examples.training import folder, record, report
from examples.training.report import Progress, draw_curve, reason, write_json
from examples.training.schedule import learning_rate
from tests.support import build
from towers.testing import assert_equals_one_batch

pytestmark = pytest.mark.xdist_group("train")  # they share trainings
ROOT = str(Path(__file__).parent.parent.parent)
SMALL = ["--depth", "8", "--batch-size", "16"]
ONE_TOWER = SMALL + ["--num-towers", "1"]
PNG = b"\x89PNG\r\n\x1a\n"
generate = data.generate


def saved_step(train_dir):
    """The step of the checkpoint that the folder's state names, 0 where there is none."""
    state = tf.train.get_checkpoint_state(str(train_dir))
    return int(state.model_checkpoint_path.rsplit("-", 1)[1]) if state else 0


@pytest.fixture(scope="module", autouse=True)
def few_images():
    """An epoch has 37 steps of 16: none ends in thirty."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "generate", lambda made=generate(600, 20): made)
        yield


@pytest.fixture(scope="module")
def trained(few_images, tmp_path_factory):
    """A folder with a finished training of twelve steps, and what it printed."""
    train_dir, out = tmp_path_factory.mktemp("trained"), io.StringIO()
    with contextlib.redirect_stdout(out):
        assert train.main(SMALL + ["--steps", "12", "--num-towers", "2", "--train-dir", str(train_dir)]) == 0
    return train_dir, out.getvalue()


@pytest.fixture
def one_layer(monkeypatch):
    """What the command does with files is the same with a network of one layer."""
    monkeypatch.setattr(resnets, "_block", lambda x, *_: x[..., :16])


@pytest.fixture(scope="module")
def small_folders():
    return []


@pytest.fixture
def small(one_layer, small_folders, tmp_path_factory):
    """The folder of a training of 30 steps of a network of one layer, which stays what networks are meanwhile."""
    if not small_folders:
        folder = tmp_path_factory.mktemp("small")
        assert train.main(SMALL + ["--steps", "30", "--num-towers", "2", "--train-dir", str(folder)]) == 0
        small_folders.append(folder)
    return small_folders[0]


def test_training_leaves_checkpoint_summaries_results_and_curve(trained):
    train_dir, output = trained
    assert "generated images (not CIFAR-10)" in output
    assert re.search(r"step 12 of 12, loss \d+\.\d+, accuracy \d+\.\d %, \d+ images/s", output)
    results = json.loads((train_dir / "results.json").read_text())
    assert results["step"] == 12 and 0 <= results["test_accuracy"] <= 1 and results["settings"]["num_towers"] == 2
    assert (train_dir / "curve.png").read_bytes().startswith(PNG)
    assert saved_step(train_dir) == 12
    tags = {value.tag for path in train_dir.glob("events*") for event in tf.train.summary_iterator(str(path))
            for value in event.summary.value}
    assert {"loss", "accuracy", "learning_rate", "test_accuracy"} <= tags


@pytest.mark.laws
@pytest.mark.once
def test_rerun_of_a_finished_training_changes_nothing_but_says_so(small, capsys):
    results = (small / "results.json").read_text()
    capsys.readouterr()
    assert train.main(SMALL + ["--steps", "30", "--num-towers", "2", "--train-dir", str(small)]) == 0
    output = capsys.readouterr().out
    assert "The 30 steps asked for are done." in output and "Test accuracy" in output
    assert (small / "results.json").read_text() == results


def test_evaluate_recalibrates_moving_averages_and_leaves_the_checkpoint(small, capsys):
    before = {path.name: path.read_bytes() for path in small.glob("model.ckpt*")}
    arguments = ["--train-dir", str(small), "--num-towers", "2", "--batch-size", "50"]
    assert evaluate.main(arguments + ["--recalibrate", "3"]) == 0
    out = capsys.readouterr().out
    assert "Moving averages recalibrated over 3 batches of 50 training images." in out
    assert re.search(r"Test accuracy \d+\.\d\d % on generated images", out)
    assert {path.name: path.read_bytes() for path in small.glob("model.ckpt*")} == before
    assert evaluate.main(arguments + ["--recalibrate", "100000"]) == 2
    assert "--recalibrate 100000 asks for more batches than the training images have" in capsys.readouterr().err


def test_evaluate_finds_the_accuracy_of_the_training(trained, capsys):
    train_dir, _ = trained
    assert evaluate.main(["--train-dir", str(train_dir), "--num-towers", "3"]) == 0
    accuracy = json.loads((train_dir / "results.json").read_text())["test_accuracy"]
    assert "Test accuracy %.2f %% on generated images" % (100 * accuracy) in capsys.readouterr().out


def test_moved_training_folder_goes_on(small, tmp_path):
    moved = tmp_path / "moved"
    os.rename(str(small), str(moved))
    try:
        assert evaluate.main(["--train-dir", str(moved)]) == 0
    finally:
        os.rename(str(moved), str(small))


@pytest.mark.once
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_training_saves_and_says_how_to_go_on(one_layer, tmp_path, capsys, monkeypatch, number):
    """Signals to processes of their own are in test_workers.py."""
    usual, noted = signal.getsignal(number), Progress.step

    def step(self, step, *values):
        noted(self, step, *values)
        if step == 3:
            os.kill(os.getpid(), number)
    monkeypatch.setattr(Progress, "step", step)
    assert train.main(ONE_TOWER + ["--steps", "100", "--train-dir", str(tmp_path)]) == 128 + number
    assert re.search("Interrupted; step 3 is saved in .* Run the same command again", capsys.readouterr().out)
    assert saved_step(tmp_path) == 3 and signal.getsignal(number) is usual
    assert train.main(ONE_TOWER + ["--steps", "5", "--train-dir", str(tmp_path)]) == 0
    assert "Going on from step 3" in capsys.readouterr().out and saved_step(tmp_path) == 5


@pytest.mark.parametrize("message", [
    "/a/b; File too large\n\t [[{{node save}}]]",
    "Graph execution error:\n\nDetected at\nNode: 'save'\n/a; File too large\n\t [[{{node save}}]]",
    "2 root error(s) found.\n  (0) UNKNOWN: /a/b; File too large\n\t [[{{node save}}]]\n  (1) CANCELLED: Another one\n"])
def test_of_what_tensorflow_says_the_reason_is_told(message):
    assert reason(tf.errors.UnknownError(None, None, message)) == "File too large"


def listing(folder):
    return sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir())


def refuse(capsys, run, arguments, message):
    """Runs a command line in this process: status 2, one sentence, no traceback."""
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    assert re.search(message, error), error


@pytest.mark.parametrize("arguments,message", [
    (["--num-towers", "4", "--batch-size", "3"], "A batch of 3 is too small for 4 towers"),
    (["--batch-size", "5001"], "A batch of 5001 is larger than the 600 training images"),
    (["--depth", "21"], r"depth of this ResNet is 6n \+ 2.*not 21"),
    (["--data-dir", "/nonexistent"], "There is no folder /nonexistent"),
    (["--download"], "--download needs a --data-dir"),
    (["--data-name", "a copy"], "--data-name names the data of a --data-dir, and there is none"),
])
@pytest.mark.once
def test_bad_input_is_one_sentence_and_status_2(tmp_path, capsys, arguments, message):
    refuse(capsys, train.main, arguments + ["--train-dir", str(tmp_path / "new")], message)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("arguments", [["--num-towers", "0"], ["--update-ops", "some"], ["--steps", "many"]])
def test_arguments_that_make_no_sense_are_refused_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        train.main(arguments)
    assert error.value.code == 2 and "Traceback" not in capsys.readouterr().err


@pytest.mark.once
def test_checkpoint_of_another_depth_is_refused_and_nothing_is_overwritten(trained, capsys):
    train_dir, _ = trained
    before = listing(train_dir)
    arguments = ["--depth", "14", "--num-towers", "1", "--train-dir", str(train_dir)]
    refuse(capsys, train.main, arguments, "holds a training with depth 8, and 14 was asked for: choose another --train-dir")
    settings = (train_dir / "settings.json")
    text = settings.read_text()
    settings.unlink()
    try:  # without the settings, the checkpoint itself tells
        refuse(capsys, train.main, arguments,
               r"is not of a ResNet-14: stage0_block1/\S+ is not in it, one of \d\d of \d\d\d variables\. Choose")
    finally:
        settings.write_text(text)
    assert [name for name, _ in listing(train_dir)] == [name for name, _ in before]
    assert [e for e in listing(train_dir) if e[0] != "settings.json"] == [e for e in before if e[0] != "settings.json"]


@pytest.mark.laws
@pytest.mark.once
def test_deeper_checkpoint_is_not_taken_for_a_shallower_one(tmp_path, capsys):
    with tf.Graph().as_default():
        build(resnet(14), (np.zeros([2, 32, 32, 3], np.float32), np.zeros([2], np.int32)), 1)
        tf.train.get_or_create_global_step()
        tf.train.MomentumOptimizer(0.1, 0.9).apply_gradients([(tf.zeros_like(v), v) for v in tf.trainable_variables()])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            tf.train.Saver().save(session, str(tmp_path / "model.ckpt"), global_step=1)
    refuse(capsys, train.main, ONE_TOWER + ["--train-dir", str(tmp_path)], "is not of a ResNet-8: it has stage0_block1/")


@pytest.mark.laws
@pytest.mark.once
def test_damaged_files_of_a_training_folder_are_refused(small, tmp_path, capsys):
    train_dir = small
    for path in train_dir.iterdir():
        if not path.name.startswith("events"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    index, = tmp_path.glob("*.index")
    index.write_bytes(index.read_bytes()[:20])
    refuse(capsys, train.main, ONE_TOWER + ["--train-dir", str(tmp_path)], "The checkpoint .* can't be read")
    index.write_bytes((train_dir / index.name).read_bytes())
    shard, = tmp_path.glob("*.data-*")
    shard.write_bytes(shard.read_bytes()[:1000])
    before = listing(tmp_path)
    refuse(capsys, train.main, ONE_TOWER + ["--train-dir", str(tmp_path)], "The checkpoint .* can't be read: it is damaged")
    refuse(capsys, evaluate.main, ["--train-dir", str(tmp_path)], "The checkpoint .* can't be read: it is damaged")
    assert listing(tmp_path) == before
    shard.write_bytes((train_dir / shard.name).read_bytes())
    (tmp_path / "history.json").write_text("[")
    refuse(capsys, train.main, ONE_TOWER + ["--train-dir", str(tmp_path)], "history.json is damaged")
    (tmp_path / "checkpoint").write_text("nonsense")
    assert evaluate.main(["--train-dir", str(tmp_path)]) == 0  # the checkpoint itself is found
    capsys.readouterr()
    (tmp_path / "settings.json").write_text("{")
    refuse(capsys, train.main, ONE_TOWER + ["--train-dir", str(tmp_path)], "settings.json is damaged")


def copy_of(folder, target, but=("events",)):
    """Copies a folder's files, but not those whose names begin so."""
    for path in folder.iterdir():
        if not path.name.startswith(but):
            (target / path.name).write_bytes(path.read_bytes())


def copy_checkpoint(folder, step, new_step):
    for path in folder.glob("model.ckpt-%d.*" % step):
        (folder / path.name.replace("-%d." % step, "-%d." % new_step)).write_bytes(path.read_bytes())


@pytest.mark.once
@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"nonsense", b'model_checkpoint_path: ""', None,
                                     b'model_checkpoint_path: "model.ckpt-4"\nall_model_checkpoint_paths: "model.ckpt-4"'])
def test_without_a_good_state_file_the_checkpoints_that_are_whole_are_found(small, tmp_path, content):
    copy_of(small, tmp_path, ("events", "checkpoint"))
    if content is not None:
        (tmp_path / "checkpoint").write_bytes(content)
    for step in (9, 100, 200, 300):
        copy_checkpoint(tmp_path, 30, step)
    for name, size in (("model.ckpt-100.data-00000-of-00001", 1000), ("model.ckpt-300.index", 20)):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:size])
    (tmp_path / "model.ckpt-200.data-00000-of-00001").unlink()
    (tmp_path / "model.ckpt-best.index").write_bytes((tmp_path / "model.ckpt-30.index").read_bytes())
    assert folder.saved_checkpoints(str(tmp_path)) == [str(tmp_path / "model.ckpt-9"), str(tmp_path / "model.ckpt-30")]


@pytest.mark.once
def test_training_with_an_empty_state_file_goes_on(small, tmp_path, capsys):
    copy_of(small, tmp_path)
    (tmp_path / "checkpoint").write_bytes(b"")
    assert train.main(ONE_TOWER + ["--steps", "31", "--train-dir", str(tmp_path)]) == 0
    assert "Going on from step 30" in capsys.readouterr().out and saved_step(tmp_path) == 31


@pytest.mark.once
def test_checkpoints_none_of_which_is_whole_are_not_trained_over(small, tmp_path, capsys):
    copy_of(small, tmp_path, ("events", "checkpoint"))
    copy_checkpoint(tmp_path, 30, 9)
    for path in tmp_path.glob("*.data-*"):
        path.write_bytes(path.read_bytes()[:1000])
    before = listing(tmp_path)
    for run in (train.main, evaluate.main):
        refuse(capsys, run, ["--depth", "8"][:2 * (run is train.main)] + ["--train-dir", str(tmp_path)],
               "None of the checkpoints in .* can be read; the newest is model.ckpt-30")
    assert listing(tmp_path) == before


@pytest.mark.once
@pytest.mark.parametrize("name", ["checkpoint", "settings.json", "history.json", "sums.json", "results.json", "curve.png"])
def test_a_folder_where_a_file_should_be_is_refused(one_layer, tmp_path, capsys, name):
    (tmp_path / name).mkdir()
    refuse(capsys, train.main, ONE_TOWER + ["--train-dir", str(tmp_path)],
           "%s (is a folder where a file should be: move it away|can't be read: Is a directory)" % name)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name,content,message", [
    ("settings.json", "[]", "settings.json is damaged: it holds a list where a dict was expected"),
    ("history.json", "{}", "history.json is damaged: it holds a dict where a list was expected"),
    ("history.json", "[1]", "history.json is damaged: not all of its records have numbers for step, epoch,"),
    ("history.json", '[{"step": 3}]', "history.json is damaged: not all of its records have numbers for step, epoch,"),
    ("history.json", '[{"step": "3", "epoch": 1, "train_loss": 1, "train_accuracy": 1, "test_accuracy": 1}]',
     "history.json is damaged: not all of its records have numbers"),
    ("sums.json", '{"30": [1, 2]}', r"sums.json is damaged: it has \[1, 2\] for step 30. Delete it"),
    ("sums.json", '{"30": 1}', "sums.json is damaged: it has 1 for step 30"),
])
@pytest.mark.once
def test_files_that_hold_something_else_are_refused(small, tmp_path, capsys, name, content, message):
    copy_of(small, tmp_path)
    (tmp_path / name).write_text(content)
    before = listing(tmp_path)
    refuse(capsys, train.main, ONE_TOWER + ["--train-dir", str(tmp_path)], message)
    assert listing(tmp_path) == before


def test_evaluation_needs_settings_that_say_what_was_trained(small, tmp_path, capsys):
    copy_of(small, tmp_path)
    for content, name in (("{}", "depth"), ('{"depth": "8"}', "depth"), ('{"depth": 8, "data": "CIFAR-10"}', "sync_bn")):
        (tmp_path / "settings.json").write_text(content)
        refuse(capsys, evaluate.main, ["--train-dir", str(tmp_path)], "settings.json does not say the %s of the training" % name)
    (tmp_path / "settings.json").write_text(json.dumps({"depth": 9, "data": data.generate().name, "sync_bn": True,
                                                        "weight_decay": 0}))
    refuse(capsys, evaluate.main, ["--train-dir", str(tmp_path)], r"settings.json is damaged: .*6n \+ 2.* not 9")


@pytest.mark.once
def test_a_damaged_results_file_is_written_anew(small, tmp_path, capsys):
    copy_of(small, tmp_path)
    (tmp_path / "results.json").write_text("{")
    assert train.main(ONE_TOWER + ["--steps", "30", "--train-dir", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "results.json").read_text())["step"] == 30


@pytest.mark.once
def test_a_train_dir_that_can_not_be_made_or_written_is_refused(one_layer, tmp_path, capsys):
    (tmp_path / "file").write_text("good")
    for path, message in ((tmp_path / "file" / "new", "The folder .*new can't be made: Not a directory"),
                          (tmp_path / "file", "The folder .*file can't be made: File exists"),
                          ("/proc", r"/proc/settings.json can't be written: ")):
        refuse(capsys, train.main, ONE_TOWER + ["--train-dir", str(path)], message)
    assert (tmp_path / "file").read_text() == "good"


@contextlib.contextmanager
def largest_file(size):
    """No file may grow beyond `size` bytes: to a program that is a full disk. Python ignores the signal that goes with it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.once
@pytest.mark.parametrize("size,message", [
    (100, "settings.json can't be written: File too large"),
    (3000, "The checkpoint of step 32 can't be written to .*: File too large. The earlier ones are as they were")])
def test_a_full_disk_is_one_sentence_and_leaves_the_checkpoint(small, tmp_path, capsys, size, message):
    copy_of(small, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with largest_file(size):
        refuse(capsys, train.main, ONE_TOWER + ["--steps", "40", "--save-every", "2", "--train-dir", str(tmp_path)], message)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir() if not path.name.startswith("events")}
    changed = {"settings.json", "sums.json"}
    assert set(after) == set(before) and {name for name in before if after[name] != before[name]} <= changed
    assert train.main(ONE_TOWER + ["--steps", "31", "--train-dir", str(tmp_path)]) == 0
    assert "Going on from step 30" in capsys.readouterr().out


@pytest.mark.once
def test_events_that_can_not_be_written_are_one_sentence(one_layer, tmp_path, capsys):
    with largest_file(1000):
        refuse(capsys, train.main, ONE_TOWER + ["--steps", "3", "--train-dir", str(tmp_path)], "events.* written: File too large")


@pytest.mark.laws
@pytest.mark.once
def test_output_that_can_not_be_written_is_one_sentence(small, tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "tests.examples.steps_of_training", str(tmp_path / "losses"), "float32"]
                              + ONE_TOWER + ["--steps", "30", "--train-dir", str(small)], cwd=ROOT, stdout=full,
                              stderr=subprocess.PIPE, universal_newlines=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.endswith("error: Standard output can't be written: No space left on device.\n")


class Killed(BaseException):
    """The process is gone, as far as the training can tell."""


@pytest.mark.laws
@pytest.mark.once
def test_train_loss_is_over_all_steps_of_the_epoch_although_it_was_killed(one_layer, tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(data, "generate", lambda made=generate(64, 20): made)  # four steps an epoch
    monkeypatch.setattr(Progress, "step", lambda self, step, *loss_and_accuracy: seen.update({step: loss_and_accuracy}))

    def run(steps, killed_at=None):
        def save_and_die(saver, session, train_dir, step, sums):
            folder.save(saver, session, train_dir, step, sums)
            if step == killed_at:
                raise Killed
        monkeypatch.setattr(record, "save", save_and_die)
        return train.main(ONE_TOWER + ["--steps", str(steps), "--save-every", "1", "--train-dir", str(tmp_path)])

    for killed_at in (2, 3):
        with pytest.raises(Killed):
            run(8, killed_at)
    assert run(6) == 0 and run(8) == 0
    expected = {last: np.mean([seen[step] for step in steps], 0) for last, steps in (
        (4, [1, 2, 3, 4]), (6, [5, 6]), (8, [5, 6, 7, 8]))}
    history = json.loads((tmp_path / "history.json").read_text())
    assert [epoch["step"] for epoch in history] == sorted(expected)
    for epoch in history:
        np.testing.assert_allclose([epoch["train_loss"], epoch["train_accuracy"]], expected[epoch["step"]], rtol=1e-6)
    assert set(json.loads((tmp_path / "sums.json").read_text())) == {"5", "6", "7", "8"}


def test_sums_of_another_batch_size_are_not_taken(tmp_path):
    (tmp_path / "sums.json").write_text('{"6": [3.0, 1.5, 2]}')
    assert folder.read_sums(str(tmp_path), 6, 2).tolist() == [3.0, 1.5, 2]
    assert folder.read_sums(str(tmp_path), 6, 6).tolist() == folder.read_sums(str(tmp_path), 7, 3).tolist() == [0, 0, 0]


RECORDS = 100


@pytest.fixture
def few_records(monkeypatch):
    """A file has as few records as those of `cifar_files`."""
    monkeypatch.setattr(data, "RECORDS_A_FILE", RECORDS)


@pytest.fixture(scope="module")
def cifar_files(tmp_path_factory):
    """Files in CIFAR-10's binary layout, but short, the test file's images those of ten classes made here."""
    root = tmp_path_factory.mktemp("files")
    (root / data.BINARY_FOLDER).mkdir()
    made = generate(RECORDS, 10).train
    records = np.concatenate([made.labels[:, None].astype(np.uint8), made.images.transpose(0, 3, 1, 2).reshape(RECORDS, -1)], 1)
    for name in ["data_batch_%d" % i for i in range(1, 6)] + ["test_batch"]:
        records.tofile(str(root / data.BINARY_FOLDER / (name + ".bin")))
    return root


@pytest.mark.parametrize("arguments", [["--num-towers", "2", "--sync-bn", "--update-ops", "all"],
                                       ["--num-towers", "4", "--no-sync-bn", "--update-ops", "all"],
                                       ["--num-towers", "2", "--no-sync-bn", "--update-ops", "first"]])
def test_training_on_cifar10_files_with_every_kind_of_batch_norm(
        cifar_files, few_records, one_layer, tmp_path, capsys, arguments):
    assert train.main(SMALL + arguments + ["--steps", "3", "--data-dir", str(cifar_files), "--download",
                                           "--train-dir", str(tmp_path)]) == 0
    assert "on CIFAR-10 after 3 steps" in capsys.readouterr().out
    assert train.main(SMALL + ["--steps", "3", "--data-dir", str(cifar_files), "--data-name", "a copy",
                               "--train-dir", str(tmp_path)]) == 2
    assert "holds a training with data CIFAR-10, and a copy was asked for" in capsys.readouterr().err
    with tf.Graph().as_default():
        moved = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(tmp_path)))
        assert np.abs(moved.get_tensor("first_bn/moving_mean")).max() > 0


@pytest.mark.once
def test_evaluate_refuses_an_empty_folder_and_other_data(trained, tmp_path, capsys):
    train_dir, _ = trained
    refuse(capsys, evaluate.main, ["--train-dir", str(tmp_path)], "There is no checkpoint in")
    settings = train_dir / "settings.json"
    text = settings.read_text()
    settings.write_text(text.replace("generated images (not CIFAR-10)", "CIFAR-10"))
    try:
        refuse(capsys, evaluate.main, ["--train-dir", str(train_dir)], "was trained on CIFAR-10, and this is generated")
    finally:
        settings.write_text(text)


def test_learning_rate_warms_up_and_falls_to_zero():
    rates = learning_rate(tf.constant([0, 5, 10, 100]), 100, 0.4, 10)
    with tf.Session() as session:
        np.testing.assert_allclose(session.run(rates), [0.04, 0.24, 0.4, 0], atol=1e-6)


def test_plain_lines_where_there_is_no_terminal(capsys):
    progress = Progress(0, 3, 10, seconds_between_lines=0)
    for step in (1, 2, 3):
        progress.step(step, 1.0, 0.5)
    progress.close()
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 3 and "loss 1.000, accuracy 50.0 %" in captured.out and captured.err == ""


def test_lines_keep_their_pace_through_short_epochs_and_count_no_build(capsys, monkeypatch):
    """Lines came ten seconds after an epoch's beginning, so that short epochs had none; the first step builds the graph."""
    now = [0.0]
    monkeypatch.setattr(report.time, "time", lambda: now[0])
    progress = Progress(0, 100, 10)
    now[0] += 60  # until the first step has run
    for step in range(1, 51):
        progress.step(step, 1.0, 0.5)
        if step % 5 == 0:
            now[0] += 2  # an evaluation
            progress.restart_clock()
        now[0] += 1
    progress.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 1 of 100, loss 1.000, accuracy 50.0 %"
    assert 5 <= len(lines) <= 8 and all(line.endswith(", 10 images/s") for line in lines[1:])


@pytest.mark.parametrize("arguments", [
    "--learning-rate -1", "--learning-rate nan", "--weight-decay -5", "--warmup-steps -3", "--warmup-steps 1.5", "--cutout 50",
    "--cutout -1", "--seed -1", "--seed 99999999999", "--evaluate-every 0", "--batch-size x"])
def test_an_argument_out_of_its_range_is_one_sentence_and_status_2(arguments, capsys):
    parsers = [train.parse_arguments] if "cutout" in arguments else [train.parse_arguments, segmentation.parse_arguments]
    for parse in parsers:
        with pytest.raises(SystemExit, match="^2$"):
            parse(arguments.split())
        assert re.search(r"error: argument %s: %s is (not|no) " % tuple(arguments.split()), capsys.readouterr().err)


def test_help_names_the_default_of_each_example(capsys):
    for parse, epochs in ((train.parse_arguments, 1), (segmentation.parse_arguments, 10)):
        assert parse([]).evaluate_every == epochs
        with pytest.raises(SystemExit):
            parse(["--help"])
        assert re.search(r"--evaluate-every EPOCHS\s+default %d\b" % epochs, capsys.readouterr().out)


def test_files_are_replaced_whole(tmp_path):
    write_json(str(tmp_path / "a.json"), {"a": 1})
    with pytest.raises(TypeError):
        write_json(str(tmp_path / "a.json"), {"a": object()})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1} and len(list(tmp_path.iterdir())) == 1
    # A process that is killed while it writes leaves something behind, until the file is written again.
    killed = os.fork()
    if not killed:
        try:
            report._replace(str(tmp_path / "a.json"), lambda scratch: (
                open(scratch, "w").close(), os.kill(os.getpid(), signal.SIGKILL)))
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(killed, 0)[1]) == signal.SIGKILL
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1} and len(list(tmp_path.iterdir())) == 2
    write_json(str(tmp_path / "a.json"), {"a": 2})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 2} and len(list(tmp_path.iterdir())) == 1
    history = [{"epoch": 1, "train_loss": 2.0, "train_accuracy": 0.2, "test_accuracy": 0.1}]
    draw_curve(history, MEASURES, "title", str(tmp_path / "curve.png"))
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)


def image_batch():
    rng = np.random.RandomState(0)
    return rng.randn(4, 32, 32, 3).astype(np.float32), rng.randint(0, 10, 4).astype(np.int32)


@pytest.mark.laws
def test_resnet_on_towers_trains_as_on_one_batch():
    # In float32 a ReLU near 0 goes the other way in one training of twenty.
    assert_equals_one_batch(resnet(8, dtype=tf.float64), image_batch(), 2, [1, 3], steps=1)


def test_resnet_has_the_papers_size_and_both_kinds_of_batch_norm_share_variable_names():
    names = []
    for sync_bn in (True, False):
        with tf.Graph().as_default():
            build(resnet(20, sync_bn), image_batch(), 1)
            names.append([v.op.name for v in tf.global_variables()])
            kernels = sum(v.shape.num_elements() for v in tf.trainable_variables() if "kernel" in v.op.name)
    assert names[0] == names[1] and 0.26e6 < kernels < 0.28e6


def test_resnet_refuses_another_depth():
    with pytest.raises(ValueError, match=r"6n \+ 2.* not 9"):
        resnet(9)
