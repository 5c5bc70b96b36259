"""The download of CIFAR-10: the archive's checksum, what is unpacked of it, and what is left when it fails."""
import hashlib
import http.server
import io
import os
import tarfile
import threading

import pytest

from examples.cifar10 import data


@pytest.fixture
def server(tmp_path):
    """Serves the files of a folder on the loopback address, of one named "cut" the first half; yields (folder, url)."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            path = folder / self.path.strip("/")
            self.send_response(200 if path.exists() else 404)
            content = path.read_bytes() if path.exists() else b""
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[:len(content) // 2] if path.name == "cut" else content)

        def log_message(self, *_):
            pass

    made = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield folder, "http://127.0.0.1:%d/archive" % made.server_port
    made.shutdown()
    thread.join()
    made.server_close()


def member(name, size=4, **attributes):
    """A member of an archive and its content, none where its kind has none."""
    info = tarfile.TarInfo(name)
    for key, value in attributes.items():
        setattr(info, key, value)
    info.size = size if info.isreg() else 0
    return info, b"data" * (info.size // 4)


def archive(*members):
    """An archive laid out as the official one, of one data file and of further members."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for info, content in (member(data.BINARY_FOLDER + "/data_batch_1.bin"),) + members:
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def test_download_checks_the_archive_and_unpacks_it_whole(server, tmp_path):
    folder, url = server
    content = archive(member("../escaped"))
    (folder / "archive").write_bytes(content)
    target = tmp_path / "data"
    made = data.download(str(target), url, hashlib.md5(content).hexdigest())
    assert os.listdir(made) == ["data_batch_1.bin"] and os.listdir(str(target)) == [data.BINARY_FOLDER]
    assert not (tmp_path / "escaped").exists()
    assert data.download(str(target), "http://127.0.0.1:1/never", "") == made  # what is there is not fetched again


@pytest.mark.parametrize("served,message", [(b"something else", "is not the official archive: its MD5 is"),
                                            (None, "could not be fetched")])
def test_download_that_fails_leaves_nothing(server, tmp_path, served, message):
    folder, url = server
    if served:
        (folder / "archive").write_bytes(served)
    with pytest.raises(data.DataError, match=message):
        data.download(str(tmp_path / "data"), url)
    assert os.listdir(str(tmp_path / "data")) == []


def test_download_that_can_not_be_written_is_refused(server, tmp_path):
    folder, url = server
    content = archive()
    (folder / "archive").write_bytes(content)
    (tmp_path / "file").write_text("")
    (tmp_path / data.BINARY_FOLDER).write_text("in the way")
    for target, message in ((tmp_path / "file" / "data", "Not a directory"), (tmp_path / "file", "File exists"),
                            (tmp_path, "Not a directory")):
        with pytest.raises(data.DataError, match="CIFAR-10 can't be written to %s: %s" % (target, message)):
            data.download(str(target), url, hashlib.md5(content).hexdigest())
    assert not list(tmp_path.glob("download-*"))


def unpacked(server, tmp_path, content):
    """The folder that a download of an archive comes to."""
    folder, url = server
    (folder / "archive").write_bytes(content)
    return data.download(str(tmp_path / "data"), url, hashlib.md5(content).hexdigest())


INSIDE = data.BINARY_FOLDER + "/"


@pytest.mark.parametrize("info", [
    {"name": "/towers-escaped"}, {"name": INSIDE + "../../escaped"}, {"name": "./../escaped"}, {"name": INSIDE + ".."},
    {"name": INSIDE + "sub/file"}, {"name": INSIDE + "link", "type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
    {"name": data.BINARY_FOLDER, "type": tarfile.SYMTYPE, "linkname": "../.."},
    {"name": INSIDE + "hard", "type": tarfile.LNKTYPE, "linkname": "/etc/passwd"},
    {"name": INSIDE + "hard", "type": tarfile.LNKTYPE, "linkname": INSIDE + "data_batch_1.bin"},
    {"name": INSIDE + "device", "type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3},
    {"name": INSIDE + "disk", "type": tarfile.BLKTYPE, "devmajor": 8}, {"name": INSIDE + "pipe", "type": tarfile.FIFOTYPE},
    {"name": INSIDE + "folder", "type": tarfile.DIRTYPE}])
def test_only_files_of_the_one_folder_are_unpacked(server, tmp_path, info):
    made = unpacked(server, tmp_path, archive(member(**info), member(INSIDE + "test_batch.bin")))
    assert sorted(os.listdir(made)) == ["data_batch_1.bin", "test_batch.bin"] and not os.path.islink(made)
    assert sorted(os.listdir(str(tmp_path))) == ["data", "served"] and os.listdir(str(tmp_path / "data")) == [data.BINARY_FOLDER]
    assert not os.path.exists("/towers-escaped")


def test_what_is_written_through_a_link_of_the_archive_stays_inside(server, tmp_path):
    (tmp_path / "victim").write_text("good")
    link = member(INSIDE + "test_batch.bin", type=tarfile.SYMTYPE, linkname="../../../victim")
    made = unpacked(server, tmp_path, archive(link, member(INSIDE + "test_batch.bin")))
    assert (tmp_path / "victim").read_text() == "good" and not os.path.islink(os.path.join(made, "test_batch.bin"))


def test_rights_and_owners_of_the_archive_are_not_taken(server, tmp_path):
    made = unpacked(server, tmp_path, archive(member(INSIDE + "test_batch.bin", mode=0o6777, uid=1234, gid=1234)))
    found = os.stat(os.path.join(made, "test_batch.bin"))
    assert found.st_uid == os.getuid() and found.st_mode & 0o7111 == 0


def test_enormous_members_are_not_unpacked(server, tmp_path):
    with pytest.raises(data.DataError, match="test_batch.bin is larger than the 30730000 bytes that it may have"):
        unpacked(server, tmp_path, archive(member(INSIDE + "test_batch.bin", 30730004)))
    assert os.listdir(str(tmp_path / "data")) == []


def test_an_enormous_download_ends_early(server, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_LARGEST_ARCHIVE", 10)
    with pytest.raises(data.DataError, match="/archive is larger than the 10 bytes that it may have"):
        unpacked(server, tmp_path, archive())
    assert os.listdir(str(tmp_path / "data")) == []


def test_a_download_that_is_cut_leaves_nothing(server, tmp_path):
    folder, url = server
    content = archive()
    (folder / "cut").write_bytes(content)
    with pytest.raises(data.DataError, match="is not the official archive: its MD5 is|could not be fetched"):
        data.download(str(tmp_path / "data"), url.replace("archive", "cut"), hashlib.md5(content).hexdigest())
    assert os.listdir(str(tmp_path / "data")) == []


@pytest.mark.parametrize("content", [b"no archive", archive()[:60], b""], ids=["text", "cut", "empty"])
def test_what_has_the_checksum_and_is_no_archive_is_refused(server, tmp_path, content):
    with pytest.raises(data.DataError, match="/archive can't be unpacked: "):
        unpacked(server, tmp_path, content)
    assert os.listdir(str(tmp_path / "data")) == []


def test_the_folder_has_its_name_only_when_it_is_whole(server, tmp_path, monkeypatch):
    rename, seen = os.rename, []

    def look(scratch, folder):
        seen.append((os.path.exists(folder), sorted(os.listdir(scratch))))
        rename(scratch, folder)
    monkeypatch.setattr(data.os, "rename", look)
    unpacked(server, tmp_path, archive(member(INSIDE + "test_batch.bin")))
    assert seen == [(False, ["data_batch_1.bin", "test_batch.bin"])]
