"""Files that appear whole or not at all."""

import contextlib
import glob
import os
import secrets
from pathlib import Path

from calibrate.errors import CalibrateError


def write_whole(
    path: Path,
    data: bytes,
    error: type[CalibrateError] = CalibrateError,
    exclusive: bool = False,
) -> None:
    """Publishes a file in one step: a temporary name in the same folder, fsync, then rename.

    Args:
      path: where the file shall appear; its folder is made if it is absent.
      data: what it shall hold.
      error: the exception that a failing disk is reported as.
      exclusive: publish only if nothing has that name yet.
    Raises:
      FileExistsError: `exclusive`, and the name is taken.
      error: the folder cannot be made or written; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise _unwritable(path, failure, error) from failure
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if exclusive:
            os.link(temporary, path)
        else:
            os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as failure:
        if exclusive and isinstance(failure, FileExistsError):
            raise
        raise _unwritable(path, failure, error) from failure
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _unwritable(path: Path, failure: OSError, error: type[CalibrateError]) -> CalibrateError:
    return error(
        f"cannot write {path}: {failure.strerror or failure}; "
        "free some space or choose a folder that you may write to"
    )


def remove_leftovers(path: Path) -> None:
    """Removes what a killed process left of its attempts to write `path`.

    Only for names that one process writes: another's attempt under way would be lost.
    """
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError):
            leftover.unlink()


def _sync_folder(folder: Path) -> None:
    """Makes the new name itself survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
