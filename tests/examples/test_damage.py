"""Damaged files of every kind under every program: one sentence and status 2, or the undamaged run's result; nothing is lost.

HYPOTHESIS_CASES is how many, 6 by default.
"""
import contextlib
import os
import re
import resource
import shutil
import tempfile
from pathlib import Path
from typing import Callable, NamedTuple

import pytest
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st

from examples.cifar10 import compare, evaluate, train
from examples.segmentation import evaluate as segmentation_evaluate
from examples.segmentation import predict
from examples.segmentation import train as segmentation_train
from tests.examples import damage
from tests.examples.damage import COMPARE, SEGMENTATION, TRAIN
from tests.checkpoints.test_checkpoints import contents
from tf_syncbn.checkpoints import __main__ as checkpoints

pytestmark = [pytest.mark.once, pytest.mark.xdist_group("damage")]  # they share trainings
CASES = int(os.environ.get("HYPOTHESIS_CASES", 6))
_OF_A_CHECKPOINT = re.compile(r"(model\.ckpt-\d+)\.\S+$")
# Where such a file has another value, the sentence says which, and names the folder.
_OF_A_FOLDER = ("settings.json",)
# Without a checksum another value in such a file is as good as the first.
_UNCHECKED = re.compile(r"(\.json|\.bin|data_batch_\d|test_batch|checkpoint)$")


def _state(folder):
    """What a training came to."""
    return contents(folder / "model.ckpt-6"), (folder / "history.json").read_bytes()


def _shown(out):
    return [line for line in out.split("\n") if not line.startswith("From here on")]


class Program(NamedTuple):
    """A command line, and the files that it finds.

    Attributes:
      main: function of a list of arguments.
      arguments: function of a folder as `damage.make` makes it.
      folders: the folders in it of which it reads files.
      names: a regular expression for these.
      result: function of that folder and of what was printed.
    """
    main: Callable
    arguments: Callable
    folders: tuple
    names: str
    result: Callable


_RUN = r"model\.ckpt-4\.|model\.ckpt-2\.|checkpoint|.*\.json|curve\.png"
PROGRAMS = {
    "train": Program(
        train.main, lambda f: TRAIN + ["--steps", 6, "--data-dir", f / "binary", "--train-dir", f / "run"], ("run",), _RUN,
        lambda f, out: _state(f / "run")),
    "train on binary files": Program(
        train.main, lambda f: TRAIN + ["--steps", 6, "--data-dir", f / "binary", "--train-dir", f / "run"], ("binary",),
        ".*", lambda f, out: _state(f / "run")),
    "train on pickles": Program(
        train.main, lambda f: TRAIN + ["--steps", 6, "--data-dir", f / "pickled", "--train-dir", f / "run"], ("pickled",),
        ".*", lambda f, out: _state(f / "run")),
    "evaluate": Program(
        evaluate.main, lambda f: ["--data-dir", f / "binary", "--train-dir", f / "run"], ("run", "binary"),
        _RUN + "|.*bin", lambda f, out: _shown(out)),
    "compare": Program(
        compare.main, lambda f: COMPARE + ["--out", f / "compare"], ("compare",), ".*", lambda f, out: _shown(out)),
    "list": Program(
        checkpoints.main, lambda f: ["list", f / "run"], ("run",), r"model\.ckpt-4\.|checkpoint", lambda f, out: _shown(out)),
    "convert": Program(
        checkpoints.main, lambda f: ["convert", f / "run" / "model.ckpt-4", f / "new", "--to", "slim"], ("run",),
        r"model\.ckpt-4\.", lambda f, out: contents(f / "new")),
    "train on scenes": Program(
        segmentation_train.main,
        lambda f: SEGMENTATION + ["--steps", 6, "--data-dir", f / "scenes", "--train-dir", f / "seg"], ("scenes", "seg"),
        r".*\.png|" + _RUN, lambda f, out: _state(f / "seg")),
    "evaluate on scenes": Program(
        segmentation_evaluate.main, lambda f: ["--data-dir", f / "scenes", "--train-dir", f / "seg"], ("scenes", "seg"),
        r".*\.png|" + _RUN, lambda f, out: _shown(out)),
    "predict": Program(
        predict.main, lambda f: ["--data-dir", f / "scenes", "--train-dir", f / "seg", "--out", f / "predictions.png"],
        ("scenes", "seg"), r".*\.png|" + _RUN, lambda f, out: (f / "predictions.png").read_bytes()),
}


@pytest.fixture(scope="module")
def base():
    """The undamaged folder, where it always is, and a function of a program that returns what it comes to there."""
    found = {}
    with damage.small(), tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)  # for nobody
        made, case = Path(root) / "made", Path(root) / "case"
        case.mkdir()
        damage.make(case)  # where it will be copied to: settings have paths
        case.rename(made)

        def result(name):
            if name not in found:
                with copy(made, PROGRAMS[name]) as folder:
                    found[name] = run(name, folder, 0)
            return found[name]
        yield made, result


@contextlib.contextmanager
def copy(made, program):
    """A copy of what a program reads, at the same path each time."""
    folder = made.parent / "case"
    folder.mkdir()
    try:
        for name in os.listdir(str(made)):
            if name in program.folders or any(str(made / name) in str(argument) for argument in program.arguments(made)):
                shutil.copytree(str(made / name), str(folder / name))
        yield folder
    finally:
        for path in [folder] + list(folder.rglob("*")):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
        shutil.rmtree(str(folder))


def run(name, folder, expected=None):
    """Runs a program in a folder; returns what it comes to, or its sentence if it refuses."""
    program = PROGRAMS[name]
    status, out, error = damage.run(program.main, program.arguments(folder))
    assert status in ((0, 2) if expected is None else (expected,)), (status, error)
    if status == 0:
        return program.result(folder, out)
    assert error.startswith("error: ") and error.endswith("\n") and error.count("\n") == 1, error
    return error


def files_of(program, folder):
    """The files that a program reads."""
    return [path for name in program.folders for path in sorted((folder / name).rglob("*"))
            if path.is_file() and re.match(program.names, path.name)]


def is_named(path, error):
    """Tells whether a sentence says which file is meant: a checkpoint by its prefix, a damaged value by its folder."""
    checkpoint = _OF_A_CHECKPOINT.match(path.name)
    name = checkpoint.group(1) if checkpoint else path.name
    if path.suffix == ".png" and "scenes" in path.parts:
        name = "%s/%s" % (path.parent.name, name)
    return name in error or path.name in _OF_A_FOLDER and str(path.parent) in error


def hurt(name, base, choose, kind, at, bit):
    """Damages a file that a program reads, runs it, and checks what it says and leaves; returns "refused" or "harmless"."""
    made, result_of = base
    expected, program = result_of(name), PROGRAMS[name]
    with copy(made, program) as folder:
        path = choose(files_of(program, folder))
        other = choose([p for p in files_of(program, made) + sorted((made / "other").iterdir()) if p.name != path.name])
        kind(path, other, at, bit)
        if kind is damage.flipped and path.read_bytes() == (made / path.relative_to(folder)).read_bytes():
            return "harmless"
        where = "%s, %s %s (%s, %s, %s)" % (name, path.relative_to(folder), kind.__name__, at, bit, other.relative_to(made))
        before = damage.digests(folder)
        with damage.as_nobody(folder) if kind is damage.denied else contextlib.nullcontext():
            found = run(name, folder)
        after = damage.digests(folder)
        if isinstance(found, str):
            assert is_named(path, found), (where, found)
            lost = {key for key in before if after.get(key) != before[key]}
            assert not lost, (where, found, lost)
            _goes_on(name, folder, path, expected, where)
            return "refused"
        if kind not in (damage.flipped, damage.swapped) or not _UNCHECKED.search(path.name):
            if not (kind is damage.swapped and path.suffix == ".png"):
                assert found == expected, where
        return "harmless"


def _goes_on(name, folder, path, expected, where):
    """Holds a training to the same end without its newest checkpoint, if that was damaged, as the sentence says.

    With the file as it was the folder is the one that `expected` comes of: nothing else in it has changed.
    """
    prefix = _OF_A_CHECKPOINT.match(path.name)
    if not name.startswith("train") or not prefix or prefix.group(1) != "model.ckpt-4":
        return
    for each in path.parent.glob("model.ckpt-4.*"):
        damage.remove(each)
    assert run(name, folder, 0) == expected, where


def chosen(draw):
    """A function that draws one of a list, whatever its length is."""
    return lambda found: found[draw(st.integers(0, 10 ** 6)) % len(found)]


@settings(max_examples=CASES, phases=[Phase.explicit, Phase.generate])
@given(st.data(), st.sampled_from(sorted(PROGRAMS)), st.sampled_from(damage.OF_FILES),
       st.floats(0, 1, exclude_max=True), st.integers(0, 7))
@pytest.mark.laws
def test_a_damaged_file_is_named_or_does_no_harm_and_nothing_is_lost(base, data, name, kind, at, bit):
    event(hurt(name, base, chosen(data.draw), kind, at, bit))  # --hypothesis-show-statistics says how many


@pytest.mark.laws
@settings(max_examples=CASES // 5 + 1, phases=[Phase.explicit, Phase.generate])
@given(st.sampled_from([("train", "run"), ("evaluate", "run"), ("evaluate", "binary"), ("train on pickles", "pickled"),
                        ("compare", "compare"), ("list", "run"), ("train on scenes", "scenes"), ("predict", "seg")]),
       st.sampled_from(damage.OF_FOLDERS))
def test_a_damaged_folder_is_named_and_stays(base, which, kind):
    (name, place), (made, _) = which, base
    with copy(made, PROGRAMS[name]) as folder:
        aside = folder / "aside"
        shutil.copytree(str(folder / place), str(aside))
        kind(folder / place, None, 0, 0)
        before = damage.digests(folder)
        with damage.as_nobody(folder) if kind is damage.denied else contextlib.nullcontext():
            found = run(name, folder, 2)
        assert str(folder / place) in found, found
        assert damage.digests(folder) == before


@pytest.mark.laws
@settings(max_examples=CASES // 5 + 1, phases=[Phase.explicit, Phase.generate])
@given(st.sampled_from(["train", "train on scenes", "compare", "convert"]), st.integers(0, 10 ** 6), st.booleans())
def test_a_full_disk_is_one_sentence_and_the_next_run_comes_to_the_same(base, name, drawn, by_size):
    """A file may not become larger than what is drawn, or can't be written at all."""
    made, result_of = base
    expected, program = result_of(name), PROGRAMS[name]
    with copy(made, program) as folder:
        written = folder / program.folders[-1]
        files = {"compare": ("compare.json", "compare.png")}.get(name, (
            "settings.json", "sums.json", "history.json", "results.json", "curve.png"))
        path = written / files[drawn % len(files)]
        checkpoints_before = {p: p.read_bytes() for p in written.glob("model.ckpt-*")}
        if by_size or name == "convert":
            with damage.limited(resource.RLIMIT_FSIZE, drawn % 20000):
                found = run(name, folder)
        else:
            Path(str(path) + ".tmp").symlink_to("/dev/full")
            found = run(name, folder, 2)
            assert found == "error: %s can't be written: No space left on device.\n" % path
        if isinstance(found, str):
            assert "can't be written" in found or name == "convert" and found.endswith("File too large\n"), found
            assert not [p for p in folder.rglob("*.tmp*") if p.is_symlink() or p.is_file()]
            if path.name not in ("results.json", "curve.png"):  # these are written when all is trained
                assert all(p.read_bytes() == content for p, content in checkpoints_before.items())
            found = run(name, folder, 0)
        assert found == expected
