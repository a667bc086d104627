"""Exit codes and failure messages: one line on stderr per failed command."""

import sys
import warnings
from typing import Any, NoReturn

from typer import Abort
from typer.core import TyperGroup

from calibrate.cli import interrupts
from calibrate.errors import CalibrateError


class Commands(TyperGroup):
    """The app's commands; a failure is one line on stderr and an exit code."""

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
            _stop(f"{type(error).__name__}: {error}; this is a bug; --debug shows the traceback", 1)
        except KeyboardInterrupt:
            _stop(interrupts.MESSAGE, interrupts.EXIT_CODE)


def _show_warning(message: Any, *where: Any, **also: Any) -> None:
    print("calibrate: warning: " + " ".join(str(message).split()), file=sys.stderr)


def _stop(message: str, exit_code: int) -> NoReturn:
    print("calibrate: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(exit_code)
