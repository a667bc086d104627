"""Many heads: a rule for each that one serves, all in one file; the others stay as they are."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from calibrate.errors import QualityError
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.files.collection import Collection, Heads
from calibrate.fitting.model_selection import LEAST_GAIN, Choice, Gain, HeldOut, choose, unit
from calibrate.fitting.rule_fitting import ADVICE, Options
from calibrate.fitting.solved_rows import Rows, head_in_words, heads_apart, known, solve_heads
from calibrate.maths.rule import Rule
from calibrate.parallel.jobs import ONE_PROCESS, Jobs, run

# The kinds of rule that fit into one file, whose entries are all of one kind.
FAMILIES = {"log-size": ("constant", "log-size"), "polynomial": ("constant", "polynomial")}


class HeadRule(NamedTuple):
    """The rule that one head is to have."""

    entry: Entry
    kind: str
    gain: Gain
    held_out: list[HeldOut]


class HeadFit(NamedTuple):
    """One head, and what was found for it: little, as there may be thousands."""

    layer: int | None
    head: int | None
    rows: int
    misranked: float  # share of its rows
    rule: HeadRule | None  # None: it stays as it is
    why: str  # the verdict, or what no rule has over plain softmax

    @property
    def name(self) -> str:
        return head_in_words(self.layer, self.head)

    @property
    def gain(self) -> float:
        """What it gains by its rule."""
        return self.rule.gain.mean if self.rule else 0.0


class ManyFits(NamedTuple):
    """Fits of several heads in one file."""

    coefficients: Coefficients
    heads: list[HeadFit]  # in order
    unit: str  # of gains

    @property
    def calibrated(self) -> list[HeadFit]:
        """Those that have a rule, the largest gain first."""
        return sorted((head for head in self.heads if head.rule), key=lambda head: -head.gain)


Found = dict[str, HeadFit]  # family -> the best that it has for one head


def fit_heads(
    collection: Collection,
    options: Options,
    force: str | None = None,
    jobs: Jobs = ONE_PROCESS,
    report: Callable[[int], None] = lambda heads: None,
) -> tuple[Coefficients, list[HeadFit], Counter[str]]:
    """Solves the rows of each head, and chooses a rule for it; see `choice.choose`.

    Args:
      collection: whose rows say which heads they are of.
      options: of the fits.
      force: a kind that every head is to have.
      jobs: where it is done, a few heads at a time; the result does not depend on it.
      report: called after each such group, with how many heads it has.
    Returns:
      The rule with its entries, every head, and how many rows have each status of the solver.
    Raises:
      CalibrateError: the collection is damaged.
      QualityError: there are no rows, or no head has a rule that beats plain softmax.
    """
    # Workers may have another working folder.
    there = collection._replace(folder=collection.folder.absolute())
    tasks = [partial(_fit_group, there, group, options, force) for group in heads_apart(collection)]
    groups = run(tasks, jobs, lambda group: report(len(group[0])))
    found, statuses = [], Counter[str]()
    for of_group, counts in groups:
        found += of_group
        statuses.update(counts)
    if not found:
        raise QualityError(f"{collection.folder} has no rows; {ADVICE}")
    return *in_one_file(found, options), statuses


def _fit_group(
    collection: Collection, heads: Heads | None, options: Options, force: str | None
) -> tuple[list[Found], Counter[str]]:
    """What is found for each of some heads, and how many rows have each status."""
    rows = solve_heads(collection, heads)
    return fit_each(rows, options, force), Counter(rows.count_by_status())


def fit_each(rows: Rows, options: Options, force: str | None = None) -> list[Found]:
    """What each family of rules has for each head that there are rows of, in order."""
    families = [family for family, kinds in FAMILIES.items() if force in (None, *kinds)]
    found = []
    with threadpool_limits(1):  # sums of several threads differ in their last bits
        for name in rows.heads():
            own = rows.take(rows.are_of(*name))
            found.append({family: _fit_head(own, options, force, family) for family in families})
    return found


def _fit_head(rows: Rows, options: Options, force: str | None, family: str) -> HeadFit:
    """The best rule of a family for the rows of one head."""
    rule, why = None, ""
    layer, head = known(rows.layer[0]), known(rows.head[0])
    try:
        choice = choose(rows, options, force, FAMILIES[family])
    except QualityError as failure:
        why = str(failure)
    else:
        chosen, why = choice.chosen, choice.verdict
        entry = replace(_entry(choice, family), layer=layer, head=head)
        rule = HeadRule(entry, chosen.kind, chosen.gain, choice.held_out)
    return HeadFit(layer, head, len(rows.size), float(rows.misranked.mean()), rule, why)


def _entry(choice: Choice, family: str) -> Entry:
    """The rule of one head, as a file of that family holds it."""
    entry, items = choice.chosen.fit.only, choice.rows.items
    if family != "log-size" or choice.chosen.kind == "log-size":
        return entry
    lo, hi = np.log([items.min(), items.max()]).tolist()
    domain = (lo, hi) if lo < hi else (0.0, max(hi, 1.0))
    return Entry((0.0, entry.coefficients[-1]), domain)


def in_one_file(found: list[Found], options: Options) -> tuple[Coefficients, list[HeadFit]]:
    """The rule with its entries, and every head.

    A file holds one kind of rule, and a constant is of either: of the two families the one is taken
    in which the heads gain more in all.

    Raises:
      QualityError: no head has a rule that beats plain softmax.
    """
    families = list(found[0])
    total = {family: sum(head[family].gain for head in found) for family in families}
    best = families[0]
    for family in families[1:]:
        if total[family] > total[best] + LEAST_GAIN * len(found):
            best = family
    heads = [head[best] for head in found]
    entries = [head.rule.entry for head in heads if head.rule]
    if not entries:
        raise QualityError(
            f"not for these heads: none of {len(heads)} gains by a rule on held-out rows; "
            f"{heads[0].name}: {heads[0].why}"
        )
    rule = Rule.log_size() if best == "log-size" else Rule(min_entropy=options.gate)
    return Coefficients(rule, tuple(entries)), heads


def quality_of_heads(heads: list[HeadFit], options: Options) -> dict[str, Any]:
    """The evidence that a file keeps: held-out scores of all calibrated heads, and a sentence."""
    calibrated = [head for head in heads if head.rule]
    means = [head.gain for head in calibrated]
    others = "; the others stay as they are" if len(calibrated) < len(heads) else ""
    verdict = (
        f"{len(calibrated)} of {len(heads)} heads gain, by {min(means):.4f} to {max(means):.4f} "
        f"{unit(options)} (mean {np.mean(means):.4f}){others}"
    )
    return {"held_out": [size._asdict() for size in held_out(calibrated)], "verdict": verdict}


def held_out(heads: list[HeadFit]) -> list[HeldOut]:
    """Of the calibrated heads together, by set size."""
    scores = [size for head in heads if head.rule for size in head.rule.held_out]
    found = []
    for n in sorted({score.size for score in scores}):
        mine = [score for score in scores if score.size == n]
        rows = sum(score.rows for score in mine)
        before, after = (
            sum(score.rows * getattr(score, which) for score in mine) / rows
            for which in ("before", "after")
        )
        error = float(np.sqrt(sum((score.rows * score.error) ** 2 for score in mine)) / rows)
        found.append(HeldOut(n, rows, before, after, error))
    return found
