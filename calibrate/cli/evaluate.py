"""`calibrate evaluate`: score a head, or logits on disk, under fits and simpler rules."""

from dataclasses import dataclass
from typing import Annotated, Any

from typer import BadParameter, Option

from calibrate.cli.options import HeadOrLogits, ReadStore, Workers
from calibrate.cli.request import Request
from calibrate.report.blocks import Record


@dataclass(frozen=True)
class ScoresRequest(Request):
    """Fits to score, and how scores are printed."""

    fits: Annotated[str, Option(help="Fits to score: REFERENCE,...")] = ""
    store: ReadStore = None
    as_csv: Annotated[bool, Option("--csv", help="Print the scores as CSV.")] = False

    def check_output(self) -> None:
        """Checks that one format is asked for."""
        if self.as_csv and self.as_json:
            raise BadParameter("--csv cannot be used with --json")

    def show(self, record: Any) -> None:
        """Prints the scores."""
        if self.as_csv:
            print(record.as_csv(), end="")
        else:
            super().show(record)


@dataclass(frozen=True)
class EvaluateRequest(ScoresRequest, Workers, HeadOrLogits):
    def __post_init__(self) -> None:
        """Checks what goes together."""
        super().__post_init__()
        self.check_output()


def evaluate(request: EvaluateRequest) -> Record:
    """Score a head or logits under fits and simpler rules.

    --fits are compared with plain softmax, the paper's numbers, log n and hard attention. Nothing
    is collected or fitted.

    With --logits, --fits are scored on the rows of a file or folder by the probability of the
    target, each head with its own entry. Use rows that were not fitted.

    Example: calibrate evaluate --head max-retrieval-3 --sizes 16..256 --fits max-retrieval@1
    """
    from calibrate.cli import loading, scoring

    fits = loading.load_fits(request.fits, request.store)
    if request.logits is not None:
        return scoring.score_logits(loading.read_logits(request.logits), fits)
    for fit in fits.values():
        loading.refuse_per_head(fit)
    return scoring.score_head(loading.load_head(request.head), request, fits, request.workers)
