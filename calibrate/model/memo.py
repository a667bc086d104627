"""Results of passes through a model, kept so that an interrupted fit carries on where it stopped.

A fit asks for the same passes in the same order; those that were made before are read. A result is
an .npz whose name is a digest of all that it depends on. The folder is hidden: no part of the
collection.
"""

import hashlib
import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from calibrate.errors import CalibrateError
from calibrate.files.atomic_io import write_atomically
from calibrate.files.npz import pack_arrays, parse_arrays, read_bytes

FOLDER = ".passes"
_MOST_BYTES = 1 << 26

Arrays = dict[str, np.ndarray]


class Memo:
    """Results in a folder, or nowhere if it is None.

    Args:
      folder: of a collection.
      context: what all of the results depend on.
    """

    def __init__(self, folder: Path | None, *context: str):
        self._folder = None if folder is None else folder / FOLDER
        self._context = context

    def get(self, key: bytes, make: Callable[[], Arrays]) -> tuple[Arrays, bool]:
        """A result, which is made unless it is there; and whether it was."""
        if self._folder is None:
            return make(), False
        name = hashlib.sha256(b"\0".join([*map(str.encode, self._context), key])).hexdigest()
        path = self._folder / f"{name[:32]}.npz"
        try:
            return parse_arrays(read_bytes(path, _MOST_BYTES), path), True
        except CalibrateError:  # absent or damaged
            made = make()
            self._folder.mkdir(exist_ok=True)
            write_atomically(path, pack_arrays(made))
            return made, False


def processor(device: torch.device) -> str:
    """What rounds the results of passes: another processor has others.

    The number of threads is left out: its rounding is as small, and an interrupted fit may go on
    with more of them.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
