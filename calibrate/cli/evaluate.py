"""`calibrate evaluate`: score a head, or logits on disk, under fits and simpler rules."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from typer import BadParameter, Option

from calibrate.cli.loading import load_fits, load_head, read_logits, refuse_per_head
from calibrate.cli.options import HeadOrLogits, ReadStore, Workers
from calibrate.cli.progress import Steps
from calibrate.cli.request import Request
from calibrate.parallel.jobs import ONE_PROCESS, Jobs

if TYPE_CHECKING:
    from calibrate.evidence.evidence import Evidence
    from calibrate.files.coefficients import Coefficients
    from calibrate.report.scores_record import ScoresRecord
    from calibrate.rows.heads import Head
    from calibrate.rows.logits_files import Arrays
    from calibrate.rows.work_units import Unit


@dataclass(frozen=True)
class Scored(Request):
    """Fits to score, and how scores are printed."""

    fits: Annotated[str, Option(help="Fits to score: REFERENCE,...")] = ""
    store: ReadStore = None
    as_csv: Annotated[bool, Option("--csv", help="Print the scores as CSV.")] = False

    def show(self, record: Any) -> None:
        """Prints the scores."""
        if self.as_csv:
            print(record.as_csv(), end="")
        else:
            super().show(record)


@dataclass(frozen=True)
class EvaluateRequest(Scored, Workers, HeadOrLogits):
    """What `calibrate evaluate` is asked for."""

    def __post_init__(self) -> None:
        """Checks what goes together."""
        super().__post_init__()
        if self.as_csv and self.as_json:
            raise BadParameter("--csv cannot be used with --json")


def evaluate(request: EvaluateRequest) -> "ScoresRecord":
    """Score a head or logits under fits and simpler rules.

    --fits are compared with plain softmax, the paper's numbers, log n and hard attention. Nothing
    is collected or fitted.

    With --logits, --fits are scored on the rows of a file or folder by the probability of the
    target, each head with its own entry. Use rows that were not fitted.

    Example: calibrate evaluate --head max-retrieval-3 --sizes 16..256 --fits max-retrieval@1
    """
    from calibrate.evidence.baselines import fixed_rules, in_order
    from calibrate.report.scores_record import ScoresRecord

    fits = load_fits(request.fits, request.store)
    if request.logits is not None:
        return ScoresRecord(score_logits(read_logits(request.logits), fits), tuple(fits))
    for fit in fits.values():
        refuse_per_head(fit)
    head, rules = load_head(request.head), in_order({**fixed_rules(), **fits})
    return ScoresRecord(score_head(head, request, rules, request.workers), tuple(fits))


def score_head(
    head: "Head", sets: HeadOrLogits, rules: "Mapping[str, Coefficients]", jobs: Jobs = ONE_PROCESS
) -> "Evidence":
    """Scores one head on fresh sets, with a line per set size."""
    from calibrate.rows.score_head import score_head

    sizes = sets.set_sizes
    with Steps("scoring", len(sizes), at_once=jobs.uses_workers) as steps:
        return score_head(
            head, sizes, sets.sets, sets.seed, rules, jobs=jobs,
            report=lambda size, sets: steps.advance(
                f"  n = {size:>6,}  scored on {sets:,} fresh sets"
            ),
        )  # fmt: skip


def score_logits(arrays: "Arrays", fits: "Mapping[str, Coefficients]") -> "Evidence":
    """Scores fits on logits, with a line per set size."""
    from calibrate.rows.score_logits import score_logits
    from calibrate.rows.work_units import plan_units

    units = sum(len(plan_units(size, arrays.count(size))) for size in arrays.sizes)
    with Steps("scoring", units) as steps:

        def report(unit: "Unit") -> None:
            count = arrays.count(unit.size)
            done = unit.first + unit.sets == count
            steps.advance(f"  n = {unit.size:>6,}  {count:,} rows" if done else None)

        return score_logits(arrays, fits, report)
