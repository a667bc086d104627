"""Fitting a collection: one rule for its head, or one for each head that its inputs name.

`fit_collection` solves the inputs and fits them; `fit_solved` fits inputs that are solved.

1. `solver.solved_rows.solve_collection`: optimal beta and likelihood profile of every input.
2. `fit_head.fit_head`: the rule, fitted to all inputs (`fit_rule`), and held-out scores of every
   kind of rule by folds of whole groups (`held_out`, `folds`).
3. `fit_head.find_refusal`: whether the rule is saved.
4. `verdict`, `evidence_record`: what the coefficient file says of it.
"""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from calibrate.core.rule import CONSTANT
from calibrate.datasets.collection import open_collection
from calibrate.datasets.row_collection import Heads, RowCollection
from calibrate.datasets.row_quality import check_bad_rows
from calibrate.errors import QualityError
from calibrate.evidence.significance import ALPHA, significant_fdr
from calibrate.fitting.evidence_record import evidence_record
from calibrate.fitting.fit_head import REMEDY, HeadFit, find_refusal, fit_head
from calibrate.fitting.options import FitOptions
from calibrate.fitting.verdict import bound_sentence, verdict_of_head, verdict_of_heads
from calibrate.parallel import ONE_PROCESS, SILENT, Jobs, Progress, run
from calibrate.solver.solved_rows import (
    ROWS_PER_GROUP,
    Rows,
    group_heads,
    head_label,
    known_index,
    solve_collection,
)
from calibrate.store.fit import Fit
from calibrate.store.publishing import provenance

REFUSAL_PARAMETERS = ("loss", "kind", "tolerance")  # that a refusal may name
ALL_RANKED_RIGHT = (
    "the target has the highest logit in every input, as labels made from the same logits would: "
    "check the targets"
)


@dataclass(frozen=True, eq=False)
class FitResult:
    """A fit, and what it was made of."""

    fit: Fit
    heads: Sequence[HeadFit]
    rows: Rows | None = None  # None: of many heads


def open_for_fit(folder: Path, allow_partial: bool = False) -> RowCollection:
    """Opens a collection to fit it; an unfinished one with a warning, and only if it is allowed."""
    collection = open_collection(folder, RowCollection, allow_partial)
    if collection.partial:
        n_shards = len(collection.manifest["shards"])
        warnings.warn(
            f"{folder} is unfinished; the fit is made of its {n_shards} finished "
            f"shard{'s' * (n_shards != 1)}",
            stacklevel=2,
        )
    return collection


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
      rows_per_group: inputs of a group of heads, about.
    Raises:
      CalibrateError: an option is out of range.
      QualityError: too few inputs, too many bad ones, or the answer is no; see `find_refusal`.
    Warns:
      UserWarning: a beta at its bound; targets that are ranked right in every input.
    """
    check_bad_rows(collection.manifest)
    if not collection.heads:
        return fit_solved(
            collection, solve_collection(collection, jobs), name, options, jobs, progress
        )
    options = resolve_options(collection, options)
    absolute = replace(collection, folder=collection.folder.absolute())  # for workers elsewhere
    tasks = [
        partial(_fit_group, absolute, heads, options)
        for heads in group_heads(collection, rows_per_group)
    ]
    progress.begin("fitting heads", len(tasks), len(collection.heads))
    groups = run(tasks, jobs, lambda group: progress.advance(len(group[0])))
    statuses = Counter[str]()
    for _, counts in groups:
        statuses.update(counts)  # a sum would lose those that no row has
    heads = [head for of_group, _ in groups for head in of_group]
    return _result_of_heads(collection, name, options, heads, statuses)


def fit_solved(
    collection: RowCollection,
    rows: Rows,
    name: str,
    options: FitOptions | None = None,
    jobs: Jobs = ONE_PROCESS,
    progress: Progress = SILENT,
    refuse: bool = True,
) -> FitResult:
    """Fits solved inputs: the rule of their head, or of each head that they name.

    Args:
      collection: whose inputs these are.
      rows: all that it has, solved.
      name, options, jobs, progress: see `fit_collection`.
      refuse: False returns, with a warning, a rule that would not be saved.
    """
    check_bad_rows(collection.manifest)
    options = resolve_options(collection, options)
    statuses = rows.count_by_status()
    if collection.heads:
        heads = _fit_each(rows, options, collection.misranked_only)
        return _result_of_heads(collection, name, options, heads, statuses)
    head = fit_head(rows, options, jobs, progress, collection.misranked_only)
    gain = head.gain(options.procedure)
    refusal = find_refusal(head, options, gain is not None and bool(gain.significant))
    if refusal and refuse:
        raise QualityError(refusal, parameter=REFUSAL_PARAMETERS)
    warned = [refusal, bound_sentence(head), ALL_RANKED_RIGHT if head.ranked_right else ""]
    for text in filter(None, warned):
        warnings.warn(text, stacklevel=3)
    verdict = verdict_of_head(head, options)
    return FitResult(_make_fit(collection, name, options, [head], statuses, verdict), [head], rows)


def resolve_options(collection: RowCollection, options: FitOptions | None) -> FitOptions:
    """The options, checked; the largest trained size is that of the collection if not given."""
    return (options or FitOptions()).resolved(collection.configuration.get("trained_up_to"))


def _fit_group(
    collection: RowCollection, heads: Heads | None, options: FitOptions
) -> tuple[list[HeadFit], Counter[str]]:
    rows = solve_collection(collection, ONE_PROCESS, heads)
    return _fit_each(rows, options, collection.misranked_only), Counter(rows.count_by_status())


def _fit_each(rows: Rows, options: FitOptions, misranked_only: bool) -> list[HeadFit]:
    """The fit of each head of the rows, in order; a head with too few inputs keeps softmax."""
    names = list(dict.fromkeys([CONSTANT, options.procedure]))
    heads = []
    for layer, head in rows.heads():
        own = rows.take(rows.is_of(layer, head))
        try:
            heads.append(fit_head(own, options, misranked_only=misranked_only, names=names))
        except QualityError as failure:
            misranked = float(own.misranked.mean())
            indices = known_index(layer), known_index(head)
            heads.append(HeadFit(*indices, len(own.beta), misranked, refusal=str(failure)))
    return heads


def _result_of_heads(
    collection: RowCollection,
    name: str,
    options: FitOptions,
    heads: list[HeadFit],
    statuses: Mapping[str, int],
) -> FitResult:
    """The rules of the heads that are saved, in one file; QualityError if there are none."""
    if not heads:
        raise QualityError(f"{collection.folder} has no inputs to fit; {REMEDY}")
    heads = _refuse_some(heads, options)
    if not any(head.rule for head in heads):
        first = heads[0]
        raise QualityError(
            f"none of {len(heads)} heads has a rule to save; "
            f"{head_label(first.layer, first.head)}: {first.refusal}",
            parameter=REFUSAL_PARAMETERS,
        )
    verdict = verdict_of_heads(heads, options)
    return FitResult(_make_fit(collection, name, options, heads, statuses, verdict), heads)


def _refuse_some(heads: Sequence[HeadFit], options: FitOptions) -> list[HeadFit]:
    """The heads, without the rules that are not saved; gains are corrected for their number."""
    tried = [head for head in heads if head.rule]
    gains = [head.gain(options.procedure) for head in tried]
    p_values = [1.0 if gain is None else float(gain.p_value) for gain in gains]
    significant = dict(zip(map(id, tried), significant_fdr(p_values), strict=True))
    result = []
    for head in heads:
        refusal = find_refusal(head, options, significant[id(head)]) if head.rule else ""
        if refusal and len(tried) > 1:
            refusal += f" (false discovery rate {ALPHA:.0%} over {len(tried)} heads)"
        result.append(head.without_rule(refusal) if refusal else head)
    return result


def _make_fit(
    collection: RowCollection,
    name: str,
    options: FitOptions,
    heads: Sequence[HeadFit],
    statuses: Mapping[str, int],
    verdict: str,
) -> Fit:
    """The fit with its evidence and its origin."""
    configuration, record = collection.configuration, options.record()
    if collection.partial:
        record["partial"] = True
        verdict = f"Of an unfinished collection: {verdict}"
    is_per_head = bool(collection.heads)
    entries = [
        head.rule.entry(*((head.layer, head.head) if is_per_head else (None, None)))
        for head in heads
        if head.rule
    ]
    kind = options.rule_kind
    return Fit(
        options.rule(kind),
        tuple(entries),
        name=name,
        evidence=evidence_record(collection, statuses, heads, options, verdict),
        source={
            "head": configuration["head"],
            "fingerprint": configuration["fingerprint"],
            "collection": collection.digest,
            "seed": configuration["seed"],
            "options": record,
        },
        provenance=provenance(),
    )
