"""The errors that reach a user: one line each, what was wrong and the remedy."""

_LONGEST = 2000


class CalibrateError(Exception):
    """What the user can put right; the command line prints it as one line and exits with 1.

    Messages name paths and values that anybody may have chosen: whatever is not printable is
    escaped, and what is endless is cut.
    """

    exit_code = 1

    def __init__(self, message: str):
        line = " ".join(message.splitlines())
        if len(line) > _LONGEST:
            line = f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line))


class DamagedError(CalibrateError):
    """A file that can be read, and does not hold what it should."""


class CoefficientsError(CalibrateError):
    """The one exception of coefficient files, references to them and their store."""


class QualityError(CalibrateError):
    """The data or the fit is not good enough to go on; exit 3."""

    exit_code = 3
