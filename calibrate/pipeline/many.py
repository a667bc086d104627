"""Many heads: a rule for each that one serves, all in one file; the others stay as they are."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from calibrate.errors import QualityError
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.maths.rule import LOG_SIZE, Rule
from calibrate.pipeline.candidates import Options
from calibrate.pipeline.choice import LEAST_GAIN, Choice, HeldOut, choose, unit
from calibrate.pipeline.jobs import HERE, Jobs, run
from calibrate.pipeline.solve import Rows, head_in_words, known

# The kinds of rule that fit into one file, whose entries are all of one kind.
FAMILIES = {"log-size": ("constant", "log-size"), "polynomial": ("constant", "polynomial")}


class HeadFit(NamedTuple):
    """One head, and what was found for it."""

    layer: int | None
    head: int | None
    rows: int
    misranked: float  # share of its rows
    choice: Choice | None  # None: it stays as it is
    why: str  # the verdict, or what no rule has over plain softmax

    @property
    def name(self) -> str:
        return head_in_words(self.layer, self.head)


class ManyFits(NamedTuple):
    """Fits of several heads in one file."""

    coefficients: Coefficients
    heads: list[HeadFit]  # in order
    unit: str  # of gains

    @property
    def calibrated(self) -> list[HeadFit]:
        """Those that have a rule, the largest gain first."""
        found = [head for head in self.heads if head.choice]
        return sorted(found, key=lambda head: -_gain(head))


def fit_heads(
    rows: Rows, options: Options, force: str | None = None, jobs: Jobs = HERE
) -> tuple[Coefficients, list[HeadFit]]:
    """Chooses a rule for each head; see `choice.choose`.

    A file holds one kind of rule, and a constant is of either: of the two families the one is taken
    in which the heads gain more in all.

    Args:
      rows: of several heads, or of one that is named.
      options: of the fits.
      force: a kind that every head is to have.
      jobs: where it is done, a head at a time; the result does not depend on it.
    Returns:
      The rule with its entries, and every head.
    Raises:
      QualityError: no head has a rule that beats plain softmax.
    """
    names = rows.heads()
    own = (rows.take(rows.are_of(*name)) for name in names)
    families = [force] if force else list(FAMILIES)
    found = run((partial(_fit_head, mine, options, families) for mine in own), jobs)
    fits = {
        family: [
            of_head[i]._replace(layer=known(layer), head=known(head))
            for (layer, head), of_head in zip(names, found, strict=True)
        ]
        for i, family in enumerate(families)
    }
    total = {family: sum(map(_gain, heads)) for family, heads in fits.items()}
    best = families[0]
    for family in families[1:]:
        if total[family] > total[best] + LEAST_GAIN * len(names):
            best = family
    heads = fits[best]
    entries = [_entry(head, best) for head in heads if head.choice]
    if not entries:
        raise QualityError(
            f"not for these heads: none of {len(heads)} gains by a rule on held-out rows; "
            f"{heads[0].name}: {heads[0].why}"
        )
    rule = Rule.log_size() if best == "log-size" else Rule(min_entropy=options.gate)
    return Coefficients(rule, tuple(entries)), heads


def _fit_head(rows: Rows, options: Options, families: list[str]) -> list[HeadFit]:
    """What each family of rules has for one head."""
    found = []
    for family in families:
        force = family if len(families) == 1 else None
        choice, why = None, ""
        try:
            with threadpool_limits(1):  # sums of several threads differ in their last bits
                choice = choose(rows, options, force, FAMILIES[family])
            why = choice.verdict
        except QualityError as failure:
            why = str(failure)
        misranked = float(rows.misranked.mean())
        found.append(HeadFit(None, None, len(rows.size), misranked, choice, why))
    return found


def _gain(head: HeadFit) -> float:
    return head.choice.chosen.gain.mean if head.choice else 0.0


def _entry(head: HeadFit, family: str) -> Entry:
    """The rule of one head, as a file of that family holds it."""
    assert head.choice
    chosen, items = head.choice.chosen, head.choice.rows.items
    entry = chosen.fit.only
    powers, domain = entry.coefficients, entry.domain
    if family == "log-size" and chosen.fit.rule.kind != LOG_SIZE:
        lo, hi = np.log([items.min(), items.max()]).tolist()
        powers, domain = (0.0, powers[-1]), (lo, hi) if lo < hi else (0.0, max(hi, 1.0))
    return Entry(powers, domain, head.layer, head.head)


def quality_of_heads(heads: list[HeadFit], options: Options) -> dict[str, Any]:
    """The evidence that a file keeps: held-out scores of all calibrated heads, and a sentence."""
    calibrated = [head for head in heads if head.choice]
    means = [_gain(head) for head in calibrated]
    verdict = (
        f"{len(calibrated)} of {len(heads)} heads gain, by {min(means):.4f} to {max(means):.4f} "
        f"{unit(options)} (mean {np.mean(means):.4f}); the others stay as they are"
    )
    return {"held_out": [size._asdict() for size in held_out(calibrated)], "verdict": verdict}


def held_out(heads: list[HeadFit]) -> list[HeldOut]:
    """Of the calibrated heads together, by set size."""
    scores = [size for head in heads if head.choice for size in head.choice.held_out]
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
