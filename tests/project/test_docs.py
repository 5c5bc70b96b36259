"""The Python blocks of docs/ run, each in the lanes that can run it.

On the line before a block's fence a comment, which Markdown renders as nothing, says where:

    <!-- lane: all -->               every lane
    <!-- lane: tf1 -->               TensorFlow 1.15, which has tf.contrib
    <!-- lane: keras2 -->            where tf.keras is Keras 2, so that there is tf.layers too
    <!-- lane: keras2 eager -->      that, in a process of its own with TensorFlow 2's eager execution on
    <!-- lane: keras2 estimator -->  that, where there is tf.estimator too: up to TensorFlow 2.15
    <!-- lane: tf1, continues -->    goes on from the last block that runs, in its lane
    <!-- not run: needs torch -->    and why not: the block has to be Python all the same
"""
import ast
import importlib
import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import tensorflow.compat.v1 as tf

from tests.support import has_tf_estimator, has_tf_layers
from towers.sharding.rules import RULES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
IS_TF1 = tf.__version__.startswith("1.")
LANES = {  # word of a marker -> why this lane can't run the block, or None
    "all": None,
    "tf1": None if IS_TF1 else "only TensorFlow 1 has tf.contrib",
    "keras2": None if has_tf_layers() else "tf.keras is Keras 3 here",
    "estimator": None if has_tf_estimator() else "TensorFlow has no tf.estimator from 2.16 on",
    "eager": "TensorFlow 1 has no synchronized Keras layer" if IS_TF1 else None,
}
_FENCE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
_MARKER = re.compile(r"<!-- (?:lane: (?P<lanes>\w+(?: \w+)*)(?P<continues>, continues)?|not run: (?P<reason>.+)) -->")


class Block(NamedTuple):
    """A Python block: its page, a path in docs/, the line of its fence, its source, and the line before the fence."""
    page: str
    line: int
    source: str
    before: str

    @property
    def marker(self):
        return _MARKER.fullmatch(self.before)


def name_of(path):
    return path.relative_to(DOCS).as_posix()


def blocks_of(path):
    text = path.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        before = text[:match.start()].rstrip("\n").rpartition("\n")[2]
        yield Block(name_of(path), text.count("\n", 0, match.start(1)), match.group(1), before)


def runs(blocks):
    """Returns the blocks that run, a list for each start: a block and those that continue it."""
    joined = []
    for block in blocks:
        if block.marker and block.marker["lanes"]:
            if block.marker["continues"]:
                joined[-1].append(block)
            else:
                joined.append([block])
    return joined


BLOCKS = [block for path in PAGES for block in blocks_of(path)]
RUNS = runs(BLOCKS)


def source_of(blocks):
    """Returns the blocks' source with each line where it stands in its page, so that tracebacks point there."""
    source = ""
    for block in blocks:
        source += "\n" * (block.line - source.count("\n")) + block.source
    return source


def sampled():
    """Returns the runs as parameters; what a run says of a whole network of Keras, at its end, runs in the sweep alone."""
    parameters = []
    for run in RUNS:
        small = list(itertools.takewhile(lambda block: "tf.keras.applications" not in block.source, run))
        name = "%s:%d" % (run[0].page, run[0].line)
        parameters.append(pytest.param(small, id=name))
        if len(small) < len(run):
            parameters.append(pytest.param(run, id=name + " and on", marks=pytest.mark.sweep))
    return parameters


@pytest.mark.parametrize("blocks", sampled())
def test_python_block_runs(blocks, tmp_path, monkeypatch):
    words = blocks[0].marker["lanes"].split()
    for reason in filter(None, (LANES[word] for word in words)):
        pytest.skip(reason)
    page = str(DOCS / blocks[0].page)
    if "eager" in words:
        run_eagerly(page, blocks, tmp_path)
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with mock.patch.dict(RULES):  # a page adds a rule
        exec(compile(source_of(blocks), page, "exec"), {"__name__": "docs"})


def run_eagerly(page, blocks, tmp_path):
    paths = [str(ROOT)] + os.environ.get("PYTHONPATH", "").split(os.pathsep)
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths)), TMPDIR=str(tmp_path))
    program = "import sys; exec(compile(sys.stdin.read(), %r, 'exec'), {'__name__': 'docs'})" % page
    done = subprocess.run([sys.executable, "-c", program], input=source_of(blocks), cwd=str(tmp_path), env=environment,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True, timeout=300)
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.parametrize("block", BLOCKS, ids=["%s:%d" % block[:2] for block in BLOCKS])
def test_python_block_says_where_it_runs_or_why_not_and_is_python(block):
    assert block.marker, "The line before the fence has to be a marker, not %r." % block.before
    assert set((block.marker["lanes"] or "").split()) <= set(LANES)
    ast.parse(block.source)


def test_every_fence_of_a_page_is_a_python_block_that_is_found():
    for path in PAGES:
        fences = re.findall(r"^\s*(?:```|~~~)", path.read_text(encoding="utf-8"), re.M)
        assert len(fences) == 2 * sum(block.page == name_of(path) for block in BLOCKS)


def test_block_that_continues_another_one_has_its_lane_and_page():
    for first, *others in RUNS:
        assert all((block.page, block.marker["lanes"]) == (first.page, first.marker["lanes"]) for block in others)


def test_each_lane_of_the_markers_has_a_block():
    assert {word for run in RUNS for word in run[0].marker["lanes"].split()} == set(LANES)


def test_names_and_modules_that_pages_mention_exist():
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for name in set(re.findall(r"\b(?:towers|tf_syncbn)(?!\.md\b)(?:\.[A-Za-z_]\w*)+", text)):
            find(name)


def find(name):
    """Imports as much of a dotted name as is a module, and takes the rest as attributes."""
    first, *rest = name.split(".")
    found = importlib.import_module(first)
    for index, part in enumerate(rest):
        if not hasattr(found, part):
            importlib.import_module(".".join([first] + rest[:index + 1]))
        found = getattr(found, part)
    return found


def headings_of(path):
    """Returns the anchors that a page's headings have."""
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.+)$", _FENCE.sub("", path.read_text(encoding="utf-8")), re.M)}


@pytest.mark.parametrize("path", PAGES + [ROOT / "README.md"] + sorted((ROOT / "examples").rglob("README.md")),
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_their_headings(path):
    links = re.findall(r"\]\((?!\w+:)([^)#]*)(?:#([^)]*))?\)", _FENCE.sub("", path.read_text(encoding="utf-8")))
    for name, heading in links:
        target = path.parent / name if name else path
        assert target.exists(), name
        assert not heading or heading in headings_of(target), (name, heading)


def test_each_package_has_a_page_that_other_pages_lead_to():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all("](docs/%s.md" % name in readme for name in ("towers", "tf_syncbn"))
