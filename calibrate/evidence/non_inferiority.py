"""Non-inferiority: limits on the harm of a rule, as checks of its scores and constraints of a fit.

A limit is a margin on the mean loss of some of the items: of NLL at the sizes that a head or a
model was trained on, or of KL divergence on retention text. Items that were held out may lose all
of a margin. A fit, or a choice by a validation split, keeps to a share of it (`safety_factor`), as
the held-out items have the last word.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from calibrate.defaults import MAX_KL, NLL_TOLERANCE
from calibrate.evidence.estimate import Estimate
from calibrate.evidence.evidence import Evidence, Stratum
from calibrate.evidence.metrics import KL, LOG_P, LOG_P_PER_TOKEN, ItemKind, Metric
from calibrate.store.fit import Fit

SAFETY_FACTOR = 1 / 2  # of a tolerance of NLL: what a fit, or a choice, may use
N_ERRORS_OF_KL = 2.0  # standard errors that a choice adds to the KL of retention text
NO_LOSS = Estimate(0.0, np.nan)  # of a limit that no item is under


@dataclass(frozen=True)
class NonInferiority:
    """A limit on harm: how much some of the items may lose by a rule, in the mean.

    Attributes:
      name: of these items.
      applies_to: True of their strata.
      metric: LOG_P, LOG_P_PER_TOKEN, or KL, which is a loss itself.
      margin: nats; NaN where it is not known, and nothing exceeds it.
      safety_factor: of the margin, what a fit or a choice may use.
      n_errors: standard errors that a choice adds to a loss.
      of_each_size: each size has the margin: the one that exceeds it most stands for all.
    """

    name: str
    applies_to: Callable[[Stratum], bool]
    metric: Metric
    margin: float
    safety_factor: float = 1.0
    n_errors: float = 0.0
    of_each_size: bool = False

    def items(self, evidence: Evidence) -> Evidence:
        """The items that the limit applies to; of text, those of held-out domains if any are."""
        applies = np.array([self.applies_to(stratum) for stratum in evidence.strata], bool)
        items = evidence.where(applies[evidence.stratum])
        return items.held_out_templates if self.metric == KL else items

    def check(self, evidence: Evidence, rule: str) -> "NonInferiorityResult":
        """The loss of a rule beside the margin; of `n` = 0 without such items."""
        return self.check_items(self.items(evidence), rule)

    def check_items(self, items: Evidence, rule: str) -> "NonInferiorityResult":
        """The same on items all of which the limit applies to, whatever their strata."""
        if not items.n:
            return NonInferiorityResult(self, NO_LOSS, 0)
        size, loss = None, self.loss(items, rule)
        if self.of_each_size:
            losses = {n: self.loss(part, rule) for n, part in items.by("size").items()}
            worst = max(losses, key=lambda n: float(losses[n].mean))
            if losses[worst].mean > self.margin:
                size, loss = worst, losses[worst]
        return NonInferiorityResult(self, loss, items.n, size)

    def loss(self, items: Evidence, rule: str) -> Estimate:
        """Nats that a rule loses on items, all of which the limit applies to."""
        if not self.metric.higher_is_better:
            return items.mean(rule, self.metric)  # that of the baseline is 0
        per_token = self.metric.per_token
        return -(items.gain_a_token(rule) if per_token else items.gain(rule, self.metric))

    def share(self, loss: float) -> float:
        """A loss as a share of the margin; of a margin of 0 any loss is infinitely much."""
        if self.margin > 0:
            return float(loss / self.margin)
        return np.inf if loss > 0 else float(loss)


class NonInferiorityResult(NamedTuple):
    """The loss of a rule on the items under a limit."""

    limit: NonInferiority
    loss: Estimate  # nats
    n: int  # items
    size: int | None = None  # the one that exceeds the margin most, where each size has it

    @property
    def passed(self) -> bool:
        """True unless the mean loss is more than the margin."""
        return not self.loss.mean > self.limit.margin

    @property
    def significantly_exceeded(self) -> bool:
        """True if the whole interval of the loss is beyond the margin."""
        return not self.passed and not self.loss.interval[0] <= self.limit.margin

    @property
    def share(self) -> float:
        """The mean loss as a share of the margin."""
        return self.limit.share(self.loss.mean)

    @property
    def cautious_loss(self) -> float:
        """The loss that a fit or a choice counts: with errors, and over the safety factor."""
        upper = self.loss.mean + self.limit.n_errors * np.nan_to_num(self.loss.error)
        return float(upper / self.limit.safety_factor)


def retention_text(max_kl: float = MAX_KL) -> NonInferiority:
    """The limit on KL of retention text, nats per token."""
    return NonInferiority(
        "retention text", lambda stratum: stratum.protected, KL, max_kl, n_errors=N_ERRORS_OF_KL
    )


def trained_sizes(
    up_to: float, margin: float = NLL_TOLERANCE, per_token: bool = False
) -> NonInferiority:
    """The limit on the NLL that is lost at the sizes that a head or a model was trained on.

    Args:
      up_to: the largest of these sizes; items, or tokens.
      margin: nats.
      per_token: it is of a model's answers together, per token; else rows of each size have it.
    """
    return NonInferiority(
        f"in distribution ({'tokens' if per_token else 'n'} <= {up_to:,})",
        lambda stratum: stratum.size <= up_to and not stratum.protected,
        LOG_P_PER_TOKEN if per_token else LOG_P,
        margin,
        SAFETY_FACTOR,
        of_each_size=not per_token,
    )


def limits_of(fit: Fit | None, items: ItemKind) -> Iterable[NonInferiority]:
    """The limits that the file of a fit names, on items of a kind.

    The margin of one that the file does not name is not known: NaN, which nothing exceeds. Only the
    tolerance of a head's fit has a default.
    """
    options = fit.source.get("options", {}) if fit else {}
    yield retention_text(_number(options, "max_kl", np.nan))
    if fit and fit.of_whole_model == items.of_model:  # else one counts tokens, the other items
        default = np.nan if items.of_model else NLL_TOLERANCE
        up_to, margin = (
            _number(options, *x) for x in (("trained_up_to", 0), ("tolerance", default))
        )
        yield trained_sizes(up_to, margin, items.of_model)


def _number(options: Mapping[str, Any], name: str, default: float) -> float:
    """An option of a file, where it is a number."""
    value: Any = options.get(name)
    return value if type(value) in (int, float) else default  # True is none


def check_limits(evidence: Evidence, rule: str) -> list[NonInferiorityResult]:
    """The checks of a rule by the limits of its file, of those that some items are under.

    Retention text alone is no harm beside answers: it has no check.
    """
    results = []
    for limit in limits_of(evidence.fits.get(rule), evidence.of.items):
        is_known = evidence.answers.n > 0 if limit.metric == KL else LOG_P in evidence.values
        if is_known:
            results.append(limit.check(evidence, rule))
    return [result for result in results if result.n]
