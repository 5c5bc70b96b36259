"""Checks that a wheel and a source archive hold the packages and what belongs to them, and nothing else.

    python .ci/check_package.py dist
"""
import configparser
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_OF_WHEEL = {"LICENSE", "METADATA", "RECORD", "WHEEL", "top_level.txt"}
_OF_ARCHIVE = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}


def of_packages():
    """Returns the files of the packages, a set of str."""
    settings = configparser.ConfigParser()
    settings.read(str(ROOT / "setup.cfg"))
    folders = [ROOT / package.replace(".", "/") for package in settings["options"]["packages"].split()]
    return {path.relative_to(ROOT).as_posix() for folder in folders for path in folder.iterdir()
            if path.suffix == ".py" or path.name == "py.typed"}


def of_wheel(path):
    """Returns the names in a wheel; of its metadata, those of the files alone."""
    with zipfile.ZipFile(str(path)) as wheel:
        return {name.rpartition("/")[2] if ".dist-info/" in name else name for name in wheel.namelist()}


def of_archive(path):
    """Returns the names in a source archive without its folder; of what setuptools notes for itself, nothing."""
    with tarfile.open(str(path)) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    return {name for name in names if not name.startswith("towers.egg-info/")}


def main(folder):
    """Prints what each file lacks, and what it should not hold; returns the exit status."""
    wheels, archives = sorted(Path(folder).glob("*.whl")), sorted(Path(folder).glob("*.tar.gz"))
    if len(wheels) != 1 or len(archives) != 1:
        print("%s has to hold one wheel and one source archive, not %d and %d." % (folder, len(wheels), len(archives)))
        return 1
    status = 0
    for path, found, expected in ((wheels[0], of_wheel(wheels[0]), of_packages() | _OF_WHEEL),
                                  (archives[0], of_archive(archives[0]), of_packages() | _OF_ARCHIVE)):
        for what, names in (("lacks", expected - found), ("should not hold", found - expected)):
            for name in sorted(names):
                status = 1
                print("%s %s %s" % (path.name, what, name))
        print("%s holds %d files." % (path.name, len(found)))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
