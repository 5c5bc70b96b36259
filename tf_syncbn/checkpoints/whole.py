"""A new checkpoint appears whole or not at all, whenever its writer is killed, and over nothing that is there.

TensorFlow writes a checkpoint's files under random names beside their places, and gives the index its name last. A killed writer
would leave them for ever, and a data file without an index, which the next could not tell from somebody's own.
"""
import contextlib
import os
import re

import tensorflow.compat.v1 as tf

__all__ = ["FILE_ENDING", "refuse_to_overwrite", "written_whole"]

FILE_ENDING = re.compile(r"\.(index|meta|data-\d{5}-of-\d{5})$")
_DATA, _INDEX = ".data-00000-of-00001", ".index"
_BLOCK = 1 << 20


def refuse_to_overwrite(in_prefix, out_path):
    """Raises `ValueError` where a new checkpoint would be an old one, is there already, or has no folder.

    A data file alone, which a killed writer may have left, is looked at by `written_whole`.
    """
    if os.path.realpath(out_path) == os.path.realpath(in_prefix):
        raise ValueError("The new checkpoint %r would be the old one, which is never written over." % out_path)
    if os.path.basename(out_path) in ("", ".", "..") or FILE_ENDING.search(out_path):
        raise ValueError("%r is no name for a checkpoint: give its prefix, such as DIRECTORY/model.ckpt." % out_path)
    for path in (out_path, out_path + _INDEX):
        if os.path.lexists(path) or tf.io.gfile.exists(path):
            raise ValueError(_exists(path))
    if os.path.lexists(out_path + _DATA) and not os.path.isfile(out_path + _DATA):
        raise ValueError(_exists(out_path + _DATA))
    if not tf.io.gfile.isdir(os.path.dirname(out_path) or "."):
        raise ValueError("There is no directory %r to write to." % os.path.dirname(out_path))


def _exists(path):
    return "%r exists, and nothing is written over." % path


@contextlib.contextmanager
def written_whole(out_path):
    """Gives a prefix to write a checkpoint to, of one data file; what is there in the end gets the prefix `out_path`.

    It is in a folder beside, `out_path` and ".converting", which is emptied first and gone at the end. A data file without an
    index, under `out_path`, is gone on with if it holds the same bytes.

    Raises:
      ValueError: if the folder holds anything else, or that data file other bytes.
    """
    folder = out_path + ".converting"
    prefix = os.path.join(folder, "new")
    _remove(folder)
    tf.io.gfile.makedirs(folder)
    try:
        yield prefix
        if not tf.io.gfile.exists(out_path + _DATA):
            tf.io.gfile.rename(prefix + _DATA, out_path + _DATA)
        elif not _are_same(prefix + _DATA, out_path + _DATA):
            raise ValueError(_exists(out_path + _DATA))
        tf.io.gfile.rename(prefix + _INDEX, out_path + _INDEX)
    finally:
        _remove(folder)


def _remove(folder):
    """Removes the folder of a writer, if there is one."""
    if not os.path.lexists(folder) and not tf.io.gfile.exists(folder):
        return
    if os.path.islink(folder) or not tf.io.gfile.isdir(folder):
        raise ValueError(_exists(folder))
    paths = [os.path.join(folder, name) for name in tf.io.gfile.listdir(folder)]
    if not all(os.path.basename(path).startswith("new.") and not tf.io.gfile.isdir(path) for path in paths):
        raise ValueError(_exists(folder))
    tf.io.gfile.rmtree(folder)


def _are_same(one, other):
    with tf.io.gfile.GFile(one, "rb") as left, tf.io.gfile.GFile(other, "rb") as right:
        while True:
            block = left.read(_BLOCK)
            if block != right.read(_BLOCK):
                return False
            if not block:
                return True
