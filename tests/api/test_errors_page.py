"""docs/errors.md quotes the library's messages as they are, and names every error class.

A row of a table begins with pieces of messages, in code: | `a piece`, `another one` (w) | cause | mend |
"""
import ast
import re
from pathlib import Path

import pytest

import tf_syncbn
import towers
import towers.testing

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
_TABLES = re.split(r"^\| (?:message|line) \|.*\n", PAGE, flags=re.M)[1:]
PIECES = [piece for table in _TABLES for row in re.findall(r"^\| ([^|]*) \|", table.partition("\n\n")[0], re.M)
          for piece in re.findall(r"`([^`]+)`", row)]


def messages_of(path):
    """Returns the strings of a file that are no docstrings, each joined as Python joins it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    prose = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [node.value if hasattr(node, "value") else node.s for node in ast.walk(tree)
            if node not in prose and isinstance(getattr(node, "value", getattr(node, "s", None)), str)]


@pytest.fixture(scope="module")
def messages():
    return [message for package in ("towers", "tf_syncbn") for path in sorted((ROOT / package).rglob("*.py"))
            for message in messages_of(path)]


@pytest.mark.parametrize("piece", PIECES)
def test_piece_stands_in_a_message_of_the_source(piece, messages):
    assert any(piece in message for message in messages)


def test_pieces_are_found_and_each_stands_on_the_page_once():
    assert len(PIECES) > 100
    assert len(set(PIECES)) == len(PIECES)
    assert not [piece for piece in PIECES if "%" in piece]  # a traceback has a name or number there


def test_every_public_error_class_is_named():
    for package in (towers, towers.workers, towers.testing, tf_syncbn, tf_syncbn.checkpoints):
        for name in package.__all__:
            error = getattr(package, name)
            if isinstance(error, type) and issubclass(error, BaseException):
                assert "`%s.%s`" % (package.__name__, name) in PAGE
