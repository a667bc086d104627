"""System calls that can be made to fail, or to be the last ones of a process that dies."""

import builtins
import contextlib
import fcntl
import gc
import os

_OF_OS = ("open", "fsync", "close", "link", "replace", "unlink", "mkdir", "listdir")


class Crash(BaseException):
    """The process ends here: no handler may run after it, and none that runs gets anywhere."""


def failing(code):
    """A system call that fails each time."""

    def call(*_, **__):
        raise OSError(code, os.strerror(code))

    return call


class Syscalls:
    """Counts the calls of the code under test, and does something at one of them.

    Use as a context manager around code of one thread. `calls` are the names of those that came,
    and `paths` what each was about: its first argument, and for a descriptor the path of its file.

    Args:
      at: number of the call, from 0, that does not happen; None lets all happen.
      error: an errno: that one call fails with it. None: the process dies there, and no later
        call happens either.
    """

    def __init__(self, at=None, error=None):
        self.at, self.error = at, error
        self.calls, self.paths = [], []
        self._path_of = {}  # by descriptor
        self._undo = contextlib.ExitStack()

    def __enter__(self):
        gc.disable()  # a lock of an earlier crash, if collected here, would make calls of its own
        self._undo.callback(gc.enable)
        for name in _OF_OS:
            self._replace(os, name)
        self._replace(fcntl, "flock")
        self._replace(builtins, "open")
        return self

    def __exit__(self, *_):
        self._undo.close()

    @property
    def reached(self):
        """Whether the call that was chosen came."""
        return self.at is not None and len(self.calls) > self.at

    def _replace(self, module, name):
        original = getattr(module, name)

        def call(*arguments, **options):
            subject = arguments[0] if arguments else None
            path = str(self._path_of.get(subject, subject))
            # A close or unlock that fails, and a process that dies, close and unlock all the same.
            if name == "close" or arguments[1:] == (fcntl.LOCK_UN,):
                original(*arguments)
                return self._count(f"{module.__name__}.{name}", path)
            self._count(f"{module.__name__}.{name}", path)
            result = original(*arguments, **options)
            if module is builtins:
                self._path_of[result.fileno()] = path
                return _CountedFile(result, self)
            if name == "open":
                self._path_of[result] = path
            return result

        setattr(module, name, call)
        self._undo.callback(setattr, module, name, original)

    def _count(self, name, path=None):
        number = len(self.calls)
        self.calls.append(name)
        self.paths.append(path)
        if self.at is None or number < self.at:
            return
        if self.error is None:
            raise Crash(f"{name}, call {self.at}")
        if number == self.at:
            raise OSError(self.error, os.strerror(self.error))


class _CountedFile:
    def __init__(self, file, syscalls):
        self._file, self._syscalls = file, syscalls

    def read(self, *arguments):
        self._syscalls._count("read")
        return self._file.read(*arguments)

    def write(self, data):
        self._syscalls._count("write")
        return self._file.write(data)

    def flush(self):
        self._syscalls._count("flush")
        self._file.flush()

    def fileno(self):
        return self._file.fileno()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()
