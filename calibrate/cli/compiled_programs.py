"""A cache of compiled JAX programs, so that the next command need not compile them again."""

import hashlib
import os
import platform
import sys
from collections.abc import MutableMapping
from contextlib import suppress

from calibrate.storage.atomic_io import user_cache

MAX_PROGRAM_BYTES = 1 << 28


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
    is_chosen = any(name.startswith("JAX_COMPILATION_CACHE") for name in environment)
    if is_chosen or sys.platform == "win32":
        return
    with suppress(OSError, RuntimeError):  # without a home folder there is no cache
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
    with suppress(OSError):  # not Linux
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            first = file.read(1 << 14).splitlines()  # long enough for the first processor
        lines = [x for x in first if x.startswith(("flags", "Features", "model name"))][:2]
    return "\n".join([platform.machine(), *lines])
