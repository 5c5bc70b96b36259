"""Writes into the pages of docs/reference what each public name takes and is, for those who read them as they are.

    python docs/site/signatures.py
"""
import importlib
import inspect
import re
from pathlib import Path

__all__ = ["with_signatures"]

FOLDER = Path(__file__).resolve().parent.parent / "reference"
_STUB = re.compile(r"(?:^- `[^\n]*\n\n)?^::: (?P<name>[\w.]+)$", re.M)


def with_signatures(text):
    """Returns a page's text with a line before each `::: name` that says what the name takes and is."""
    return _STUB.sub(lambda match: "- `%s`: %s\n\n%s" % (*_said(match["name"]), "::: " + match["name"]), text)


def _said(name):
    module, _, of_module = name.rpartition(".")
    found = getattr(importlib.import_module(module), of_module)
    is_error = inspect.isclass(found) and issubclass(found, BaseException)
    takes = "(%s)" % ", ".join(_parameters(found)) if callable(found) and not is_error else ""
    return of_module + takes, inspect.getdoc(found).partition("\n")[0]


def _parameters(function):
    found = list(inspect.signature(function).parameters.values())
    said = [_parameter(each) for each in found]
    by_name = [number for number, each in enumerate(found) if each.kind is each.KEYWORD_ONLY]
    return said[:by_name[0]] + ["*"] + said[by_name[0]:] if by_name else said


def _parameter(parameter):
    default = parameter.default
    said = repr(default) if " at 0x" not in repr(default) else type(default).__name__ + "()"
    name = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "") + parameter.name
    return name if default is parameter.empty else "%s=%s" % (name, said)


if __name__ == "__main__":
    for page in sorted(FOLDER.glob("*.md")):
        page.write_text(with_signatures(page.read_text(encoding="utf-8")), encoding="utf-8")
