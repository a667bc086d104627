"""The result of `calibrate check-softmax`."""

from calibrate.conformance.check_softmax import SoftmaxCheck
from calibrate.errors import QualityError
from calibrate.report.blocks import Result, Text


def softmax_result(function: str, check: SoftmaxCheck) -> Result:
    """The verdict with its remedies; a failure, exit code 3, if the function is wrong."""
    failure = None if check.right else QualityError(f"{function} does not apply the rule")
    return Result([Text(line) for line in str(check).splitlines()], check, failure)
