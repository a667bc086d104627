"""Evidence: the scores of items under several rules.

An item is an input of a head, an example of a model, or a batch. Scoring a head and scoring a model
fill the same arrays, so that tables, verdicts and limits are computed alike.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from calibrate.evidence.estimate import Estimate, estimate
from calibrate.evidence.metrics import LOG_P, ROWS, ItemKind, Metric
from calibrate.store.fit import Fit

BASELINE = "baseline"  # softmax, beta = 1: the rule that the others are compared with
OWN = "own"  # the fit that a command made or reports on

OptionalHeadId = tuple[int | None, int | None]  # (layer, head), None where unknown


class Stratum(NamedTuple):
    """Items of one size, prompt template and role.

    Attributes:
      size: n of an input; nominal tokens of an example.
      template: prompt template of an example, or domain of a text.
      protected: retention text, whose predictions must stay; its scores are per token.
      unseen: the prompt template or text domain is held out from the fit.
    """

    size: int
    template: str = ""
    protected: bool = False
    unseen: bool = False


class Scored(NamedTuple):
    """The source of the items."""

    name: str  # of the head, the logits or the model
    fingerprint: str = ""
    items: ItemKind = ROWS
    left_out: Mapping[str, int] = {}  # numbers of items that were not scored, by reason


@dataclass(frozen=True, eq=False)
class Evidence:
    """Scores of the same items under several rules.

    Attributes:
      rules: names; BASELINE is among them.
      values: by metric, (rules, items); the metrics are in `metrics.py`.
      strata: the distinct ones.
      stratum: (items,) int, index of each item's stratum in `strata`.
      group: (items,) int, of dependent items; -1 for an item that is a group by itself.
      weight: (items,) of an item in every mean.
      heads: the distinct (layer, head).
      head: (items,) int, index of each item's head in `heads`.
      fits: the rules that are fits with entries for heads; other rules apply to every head.
      of: the source of the items.
      tokens: (items,) number of tokens that LOG_P is the sum of, if losses are per token.
      fewest: by size, the least n of its rows, if rows of several n share a size.
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
        """The number of groups; 0 if every item is a group by itself."""
        known = self.group >= 0
        return len(np.unique(self.group[known])) + int((~known).sum()) if known.any() else 0

    def span(self, size: int) -> str:
        """A size as text: "64", or "33-64" if rows of 33 to 64 items share it."""
        fewest = self.fewest.get(size, size)
        return f"{size:,}" if fewest == size else f"{fewest:,}-{size:,}"

    def gain_a_token(self, rule: str) -> Estimate:
        """The mean paired difference in log p of a rule to the baseline, per token of an answer."""
        difference = self.scores(rule, LOG_P).astype(float) - self.scores(BASELINE, LOG_P)
        return self.estimate(difference / (1 if self.tokens is None else self.tokens))

    def is_held_out(self, rule: str) -> bool:
        """True unless a rule was fitted to these items, by the fingerprint in its file."""
        fit = self.fits.get(rule)
        return fit is None or fit.fingerprint != self.of.fingerprint

    @property
    def judged(self) -> "Evidence":
        """The items that decide: of held-out templates, if there are any; else all.

        Retention text decides only if there are no other items.
        """
        return (self.answers if self.answers.n else self).held_out_templates

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
        """The items of prompt templates and text domains that a fit may have been calibrated on."""
        return self.where(~self._strata_are("unseen"))

    @property
    def held_out_templates(self) -> "Evidence":
        """The items of held-out prompt templates or text domains; all items if there are none."""
        held_out = self._strata_are("unseen")
        return self.where(held_out) if held_out.any() else self

    def where(self, chosen: np.ndarray) -> "Evidence":
        """Some of the items, by (items,) bool or by indices."""
        if chosen.dtype == bool and chosen.all():
            return self
        names = ("stratum", "group", "weight", "head", "tokens")
        columns: dict[str, Any] = {
            name: getattr(self, name)[chosen] for name in names if getattr(self, name) is not None
        }
        values = {metric: scores[:, chosen] for metric, scores in self.values.items()}
        return replace(self, **columns, values=values)

    def by(self, what: str) -> "dict[Any, Evidence]":
        """The items in parts, by "size", "template", "stratum" or "head".

        Sizes rise; templates, strata and heads keep their order.
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
        """The mean of a metric under a rule."""
        return self.estimate(self.scores(rule, metric))

    def gain(self, rule: str, metric: Metric, over: str = BASELINE) -> Estimate:
        """The mean paired difference in a metric of a rule to another."""
        difference = self.scores(rule, metric).astype(float) - self.scores(over, metric)
        return self.estimate(difference)

    def held_out_records(self, rule: str = OWN) -> list[dict[str, Any]]:
        """By size n, the NLL of the baseline and of a rule, and the error of their difference."""
        size = np.array([stratum.size for stratum in self.strata])[self.stratum]
        before, after = (self.scores(name, LOG_P) for name in (BASELINE, rule))
        return held_out_records(size, before, after, self.weight, self.group)

    def best(self, among: Iterable[str] = ()) -> str:
        """The rule with the best mean log-likelihood; of equal ones the first."""
        rules = list(among) or self.rules
        means = [self.mean(rule, LOG_P).mean for rule in rules]
        return rules[int(np.nan_to_num(means, nan=-np.inf).argmax())]

    def names(self, rule: str, head: OptionalHeadId) -> bool:
        """True if a rule has an entry for a head; without an entry the head keeps the baseline."""
        fit, unknown = self.fits.get(rule), self.heads == ((None, None),)
        return rule != BASELINE and (fit is None or unknown or fit.entry_of(*head) is not None)

    def with_rule(self, rule: str, values: Mapping[Metric, np.ndarray]) -> "Evidence":
        """The same items under one more rule, whose values are (items,) by metric."""
        more = {
            metric: np.concatenate([scores, values[metric][None]])
            for metric, scores in self.values.items()
        }
        return replace(self, rules=(*self.rules, rule), values=more)

    def _strata_are(self, what: str) -> np.ndarray:
        """(items,) bool: the stratum of each item is "protected" or "unseen"."""
        flags = np.array([getattr(stratum, what) for stratum in self.strata], bool)
        return np.asarray(flags[self.stratum])

    def estimate(self, values: np.ndarray) -> Estimate:
        """The weighted mean of (..., items) values, with its error over groups."""
        return estimate(values, self.weight, self.group)

    def scores(self, rule: str, metric: Metric) -> np.ndarray:
        """(items,) values of a metric under a rule."""
        return np.asarray(self.values[metric][self.rules.index(rule)])


def held_out_records(
    size: np.ndarray, before: np.ndarray, after: np.ndarray, weight: np.ndarray, group: np.ndarray
) -> list[dict[str, Any]]:
    """Records of a coefficient file by n: inputs, NLL before and after, SE of the difference.

    Args:
      size: (items,) n.
      before, after: (items,) log p of the target under the baseline and under a rule, nats.
      weight, group: see `estimate`.
    """
    records = []
    for n in np.unique(size):
        of_n = size == n
        before_n, after_n = before[of_n].astype(float), after[of_n].astype(float)
        values = np.stack([-before_n, -after_n, after_n - before_n])
        means = estimate(values, weight[of_n], group[of_n])
        record = {
            "n": int(n),
            "inputs": int(np.count_nonzero(of_n)),
            "nll_before": float(means.mean[0]),
            "nll_after": float(means.mean[1]),
        }
        error = float(means.error[2])
        records.append(record | ({"se": error} if np.isfinite(error) else {}))
    return records
