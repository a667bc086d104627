"""Compiled programs of JAX, kept from one command to the next: the second does not compile anew."""

import hashlib
import os
import platform
import sys
from collections.abc import MutableMapping
from contextlib import suppress

from calibrate.storage.atomic_io import user_cache

MAX_BYTES = 1 << 28


def keep_compiled_programs(
    environment: MutableMapping[str, str] = os.environ, processor: str | None = None
) -> None:
    """Has JAX keep them in the user's cache folder, unless the user has said where or whether.

    JAX reads this when it is imported, and removes those that were not used for longest. A folder
    that others may write to is not used: programs are run as they are found. Nor is one of another
    processor (None is this one): its programs may not run here.
    """
    is_chosen = any(name.startswith("JAX_COMPILATION_CACHE") for name in environment)
    if is_chosen or sys.platform == "win32":
        return
    with suppress(OSError, RuntimeError):  # without a folder, or a home, they are compiled anew
        of_processor = hashlib.sha256((processor or _processor()).encode()).hexdigest()[:16]
        folder = user_cache(environment) / f"compiled-{of_processor}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid == os.getuid() and not found.st_mode & 0o022:
            environment["JAX_COMPILATION_CACHE_DIR"] = str(folder)
            environment["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(MAX_BYTES)
            environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")


def _processor() -> str:
    """Describes the target of compiled programs: the machine's name, and its instructions."""
    known = []
    with suppress(OSError):  # not Linux
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            first = file.read(1 << 14).splitlines()  # long enough for the first processor
        known = [x for x in first if x.startswith(("flags", "Features", "model name"))][:2]
    return "\n".join([platform.machine(), *known])
