"""Evidence: what items are worth under rules, whatever the items are.

An item is a set that a head was shown, a row of logits, or an example of a model. Whoever scores
rules fills the same arrays; nothing downstream asks who filled them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from calibrate.evidence.estimate import Estimate, estimate
from calibrate.evidence.metrics import LOG_P, ROWS, ItemKind, Metric
from calibrate.store.fit import Fit

BASELINE = "baseline"  # softmax, beta = 1: the rule that all others are compared with
OWN = "own"  # the fit that a command made, or reports on

OptionalHeadId = tuple[int | None, int | None]  # (layer, head), None where unknown


class Stratum(NamedTuple):
    """Items that are alike by design."""

    size: int  # items of a set or row; tokens of an example, nominal
    template: str = ""  # of an example
    protected: bool = False  # retention text, whose predictions must stay; its scores are per token
    unseen: bool = False  # of a prompt template or text domain that is held out from the fit


class Scored(NamedTuple):
    """The source of the items."""

    name: str  # of the head, the logits or the model
    fingerprint: str = ""
    items: ItemKind = ROWS
    left_out: Mapping[str, int] = {}  # reason -> items that are not among those scored


@dataclass(frozen=True, eq=False)
class Evidence:
    """Rules on the same items.

    Attributes:
      rules: their names; the baseline, BASELINE, is among them.
      values: by metric, (rules, items): LOG_P, nats of the target or the whole answer, of text
        per token; P; RIGHT, 1 where the head or the answer is right, of text the share of its
        tokens; KL, nats a token of text, from the baseline's predictions, SAME_TOP, the share of
        tokens that stay the most probable, and HIGHEST_KL, (rules, items, some); CONFIDENCE, p
        of the item with the highest logit, and RANKED, 1 where no item has a higher logit than
        the target.
      strata: of the items.
      stratum: (items,) int, the place of each item's stratum in `strata`.
      group: (items,) int, what makes items dependent; -1 where each is its own.
      weight: (items,) of an item in every mean.
      heads: of the items.
      head: (items,) int, the place of each item's head in `heads`.
      fits: the rules that are fits with entries for heads; others apply to every head.
      of: what was scored.
      tokens: (items,) that LOG_P is the sum of, where losses are counted a token.
      text_tokens: (items,) that a window of text has; 0 of an answer.
      fewest: by size, the fewest items of its rows, where rows of several lengths share a size.
    """

    rules: tuple[str, ...]
    values: Mapping[Metric, np.ndarray]
    strata: tuple[Stratum, ...]
    stratum: np.ndarray
    group: np.ndarray
    weight: np.ndarray
    of: Scored
    heads: tuple[OptionalHeadId, ...] = ((None, None),)
    head: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    fits: Mapping[str, Fit] = field(default_factory=dict)
    tokens: np.ndarray | None = None
    text_tokens: np.ndarray | None = None
    fewest: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.head) != len(self.stratum):
            object.__setattr__(self, "head", np.zeros(len(self.stratum), int))

    @property
    def n(self) -> int:
        """The number of items."""
        return len(self.stratum)

    @property
    def n_groups(self) -> int:
        """The number of groups, items of none among them; 0 where each item is its own."""
        known = self.group >= 0
        return len(np.unique(self.group[known])) + int((~known).sum()) if known.any() else 0

    @property
    def weighed(self) -> bool:
        """True if the weights of the items differ."""
        return bool((self.weight != 1).any())

    def span(self, size: int) -> str:
        """A size for people: "64", or "33-64" where rows of 33 to 64 items share it."""
        fewest = self.fewest.get(size, size)
        return f"{size:,}" if fewest == size else f"{fewest:,}-{size:,}"

    def gain_a_token(self, rule: str) -> Estimate:
        """The paired difference of a rule to the baseline in log p, per token of an answer."""
        difference = self.scores(rule, LOG_P).astype(float) - self.scores(BASELINE, LOG_P)
        return self.estimate(difference / (1 if self.tokens is None else self.tokens))

    @property
    def answers(self) -> "Evidence":
        """The items that are not retention text."""
        return self.where(~self._strata_are("protected"))

    @property
    def text(self) -> "Evidence":
        """The retention text."""
        return self.where(self._strata_are("protected"))

    @property
    def calibration_templates(self) -> "Evidence":
        """The items of templates that a fit may have been calibrated on."""
        return self.where(~self._strata_are("unseen"))

    @property
    def held_out_templates(self) -> "Evidence":
        """The items of held-out prompt templates or text domains; all where there are none."""
        held_out = self._strata_are("unseen")
        return self.where(held_out) if held_out.any() else self

    def where(self, chosen: np.ndarray) -> "Evidence":
        """Some of the items, by (items,) bool or positions."""
        if chosen.dtype == bool and chosen.all():
            return self
        names = ("stratum", "group", "weight", "head", "tokens", "text_tokens")
        columns = {name: getattr(self, name) for name in names}
        some: dict[str, Any] = {name: x[chosen] for name, x in columns.items() if x is not None}
        return replace(self, **some, values={m: x[:, chosen] for m, x in self.values.items()})

    def by(self, what: str) -> "dict[Any, Evidence]":
        """Parts of the items: by "size", "template", "stratum" or "head".

        Keys rise, or, of templates, strata and heads, are in their own order.
        """
        names: tuple[Any, ...] = self.heads
        code = self.head
        if what != "head":
            keys = [s if what == "stratum" else getattr(s, what) for s in self.strata]
            names = tuple(sorted(set(keys)) if what == "size" else dict.fromkeys(keys))
            code = np.array([names.index(key) for key in keys], int)[self.stratum]
        order = np.argsort(code, kind="stable")
        ends = np.searchsorted(code[order], np.arange(len(names) + 1))
        parts = zip(names, ends, ends[1:], strict=False)
        return {name: self.where(order[a:b]) for name, a, b in parts if b > a}

    def mean(self, rule: str, metric: Metric) -> Estimate:
        """The mean of a rule over the items."""
        return self.estimate(self.scores(rule, metric))

    def gain(self, rule: str, metric: Metric, over: str = BASELINE) -> Estimate:
        """The mean paired difference of a rule to another, item by item."""
        pair = (self.scores(name, metric).astype(float) for name in (rule, over))
        return self.estimate(next(pair) - next(pair))

    def held_out_records(self, rule: str = OWN) -> list[dict[str, Any]]:
        """By size n, the NLL of the baseline and of a rule, and the error of their difference."""
        size = np.array([stratum.size for stratum in self.strata])[self.stratum]
        before, after = (self.scores(name, LOG_P) for name in (BASELINE, rule))
        return held_out_records(size, before, after, self.weight, self.group)

    def best(self, metric: Metric, among: Iterable[str] = ()) -> str:
        """The rule of the best mean; of equal ones the first."""
        rules = list(among) or self.rules
        means = [metric.sign * self.mean(rule, metric).mean for rule in rules]
        return rules[int(np.nan_to_num(means, nan=-np.inf).argmax())]

    def not_significantly_better(self, rule: str, metric: Metric) -> list[str]:
        """The other rules that this one is not significantly better than."""
        others = [other for other in self.rules if other != rule]
        return [other for other in others if not self.gain(rule, metric, other).sign > 0]

    def names(self, rule: str, head: OptionalHeadId) -> bool:
        """True if a rule has an entry for a head; without one the head keeps the baseline."""
        fit, unknown = self.fits.get(rule), self.heads == ((None, None),)
        return rule != BASELINE and (fit is None or unknown or fit.entry_of(*head) is not None)

    def is_held_out(self, rule: str) -> bool:
        """True if a rule was fitted to other items, by the fingerprint in a fit's file."""
        fit = self.fits.get(rule)
        return fit is None or fit.fingerprint != self.of.fingerprint

    def with_rule(self, rule: str, values: Mapping[Metric, np.ndarray]) -> "Evidence":
        """With one more rule, by metric (items,)."""
        more = {m: np.concatenate([x, values[m][None]]) for m, x in self.values.items()}
        return self.with_only((*self.rules, rule), more)

    def with_only(self, rules: tuple[str, ...], values: Mapping[Metric, np.ndarray]) -> "Evidence":
        """The same items under other rules, by metric (rules, items)."""
        return replace(self, rules=rules, values=values)

    def _strata_are(self, what: str) -> np.ndarray:
        """(items,) bool, "protected" or "unseen"."""
        are = np.array([getattr(s, what) for s in self.strata], bool)
        return np.asarray(are[self.stratum])

    def estimate(self, values: np.ndarray) -> Estimate:
        """The mean of (..., items) values over all items, with its error by group."""
        return estimate(values, self.weight, self.group)

    def scores(self, rule: str, metric: Metric) -> np.ndarray:
        """(items,) what a rule scored on each."""
        row: np.ndarray = self.values[metric][self.rules.index(rule)]
        return row


def held_out_records(
    size: np.ndarray, before: np.ndarray, after: np.ndarray, weight: np.ndarray, group: np.ndarray
) -> list[dict[str, Any]]:
    """Records of a file, by size n: items, NLL before and after, and the error of the difference.

    Args:
      size: (items,) n.
      before, after: (items,) log p of the target under the baseline and under a rule, nats.
      weight, group: see `estimate`.
    """
    records = []
    for n in np.unique(size):
        of_n = size == n
        one, two = before[of_n].astype(float), after[of_n].astype(float)
        nll_before, nll_after, difference = (
            estimate(values, weight[of_n], group[of_n]) for values in (-one, -two, two - one)
        )
        record = {"n": int(n), "inputs": int(of_n.sum()), "nll_before": float(nll_before.mean)}
        record |= {"nll_after": float(nll_after.mean)}
        error = float(difference.error)
        records.append(record | ({"se": error} if np.isfinite(error) else {}))
    return records


def join(parts: Sequence[Evidence]) -> Evidence:
    """The items of several, under the same rules and by the same metrics; of no named heads."""
    strata = tuple(dict.fromkeys(stratum for part in parts for stratum in part.strata))
    first = parts[0]
    return Evidence(
        rules=first.rules,
        values={
            m: np.concatenate([part.values[m] for part in parts], axis=1) for m in first.values
        },
        strata=strata,
        stratum=np.concatenate(
            [np.array([strata.index(s) for s in part.strata], int)[part.stratum] for part in parts]
        ),
        group=np.concatenate([part.group for part in parts]),
        weight=np.concatenate([part.weight for part in parts]),
        of=first.of,
    )
