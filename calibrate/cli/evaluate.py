"""`calibrate evaluate`: score a head, or logits on disk, under fits and simpler rules."""

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from calibrate.cli.options import HeadOrLogits, ReadStore, Request, Workers
from calibrate.report.blocks import Record

FitsToScore = Annotated[str, Option(help="Fits to score: REFERENCE,...")]


@dataclass(frozen=True)
class EvaluateRequest(Request, Workers, HeadOrLogits):
    fits: FitsToScore = ""
    store: ReadStore = None


def evaluate(request: EvaluateRequest) -> Record:
    """Score a head or logits under fits and simpler rules.

    --fits are compared with plain softmax, the paper's numbers, log n and hard attention. Nothing
    is collected or fitted.

    With --logits, --fits are scored on the rows of a file or folder by the probability of the
    target, each head with its own entry. Use rows that were not fitted.

    Example: calibrate evaluate --head max-retrieval-3 --sizes 16..256 --fits max-retrieval@1
    """
    from calibrate.cli import loading, scoring
    from calibrate.evidence.baselines import fixed_rules, in_order

    fits = loading.load_fits(request.fits, request.store)
    if request.logits is not None:
        return scoring.score_logits(loading.read_logits(request.logits), fits)
    rules = in_order({**fixed_rules(), **fits})
    head = loading.load_head(request.head)
    return scoring.score_head(head, request, rules, list(fits), request.workers)
