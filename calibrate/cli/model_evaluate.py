"""`calibrate model evaluate`: score fits by a model's own answers."""

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from calibrate.cli.evaluate import ScoresRequest
from calibrate.cli.options import Constants, RunOrExamples, parse_betas
from calibrate.report.blocks import Record


@dataclass(frozen=True)
class ModelEvaluateRequest(ScoresRequest, RunOrExamples):
    constants: Constants = ""
    trained_up_to: Annotated[
        int | None,
        Option(min=2, help="Tokens the model was trained up to, N; log n / log N is compared."),
    ] = None

    def __post_init__(self) -> None:
        """Checks what goes together."""
        super().__post_init__()
        parse_betas(self.constants)
        self.check_output()


def evaluate(request: ModelEvaluateRequest) -> Record:
    """Score fits by a model's own answers, beside simpler rules.

    Log p and how many are right, by template and length, on RUN, a collection of examples, or on
    those that --model and the options of `model collect` make. Of the collection that a fit was
    made of, only the examples count that it has not seen. With RUN, scores are kept: the same
    command continues where it was interrupted.

    Example: calibrate model evaluate runs/model --fits mine --constants 1.15,1.3
    """
    from calibrate.cli.loading import load_fits, open_or_make

    fits, constants = load_fits(request.fits, request.store), parse_betas(request.constants)
    found = open_or_make(request.model, request, request.run)
    from calibrate.cli.model_scoring import rules_beside, score_rules

    return score_rules(*found, fits, rules_beside(constants, request.trained_up_to))
