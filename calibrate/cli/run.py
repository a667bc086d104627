"""`calibrate run`: collect, fit, evaluate and report, on a head or on logits."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from unicodedata import combining, normalize

from typer import Context, Option

from calibrate.cli.collect import collect_rows
from calibrate.cli.fit import fit_options, fit_rows, publish_fit, published_record
from calibrate.cli.options import (
    AsJson,
    Draws,
    HeadName,
    LogitsPath,
    Loss,
    MinBeta,
    MinEntropy,
    Overwrite,
    Paper,
    Q,
    RowsToFit,
    RuleKind,
    Seed,
    Sets,
    Sizes,
    Store,
    check_fit_name,
    check_rule,
    check_source,
    parse_sizes,
)
from calibrate.report.blocks import Record
from calibrate.report.terminal import show

if TYPE_CHECKING:
    from calibrate.datasets.row_collection import RowCollection
    from calibrate.fitting.fit_result import FitResult
    from calibrate.report.fit_record import FitRecord
    from calibrate.report.run_record import SolvedHead
    from calibrate.report.scores_record import ScoresRecord

_LETTERS = str.maketrans({"æ": "ae", "œ": "oe", "ø": "o", "đ": "d", "ł": "l", "ð": "d", "þ": "th"})
MAX_NAME = 64 - len("-polynomial")  # of the fit beside it
_NOT_IN_NAMES = re.compile(r"[^a-z0-9._]+")
RuleOptions = Mapping[str, Any]  # of `fit_options`


def run(
    ctx: Context,
    *,
    head: HeadName = None,
    logits: LogitsPath = None,
    name: Annotated[
        str | None,
        Option(callback=check_fit_name, help="Name of the fit [default: that of the data]"),
    ] = None,
    overwrite: Overwrite = False,
    sizes: Sizes = "16..4096",
    sets: Sets = 1024,
    kind: RuleKind = "auto",
    loss: Loss = "likelihood",
    paper: Paper = False,
    rows: RowsToFit = None,
    q: Q = None,
    min_entropy: MinEntropy = 0.0,
    min_beta: MinBeta = None,
    seed: Seed = 0,
    store: Store = None,
    verbose: Annotated[bool, Option("--verbose", help="Print all rules, kinds and rows.")] = False,
    as_json: AsJson = False,
) -> None:
    """Collect, fit, evaluate and report, in one command.

    The head is evaluated on new held-out sets before and after. Of --logits, 20 % of the rows
    (whole groups) are the test split. If the fit is significantly better than the baseline there,
    it is published as NAME, with the report beside it; if not, nothing is published (exit code 3).
    The same command continues an interrupted run. For a language model, use `calibrate model`.

    Example: calibrate run

    Example: calibrate run --logits mine.npz
    """
    check_source(ctx)
    check_rule(ctx, kind, loss)
    draws = Draws(parse_sizes(sizes), sets, seed)
    from calibrate.store.publishing import check_store

    check_store(store)
    rule = {"paper": paper, "kind": kind, "min_beta": min_beta, "loss": loss, "rows": rows}
    rule |= {"q": q, "min_entropy": min_entropy}
    if logits is None:
        record = _run_on_head(head, name or "quickstart", draws, overwrite, rule, store)
    else:
        record = _run_on_logits(logits, name or name_after(logits), draws, overwrite, rule, store)
    show(record, as_json, verbose)


def _run_on_head(
    reference: str | None,
    name: str,
    draws: Draws,
    overwrite: bool,
    rule: RuleOptions,
    store: Path | None,
) -> Record:
    """Fits a head, and evaluates it before and after on new held-out sets."""
    from calibrate.cli import row_scoring
    from calibrate.cli.loading import load_head
    from calibrate.fitting.fitted_baselines import smaller_q_rules

    head = load_head(reference)
    collection = collect_rows(head, Path("runs") / name, draws, overwrite)
    result = fit_rows(collection, name, fit_options(collection, **rule), head)
    solved = _solved(collection, result)
    fitted = row_scoring.baselines_of(solved, result.selection)
    baselines = {**fitted, **smaller_q_rules(result.selection)}
    scores = row_scoring.score_own(head, draws, result.coefficients, baselines)
    record, solved = _publish(result, solved, scores, rule, store)
    scores = replace(scores, own=record.coefficients.reference)
    return row_scoring.end_run(record, scores, solved)


def _run_on_logits(
    logits: Path, name: str, draws: Draws, overwrite: bool, rule: RuleOptions, store: Path | None
) -> Record:
    """Fits the calibration split of a file or folder, and evaluates the fit on the test split."""
    from calibrate.cli import row_scoring
    from calibrate.cli.loading import read_logits
    from calibrate.evidence.baselines import without_equals
    from calibrate.evidence.evidence import OWN
    from calibrate.fitting.fitted_baselines import baselines_on_logits
    from calibrate.fitting.groups import hold_out

    split = hold_out(read_logits(logits), seed=draws.seed)
    collection = collect_rows(split.fitted, Path("runs") / name, draws, overwrite)
    rule = {**rule, "q": rule["q"] or 0.0}  # there is no head to tune it for
    result = fit_rows(collection, name, fit_options(collection, **rule), None)
    solved = _solved(collection, result)
    polynomial = None if solved is None else solved.polynomial
    baselines = baselines_on_logits(result.rows, result.selection, polynomial)
    own = result.coefficients
    fits = {OWN: own, **without_equals(baselines, {OWN: own})}
    scores = replace(row_scoring.score_logits(split.held_out, fits), fits=(OWN,))
    record, solved = _publish(result, solved, scores, rule, store)
    reference = record.coefficients.reference
    evidence = scores.evidence.renamed({OWN: reference})
    scores = replace(scores, evidence=evidence, fits=(reference,))
    return row_scoring.end_run(record, scores, solved)


def _solved(collection: "RowCollection", result: "FitResult") -> "SolvedHead | None":
    """The rows that a fit was made of, with their polynomial; None where rows name heads."""
    from calibrate.cli import row_scoring

    if result.rows is None:
        return None
    name = f"{result.coefficients.name[:MAX_NAME]}-polynomial"
    return row_scoring.solved_head(collection, result.rows, name)


def _publish(
    result: "FitResult",
    solved: "SolvedHead | None",
    scores: "ScoresRecord",
    rule: RuleOptions,
    store: Path | None,
) -> "tuple[FitRecord, SolvedHead | None]":
    """Publishes a fit that its verdict favours, or whose kind was named, and the polynomial.

    Raises:
      QualityError: the kind was selected, and is not significantly better than the baseline.
    """
    from calibrate.evidence.evidence import OWN
    from calibrate.report.sentences import require_gain

    if rule["kind"] == "auto" and not rule["paper"]:
        require_gain(scores.evidence, OWN, result.coefficients.name)
    record = published_record(result, store)
    if solved is None or solved.polynomial is None:
        return record, solved
    is_same = solved.polynomial == record.coefficients  # as of --paper
    polynomial = record.coefficients if is_same else publish_fit(solved.polynomial, store)
    return record, replace(solved, polynomial=polynomial)


def name_after(path: Path) -> str:
    """The name of a file or folder as that of a fit."""
    path = path.resolve()
    stem = path.stem if path.suffix == ".npz" else path.name
    letters = normalize("NFKD", stem.casefold()).translate(_LETTERS)
    bare = "".join(c for c in letters if not combining(c))
    return _NOT_IN_NAMES.sub("-", bare).strip("-._")[:64] or "mine"
