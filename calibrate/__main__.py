"""The console script, and `python -m calibrate`."""

import contextlib
import os
import sys

from calibrate.errors import ExitCode


def main() -> None:
    """Runs the command line. An interrupt is one line, even during imports.

    Python ignores an interrupt inside a callback of JAX; the next one takes effect.
    """
    try:
        from calibrate.cli.compiled_programs import keep_compiled_programs
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


if __name__ == "__main__":
    main()
