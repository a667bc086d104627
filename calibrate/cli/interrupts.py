"""Interrupts while no step is under way. Imports next to nothing: it is loaded before the rest."""

import os
from types import FrameType
from typing import NoReturn

from calibrate.exit_codes import ExitCode

MESSAGE = "interrupted; run the same command again to continue"


def end_interrupted(number: int, frame: FrameType | None) -> NoReturn:
    """Ends the process at once: the handler of interrupts.

    An exception might be raised in a callback that JAX sets while it is loaded, where Python prints
    and ignores it, or C++ aborts. Files are written atomically, so none is cut short.
    """
    os.write(2, f"calibrate: {MESSAGE}\n".encode())
    os._exit(ExitCode.INTERRUPTED)
