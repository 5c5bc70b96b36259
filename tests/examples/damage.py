"""What can happen to a file, and small folders of data, trainings and comparisons for it to happen to.

The examples run as they are but for fewer images and networks of a few layers: what is tested is what they do with files.
"""
import contextlib
import faulthandler
import hashlib
import io
import json
import os
import pickle
import resource
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from examples.cifar10 import compare, data, train
from examples.cifar10 import model as resnets
from examples.segmentation import model as pspnets
from examples.segmentation import predict
from examples.segmentation import train as segmentation_train
from examples.training import record, report
from examples.training.compare import KINDS, Trainings
from examples.training.folder import save
from tests.examples.test_scenes import scene, write_png

NOBODY = 65534
IMAGES_A_FILE = 20
_ENORMOUS = 1 << 40
_MEMORY = 4 << 30  # more than what a program has already
_PATIENCE = 300  # seconds, for a program that waits for a pipe
_BATCHES = ["data_batch_%d" % i for i in range(1, 6)] + ["test_batch"]


def truncated(path, other, at, bit):
    os.truncate(str(path), int(at * path.stat().st_size))


def flipped(path, other, at, bit):
    content = bytearray(path.read_bytes())
    content[int(at * len(content))] ^= 1 << bit
    path.write_bytes(bytes(content))


def swapped(path, other, at, bit):
    path.write_bytes(other.read_bytes())


def emptied(path, other, at, bit):
    path.write_bytes(b"")


def enormous(path, other, at, bit):
    os.truncate(str(path), _ENORMOUS)


def denied(path, other, at, bit):
    path.chmod(0)


def a_folder(path, other, at, bit):
    remove(path)
    path.mkdir()


def a_dangling_link(path, other, at, bit):
    remove(path)
    path.symlink_to(path.parent / "nothing")


def a_looping_link(path, other, at, bit):
    remove(path)
    path.symlink_to(path)


def a_pipe(path, other, at, bit):
    remove(path)
    os.mkfifo(str(path))


def a_device(path, other, at, bit):
    remove(path)
    path.symlink_to("/dev/zero")


def remove(path):
    """Removes a file or a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(str(path))
    else:
        path.unlink()


OF_FILES = [truncated, flipped, swapped, emptied, enormous, denied, a_folder, a_dangling_link, a_looping_link, a_pipe, a_device]
OF_FOLDERS = [denied, a_dangling_link, a_looping_link, a_pipe, a_device]


def digests(folder):
    """Returns what is in a folder, by path: of files a digest, or, where they can't be read as a whole, what they are."""
    found = {}
    for path in sorted(folder.rglob("*")):
        kind = path.lstat().st_mode
        whole = (path.is_file() and not path.is_symlink() and path.stat().st_size < _ENORMOUS
                 and os.access(str(path), os.R_OK))
        found[str(path.relative_to(folder))] = kind, hashlib.sha256(path.read_bytes()).hexdigest() if whole else None
    return found


@contextlib.contextmanager
def as_nobody(folder):
    """Whoever may read everything, root, is somebody else meanwhile, who owns the folder."""
    if os.geteuid() != 0:
        yield
        return
    for path in [folder] + list(folder.rglob("*")):
        os.chown(str(path), NOBODY, NOBODY, follow_symlinks=False)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextlib.contextmanager
def limited(kind, most):
    """A limit of this process, lifted afterwards. Python ignores the signal of too large a file, which is a full disk then."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def run(main, arguments):
    """Runs a command line in this process, which is ended should it wait for ever; returns its status, output and errors.

    It may take a few gigabytes more than this process has, and no more: what reads an enormous file fails. Addresses alone, which
    CUDA takes by the hundred gigabytes, are not limited.
    """
    out, err = io.StringIO(), io.StringIO()
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    faulthandler.dump_traceback_later(_PATIENCE, exit=True)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), tf.Graph().as_default(), \
                limited(resource.RLIMIT_DATA, pages * resource.getpagesize() + _MEMORY):
            status = main([str(argument) for argument in arguments])
    finally:
        faulthandler.cancel_dump_traceback_later()
        for number, handler in usual.items():
            signal.signal(number, handler)
    return status, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def small():
    """The examples with few images, networks of a few layers, and pictures that take no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "RECORDS_A_FILE", IMAGES_A_FILE)
        patch.setattr(data, "generate", lambda made=data.generate(40, 20): made)
        patch.setattr(resnets, "_block", lambda x, *_: x[..., :16])
        patch.setitem(pspnets.BLOCKS, 18, (1, 1, 1, 1))
        patch.setattr(pspnets, "BINS", (1,))
        patch.setattr(pspnets._Network, "_block", lambda self, x, channels, stride, dilation: x[:, ::stride, ::stride])
        patch.setattr(record, "draw_curve", lambda history, measures, title, path: _picture(path))
        patch.setattr(predict, "draw", lambda images, labels, predictions, dataset, path: _picture(path))
        # A comparison is finished; a run that it lost is made as it was.
        patch.setattr(Trainings, "initial_values", lambda self, seed: None)
        patch.setattr(Trainings, "train_one", lambda self, kind, seed, start: _run_of(kind, seed))
        yield


def _picture(path):
    def write(scratch):
        with open(scratch, "wb") as f:
            f.write(b"\x89PNG\r\n\x1a\n")
    report._replace(path, write)


def _run_of(kind, seed):
    losses = [2.5 - 0.125 * number for number in range(4)]
    return {"kind": kind, "seed": seed, "test_accuracy": 0.25, "milliseconds_a_step": 10.5, "first_losses": losses,
            "first_losses_in_float64": losses, "curve": [[step, 2.25] for step in range(1, 5)]}


TRAIN = ["--depth", "8", "--batch-size", "25", "--save-every", "2", "--num-towers", "1"]
SEGMENTATION = ["--width", "8", "--crop", "16", "16", "--batch-size", "2", "--save-every", "2", "--evaluate-every", "2",
                "--num-towers", "1"]
COMPARE = ["--depth", "8", "--batch-size", "4", "--images-a-tower", "2", "--seeds", "1", "--steps", "4"]


def make(folder):
    """Makes the folders that programs find, under `small`: data, a comparison, and trainings killed after four of six steps."""
    made = _images(6 * IMAGES_A_FILE)
    for name in ("binary", "pickled", "scenes", "compare"):
        (folder / name).mkdir()
    for number, name in enumerate(_BATCHES):
        part = made[number * IMAGES_A_FILE:(number + 1) * IMAGES_A_FILE]
        (folder / "binary" / (name + ".bin")).write_bytes(part.tobytes())
        (folder / "pickled" / name).write_bytes(pickle.dumps({b"data": part[:, 1:], b"labels": part[:, 0].tolist()}, 2))
    for split, count in (("train", 4), ("test", 2)):
        for number in range(count):
            image, labels = scene(number, range(12), 16, 24)
            write_png(folder / "scenes" / split / ("%d.png" % number), image)
            write_png(folder / "scenes" / (split + "annot") / ("%d.png" % number), labels)
    for main, arguments in (
            (train.main, TRAIN + ["--data-dir", folder / "binary", "--train-dir", folder / "run"]),
            (train.main, ["--depth", "14", "--batch-size", "10", "--num-towers", "1", "--train-dir", folder / "other"]),
            (segmentation_train.main, SEGMENTATION + ["--data-dir", folder / "scenes", "--train-dir", folder / "seg"])):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            patch.setattr(record, "save", _save_and_die)
            run(main, arguments + ["--steps", "6"])
        report.write_json(str(arguments[-1] / "results.json"), {"step": 2})  # of a training that was asked for less
        _picture(str(arguments[-1] / "curve.png"))
    status, _, error = run(compare.main, COMPARE + ["--out", folder / "compare"])
    assert status == 0, error
    assert len(json.loads((folder / "compare" / "compare.json").read_text())["runs"]) == len(KINDS)


class Killed(BaseException):
    """The process is gone, as far as the training can tell."""


def _save_and_die(saver, session, train_dir, step, sums):
    save(saver, session, train_dir, step, sums)
    if step == 4:
        raise Killed


def _images(count):
    rng = np.random.RandomState(0)
    records = rng.randint(0, 256, [count, 3073]).astype(np.uint8)
    records[:, 0] = np.arange(count) % 10
    return records
