"""Fits per head: a rule for each head that gains by one, all in one file."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from calibrate.core.rule import Rule
from calibrate.core.rule_kinds import FAMILIES, KINDS, OF_LEAST_SQUARES, in_family
from calibrate.datasets.row_collection import Heads, RowCollection
from calibrate.errors import QualityError
from calibrate.evidence.evidence import Evidence
from calibrate.evidence.publish_threshold import min_improvement
from calibrate.evidence.selection_criterion import Gain
from calibrate.evidence.significance import ALPHA, significant_fdr
from calibrate.fitting.cross_validate import Candidate, CrossValidation, cross_validate
from calibrate.fitting.options import LIKELIHOOD, Options
from calibrate.fitting.refusal import REFUSAL_PARAMETERS
from calibrate.fitting.select import Selection, polynomial_beside_constant, select_rule
from calibrate.parallel import ONE_PROCESS, SILENT, Jobs, Progress, run
from calibrate.solver.solved_rows import (
    ROWS_PER_GROUP,
    Rows,
    group_heads,
    head_label,
    known_index,
    solve_collection,
)
from calibrate.store.coefficients import Coefficients
from calibrate.store.entry import MAX_ENTROPY, Entry

AVERAGED = ("kind", "loss", "q", "log_p", "gain")  # of the record of a candidate


@dataclass(frozen=True)
class HeadFit:
    """One head and its rule, without its logits, as there may be thousands."""

    layer: int | None
    head: int | None
    rows: int
    misranked: float  # share of its rows
    verdict: str  # why it has this rule, or none
    entry: Entry | None = None  # its rule; None: the baseline
    kind: str | None = None
    gain: Gain | None = None  # of its rule over the baseline, held out
    held_out_evidence: Evidence | None = field(default=None, compare=False)  # as of `Selection`
    # By kind of rule that was compared, its record without coefficients.
    candidates: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, compare=False)

    @property
    def nats(self) -> float:
        """The mean of the gain; 0 without a rule."""
        return self.gain.mean if self.gain else 0.0

    def without_rule(self, verdict: str) -> "HeadFit":
        """The head at the baseline, and why."""
        return HeadFit(
            self.layer,
            self.head,
            self.rows,
            self.misranked,
            verdict,
            candidates=self.candidates,
        )


# By family, the best rule for one head. A family is the kinds of rule that fit into one file, whose
# entries are all of one kind; it is called as that kind in files.
FamilyFits = dict[str, HeadFit]


def fit_heads(
    collection: RowCollection,
    options: Options,
    jobs: Jobs = ONE_PROCESS,
    progress: Progress = SILENT,
    rows_per_group: int = ROWS_PER_GROUP,
) -> tuple[list[FamilyFits], Counter[str]]:
    """Solves a collection, group by group of its heads: see `fit_each_head`; and counts statuses.

    Arguments are those of `fit_collection`.
    """
    # Workers may have another working folder.
    absolute = replace(collection, folder=collection.folder.absolute())
    groups_of_heads = group_heads(collection, rows_per_group)
    tasks = [partial(_fit_group, absolute, heads, options) for heads in groups_of_heads]
    progress.begin("fitting heads", len(tasks), len(collection.heads))

    def advance(group: tuple[list[FamilyFits], Counter[str]]) -> None:
        of_heads, _ = group
        progress.advance(len(of_heads))

    groups = run(tasks, jobs, advance)
    fits = [head for of_group, _ in groups for head in of_group]
    statuses = Counter[str]()
    for _, counts in groups:
        statuses.update(counts)  # a sum would lose those that no row has
    return fits, statuses


def _fit_group(
    collection: RowCollection, heads: Heads | None, options: Options
) -> tuple[list[FamilyFits], Counter[str]]:
    rows = solve_collection(collection, ONE_PROCESS, options.min_beta, heads)
    return fit_each_head(rows, options, collection.misranked_only), Counter(rows.count_by_status())


def fit_each_head(rows: Rows, options: Options, misranked_only: bool = False) -> list[FamilyFits]:
    """The best rule of each family for each head of the rows, in order.

    Args:
      rows: solved.
      options: of the fit.
      misranked_only: whether the collection keeps no other rows.
    """
    families = [family for family in FAMILIES if _allows(options, family)]
    with threadpool_limits(1):  # sums of several threads differ in their last bits
        return [
            _fit_families(rows.take(rows.is_of(*name)), options, families, misranked_only)
            for name in rows.heads()
        ]


def _allows(options: Options, family: str) -> bool:
    """True if files of a family can hold what the options ask for.

    Rules of log n have no threshold of entropy: a constant would be applied below it too.
    """
    if options.loss != LIKELIHOOD:
        return family == OF_LEAST_SQUARES.file_kind
    has_threshold = options.rule(family).by_entropy
    return options.kind in (None, *_kinds_of(family)) and (
        has_threshold or not options.min_entropy > 0
    )


def _kinds_of(family: str) -> tuple[str, ...]:
    return tuple(kind.name for kind in FAMILIES[family])


def _fit_families(
    rows: Rows, options: Options, families: list[str], misranked_only: bool
) -> FamilyFits:
    """The best rule of each family for the rows of one head."""
    weighed = rows.weight > 0
    own = rows.take(weighed) if weighed.any() else rows
    layer, index = known_index(own.layer[0]), known_index(own.head[0])
    head = HeadFit(layer, index, len(own.size), float(own.misranked.mean()), "")
    try:
        if options.loss != LIKELIHOOD:
            selection = polynomial_beside_constant(own, options, misranked_only)
            fit = _with_rule(head, selection, OF_LEAST_SQUARES.file_kind)
            return dict.fromkeys(families, fit)
        names = {name for family in families for name in _kinds_of(family)}
        kinds = [kind for kind in KINDS.values() if kind.name in names]
        validation = cross_validate(own, kinds, options)
    except QualityError as failure:
        return dict.fromkeys(families, replace(head, verdict=str(failure)))
    head = replace(head, candidates=_records(validation.candidates))
    return {family: _fit_family(head, validation, family) for family in families}


def _fit_family(head: HeadFit, validation: CrossValidation, family: str) -> HeadFit:
    """The head with the rule that is selected for a family, if any."""
    try:
        return _with_rule(head, select_rule(validation, _kinds_of(family)), family)
    except QualityError as failure:
        return replace(head, verdict=str(failure))


def _with_rule(head: HeadFit, selection: Selection, family: str) -> HeadFit:
    published = selection.published
    return replace(
        head,
        verdict=selection.verdict,
        entry=replace(_entry(selection, family), layer=head.layer, head=head.head),
        kind=published.kind,
        gain=published.gain,
        held_out_evidence=selection.held_out_evidence,
        candidates=head.candidates or _records(selection.candidates),
    )


def _records(candidates: Sequence[Candidate]) -> dict[str, dict[str, Any]]:
    """By kind, the loss and the scores that are averaged over heads."""
    records = [candidate.record() for candidate in candidates]
    return {
        record["kind"]: {name: record[name] for name in AVERAGED if name in record}
        for record in records
    }


def _entry(selection: Selection, family: str) -> Entry:
    """The rule of one head, as a file of that family holds it."""
    fit = selection.published.coefficients
    entry, rule = fit.only, fit.rule
    if rule.kind == family:
        return entry
    items = selection.published.rows.items
    lo, hi = np.log([items.min(), items.max()]).tolist()
    sizes = (lo, hi) if lo < hi else (0.0, max(hi, 1.0))
    entropies = (entry.domain[0], entry.domain[1]) if rule.by_entropy else (0.0, MAX_ENTROPY)
    return Entry(*in_family(rule, entry.coefficients, family, entropies, sizes))


def combine_heads(fits: list[FamilyFits], options: Options) -> tuple[Coefficients, list[HeadFit]]:
    """The rule with its entries, and every head; QualityError if none has a rule.

    A head has a rule that gains significantly; or one of the kind that is named, as least squares
    name theirs, whatever it gains, if it can be fitted.
    """
    family, heads = select_family(fits, options.kind)
    entries = [head.entry for head in heads if head.entry]
    if not entries:
        first = heads[0]
        raise QualityError(
            f"not for these heads: none of {len(heads)} {_lack(options)}; "
            f"{head_label(first.layer, first.head)}: {first.verdict}",
            parameter=REFUSAL_PARAMETERS,
        )
    return Coefficients(options.rule(family), tuple(entries)), heads


def _lack(options: Options) -> str:
    """A clause on heads that have no rule."""
    if options.kind is None:
        return "gains by a rule on held-out rows"
    if options.loss == LIKELIHOOD:
        return f"can be fitted by the kind {options.kind}"
    return "has enough rows for a polynomial"


def select_family(fits: list[FamilyFits], named: str | None = None) -> tuple[str, list[HeadFit]]:
    """The family of rules for a file, and its heads.

    A file holds one kind of rule, and a constant fits into either. Gains that chance gives one of
    so many heads are left out, unless the kind is named; the family is selected in which the others
    gain more in all.
    """
    families = {family: [head[family] for head in fits] for family in fits[0]}
    if named is None:
        families = {family: _correct_for_many(heads) for family, heads in families.items()}
    total = {family: sum(head.nats for head in heads) for family, heads in families.items()}
    n_rules = max(sum(head.entry is not None for head in heads) for heads in families.values())
    best, *others = families
    for family in others:
        required = n_rules * min_improvement(Rule(kind=family).depends_on_both)
        if total[family] > total[best] + required:
            best = family
    return best, families[best]


def _correct_for_many(heads: list[HeadFit]) -> list[HeadFit]:
    """The heads, without the rules whose gain is not significant among so many heads."""
    p = [head.gain.p if head.gain else 1.0 for head in heads]
    among = f"not significant among {len(heads)} heads (false discovery rate {ALPHA:.0%})"
    return [
        head if significant or not head.entry else head.without_rule(f"{among}: {head.verdict}")
        for head, significant in zip(heads, significant_fdr(p), strict=True)
    ]
