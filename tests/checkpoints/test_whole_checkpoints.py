"""`tf_syncbn.checkpoints`: a converted checkpoint is whole or not there, and what could keep a reader for ever is refused."""
import os

import numpy as np
import pytest

from tests.checkpoints.test_checkpoints import contents, write
from tf_syncbn.checkpoints import convert
from tf_syncbn.checkpoints.__main__ import main

DATA = ".data-00000-of-00001"


@pytest.fixture
def path(tmp_path):
    (tmp_path / "from").mkdir()
    return write(tmp_path / "from" / "model", {"fc/W": np.arange(6.0), "fc/b": np.ones(2)})


def test_what_a_killed_conversion_left_is_gone_on_with(path, tmp_path):
    convert(path, tmp_path / "whole", "slim")
    (tmp_path / ("new" + DATA)).write_bytes((tmp_path / ("whole" + DATA)).read_bytes())  # the index had no name yet
    (tmp_path / "new.converting").mkdir()
    (tmp_path / "new.converting" / ("new" + DATA + ".tempstate123")).write_bytes(b"half")
    convert(path, tmp_path / "new", "slim")
    assert contents(tmp_path / "new") == contents(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.glob("new*")) == ["new" + DATA, "new.index"]


@pytest.mark.parametrize("content", [b"", b"somebody's own", None])
def test_a_data_file_of_other_bytes_is_not_written_over(path, tmp_path, content):
    if content is None:
        os.mkfifo(str(tmp_path / ("new" + DATA)))
    else:
        (tmp_path / ("new" + DATA)).write_bytes(content)
    with pytest.raises(ValueError, match="new%s' exists, and nothing is written over" % DATA):
        convert(path, tmp_path / "new", "slim")
    assert [p.name for p in tmp_path.glob("new*")] == ["new" + DATA]
    assert content is None or (tmp_path / ("new" + DATA)).read_bytes() == content


def test_a_folder_of_other_things_is_not_emptied(path, tmp_path):
    (tmp_path / "new.converting").mkdir()
    (tmp_path / "new.converting" / "mine").write_text("good")
    with pytest.raises(ValueError, match="new.converting' exists, and nothing is written over"):
        convert(path, tmp_path / "new", "slim")
    assert [p.name for p in tmp_path.glob("new*")] == ["new.converting"]
    (tmp_path / "other.converting").symlink_to(tmp_path / "from")
    with pytest.raises(ValueError, match="other.converting' exists"):
        convert(path, tmp_path / "other", "slim")
    assert len(list((tmp_path / "from").iterdir())) == 4 and (tmp_path / "new.converting" / "mine").read_text() == "good"


@pytest.mark.parametrize("name", ["model.index", "model" + DATA, "checkpoint"])
def test_a_pipe_in_a_files_place_is_refused_and_not_waited_for(path, tmp_path, capsys, name):
    (tmp_path / "from" / name).unlink()
    os.mkfifo(str(tmp_path / "from" / name))
    given = path if name.startswith("model") else str(tmp_path / "from")
    assert main(["convert", given, str(tmp_path / "new"), "--to", "slim"]) == 2
    error = capsys.readouterr().err
    assert "can't be read as a checkpoint: it is no regular file" in error or "is damaged: give a checkpoint's prefix" in error
    assert given in error and error.count("\n") == 1


def test_an_enormous_state_file_is_not_read(path, tmp_path, capsys):
    os.truncate(str(tmp_path / "from" / "checkpoint"), 1 << 40)
    assert main(["list", str(tmp_path / "from")]) == 2
    assert "The file 'checkpoint' in the directory" in capsys.readouterr().err
