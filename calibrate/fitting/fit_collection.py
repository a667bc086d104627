"""Fitting a collection: one rule for its head, or one for each head that its inputs name.

1. `solve_collection`: the optimal beta and the likelihood profile of every input.
2. `fit_head`: the rule of a head, fitted to all its inputs (`fit_rule.py`), and held-out scores of
   every kind of rule (`held_out.py`).
3. `find_refusal`: whether the rule is saved (`head_fit.py`).
4. `_make_fit`: the fit with its verdict and evidence, as the coefficient file has it.

`fit_collection` takes all steps, `fit_solved` those after the first.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from calibrate.core.rule import CONSTANT
from calibrate.errors import CalibrateError, QualityError, warn_user
from calibrate.evidence.estimate import ALPHA, per_cent, significant_fdr
from calibrate.fitting.fit_rule import can_have_slope, fit_rule
from calibrate.fitting.head_fit import (
    HeadFit,
    advise_kind,
    find_refusal,
    verdict_text,
)
from calibrate.fitting.held_out import (
    HeldOut,
    join_held_out,
    list_procedures,
    score_held_out,
)
from calibrate.fitting.least_squares import r_squared_of_log_beta
from calibrate.fitting.options import LEAST_SQUARES, LIKELIHOOD, MIN_GROUPS, MIN_INPUTS, FitOptions
from calibrate.parallel import ONE_PROCESS, SILENT, Jobs, Progress, run
from calibrate.rows.collection import RowCollection
from calibrate.rows.rows import HeadIndices, count_bad, head_label, known_index
from calibrate.rows.solve import SolvedInputs, concatenate_solved, solve_collection
from calibrate.store.fit import Fit
from calibrate.store.saving import provenance

# Rows of a group of heads that are solved together; a row takes some 1,700 bytes.
ROWS_PER_GROUP = 1 << 15
REFUSAL_PARAMETERS = ("loss", "kind", "tolerance")  # that a refusal may name
REMEDY = "collect more inputs, or larger ones; of arrays, give more rows"


@dataclass(frozen=True, eq=False)
class FitResult:
    """A fit, the fits of its heads, and the solved inputs of a single head."""

    fit: Fit
    heads: Sequence[HeadFit]
    solved: SolvedInputs | None = None  # None: of many heads


def fit_collection(
    collection: RowCollection,
    name: str,
    options: FitOptions | None = None,
    jobs: Jobs = ONE_PROCESS,
    progress: Progress = SILENT,
    rows_per_group: int = ROWS_PER_GROUP,
) -> FitResult:
    """Solves a collection, and fits a rule to its head; if inputs name heads, one to each.

    Args:
      collection: of inputs.
      name: of the fit.
      options: of the fit; None are the defaults.
      jobs: where solver and folds run; the result does not depend on it. Where inputs name heads,
        a task is a group of heads.
      progress: advances by the folds, or by the heads of a group.
      rows_per_group: inputs of a group of heads, at most about.
    Raises:
      CalibrateError: an option is out of range.
      QualityError: too few inputs, too many bad ones, or the answer is no; see `find_refusal`.
    """
    if not collection.heads:
        solved = solve_collection(collection, jobs)
        return fit_solved(collection, solved, name, options, jobs, progress)
    options = _resolve(options, collection)
    absolute = replace(collection, folder=collection.folder.absolute())  # for workers elsewhere
    n_rows = sum(shard["kept"] for shard in collection.manifest["shards"])
    groups = _group_heads(collection.heads, n_rows, rows_per_group)
    tasks = [partial(_fit_group, absolute, heads, options) for heads in groups]
    progress.begin("fitting heads", len(tasks), len(collection.heads))
    fits = run(tasks, jobs, lambda of_group: progress.advance(len(of_group[0])))
    heads = [head for of_group, _ in fits for head in of_group]
    statuses = Counter[str]()
    for _, counts in fits:
        statuses.update(counts)  # unlike `+`, keeps counts of 0
    return _fit_of_heads(collection, name, options, heads, statuses)


def _group_heads(heads: HeadIndices, n_rows: int, rows_per_group: int) -> list[HeadIndices]:
    """Divides heads of n_rows rows in total into groups of so many rows at most, about.

    All rows may not fit in memory, and the rows of a head are in many shards. Therefore a fit of
    each head reads all shards once for each group of heads. The number of groups is a multiple of
    4, so that two or four processes have equal shares.
    """
    n_groups = min(4 * math.ceil(max(1, n_rows) / rows_per_group / 4), len(heads))
    ends = [len(heads) * i // n_groups for i in range(n_groups + 1)]
    return [heads[first:end] for first, end in pairwise(ends)]


def fit_solved(
    collection: RowCollection,
    solved: SolvedInputs,
    name: str,
    options: FitOptions | None = None,
    jobs: Jobs = ONE_PROCESS,
    progress: Progress = SILENT,
    refuse: bool = True,
) -> FitResult:
    """Fits solved inputs: the rule of their head, or of each head that they name.

    Args:
      collection: of the inputs.
      solved: all of them.
      name, options, jobs, progress: see `fit_collection`.
      refuse: False returns the rule of a single head that would not be saved, with a warning; of
        inputs that name heads, refused rules are left out all the same.
    Raises: as `fit_collection`.
    """
    options = _resolve(options, collection)
    statuses = solved.count_by_status()
    if collection.heads:
        heads = _fit_each_head(solved, options, collection.misranked_only)
        return _fit_of_heads(collection, name, options, heads, statuses)
    head = fit_head(solved, options, jobs, progress, collection.misranked_only)
    refusal = drop_refused_rules([head], options)[0].refusal
    if refusal and refuse:
        raise QualityError(refusal, parameter=REFUSAL_PARAMETERS)
    if refusal:
        warn_user(refusal)
    return FitResult(_make_fit(collection, name, options, [head], statuses), [head], solved)


def _resolve(options: FitOptions | None, collection: RowCollection) -> FitOptions:
    """The options, checked; the largest trained size is that of the collection if not given."""
    return (options or FitOptions()).resolved(collection.configuration.get("trained_up_to"))


def fit_head(
    solved: SolvedInputs,
    options: FitOptions,
    jobs: Jobs = ONE_PROCESS,
    progress: Progress = SILENT,
    misranked_only: bool = False,
    procedures: Sequence[str] | None = None,
) -> HeadFit:
    """Fits the rule of a head to all its inputs, and scores procedures on held-out folds.

    Args:
      solved: inputs of one head.
      options: resolved.
      jobs: where the folds run.
      progress: of the folds.
      misranked_only: the collection keeps no other inputs: there are no held-out scores.
      procedures: to score; None: all that can be fitted.
    Raises:
      QualityError: too few inputs or groups, with their numbers.
      CalibrateError: misranked inputs alone, and maximum likelihood.
    """
    solved = solved.take(solved.weight > 0)
    require_inputs(solved, options, misranked_only)
    rule = fit_rule(solved, options.procedure, options, can_have_slope(solved))
    constant = held_out = None
    if not misranked_only:
        constant = fit_rule(solved, CONSTANT, options).coefficients[0]
        procedures = list_procedures(solved, options) if procedures is None else procedures
        held_out = score_held_out(solved, procedures, options, jobs, progress)
    finite = solved.fitted_by_least_squares()
    if options.loss == LEAST_SQUARES:
        is_fitted = finite
    elif rule.form.min_entropy > 0:
        is_fitted = solved.entropy > rule.form.min_entropy
    else:
        is_fitted = np.ones(len(solved.beta), bool)
    return HeadFit(
        layer=known_index(solved.layer[0]),
        head=known_index(solved.head[0]),
        inputs=len(solved.beta),
        misranked=float(np.average(solved.misranked, weights=solved.weight)),
        rule=rule,
        constant=constant,
        fitted=int(is_fitted.sum()),
        r_squared=r_squared_of_log_beta(solved, rule.beta(solved)),
        bound=rule.bound_reached(solved) if options.loss == LIKELIHOOD else "",
        ranked_right=not solved.misranked.any(),
        near_ties=int((finite & (solved.beta > rule.form.max_beta)).sum()),
        held_out=held_out,
    )


def require_inputs(solved: SolvedInputs, options: FitOptions, misranked_only: bool = False) -> None:
    """Raises an error for inputs that cannot be fitted.

    Raises:
      QualityError: too few inputs or groups.
      CalibrateError: misranked inputs alone, on which maximum likelihood is biased.
    """
    if options.loss == LIKELIHOOD and misranked_only:
        raise CalibrateError(
            "the collection keeps misranked inputs only, on which maximum likelihood is biased; "
            'collect all inputs, or fit with loss="least-squares"',
            parameter="loss",
        )
    count, noun = len(solved.beta), "inputs of positive weight"
    if options.loss == LEAST_SQUARES:
        count, noun = int(solved.fitted_by_least_squares().sum()), "misranked inputs"
    if count < MIN_INPUTS:
        raise QualityError(f"{count} {noun}, fewer than the {MIN_INPUTS} of a fit; {REMEDY}")
    n_groups = solved.n_groups()
    if n_groups < MIN_GROUPS and options.loss == LIKELIHOOD:
        raise QualityError(
            f"the inputs come from {n_groups} groups (prompts), fewer than the {MIN_GROUPS} that "
            "folds of whole groups need; collect inputs of more prompts"
        )


def _fit_group(
    collection: RowCollection, heads: HeadIndices, options: FitOptions
) -> tuple[list[HeadFit], Counter[str]]:
    """Solves and fits some heads; also returns their numbers of inputs by status."""
    solved = solve_collection(collection, ONE_PROCESS, heads)
    fits = _fit_each_head(solved, options, collection.misranked_only)
    return fits, Counter(solved.count_by_status())


def _fit_each_head(
    solved: SolvedInputs, options: FitOptions, misranked_only: bool
) -> list[HeadFit]:
    """The fit of each head of the rows, in order; a head with too few inputs keeps softmax."""
    procedures = list(dict.fromkeys([CONSTANT, options.procedure]))
    fits = []
    for layer, head in solved.heads():
        # Copied, since rows that lie next to each other are fitted in 0.95 of the time.
        own = concatenate_solved([solved.take(solved.is_of(layer, head))])
        try:
            fits.append(
                fit_head(own, options, misranked_only=misranked_only, procedures=procedures)
            )
        except QualityError as failure:
            misranked = float(own.misranked.mean())
            indices = known_index(layer), known_index(head)
            fits.append(HeadFit(*indices, len(own.beta), misranked, refusal=str(failure)))
    return fits


def _fit_of_heads(
    collection: RowCollection,
    name: str,
    options: FitOptions,
    heads: list[HeadFit],
    statuses: Mapping[str, int],
) -> FitResult:
    """The rules of the heads that are saved, in one fit; QualityError if there are none."""
    heads = drop_refused_rules(heads, options)
    if not any(head.rule for head in heads):
        reasons = [f"{head_label(head.layer, head.head)}: {head.refusal}" for head in heads[:1]]
        raise QualityError(
            f"none of {len(heads)} heads has a rule to save; {(reasons or [REMEDY])[0]}",
            parameter=REFUSAL_PARAMETERS,
        )
    return FitResult(_make_fit(collection, name, options, heads, statuses), heads)


def drop_refused_rules(heads: Sequence[HeadFit], options: FitOptions) -> list[HeadFit]:
    """The heads, without rules that are not saved; the tests are corrected for their number."""
    tried = [i for i, head in enumerate(heads) if head.rule]
    gains = [heads[i].gain(options.procedure) for i in tried]
    p_values = [1.0 if gain is None else float(gain.p_value) for gain in gains]
    result = list(heads)
    for i, is_significant in zip(tried, significant_fdr(p_values), strict=True):
        refusal = find_refusal(heads[i], options, is_significant)
        if refusal and len(tried) > 1:
            refusal += f" (false discovery rate {per_cent(ALPHA, 0)} over {len(tried)} heads)"
        if refusal:
            result[i] = heads[i].without_rule(refusal)
    return result


def _make_fit(
    collection: RowCollection,
    name: str,
    options: FitOptions,
    heads: Sequence[HeadFit],
    statuses: Mapping[str, int],
) -> Fit:
    """The fit with its evidence and its origin; `statuses` are numbers of inputs by status."""
    sizes, configuration = collection.manifest["sizes"], collection.configuration
    saved = [head for head in heads if head.rule]
    scored = [head.held_out for head in saved if head.held_out is not None]
    held_out = join_held_out(scored) if scored else None
    inputs = {
        "seen": sum(size["rows"] for size in sizes),
        "misranked": sum(size["misranked"] for size in sizes),
        "optimum_infinite": statuses["sharp"],
        "optimum_zero": statuses["flat"],
        "optimum_finite": statuses["interior"],
        "bad": sum(map(count_bad, sizes)),
        "fitted": sum(head.fitted for head in saved),
    }
    return Fit(
        options.form(options.rule_kind),
        tuple(head.rule.entry(head.layer, head.head) for head in saved if head.rule),
        name=name,
        evidence={
            "inputs": inputs,
            "heads": [head.record(options.procedure) for head in heads],
            **_held_out_evidence(held_out, options.procedure),
            "verdict": verdict_text(heads, options, held_out),
        },
        source={
            "head": configuration["head"],
            "fingerprint": configuration["fingerprint"],
            "collection": collection.digest,
            "seed": configuration["seed"],
            "options": options.record(),
        },
        provenance=provenance(),
    )


def _held_out_evidence(held_out: HeldOut | None, procedure: str) -> dict[str, Any]:
    """The scores by n and by kind, and the kind that the verdict advises instead, if any."""
    if held_out is None:
        return {}
    advice = advise_kind(held_out, procedure)
    return held_out.records(procedure) | ({} if advice is None else {"advised_kind": advice[0]})
