"""Fits per head: a rule for each head that gains by one, all in one file."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from calibrate.errors import QualityError
from calibrate.files.coefficients import MAX_ENTROPY, Coefficients, Entry
from calibrate.files.rows import Heads, RowCollection
from calibrate.maths.rule import ENTROPY_AND_SIZE, ENTROPY_POLYNOMIAL, LOG_SIZE, Rule
from calibrate.parallel.jobs import ONE_PROCESS, Jobs, run
from calibrate.rows.gain import CHANCE, Gain, evident_among, least_lead
from calibrate.rows.held_out import HeldOut, combine_held_out
from calibrate.rows.model_selection import Choice, Trial, choose_from, try_kinds
from calibrate.rows.rule_fitting import ADVICE, KINDS, Options
from calibrate.rows.solved_rows import Rows, group_heads, head_label, known_index, solve_heads

# The kinds of rule that fit into one file, whose entries are all of one kind.
FAMILIES = {
    LOG_SIZE: ("constant", "log-size"),
    ENTROPY_POLYNOMIAL: ("constant", "polynomial"),
    ENTROPY_AND_SIZE: KINDS,
}


@dataclass(frozen=True)
class HeadRule:
    """The rule of one head."""

    entry: Entry
    kind: str
    gain: Gain
    held_out: list[HeldOut]


@dataclass(frozen=True)
class HeadFit:
    """One head and its rule, without rows, as there may be thousands."""

    layer: int | None
    head: int | None
    rows: int
    misranked: float  # share of its rows
    rule: HeadRule | None  # None: plain softmax
    verdict: str  # why it has this rule, or none

    @property
    def label(self) -> str:
        return head_label(self.layer, self.head)

    @property
    def gain(self) -> float:
        """Held-out gain of its rule over plain softmax."""
        return self.rule.gain.mean if self.rule else 0.0


@dataclass(frozen=True)
class PerHeadResult:
    """Fits of several heads in one file."""

    coefficients: Coefficients
    heads: list[HeadFit]  # in order

    @property
    def calibrated(self) -> list[HeadFit]:
        """Those that have a rule, the largest gain first."""
        return sorted((head for head in self.heads if head.rule), key=lambda head: -head.gain)


FamilyFits = dict[str, HeadFit]  # family -> its best rule for one head


def fit_heads(
    collection: RowCollection,
    options: Options,
    force: str | None = None,
    jobs: Jobs = ONE_PROCESS,
    report: Callable[[int], None] = lambda heads: None,
) -> tuple[Coefficients, list[HeadFit], Counter[str]]:
    """Solves the rows of each head, and chooses a rule for it; see `choose`.

    Args:
      collection: with rows of named heads.
      options: of the fits.
      force: a kind that every head is to have.
      jobs: where it runs, a group of heads at a time; the result does not depend on it.
      report: called after each such group, with its number of heads.
    Returns:
      The rule with its entries, every head, and how many rows have each status of the solver.
    Raises:
      CalibrateError: the collection is damaged.
      QualityError: there are no rows, or no head has a rule that beats plain softmax.
    """
    # Workers may have another working folder.
    absolute = replace(collection, folder=collection.folder.absolute())
    groups = group_heads(collection)
    tasks = [partial(_fit_group, absolute, group, options, force) for group in groups]
    fits, statuses = [], Counter[str]()
    for of_group, counts in run(tasks, jobs, lambda result: report(len(result[0]))):
        fits += of_group
        statuses.update(counts)
    if not fits:
        raise QualityError(f"{collection.folder} has no rows; {ADVICE}")
    return *combine_heads(fits, options), statuses


def _fit_group(
    collection: RowCollection, heads: Heads | None, options: Options, force: str | None
) -> tuple[list[FamilyFits], Counter[str]]:
    """The fits of some heads, and how many rows have each status."""
    rows = solve_heads(collection, heads)
    return fit_each_head(rows, options, force), Counter(rows.count_by_status())


def fit_each_head(rows: Rows, options: Options, force: str | None = None) -> list[FamilyFits]:
    """The best rule of each family for each head of the rows, in order."""
    families = [
        family for family, kinds in FAMILIES.items()
        # A file of rules by size has no gate: it would apply a constant below the gate too.
        if force in (None, *kinds) and not (family == LOG_SIZE and options.gate > 0)
    ]  # fmt: skip
    kinds = [kind for kind in KINDS if any(kind in FAMILIES[family] for family in families)]
    fits = []
    with threadpool_limits(1):  # sums of several threads differ in their last bits
        for name in rows.heads():
            mine = rows.is_of(*name)
            weighed = mine & (rows.weight > 0)
            own = rows.take(weighed if weighed.any() else mine)
            layer, index = map(known_index, name)
            misranked = float(own.misranked.mean())
            head = HeadFit(layer, index, len(own.size), misranked, None, "")
            try:
                trial = try_kinds(own, options, kinds)
            except QualityError as failure:
                fits.append(dict.fromkeys(families, replace(head, verdict=str(failure))))
            else:
                fits.append({family: _fit_head(head, trial, force, family) for family in families})
    return fits


def _fit_head(head: HeadFit, trial: Trial, force: str | None, family: str) -> HeadFit:
    """The head with its best rule of a family, if any; its kinds were tried on its rows."""
    try:
        choice = choose_from(trial.of_kinds(FAMILIES[family]), force)
    except QualityError as failure:
        return replace(head, verdict=str(failure))
    entry = replace(_entry(choice, family), layer=head.layer, head=head.head)
    rule = HeadRule(entry, choice.chosen.kind, choice.chosen.gain, choice.held_out)
    return replace(head, rule=rule, verdict=choice.verdict)


def _entry(choice: Choice, family: str) -> Entry:
    """The rule of one head, as a file of that family holds it."""
    entry, rule, items = choice.chosen.fit.only, choice.chosen.fit.rule, choice.rows.items
    if rule.kind == family:
        return entry
    lo, hi = np.log([items.min(), items.max()]).tolist()
    sizes = (lo, hi) if lo < hi else (0.0, max(hi, 1.0))
    if family == LOG_SIZE:
        return Entry((0.0, entry.coefficients[-1]), sizes)
    if rule.kind == LOG_SIZE:
        kappa, b = entry.coefficients
        return Entry((0.0, 0.0, 0.0, 0.0, b, 0.0, 0.0, kappa), (0.0, MAX_ENTROPY, *sizes))
    return Entry((*entry.coefficients, 0.0, 0.0, 0.0), (*entry.domain, *sizes))


def combine_heads(fits: list[FamilyFits], options: Options) -> tuple[Coefficients, list[HeadFit]]:
    """The rule with its entries, and every head.

    Raises:
      QualityError: no head has a rule that beats plain softmax.
    """
    family, heads = choose_family(fits)
    entries = [head.rule.entry for head in heads if head.rule]
    if not entries:
        raise QualityError(
            f"not for these heads: none of {len(heads)} gains by a rule on held-out rows; "
            f"{heads[0].label}: {heads[0].verdict}"
        )
    rule = Rule.log_size() if family == LOG_SIZE else Rule(options.gate, kind=family)
    return Coefficients(rule, tuple(entries)), heads


def choose_family(fits: list[FamilyFits]) -> tuple[str, list[HeadFit]]:
    """The family of rules for a file, and its heads.

    A file holds one kind of rule, and a constant fits into either. Gains that chance gives one of
    so many heads are left out, and chosen is the family in which the others gain more in all.
    """
    families = {family: correct_for_many([head[family] for head in fits]) for family in fits[0]}
    total = {family: sum(head.gain for head in heads) for family, heads in families.items()}
    n_rules = max(sum(head.rule is not None for head in heads) for heads in families.values())
    best, *others = families
    for family in others:
        if total[family] > total[best] + least_lead(family) * n_rules:
            best = family
    return best, families[best]


def correct_for_many(heads: list[HeadFit]) -> list[HeadFit]:
    """The heads, without the rules whose gain is not evident among so many heads.

    The false-discovery rate is held at that of one head.
    """
    evident = evident_among([head.rule.gain.p if head.rule else 1.0 for head in heads])
    return [
        head if keep or not head.rule else _without_rule(head, head.rule, len(heads))
        for head, keep in zip(heads, evident, strict=True)
    ]


def _without_rule(head: HeadFit, rule: HeadRule, n_heads: int) -> HeadFit:
    reason = (
        f"not evident among {n_heads} heads (p = {rule.gain.p:.2g}, false-discovery rate "
        f"{CHANCE:.1%}): {head.verdict}"
    )
    return replace(head, rule=None, verdict=reason)


def quality_of_heads(heads: list[HeadFit]) -> dict[str, Any]:
    """The evidence that a file keeps: held-out scores of all calibrated heads, and a sentence."""
    rules = [head.rule for head in heads if head.rule]
    means = [rule.gain.mean for rule in rules]
    others = "; the others stay as they are" if len(rules) < len(heads) else ""
    by, mean = f"s, by {means[0]:.4f}", ""
    if len(means) > 1:
        by, mean = f", by {min(means):.4f} to {max(means):.4f}", f"mean {np.mean(means):.4f}; "
    verdict = (
        f"{len(rules)} of {len(heads)} heads gain{by} nats of log p ({mean}false-discovery rate "
        f"{CHANCE:.1%}){others}"
    )
    return {
        "held_out": [
            size.record() for size in combine_held_out([s for rule in rules for s in rule.held_out])
        ],
        "verdict": verdict,
    }
