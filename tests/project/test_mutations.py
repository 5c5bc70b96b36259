"""The tool that changes a line of the library: which changes it makes. Without it, nobody would know what the tests miss."""
import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.once, pytest.mark.skipif(
    sys.version_info < (3, 8), reason="Python's parser does not say where nodes end")]
SOURCE = '''"""One."""
__all__ = ["f"]


def f(a: int, b=True) -> "x":
    """Two."""
    if a < 2 and not b:
        raise ValueError("%d" % (a + 1))
    g(a)
    return a - 1
'''


def changed_lines():
    spec = importlib.util.spec_from_file_location("mutations", Path(__file__).parents[2] / "tools" / "mutations.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    changes = tool.changes_of("f.py", SOURCE)
    return sorted(change.of(SOURCE).split("\n")[change.line - 1].strip() for change in changes)


def test_each_change_is_of_code_and_of_one_line():
    assert changed_lines() == sorted([
        'def f(a: int, b=False) -> "x":',
        "if not a < 2 and not b:", "if a < 2 or not b:", "if a <= 2 and not b:", "if a < 3 and not b:", "if a < 2 and b:",
        "pass",
        "return None", "return a + 1", "return a - 2"])
