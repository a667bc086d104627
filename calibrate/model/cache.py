"""A cache of results of passes, in a hidden folder of a collection that is not a part of it.

An interrupted command needs the same passes in the same order, and reads those made before.
"""

import hashlib
import importlib.metadata
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from calibrate.datasets.examples import PASSES, ExampleCollection
from calibrate.datasets.resume import read_if_sound
from calibrate.model.runner import MODEL_PACKAGES
from calibrate.storage.atomic_io import write_atomically

_CACHE_VERSION = "4"  # changes where a pass computes something else: cached ones are made again
_MAX_BYTES = 1 << 28  # of one

Content = TypeVar("Content")


class ResultCache:
    """Results of passes, which depend on a context, in the folder of a collection or nowhere."""

    def __init__(self, folder: Path | None, *context: str):
        self._folder, self._context = folder and folder / PASSES, context

    def find(self, key: bytes, parse: Callable[[bytes, Path], Content]) -> Content | None:
        """A result, if a sound one is there."""
        return read_if_sound(self._path(key), _MAX_BYTES, parse) if self._folder else None

    def keep(self, key: bytes, data: bytes) -> None:
        """Keeps a result."""
        if self._folder:
            write_atomically(self._path(key), data)

    def _path(self, key: bytes) -> Path:
        name = hashlib.sha256(b"\0".join([*map(str.encode, self._context), key])).hexdigest()
        return (self._folder or Path()) / f"{name[:32]}.npz"


NO_CACHE = ResultCache(None)


def result_cache(collection: ExampleCollection, device: torch.device | str) -> ResultCache:
    """The cache of a collection, of these versions and this processor."""
    rounds = (
        _CACHE_VERSION,
        processor(torch.device(device)),
        *map(importlib.metadata.version, MODEL_PACKAGES),
    )
    return ResultCache(collection.folder, collection.digest, *rounds)


def processor(device: torch.device) -> str:
    """The processor, whose rounding results depend on; the number of threads matters as little."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
