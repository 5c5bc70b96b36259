"""Files that may be damaged: what can't be the file that is meant is refused before a byte of it is read."""
import errno
import os
import stat

__all__ = ["check_file"]


def check_file(path, most_bytes=None):
    """Refuses a pipe or a device, which could keep its reader for ever, and a file that would fill the memory.

    A folder passes: whoever opens it is told so.

    Args:
      path: str.
      most_bytes: int, the size of the largest file that is taken, or None for any.

    Raises:
      OSError: if there is no such file, or it is not to be read.
    """
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", path)
    if most_bytes is not None and stat.S_ISREG(found.st_mode) and found.st_size > most_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
