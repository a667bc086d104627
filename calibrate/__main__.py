"""The console script, and `python -m calibrate`; it handles interrupts before it loads the rest."""

import signal

from calibrate.cli.interrupts import end_interrupted


def main() -> None:
    """Runs the command line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not in the background
        signal.signal(signal.SIGINT, end_interrupted)
    from calibrate.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
