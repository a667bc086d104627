"""How a command ends: a failure is one line, and the exit code says which kind."""

import os
import sys
import warnings
from types import FrameType
from typing import Any, NoReturn

from typer import Abort
from typer.core import TyperGroup

from calibrate.errors import CalibrateError

INTERRUPTED = 130  # exit code
_INTERRUPTED = "interrupted; the same command carries on with what is collected, or trained"


class Commands(TyperGroup):
    """Ends a command that fails with one line, and with the exit code that says which kind."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("default", UserWarning)
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except CalibrateError as error:
            if ctx.params["debug"]:
                raise
            _stop(str(error), error.exit_code)
        except (BrokenPipeError, Abort):
            raise
        except OSError as error:
            if ctx.params["debug"]:
                raise
            _stop(f"{error.filename or 'output'}: {error.strerror}; check the path and the disk", 1)
        except Exception as error:
            if ctx.params["debug"] or hasattr(error, "exit_code"):
                raise  # what has an exit code is Typer's own, a usage error for instance
            _stop(f"{type(error).__name__}: {error}; this is a bug: see it with --debug", 1)
        except KeyboardInterrupt:
            _stop(_INTERRUPTED, INTERRUPTED)


def end_interrupted(number: int, frame: FrameType | None) -> NoReturn:
    """What an interrupt does where no step is under way, in which it would wait or clean up.

    An exception might hit a callback that JAX sets while it is loaded, where Python prints and
    forgets it, or C++ aborts. Whatever is written appears whole or not at all.
    """
    os.write(2, f"calibrate: {_INTERRUPTED}\n".encode())
    os._exit(INTERRUPTED)


def _show_warning(message: Any, *where: Any, **also: Any) -> None:
    print("calibrate: warning: " + " ".join(str(message).split()), file=sys.stderr)


def _stop(message: str, exit_code: int) -> NoReturn:
    print("calibrate: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(exit_code)
