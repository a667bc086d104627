"""The console script, and `python -m calibrate`."""

import sys

from calibrate.exit_codes import ExitCode


def main() -> None:
    """Runs the command line. An interrupt is one line, also while the rest is imported.

    Python ignores an interrupt that falls into a callback of JAX's; the next one takes effect.
    """
    try:
        from calibrate.cli.main import run_app

        code = run_app()
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    if code == ExitCode.INTERRUPTED:
        print("calibrate: interrupted; run the same command again to continue", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
