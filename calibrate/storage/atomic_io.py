"""Whole files: reading with a limit on the size, atomic writing, locks on folders."""

import contextlib
import errno
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from calibrate.errors import CalibrateError

if TYPE_CHECKING:
    from filelock import BaseFileLock

LOCK = ".lock"  # the file of a folder's lock
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}\.tmp", re.DOTALL)
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK}
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK}
_NO_FSYNC = _NO_LOCKS | {errno.EINVAL, errno.EBADF}  # of folders, on some network disks
_NOT_YOURS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
SPACE = "free some space"
_REMEDIES = {
    **dict.fromkeys(_NOT_YOURS, "choose a folder that you may write to"),
    errno.EISDIR: "choose a name that is not that of a folder",
}


def read_file(path: Path, most: int) -> bytes:
    """A file's bytes; OSError if it cannot be read, or has more bytes than `most`."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            reason = f"it has {size:,} bytes, more than the limit of {most:,}"
            raise OSError(errno.EFBIG, reason)
        return file.read()


def write_atomically(
    path: Path,
    data: bytes,
    error: type[CalibrateError] = CalibrateError,
    exclusive: bool = False,
    full: str = SPACE,
) -> None:
    """Writes a file completely or not at all: temporary name, fsync, rename.

    Args:
      path: of the file; its folder is made if it is absent.
      data: its content.
      error: the exception to raise when the disk fails.
      exclusive: write only if the name is free. On a disk without hard links two writers may both
        succeed, unless the folder is `locked`.
      full: the remedy for a full disk.
    Raises:
      FileExistsError: `exclusive`, and the name is taken.
      error: the folder cannot be made or written. Nothing is left behind, unless the last step,
        the fsync of the folder, failed: then the complete file stays.
    """
    with _temporary(path, error, full) as temporary:
        _write_new(temporary, data)
        if exclusive:
            _link(temporary, path)
        else:
            os.replace(temporary, path)


@contextlib.contextmanager
def _temporary(
    path: Path, error: type[CalibrateError] = CalibrateError, full: str = SPACE
) -> Iterator[Path]:
    """A temporary name beside `path`; what is there at the end is removed."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with contextlib.suppress(FileExistsError):  # if it is a file, writing fails and says so
            path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _sync(path.parent)
    except FileExistsError:  # of an exclusive write
        raise
    except OSError as failure:
        raise unwritable(path, failure, error, full) from failure
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        shutil.rmtree(temporary, ignore_errors=True)  # of a folder


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary name to write a large file to; it becomes `path` at the end, or is removed.

    Raises:
      CalibrateError: the folder cannot be made or written, or the name is taken.
    """
    with _temporary(path) as temporary:
        yield temporary
        _sync(temporary)
        check_free(path)
        os.replace(temporary, path)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A temporary folder, which becomes `path` at the end, or is removed.

    The caller fsyncs the files that it writes there.

    Raises:
      CalibrateError: `path` is taken by a file, or by a folder with something in it; or the disk
        fails.
    """
    check_free(path)
    with new_file(path) as temporary:
        os.mkdir(temporary)
        yield temporary


@contextlib.contextmanager
def scratch_folder(files: Mapping[str, bytes]) -> Iterator[Path]:
    """A folder of the system for temporary files, with small files; removed at the end.

    Raises:
      CalibrateError: the system's folder for temporary files cannot hold them.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for name, data in files.items():
                (folder / name).write_bytes(data)
        except OSError as failure:
            raise CalibrateError(
                f"cannot write temporary files in TMPDIR ({tempfile.tempdir}): {failure.strerror}; "
                "set TMPDIR to a folder with free space that you may write to"
            ) from failure
        yield folder


def user_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """The package's folder in the user's cache, which need not exist.

    Raises:
      RuntimeError: the user has no home.
    """
    base = environment.get("XDG_CACHE_HOME") or environment.get("LOCALAPPDATA")
    return Path(base or Path.home() / ".cache") / "calibrate"


def check_free(path: Path) -> None:
    """Raises CalibrateError if a path is taken; an empty folder is free."""
    taken = any(path.iterdir()) if path.is_dir() else os.path.lexists(path)
    if taken:
        raise CalibrateError(f"{path} exists already; choose a new name")


def require_outside(path: Path, folder: Path) -> None:
    """Raises CalibrateError if a path to write to is within a model's folder."""
    if path.resolve().is_relative_to(folder.resolve()):
        raise CalibrateError(f"{path} is within the model's folder; choose another")


@contextlib.contextmanager
def locked(
    folder: Path,
    error: type[CalibrateError] = CalibrateError,
    waiting: Callable[[], None] = lambda: None,
) -> Iterator[bool]:
    """Locks a folder, which is made if it is absent.

    The lock ends with the process, however it ends; its file stays. On disks without locks (some
    network disks) nobody waits, and exclusive names keep writers apart.

    Args:
      folder: to lock.
      error: the exception to raise when the disk fails.
      waiting: called once if another process has the lock.
    Yields:
      True if the disk has locks.
    Raises:
      error: the folder cannot be made or written.
    """
    from filelock import FileLock  # deferred, so that the command line's help does not load it

    # A soft lock would outlive a killed process.
    lock = FileLock(folder / LOCK, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        has_locks = _acquire(lock, waiting)
    except OSError as failure:
        raise unwritable(folder / LOCK, failure, error) from failure
    try:
        yield has_locks
    finally:
        with contextlib.suppress(OSError):
            lock.release()


def _acquire(lock: "BaseFileLock", waiting: Callable[[], None]) -> bool:
    """Acquires a lock; False if the disk has none."""
    try:
        try:
            lock.acquire(blocking=False)
        except TimeoutError:
            waiting()
            lock.acquire()
    except OSError as failure:
        if failure.errno not in _NO_LOCKS:
            raise
        return False
    return True


def check_writable(path: Path, error: type[CalibrateError] = CalibrateError) -> None:
    """Raises `error` unless a file could be written, or its folder made; it makes nothing.

    Called before long work.
    """
    try:
        nearest = next(folder for folder in path.absolute().parents if folder.exists())
        code = 0 if os.access(nearest, os.W_OK) else errno.EACCES
        code = code if nearest.is_dir() else errno.ENOTDIR
        code = errno.EISDIR if path.is_dir() else code
        if code:
            raise OSError(code, os.strerror(code))
    except OSError as failure:
        raise unwritable(path, failure, error) from failure


def not_a(kind: str, path: Path) -> str:
    """The problem of a path that is not a file, or a folder, of a kind."""
    return f"{path} is not a {kind}" if path.exists() else f"{path} does not exist"


def final_name(name: str) -> str:
    """The name that a temporary file was to have; any other name as it is."""
    return _TEMPORARY.sub(r"\1", name)


def remove_leftovers(folder: Path, names: str) -> None:
    """Removes temporary files that killed processes left, if their final names match a pattern.

    Called under a lock; without one, another process would lose the file that it is writing.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name != final_name(name) and re.fullmatch(names, final_name(name)):
                os.unlink(folder / name)


def unwritable(
    path: Path, failure: OSError, error: type[CalibrateError], full: str = SPACE
) -> CalibrateError:
    """The error for a file that cannot be written; `full` is the remedy for a full disk."""
    is_full = failure.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = full if is_full else _REMEDIES.get(failure.errno or 0, "check the path and the disk")
    return error(f"cannot write {path}: {failure.strerror or failure}; {remedy}")


def _write_new(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _link(temporary: Path, path: Path) -> None:
    """Gives a file its name; FileExistsError if the name is taken."""
    try:
        os.link(temporary, path)
    except OSError as failure:
        if failure.errno not in _NO_LINKS:
            raise
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.replace(temporary, path)


def _sync(folder: Path) -> None:
    """Calls fsync on a folder, so that new names survive a power cut, or on a file.

    Some disks have no fsync of folders; there it is left out.
    """
    if os.name == "nt":
        return  # Windows does not open folders
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as failure:
        if failure.errno not in _NO_FSYNC or not os.path.isdir(folder):
            raise
    finally:
        os.close(descriptor)
