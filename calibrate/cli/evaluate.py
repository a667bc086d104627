"""`calibrate evaluate`: score a head, or logits on disk, under fits and simpler rules."""

from dataclasses import dataclass
from typing import Annotated

from typer import Argument, Option

from calibrate.cli.options import HeadOrLogits, ReadStore, Workers
from calibrate.cli.request import Request
from calibrate.report.blocks import Record

FitsToScore = Annotated[str, Option(help="More fits to score: REFERENCE,...")]


@dataclass(frozen=True)
class EvaluateRequest(Request, Workers, HeadOrLogits):
    references: Annotated[
        list[str] | None, Argument(metavar="REFERENCE...", help="Fits to score.")
    ] = None
    fits: FitsToScore = ""
    store: ReadStore = None

    @property
    def all_fits(self) -> str:
        """The fits of both, REFERENCE,... ."""
        return ",".join([*(self.references or []), *filter(None, [self.fits])])


def evaluate(request: EvaluateRequest) -> Record:
    """Score a head or logits under fits and simpler rules.

    Fits are ranked beside the baseline, the paper's published polynomial, log n and argmax,
    and one of them is recommended. Nothing is collected or fitted.

    With --logits, they are scored on the rows of a file or folder by the probability of the target,
    each head with its own entry. Use rows that were not fitted.

    Example: calibrate evaluate max-retrieval@1 paper --head max-retrieval-3 --sizes 16..256
    """
    from calibrate.cli import loading, row_scoring
    from calibrate.evidence.baselines import fixed_rules, without_equals
    from calibrate.report.labels import in_order

    fits = loading.load_fits(request.all_fits, request.store)
    if request.logits is not None:
        return row_scoring.score_logits(loading.read_logits(request.logits), fits)
    rules = in_order({**without_equals(fixed_rules(), fits), **fits})
    head = loading.load_head(request.head)
    return row_scoring.score_head(head, request, rules, list(fits), request.workers)
