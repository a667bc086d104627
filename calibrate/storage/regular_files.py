"""Reading of regular files only: a pipe or a device in the place of one might never end."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def read_file(path: Path, most: int) -> bytes:
    """A regular file's bytes; those appended meanwhile are not read.

    Raises:
      OSError: it cannot be read, has more bytes than `most`, or is not a regular file.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            said = f"it has {size:,} bytes, more than the limit of {most:,}"
            raise OSError(errno.EFBIG, said)
        return file.read(size)


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file to read; OSError of all else, such as a pipe, which might never end."""
    return open(path, "rb", opener=_open_at_once)


def _open_at_once(path: str, flags: int) -> int:
    """Does not wait for the other end of a pipe."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # folders are refused by `open` itself
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return descriptor
