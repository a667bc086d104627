"""Fitting a collection: a calibrated rule with its evidence, uncertainty and provenance."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from calibrate.core.rule import beta_of
from calibrate.datasets.collection import open_collection
from calibrate.datasets.row_quality import check_bad_rows, count_bad
from calibrate.datasets.rows import RowCollection
from calibrate.errors import CalibrateError, QualityError, parameter
from calibrate.fitting.groups import N_BLOCKS
from calibrate.fitting.per_head import HeadFit, fit_heads, quality_of_heads
from calibrate.fitting.polynomial_rule import FittedPolynomial, score_polynomial
from calibrate.fitting.row_problem import Candidate
from calibrate.fitting.rule_fitting import (
    LIKELIHOOD,
    MIN_BETA_LIMIT,
    KindFit,
    Options,
    applied_beta,
)
from calibrate.fitting.select import Accuracy, Choice, bound_note, choose
from calibrate.parallel.jobs import ONE_PROCESS, Jobs, run, with_cluster
from calibrate.rows.heads import Head
from calibrate.rows.score_head import VALIDATION_STREAM, score_head
from calibrate.solver.solved_rows import Rows, solve_collection
from calibrate.store.coefficients import Coefficients
from calibrate.store.publishing import provenance

# Of each size, at most, that choose q.
VALIDATION_SETS = 1_024
VALIDATION_ITEMS = 1 << 19
N_RESAMPLES = 200
INTERVAL = (2.5, 97.5)  # per cent
N_CHUNKS = 8  # of resamples; one is a task
BAND_POINTS = 65
JUST_ABOVE = 1e-6  # nats
N_ERRORS = 3  # standard errors by which argmax has to be better than a guess


@dataclass(frozen=True, eq=False)
class FitResult:
    """A fit, and what it was made of."""

    coefficients: Coefficients
    rows: Rows | None = None  # None: of many heads
    choice: Choice | None = None  # why it is of this kind; None: by the paper's procedure
    heads: Sequence[HeadFit] = ()  # of a fit per head: every head, in order


def open_for_fit(folder: Path, allow_partial: bool = False) -> RowCollection:
    """Opens a collection to fit it; an unfinished one with a warning, and only if it is allowed."""
    collection = open_collection(folder, RowCollection, allow_partial)
    if collection.partial:
        n_shards = len(collection.manifest["shards"])
        warnings.warn(
            f"{folder} is unfinished; the fit is made of its {n_shards} finished shards",
            stacklevel=2,
        )
    return collection


def fit_collection(
    collection: RowCollection | Path,
    name: str,
    options: Options | None = None,
    jobs: Jobs = ONE_PROCESS,
    head: Head | None = None,
) -> FitResult:
    """Solves a collection, and fits the rule that its head needs.

    Args:
      collection: or its folder.
      name: of the fit.
      options: of the fit; None are the defaults.
      jobs: where solver, bootstrap and head run; the result does not depend on it.
      head: of the collection, whose accuracy chooses q if the options leave it open; without one
        that can be scored q is 0.
    Raises:
      CalibrateError: the collection is absent, unfinished or damaged, names heads, lacks the rows
        asked for, or is of another head; or an option is out of range.
      QualityError: too few rows, too many bad ones, or no significant improvement by any rule.
    """
    collection = _opened(collection)
    options = resolve_options(collection, options)
    if options.loss != LIKELIHOOD:
        rows = solve_collection(collection, jobs, options.min_beta)
        return fit_solved(collection, rows, name, options)
    with with_cluster(jobs) as running:
        rows = solve_collection(collection, running, options.min_beta)
        accuracy = None if head is None else accuracy_of(head, collection, running)
        choice = choose(rows, options, accuracy)
        _check_bounds(collection, rows, choice.chosen.fit)
        quality = _quality(collection, rows, choice, running)
    fit = _add_metadata(choice.chosen.fit, name, collection, quality, options.record())
    return FitResult(fit, rows, choice)


def _check_bounds(collection: RowCollection, rows: Rows, fit: Coefficients) -> None:
    """Warns of a beta at a bound; raises QualityError if it is 1/64 and argmax is at chance.

    That is decided by all good rows, whichever are kept. Ties with a target count as wrong, as
    constant logits would be right otherwise.
    """
    note = bound_note(rows, fit)
    if not note:
        return
    at_lower = fit.rule.min_beta == MIN_BETA_LIMIT and bool(applied_beta(fit, rows).mean() < 1)
    sizes = [x for x in collection.manifest["sizes"] if (rows.size == x["size"]).any()]
    good = np.array([size["rows"] - count_bad(size) for size in sizes])
    n, chances = good.sum(), [np.mean(1 / rows.items[rows.size == x["size"]]) for x in sizes]
    right = 1 - sum(size["misranked"] + size["ties"] for size in sizes) / n
    chance = float(good @ chances / n)
    if at_lower and right <= chance + N_ERRORS * np.sqrt(chance * (1 - chance) / n):
        raise QualityError(
            "the logits carry no information about the targets (argmax is right in "
            f"{right:.1%} of the rows, a guess in {chance:.1%}); check that target holds the "
            "positions that should win"
        )
    warnings.warn(note, stacklevel=2)


def accuracy_of(head: Head, collection: RowCollection, jobs: Jobs) -> Accuracy | None:
    """Scores rules on validation sets; None of a head that cannot be scored.

    Raises:
      CalibrateError: the collection is of another head.
    """
    made_of = collection.manifest["configuration"]
    if head.fingerprint != made_of["fingerprint"]:
        raise CalibrateError(
            f"{collection.folder} was made of head {made_of['head']!r} ({made_of['fingerprint']}), "
            f"not of {head.name!r} ({head.fingerprint}); give that head"
        )
    if getattr(head, "correct", None) is None:
        return None
    sizes = [size["size"] for size in collection.manifest["sizes"]]
    sets = {n: min(VALIDATION_SETS, max(1, VALIDATION_ITEMS // n)) for n in sizes}
    return partial(
        score_head, head, sizes, sets, made_of["seed"], jobs=jobs, stream=VALIDATION_STREAM
    )


def fit_heads_of_collection(
    collection: RowCollection | Path,
    name: str,
    options: Options | None = None,
    jobs: Jobs = ONE_PROCESS,
    report: Callable[[int], None] = lambda heads: None,
) -> FitResult:
    """Solves a collection of named heads, and fits each of them.

    Args and errors are those of `fit_collection`; a task of `jobs` is a group of heads, and
    `report` is called after each with their number.
    """
    collection = _opened(collection, per_head=True)
    options = resolve_options(collection, options)
    fits, heads, statuses = fit_heads(collection, options, jobs, report)
    quality = {"rows": _row_counts(collection, statuses)} | quality_of_heads(heads, options)
    coefficients = _add_metadata(fits, name, collection, quality, options.record())
    return FitResult(coefficients, heads=heads)


def _opened(collection: RowCollection | Path, per_head: bool = False) -> RowCollection:
    """A collection without too many bad rows; for one rule, of rows that name no heads."""
    if not isinstance(collection, RowCollection):
        collection = open_for_fit(Path(collection))
    check_bad_rows(collection.manifest)
    if collection.heads and not per_head:
        raise CalibrateError(
            f"{collection.folder} says which heads its rows are of ({len(collection.heads)}); fit "
            "each of them by likelihood, as `calibrate fit` does"
        )
    return collection


def resolve_options(collection: RowCollection, options: Options | None = None) -> Options:
    """The options, checked; what they leave open is as the collection has it."""
    options, configuration = options or Options(), collection.manifest["configuration"]
    kept = configuration.get("keep", "misranked")
    if options.rows == "all" and kept != "all":
        raise CalibrateError(
            f"{collection.folder} keeps misranked rows only, and all are asked for; collect into "
            f"another folder and keep all rows, or fit with {parameter('rows', 'misranked')}"
        )
    if options.trained_up_to is None:
        options = options._replace(trained_up_to=configuration.get("trained_up_to"))
    return options._replace(rows=options.rows or kept).checked()


def fit_solved(collection: RowCollection, rows: Rows, name: str, options: Options) -> FitResult:
    """Fits the polynomial to the optimal betas of solved rows.

    Args:
      collection: whose rows these are.
      rows: all that it has, solved.
      name: of the fit.
      options: with a loss of the optimal beta.
    Raises:
      CalibrateError: an option is out of range.
      QualityError: fewer than 100 rows with a finite optimum.
    """
    options = resolve_options(collection, options)
    fitted = score_polynomial(rows, options)
    counts = {"used": fitted.powers.n_rows, "at_bound": fitted.powers.n_at_bound}
    quality = {
        "rows": _row_counts(collection, rows.count_by_status()) | counts,
        "residuals": _residuals(rows, fitted),
        "held_out": fitted.held_out.gain_records(),
        "verdict": fitted.verdict,
    }
    fit = _add_metadata(fitted.fit, name, collection, quality, options.record())
    return FitResult(fit, rows)


def _add_metadata(
    fit: Coefficients,
    name: str,
    collection: RowCollection,
    quality: dict[str, Any],
    options: dict[str, Any],
) -> Coefficients:
    """The rule with its name, its evidence, and where it came from."""
    if collection.partial:
        options = {**options, "partial": True}
        if "verdict" in quality:
            quality = {**quality, "verdict": f"of an unfinished collection: {quality['verdict']}"}
    configuration = collection.manifest["configuration"]
    split = {key: configuration[key] for key in ("held_out",) if key in configuration}
    source = {
        "head": configuration["head"],
        "fingerprint": configuration["fingerprint"],
        "collection": collection.digest,
        "seed": configuration["seed"],
        "options": options | split,
    }
    return replace(fit, name=name, quality=quality, source=source, provenance=provenance())


def _quality(collection: RowCollection, rows: Rows, choice: Choice, jobs: Jobs) -> dict[str, Any]:
    chosen, options = choice.chosen, choice.problem.options
    errors, band = bootstrap(chosen, jobs)
    least = chosen.fit.rule.min_entropy
    counts = {
        "used": int(options.usable(rows, chosen.kind).sum()),
        "gated": int((least > 0) * (rows.entropy <= least).sum()),
    }
    return {
        "rows": _row_counts(collection, rows.count_by_status()) | counts,
        "standard_errors": [errors],
        "condition": chosen.kind_fit.condition,
        "held_out": choice.held_out.gain_records(),
        "candidates": [_candidate_record(c) for c in [*choice.candidates, *choice.trade[1:]]],
        **({} if band is None else {"band": band.tolist()}),
        "q": chosen.q,
        "verdict": choice.verdict,
    }


def _candidate_record(candidate: Candidate) -> dict[str, Any]:
    """A rule that was weighed: its numbers, and its scores on rows that folds left out."""
    (mean, low, high, _), entry = candidate.gain, candidate.fit.only
    return {
        "kind": candidate.kind,
        "loss": LIKELIHOOD,
        "q": candidate.q,
        "log_p": candidate.mean_log_p,
        "p": candidate.mean_p,
        "gain": mean,
        "low": low,
        "high": high,
        "coefficients": list(entry.coefficients),
        "domain": list(entry.domain),
    }


def _row_counts(collection: RowCollection, statuses: Mapping[str, int]) -> dict[str, int]:
    sizes = collection.manifest["sizes"]
    totals = {key: sum(size[key] for size in sizes) for key in sizes[0] if key != "size"}
    return {**totals, **statuses}


def _residuals(rows: Rows, fitted: FittedPolynomial) -> dict[str, float]:
    """The error of the fit on rows with a finite optimum; theta as it is applied, at most 1."""
    used = rows.interior()
    applied = applied_beta(fitted.fit, used)
    return {
        "beta_rms": float(np.sqrt(np.mean((applied - used.beta) ** 2))),
        "theta_rms": float(np.sqrt(np.mean((1 / applied - np.minimum(1 / used.beta, 1)) ** 2))),
        "log_beta_r_squared": fitted.powers.r_squared,
    }


def bootstrap(
    candidate: Candidate, jobs: Jobs = ONE_PROCESS
) -> tuple[list[float], np.ndarray | None]:
    """Fits to blocks that are drawn with replacement, of those that have rows.

    Returns:
      Standard errors of the coefficients in plain powers; and (points, 3): entropy or log n, and
      the 95 % interval of beta there, None of a rule of both.
    """
    kind_fit, rng = candidate.kind_fit, np.random.default_rng(1)
    blocks = kind_fit.data.blocks
    used = len(blocks)
    drawn = np.zeros((N_RESAMPLES, N_BLOCKS))
    drawn[:, blocks] = rng.multinomial(used, [1 / used] * used, N_RESAMPLES)
    chunks = np.array_split(drawn, N_CHUNKS)
    tasks = [partial(_refit, kind_fit, candidate.solution, chunk) for chunk in chunks]
    solutions = np.concatenate(run(tasks, jobs))
    powers = np.array([kind_fit.plain_coefficients(c) for c in solutions])
    return powers.std(axis=0, ddof=1).tolist(), _band(kind_fit, powers)


def _band(kind_fit: KindFit, powers: np.ndarray) -> np.ndarray | None:
    """The interval of the curves of (resamples, coefficients)."""
    if kind_fit.rule.by_entropy and kind_fit.rule.by_size:
        return None
    x = np.linspace(kind_fit.domain[0], kind_fit.domain[1], BAND_POINTS)
    if least := kind_fit.rule.min_entropy:
        x[0] = max(x[0], least + JUST_ABOVE)  # where the rule is on
    curves = [beta_of(x, x, tuple(p), kind_fit.domain, kind_fit.rule, np) for p in powers]
    low, high = np.percentile(curves, INTERVAL, axis=0)
    return np.stack([x, low, high], axis=1)


def _refit(kind_fit: KindFit, start: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    with threadpool_limits(1):  # sums of several threads differ in their last bits
        return kind_fit.solve_each(drawn, start)
