"""What stands in a file's place in training folders, comparisons and data: refused before it is read, or known for what it is."""
import json
import os
import re

import numpy as np
import pytest

from examples.cifar10 import data
from examples.cifar10.task import MEASURES
from examples.segmentation import scenes
from examples.segmentation.trained import Trained
from examples.training import comparison, folder
from examples.training.report import read_json
from tests.examples.test_compare import MADE
from tests.examples.test_scenes import scene, write_png
from tests.checkpoints.test_checkpoints import write


@pytest.fixture
def train_dir(tmp_path):
    """A folder with checkpoints of two, four and six steps, as their saver left them."""
    for step in (2, 4, 6):
        write(tmp_path / ("model.ckpt-%d" % step), {"first/kernel": np.full(3, float(step)), "global_step": np.int64(step)},
              write_version=2)
    names = "".join('all_model_checkpoint_paths: "model.ckpt-%d"\n' % step for step in (2, 4, 6))
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-6"\n' + names)
    return tmp_path


def steps_of(train_dir):
    return [int(path.rsplit("-", 1)[1]) for path in folder.saved_checkpoints(str(train_dir))]


@pytest.mark.parametrize("before,after", [
    ('paths: "model.ckpt-6"', 'paths: "model.ckpt-7"'), ('paths: "model.ckpt-6"', 'paths: "model.ckpt-4"'),
    ('_path: "model.ckpt-6"', '_path: "model.ckpt-4"'), ('paths: "model.ckpt-4"', 'paths: "model.ckpt-5"')])
def test_a_state_file_with_another_digit_does_not_go_back_to_earlier_steps(train_dir, before, after):
    state = train_dir / "checkpoint"
    assert steps_of(train_dir) == [2, 4, 6]
    state.write_text(state.read_text().replace(before, after))
    assert steps_of(train_dir) == [2, 4, 6]


def test_without_the_newest_checkpoint_the_one_before_it_is_the_newest(train_dir):
    for path in train_dir.glob("model.ckpt-6.*"):
        path.unlink()
    assert steps_of(train_dir) == [2, 4]


PIPE, LINK, ENORMOUS = "pipe", "link", "enormous"


def spoil(path, how):
    """Puts something into a file's place that is not to be read."""
    if path.exists() and how != ENORMOUS:
        path.unlink()
    if how == PIPE:
        os.mkfifo(str(path))
    elif how == LINK:
        path.symlink_to(path.parent / "nothing")
    else:
        path.touch()
        os.truncate(str(path), 1 << 40)


@pytest.mark.parametrize("how", [PIPE, LINK, ENORMOUS])
def test_a_state_file_that_is_not_to_be_read_is_as_none(train_dir, how):
    spoil(train_dir / "checkpoint", how)
    assert steps_of(train_dir) == [2, 4, 6]


@pytest.mark.parametrize("name", ["model.ckpt-6.index", "model.ckpt-6.data-00000-of-00001"])
def test_a_pipe_in_a_checkpoint_is_refused_and_not_waited_for(train_dir, name):
    spoil(train_dir / name, PIPE)
    message = "model.ckpt-6 can't be read: %s: Not a regular file. Delete its files to go on from the one before it" % name
    with pytest.raises(folder.UsageError, match=message):
        folder.check_checkpoint(folder.saved_checkpoints(str(train_dir))[-1], [], "ResNet-8")


@pytest.mark.parametrize("how,message", [(PIPE, "Not a regular file"), (LINK, "No such file or directory"),
                                         (ENORMOUS, "File too large")])
def test_json_that_is_not_to_be_read_is_refused(tmp_path, how, message):
    for name, read in (("settings.json", lambda: folder.read_settings(str(tmp_path))),
                       ("history.json", lambda: folder.read_history(str(tmp_path), 1, MEASURES)),
                       ("sums.json", lambda: folder.read_sums(str(tmp_path), 1, 1)),
                       ("compare.json", lambda: comparison.read(str(tmp_path / "compare.json"), {}, MEASURES[0]))):
        spoil(tmp_path / name, how)
        with pytest.raises(folder.UsageError, match="%s can't be read: %s" % (name, message)):
            read()


def test_json_that_is_nested_too_deeply_is_damaged(tmp_path):
    (tmp_path / "history.json").write_text("[" * 10 ** 5)
    with pytest.raises(ValueError, match="it is nested too deeply"):
        read_json(str(tmp_path / "history.json"), [])
    with pytest.raises(folder.UsageError, match="history.json is damaged: it is nested too deeply"):
        folder.read_history(str(tmp_path), 1, MEASURES)


@pytest.mark.parametrize("how", [PIPE, LINK])
def test_what_is_no_file_is_not_trained_over(tmp_path, how):
    spoil(tmp_path / "results.json", how)
    with pytest.raises(folder.UsageError, match="results.json is something else where a file should be: move it away"):
        folder.check_folder(str(tmp_path))


def test_what_killed_processes_left_half_written_is_removed_and_nothing_else(train_dir):
    kept = sorted(os.listdir(str(train_dir))) + ["model.ckpt-8.tempstate", "my.tempstate1", "model.ckpt-8.tmp"]
    for name in kept[-3:] + ["model.ckpt-8.data-00000-of-00001.tempstate123", "model.ckpt-8.index.tempstate9", "checkpoint.tmp",
                             "checkpoint.tmp0123456789abcdef"]:
        (train_dir / name).write_text("half")
    folder.remove_leftovers(str(train_dir))
    assert sorted(os.listdir(str(train_dir))) == sorted(kept)


@pytest.mark.parametrize("before,after", [
    ("[2.5, 2.0]", "[2,5, 2.0]"), ("[[10, 2.5]", "[[10, 2,5]"), ('"seed": 1', '"seed": 0'), ('"one"', '"onf"'),
    ("[[10, 2.5], [20, 2.0]]", "[]"), ("[2.5, 2.0]", '["a", 2.0]'), ("[2.5, 2.0]", "{}")])
def test_a_comparison_whose_runs_do_not_fit_each_other_is_damaged(tmp_path, before, after):
    path = tmp_path / "compare.json"
    path.write_text(json.dumps(MADE))
    assert comparison.read(str(path), MADE["settings"], MEASURES[0]) == MADE
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after, 1))
    with pytest.raises(folder.UsageError, match="compare.json is damaged: delete it"):
        comparison.read(str(path), MADE["settings"], MEASURES[0])


@pytest.mark.parametrize("name", ["data_batch_1.bin", "data_batch_1"])
def test_a_pipe_among_the_data_is_refused_and_not_waited_for(tmp_path, name):
    spoil(tmp_path / name, PIPE)
    with pytest.raises(data.DataError, match="%s can't be read: Not a regular file" % name):
        data.load(str(tmp_path))


@pytest.mark.parametrize("how,message", [(PIPE, "Not a regular file"), (ENORMOUS, "File too large")])
def test_an_image_that_is_not_to_be_read_is_refused(tmp_path, how, message):
    image, labels = scene(0, range(12))
    write_png(tmp_path / "train" / "0.png", image)
    write_png(tmp_path / "trainannot" / "0.png", labels)
    (tmp_path / "test").symlink_to(tmp_path / "train")
    (tmp_path / "testannot").symlink_to(tmp_path / "trainannot")
    spoil(tmp_path / "train" / "0.png", how)
    with pytest.raises(scenes.DataError, match="train/0.png can't be read: %s" % message):
        scenes.load(str(tmp_path))


def test_settings_that_no_network_has_are_damaged_settings(train_dir, tmp_path_factory):
    dataset = scenes.generate(str(tmp_path_factory.mktemp("scenes")), 1, 1)
    settings = {"depth": 50, "width": 8, "output_stride": 8, "data": dataset.name, "sync_bn": True, "mask": False}
    (train_dir / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(folder.UsageError, match=re.escape("%s is damaged: The depth" % (train_dir / "settings.json"))):
        Trained(str(train_dir), dataset)
