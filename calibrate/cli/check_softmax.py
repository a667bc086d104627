"""`calibrate check-softmax`: names the faults of somebody else's adaptive softmax."""

from typing import Annotated

from typer import Argument, Option

from calibrate.cli.options import AsJson
from calibrate.errors import QualityError
from calibrate.report.blocks import Result, Text
from calibrate.report.terminal import show


def check_softmax_command(
    function: Annotated[str, Argument(help="MODULE:FUNCTION, found in the working folder first.")],
    *,
    fit: Annotated[str, Option(help="The fit that it should apply; paper: the published one.")] = (
        "paper"
    ),
    mask: Annotated[
        str | None,
        Option(
            help="Argument that takes a bool mask, True for real items [default: where or mask]"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the faults of an adaptive-temperature softmax.

    The function takes logits, of NumPy, PyTorch or JAX, and returns probabilities. It is run on
    some thirty inputs with known results. If it is wrong (exit code 3), the command names the
    mistake that explains it, such as reversed coefficients or the entropy in bits, and the remedy.

    Example: calibrate check-softmax my_model:adaptive_softmax
    """
    from calibrate.conformance.calls import load_function
    from calibrate.conformance.check_softmax import check_softmax

    check = check_softmax(load_function(function), fit, mask=mask)
    failure = None if check.right else QualityError(f"{function} does not apply the rule")
    show(Result([Text(line) for line in str(check).splitlines()], check, failure), as_json)
