"""The console script, and `python -m calibrate`."""

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
    sys.exit(code)


if __name__ == "__main__":
    main()
