"""Whole files: reading with a limit on the size, atomic writing, locks on folders."""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from calibrate.errors import CalibrateError, DamagedError

LOCK = ".lock"  # the file of a folder's lock
MAX_BYTES = 1 << 30  # of a file whose size nothing else bounds, such as weights


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """A file's bytes; a file of more than `most` bytes is refused before it is read.

    Raises:
      DamagedError: it is too large.
      CalibrateError: it is absent, or cannot be read.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > most:
                raise DamagedError(f"{path} has {size:,} bytes, more than the limit of {most:,}")
            return file.read()
    except OSError as failure:
        raise CalibrateError(
            f"cannot read {path}: {failure.strerror}; check the path and its permissions"
        ) from failure


def write_atomically(path: Path, data: bytes, exclusive: bool = False) -> None:
    """Writes a file completely or not at all: temporary name, fsync, rename.

    Args:
      path: of the file; its folder is made if it is absent.
      data: its content.
      exclusive: write only if the name is free. On a disk without hard links two writers may both
        succeed, unless the folder is `locked`.
    Raises:
      FileExistsError: `exclusive`, and the name is taken.
      CalibrateError: the folder cannot be made or written; nothing is left behind.
    """
    with _temporary(path) as temporary:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if exclusive:
            _link(temporary, path)
        else:
            os.replace(temporary, path)


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
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
        raise unwritable(path, failure) from failure
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
def locked(folder: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Locks a folder, which is made if it is absent.

    The lock ends with the process, however it ends; its file stays. On disks without locks (some
    network disks) nobody waits, and exclusive names keep writers apart.

    Args:
      folder: to lock.
      waiting: called once if another process has the lock.
    Yields:
      True if the disk has locks.
    Raises:
      CalibrateError: the folder cannot be made.
    """
    from filelock import FileLock  # deferred, so that the command line's help does not load it

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise unwritable(folder / LOCK, failure) from failure
    # A soft lock would outlive a killed process.
    lock = FileLock(folder / LOCK, fallback_to_soft=False)
    has_locks = True
    try:
        lock.acquire(blocking=False)
    except TimeoutError:
        waiting()
        lock.acquire()
    except OSError:
        has_locks = False
    try:
        yield has_locks
    finally:
        with contextlib.suppress(OSError):
            lock.release()


def check_writable(path: Path) -> None:
    """Raises CalibrateError unless a file could be written, or its folder made; it makes nothing.

    Called before long work.
    """
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir() or not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise CalibrateError(
            f"cannot write {path}; give a path that is not a folder, in a folder that you may "
            "write to"
        )


def not_a(kind: str, path: Path) -> str:
    """The problem of a path that is not a file, or a folder, of a kind."""
    return f"{path} is not a {kind}" if path.exists() else f"{path} does not exist"


def remove_leftovers(folder: Path, name: str = "*") -> None:
    """Removes temporary files that killed processes left, of files of this name, or of all.

    Called under a lock; without one, another process would lose the file that it is writing.
    """
    for path in folder.glob(f".{name}.????????.tmp"):
        with contextlib.suppress(OSError):
            os.unlink(path)


def unwritable(path: Path, failure: OSError) -> CalibrateError:
    """The error for a file that cannot be written."""
    return CalibrateError(
        f"cannot write {path}: {failure.strerror or failure}; free some space, or choose a path "
        "that you may write to"
    )


def _link(temporary: Path, path: Path) -> None:
    """Gives a file its name; FileExistsError if the name is taken."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a disk without hard links
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.replace(temporary, path)


def _sync(path: Path) -> None:
    """Calls fsync on a file; or on a folder, so that new names survive a power cut.

    Windows and some network disks have no fsync of folders; there it is left out.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        if not os.path.isdir(path):
            raise
