"""The documentation as a site: its pages, its navigation, its links and its reference."""
import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest

from tests.support import PUBLIC_MODULES

ROOT = Path(__file__).parents[2]
SETTINGS = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def load(name):
    spec = importlib.util.spec_from_file_location(name, str(ROOT / "docs" / "site" / (name + ".py")))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


assemble, signatures = load("assemble"), load("signatures")
NAMES = {"README.md": "index.md", "docs/towers.md": "towers.md", "docs/results/README.md": "results/index.md"}


def test_navigation_has_every_page_once_and_no_other():
    in_navigation = re.findall(r"^ +- .+: (\S+\.md)$", SETTINGS, re.M)
    assert sorted(in_navigation) == sorted(name for name in assemble.pages().values() if name.endswith(".md"))


def test_every_page_and_picture_is_assembled_and_its_links_lead_to_assembled_files(tmp_path):
    assemble.assemble(tmp_path)
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()} \
        == set(assemble.pages().values())
    for path in tmp_path.rglob("*.md"):
        text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
        for target in re.findall(r"\]\((?!\w+:)([^)#]+)", text):
            assert (path.parent / target).exists(), (path.name, target)


@pytest.mark.parametrize("path,text,expected", [
    ("README.md", "[a](docs/towers.md#train)", "[a](towers.md#train)"),
    ("docs/towers.md", "[a](../README.md) [b](results/README.md) [c](#train)", "[a](index.md) [b](results/index.md) [c](#train)"),
    ("docs/results/README.md", "![a](../towers.md)", "![a](../towers.md)"),
    ("docs/towers.md", "[`a`](../README.md)", "[`a`](index.md)"),
    ("README.md", "[a](https://b.c/docs/towers.md)", "[a](https://b.c/docs/towers.md)"),
    ("README.md", "`[a](docs/towers.md)`", "`[a](docs/towers.md)`"),
    ("README.md", "```python\na[0](docs/towers.md)\n```", "```python\na[0](docs/towers.md)\n```"),
    ("README.md", "a\n\n    [a](docs/towers.md)\n", "a\n\n    [a](docs/towers.md)\n"),
    ("README.md", "<!-- lane: all -->\n```python\n```", "```python\n```"),
])
def test_link_to_a_page_leads_to_it_in_the_site_and_code_is_left_alone(path, text, expected):
    assert assemble.relink(text, path, NAMES) == expected


def test_link_to_another_file_leads_to_the_repository_or_names_the_file():
    text = "[the model](../examples/cifar10/model.py) [`tests/support.py`](../tests/support.py)"
    assert assemble.relink(text, "docs/towers.md", NAMES) \
        == "the model (`examples/cifar10/model.py`) `tests/support.py`"
    assert assemble.relink(text, "docs/towers.md", NAMES, "https://host/it/") \
        == ("[the model](https://host/it/blob/main/examples/cifar10/model.py) "
            "[`tests/support.py`](https://host/it/blob/main/tests/support.py)")


def test_link_to_a_file_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="docs/towers.md has a link to docs/nowhere.md, which is not there"):
        assemble.relink("[a](nowhere.md)", "docs/towers.md", NAMES)


def test_reference_has_every_public_name_once_and_no_other():
    on_pages = [name for path in (ROOT / "docs" / "reference").glob("*.md")
                for name in re.findall(r"^::: (\S+)$", path.read_text(encoding="utf-8"), re.M)]
    public = []
    for module in map(importlib.import_module, PUBLIC_MODULES):
        for name in module.__all__:
            if inspect.ismodule(getattr(module, name)):
                assert getattr(module, name).__name__ in PUBLIC_MODULES
            else:
                public.append("%s.%s" % (module.__name__, name))
    assert sorted(on_pages) == sorted(public)


@pytest.mark.skipif(sys.version_info < (3, 8), reason="of one Python, as `python docs/site/signatures.py` writes them")
def test_reference_says_what_each_public_name_takes():
    for path in (ROOT / "docs" / "reference").glob("*.md"):
        text = path.read_text(encoding="utf-8")
        assert text.count("\n- `") >= text.count("\n::: ") > 0
        assert signatures.with_signatures(text) == text, "run: python docs/site/signatures.py"
        assert "\n- `" not in assemble.relink(text, "docs/reference/" + path.name, assemble.pages())


def public_docstrings():
    for module in map(importlib.import_module, PUBLIC_MODULES):
        for name in module.__all__:
            found = getattr(module, name)
            members = vars(found).values() if inspect.isclass(found) else ()
            for each in (found, *(member for member in members if inspect.isfunction(member))):
                yield name, inspect.getdoc(each) or ""


def test_what_a_public_function_returns_is_no_type_and_colon_to_the_parser():
    first_lines = [(name, line) for name, text in public_docstrings() for line in re.findall(r"^Returns:\n +(.*)", text, re.M)]
    assert len(first_lines) > 20
    assert not [each for each in first_lines if ":" in each[1]]


def test_nothing_of_the_site_is_fetched_from_the_network():
    assert "font: false" in SETTINGS and "strict: true" in SETTINGS
    assert not re.search(r"^(?!repo_url|site_url).*https?://", SETTINGS, re.M)
