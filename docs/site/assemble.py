"""Collects the pages of the site, those of docs/ and of the repository's other folders, with links that lead to the same place.

    python docs/site/assemble.py build/pages

Pages are written for GitHub: links are paths of the repository. In the site a link to a page leads to that page, wherever its
file stands, and a link to any other file to the repository, where mkdocs.yml gives its address (`repo_url`); else the file is
named.
"""
import posixpath
import re
import shutil
import sys
from pathlib import Path

__all__ = ["assemble", "pages", "relink"]

ROOT = Path(__file__).resolve().parent.parent.parent
# Pages that stand outside of docs/ -> their names in the site.
_OUTSIDE = {"README.md": "index.md", "CHANGELOG.md": "changes.md", "CONTRIBUTING.md": "contributing.md",
            "examples/cifar10/README.md": "cifar10.md", "examples/segmentation/README.md": "segmentation.md"}
_BESIDES = (".png", ".svg", ".css")
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?!\w+:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)]*)?\)")
# A fence, an indented block, or code in a line that is not the text of a link.
_CODE = re.compile(r"(^```.*?^```$|(?:^\n(?: {4}[^\n]*\n|\n)+)|(?<!\[)`[^`\n]+`(?!\]))", re.M | re.S)
_MARKER = re.compile(r"^<!-- (?:lane|not run): .* -->\n", re.M)  # of tests/project/test_docs.py
_SIGNATURE = re.compile(r"^- `[^\n]*\n\n(?=::: )", re.M)  # of docs/site/signatures.py


def pages():
    """Returns a dict from the paths of pages, and of pictures and styles, in the repository to their names in the site."""
    found = {path: name for path, name in _OUTSIDE.items()}
    for path in sorted((ROOT / "docs").rglob("*")):
        if path.suffix in (".md",) + _BESIDES:
            name = path.relative_to(ROOT / "docs").as_posix()
            found["docs/" + name] = re.sub(r"\bREADME\.md$", "index.md", name)
    return found


def relink(text, path, names, repo_url=None):
    """Returns a page's text with links of the site.

    Args:
      text: str, Markdown.
      path: str, where the page stands in the repository.
      names: dict, see `pages`.
      repo_url: str, the repository's address; None where it has none.

    Raises:
      ValueError: for a link to a file that is not there.
    """
    folder = posixpath.dirname(names[path]) or "."

    def link(match):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match["path"]))
        if target in names:
            return "[%s](%s%s)" % (match["text"], posixpath.relpath(names[target], folder), match["anchor"] or "")
        if not (ROOT / target).exists():
            raise ValueError("%s has a link to %s, which is not there." % (path, target))
        if repo_url:
            return "[%s](%s/blob/main/%s)" % (match["text"], repo_url.rstrip("/"), target)
        return match["text"] if target in match["text"] else "%s (`%s`)" % (match["text"], target)

    parts = _CODE.split(_SIGNATURE.sub("", _MARKER.sub("", text)))  # what is code stands at the odd places
    return "".join(part if number % 2 else _LINK.sub(link, part) for number, part in enumerate(parts))


def assemble(folder, repo_url=None):
    """Writes all pages, and what they show, into a folder, which is emptied first."""
    shutil.rmtree(str(folder), ignore_errors=True)
    names = pages()
    for path, name in names.items():
        target = Path(folder, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix == ".md":
            target.write_text(relink((ROOT / path).read_text(encoding="utf-8"), path, names, repo_url), encoding="utf-8")
        else:
            shutil.copy(str(ROOT / path), str(target))


def _repo_url():
    match = re.search(r"^repo_url: *(\S+)", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    return match and match.group(1)


if __name__ == "__main__":
    assemble(sys.argv[1], _repo_url())
