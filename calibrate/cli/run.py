"""`calibrate run`: collect, fit, evaluate and report, on a head or on logits."""

import re
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from unicodedata import combining, normalize

from typer import Option

from calibrate.cli.collect import CollectRequest, collect_rows
from calibrate.cli.fit import FitRequest, fit_rows, publish_fit, published_record
from calibrate.cli.options import (
    HeadOrLogits,
    Overwrite,
    RuleOptions,
    Sets,
    Sizes,
    Store,
    check_fit_name,
)
from calibrate.cli.request import Request
from calibrate.report.blocks import Record

if TYPE_CHECKING:
    from calibrate.datasets.row_collection import RowCollection
    from calibrate.fitting.fit_result import FitResult
    from calibrate.report.fit_record import FitRecord
    from calibrate.report.run_record import SolvedHead
    from calibrate.report.scores_record import ScoresRecord

_LETTERS = str.maketrans({"æ": "ae", "œ": "oe", "ø": "o", "đ": "d", "ł": "l", "ð": "d", "þ": "th"})
MAX_NAME = 64 - len("-polynomial")  # of the fit beside it
_NOT_IN_NAMES = re.compile(r"[^a-z0-9._]+")


@dataclass(frozen=True)
class RunRequest(Request, HeadOrLogits, RuleOptions):
    _: KW_ONLY
    name: Annotated[
        str | None,
        Option(callback=check_fit_name, help="Name of the fit [default: that of the data]"),
    ] = None
    sizes: Sizes = "16..4096"
    sets: Sets = 1024
    overwrite: Overwrite = False
    store: Store = None
    verbose: Annotated[bool, Option("--verbose", help="Print all rules, kinds and rows.")] = False

    def __post_init__(self) -> None:
        """Checks that nothing is given that would be ignored."""
        super().__post_init__()
        self.check_rule()

    def fit_request(self, name: str, default_q: float | None = None) -> FitRequest:
        """The request of `calibrate fit` for the same rules."""
        options = {field.name: getattr(self, field.name) for field in fields(RuleOptions)}
        options["q"] = default_q if self.q is None else self.q
        return FitRequest(Path("runs") / name, name, store=self.store, **options)


def run(request: RunRequest) -> Record:
    """Collect, fit, evaluate and report, in one command.

    The head is evaluated on new held-out sets before and after. Of --logits, 20 % of the rows
    (whole groups) are the test split. If the fit is significantly better than the baseline there,
    it is published as NAME, with the report beside it; if not, nothing is published (exit code 3).
    The same command continues an interrupted run. For a language model, use `calibrate model`.

    Example: calibrate run

    Example: calibrate run --logits mine.npz
    """
    from calibrate.store.publishing import check_store

    check_store(request.store)
    if request.logits is not None:
        return _run_on_logits(request, request.logits)
    return _run_on_head(request)


def _run_on_head(request: RunRequest) -> Record:
    """Fits a head, and evaluates it before and after on new held-out sets."""
    from calibrate.cli import row_scoring
    from calibrate.cli.loading import load_head
    from calibrate.fitting.fitted_baselines import smaller_q_rules

    name, head = request.name or "quickstart", load_head(request.head)
    collection = collect_rows(_collect_request(request, name), head)
    found = fit_rows(collection, request.fit_request(name), head)
    solved = _solved(collection, found)
    fitted = row_scoring.baselines_of(solved, found.selection)
    baselines = {**fitted, **smaller_q_rules(found.selection)}
    scores = row_scoring.score_own(head, request, found.coefficients, baselines)
    record, solved = _publish(found, solved, scores, request)
    scores = replace(scores, own=record.coefficients.reference)
    return row_scoring.end_run(record, scores, solved)


def _run_on_logits(request: RunRequest, logits: Path) -> Record:
    """Fits the calibration split of a file or folder, and evaluates the fit on the test split."""
    from calibrate.cli import row_scoring
    from calibrate.cli.loading import read_logits
    from calibrate.evidence.baselines import without_equals
    from calibrate.evidence.evidence import OWN
    from calibrate.fitting.fitted_baselines import baselines_on_logits
    from calibrate.fitting.groups import hold_out

    name = request.name or name_after(logits)
    split = hold_out(read_logits(logits), seed=request.seed)
    collection = collect_rows(_collect_request(request, name), split.fitted)
    found = fit_rows(collection, request.fit_request(name, None if request.paper else 0.0))
    solved = _solved(collection, found)
    polynomial = None if solved is None else solved.polynomial
    baselines = baselines_on_logits(found.rows, found.selection, polynomial)
    own = found.coefficients
    fits = {OWN: own, **without_equals(baselines, {OWN: own})}
    scores = replace(row_scoring.score_logits(split.held_out, fits), fits=(OWN,))
    record, solved = _publish(found, solved, scores, request)
    reference = record.coefficients.reference
    evidence = scores.evidence.renamed({OWN: reference})
    scores = replace(scores, evidence=evidence, fits=(reference,))
    return row_scoring.end_run(record, scores, solved)


def _solved(collection: "RowCollection", found: "FitResult") -> "SolvedHead | None":
    """The rows that a fit was made of, with their polynomial; None where rows name heads."""
    from calibrate.cli import row_scoring

    if found.rows is None:
        return None
    name = f"{found.coefficients.name[:MAX_NAME]}-polynomial"
    return row_scoring.solved_head(collection, found.rows, name)


def _publish(
    found: "FitResult", solved: "SolvedHead | None", scores: "ScoresRecord", request: RunRequest
) -> "tuple[FitRecord, SolvedHead | None]":
    """Publishes a fit that its verdict favours, or whose kind was named, and the polynomial.

    Raises:
      QualityError: the kind was selected, and is not significantly better than the baseline.
    """
    from calibrate.evidence.evidence import OWN
    from calibrate.report.sentences import require_gain

    if request.is_chosen:
        require_gain(scores.evidence, OWN, found.coefficients.name)
    record = published_record(found, request.store)
    if solved is None or solved.polynomial is None:
        return record, solved
    is_same = solved.polynomial == record.coefficients  # as of --paper
    polynomial = record.coefficients if is_same else publish_fit(solved.polynomial, request.store)
    return record, replace(solved, polynomial=polynomial)


def _collect_request(request: RunRequest, name: str) -> CollectRequest:
    return CollectRequest(
        Path("runs") / name,
        request.overwrite,
        sizes=request.sizes,
        sets=request.sets,
        seed=request.seed,
    )


def name_after(path: Path) -> str:
    """The name of a file or folder as that of a fit."""
    path = path.resolve()
    stem = path.stem if path.suffix == ".npz" else path.name
    letters = normalize("NFKD", stem.casefold()).translate(_LETTERS)
    bare = "".join(c for c in letters if not combining(c))
    return _NOT_IN_NAMES.sub("-", bare).strip("-._")[:64] or "mine"
