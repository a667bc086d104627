"""The errors that reach a user: one line each, what was wrong and the remedy."""


class CalibrateError(Exception):
    """What the user can put right; the command line prints it as one line and exits with 1."""

    exit_code = 1


class CoefficientsError(CalibrateError):
    """The one exception of coefficient files, references to them and their store."""


class QualityError(CalibrateError):
    """The data or the fit is not good enough to go on; exit 3."""

    exit_code = 3
