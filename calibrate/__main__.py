"""The console script, and `python -m calibrate`; it keeps JAX's compiled programs."""

import contextlib
import hashlib
import os
import platform
import sys
from collections.abc import MutableMapping

from calibrate.errors import ExitCode

MAX_PROGRAM_BYTES = 1 << 28


def main() -> None:
    """Runs the command line. An interrupt is one line, even during imports.

    Python ignores an interrupt inside a callback of JAX; the next one takes effect.
    """
    try:
        from calibrate.cli.exit_code import run_app
        from calibrate.cli.main import app

        keep_compiled_programs()
        code = run_app(app)
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    if code == ExitCode.INTERRUPTED:
        print("calibrate: interrupted; run the same command again to continue", file=sys.stderr)
        # Python's own exit ends in a segmentation fault in one of five interrupted fits, as threads
        # of JAX are still at work. Files are closed by now.
        with contextlib.suppress(OSError, AttributeError):  # a closed or absent stream
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def keep_compiled_programs(
    environment: MutableMapping[str, str] = os.environ, processor: str | None = None
) -> None:
    """Sets JAX's compilation cache to the user's cache folder, unless the user has set it.

    JAX reads these variables when it is imported. A folder that others may write to is not used,
    since JAX runs the programs in it unchecked. Each processor has a folder of its own, since
    programs for another one may fail.

    Args:
      environment: to read and change.
      processor: a description of the target; None is this machine.
    """
    from calibrate.storage.atomic_io import user_cache  # deferred: an interrupt is one line

    is_chosen = any(name.startswith("JAX_COMPILATION_CACHE") for name in environment)
    if is_chosen or sys.platform == "win32":
        return
    with contextlib.suppress(OSError, RuntimeError):  # without a home folder there is no cache
        digest = hashlib.sha256((processor or _processor()).encode()).hexdigest()[:16]
        folder = user_cache(environment) / f"compiled-{digest}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid == os.getuid() and not status.st_mode & 0o022:
            environment["JAX_COMPILATION_CACHE_DIR"] = str(folder)
            environment["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(MAX_PROGRAM_BYTES)
            environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")


def _processor() -> str:
    """Describes this machine: its architecture, and the instructions of its processor."""
    lines = []
    with contextlib.suppress(OSError):  # not Linux
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            first = file.read(1 << 14).splitlines()  # long enough for the first processor
        lines = [x for x in first if x.startswith(("flags", "Features", "model name"))][:2]
    return "\n".join([platform.machine(), *lines])


if __name__ == "__main__":
    main()
