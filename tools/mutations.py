"""Single-line changes of the library at random places: does `make test` find each of them?

    make mutations                      # 60 of them, hours on 2 cores
    python tools/mutations.py .coverage --number 60 --seed 0 --processes 2 --out mutations.json

A change turns a comparison, makes `or` of `and`, drops a `not`, adds 1 to a number, takes the other branch, leaves a call out or
returns nothing. It is made in a copy of the repository, where the tests run that reach its line, those first that reach the
fewest lines. It is found where one of them fails, or does not end. What none finds is for a person to read: some changes
are of speed alone, or of words. The same command goes on where it was cut.
"""
import argparse
import ast
import collections
import concurrent.futures
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import tqdm

ROOT = Path(__file__).parents[1]
PACKAGES = ("towers", "tf_syncbn")
PROCESSES = ("towers/workers/", "towers/launch.py")
OF_MAKE_TEST = "not laws and not sweep"
NO_TESTS = 5  # status of pytest where all are left out
TIME_LIMIT = 1800  # seconds of one change's tests
_OTHER = {
    ast.Eq: "!=", ast.NotEq: "==", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Is: "is not", ast.IsNot: "is",
    ast.In: "not in", ast.NotIn: "in", ast.And: "or", ast.Or: "and", ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*"}


class Change(NamedTuple):
    """What stands on a line, and what is to stand there.

    Attributes:
      path: str, relative to the repository.
      line: int, from 1.
      start, end: int, columns.
      new: str.
    """
    path: str
    line: int
    start: int
    end: int
    new: str

    def of(self, source):
        """Returns a source with the change made."""
        lines = source.split("\n")
        line = lines[self.line - 1]
        lines[self.line - 1] = line[:self.start] + self.new + line[self.end:]
        return "\n".join(lines)


def changes_of(path, source):
    """Returns the list of all `Change`s of a file's code; of its annotations and texts there is none."""
    lines, found = source.split("\n"), []
    for node in _code(ast.parse(source)):
        for (line, start), (last_line, end), new in _changes(node):
            if line == last_line:
                start, end = (len(lines[line - 1].encode()[:column].decode()) for column in (start, end))
                found.append(Change(path, line, start, end, new))
    return [change for change in found if _is_python(change.of(source))]


def _code(node):
    """Yields all nodes but those of annotations, names for readers, and the texts of errors and warnings."""
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            is_said = isinstance(child, ast.Raise) or isinstance(child, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id.startswith("__") for target in child.targets)
            if isinstance(child, ast.AST) and not is_said:
                yield from _code(child)


def _start(node):
    return node.lineno, node.col_offset


def _end(node):
    return node.end_lineno, node.end_col_offset


def _changes(node):
    """Yields triples (start, end, new text) of a node, its places as pairs of line and column."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OTHER:
        yield _end(node.left), _start(node.comparators[0]), " %s " % _OTHER[type(node.ops[0])]
    elif isinstance(node, ast.BoolOp):
        for left, right in zip(node.values, node.values[1:]):
            yield _end(left), _start(right), " %s " % _OTHER[type(node.op)]
    elif isinstance(node, ast.BinOp) and type(node.op) in _OTHER:
        yield _end(node.left), _start(node.right), " %s " % _OTHER[type(node.op)]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield _start(node), _start(node.operand), ""
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int)):
        yield _start(node), _end(node), repr(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, (ast.If, ast.IfExp)):
        yield _start(node.test), _start(node.test), "not "
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield _start(node), _end(node), "pass"
    elif isinstance(node, ast.Return) and node.value is not None and getattr(node.value, "value", True):  # as false as None
        yield _start(node.value), _end(node.value), "None"


def _is_python(source):
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def choose(number, seed):
    """Returns a list of changes at random lines, of each line one."""
    of_line = collections.defaultdict(list)
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for change in changes_of(path.relative_to(ROOT).as_posix(), path.read_text()):
            of_line[change[:2]].append(change)
    chance = random.Random(seed)
    return [chance.choice(of_line[line]) for line in chance.sample(sorted(of_line), number)]


class Reached:
    """Which tests reach which lines, by what coverage.py measured with `--cov-context=test`."""

    def __init__(self, path):
        import coverage  # not among what tests need

        data = coverage.CoverageData(str(path))
        data.read()
        self._tests = {}
        self._lines = collections.Counter()
        for name in data.measured_files():
            of_lines = {line: {context.split("|")[0].split("@")[0] for context in contexts} - {""}
                        for line, contexts in data.contexts_by_lineno(name).items()}
            parts = Path(name).parts
            package = max(i for i, part in enumerate(parts) if part in PACKAGES and i + 1 < len(parts))
            self._tests["/".join(parts[package:])] = of_lines
            for tests in of_lines.values():
                self._lines.update(tests)

    def tests_of(self, change):
        """Returns the tests that reach a line, those first that reach the fewest; where it runs on import, those of its file,
        or all tests where all of that file does.

        What of `towers/workers` no test reaches may run in the processes that its tests start: then it is all of these.
        """
        of_lines = self._tests.get(change.path, {})
        tests = of_lines.get(change.line)
        if tests is None and change.path.startswith(PROCESSES):
            tests = {test for test in self._lines if test.startswith("tests/workers/")}
        if tests is not None and not tests:
            tests = set().union(*of_lines.values()) or set(self._lines)
        return sorted(tests or (), key=lambda test: (self._lines[test], test))


def first_failure(tests, folder):
    """Returns which of some tests of a copy of the repository fails first, or what else ends them; None where all pass."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--no-header", "-m", OF_MAKE_TEST, *tests],
            cwd=folder, text=True, env=dict(os.environ, PYTHONPATH=str(folder)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        return "does not end"
    failed = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.M)
    return None if done.returncode in (0, NO_TESTS) else (failed or ["status %d" % done.returncode])[0]


def try_out(change, tests, folder):
    """Returns which test finds a change in a copy of the repository, a str; None where none does."""
    path = folder / change.path
    source, tests = path.read_text(), list(tests)
    while tests:
        path.write_text(change.of(source))
        found = first_failure(tests, folder)
        path.write_text(source)
        if found not in tests or first_failure([found], folder) is None:
            return found
        tests.remove(found)  # it fails without the change too
    return None


def main():
    """Makes the changes, and says of each what finds it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("coverage", help="the data file that pytest-cov wrote, with --cov-context=test")
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("mutations.json"))
    arguments = parser.parse_args()
    reached, changes = Reached(arguments.coverage), choose(arguments.number, arguments.seed)
    known = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    results = dict(known)

    def attempt(change):
        if repr(change) in known:
            return change, known[repr(change)]
        tests, began = reached.tests_of(change), time.time()
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "copy"
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "build"))
            found = try_out(change, tests, copy) if tests else None
        return change, {"found": found, "tests": len(tests), "seconds": round(time.time() - began)}

    with concurrent.futures.ThreadPoolExecutor(arguments.processes) as pool:
        waiting = [pool.submit(attempt, change) for change in changes]
        for done in tqdm.tqdm(concurrent.futures.as_completed(waiting), total=len(waiting), unit="change", disable=None):
            change, result = done.result()
            results[repr(change)] = result
            old = (ROOT / change.path).read_text().split("\n")[change.line - 1]
            tqdm.tqdm.write("%-9s %s:%d: %s -> %s  (%s; %d tests reach it, %d s)" % (
                "found" if result["found"] else "NOT FOUND", change.path, change.line, old.strip(),
                change.new.strip() or "(nothing)", result["found"], result["tests"], result["seconds"]))
            arguments.out.write_text(json.dumps(results, indent=1))
    print("%d of %d changes were found." % (sum(bool(results[repr(change)]["found"]) for change in changes), len(changes)))


if __name__ == "__main__":
    main()
