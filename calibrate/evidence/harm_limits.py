"""Non-inferiority: limits on the harm of a rule.

A limit is a margin on the mean loss of some of the items: of NLL at the sizes that a head or a
model was trained on, or of KL divergence on retention text. Held-out items may lose the whole
margin. A fit, or a choice by a validation split, keeps to a share of it (`safety_factor`), because
the held-out items decide at the end.
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

SAFETY_FACTOR = 1 / 2  # the share of a tolerance of NLL that a fit, or a choice, may use
N_ERRORS_OF_KL = 2.0  # standard errors that a choice adds to the KL of retention text
NO_LOSS = Estimate(0.0, np.nan)  # of a limit that applies to no item
UNITS_OF_LOSS = {
    LOG_P: "nats of log-likelihood",
    LOG_P_PER_TOKEN: "nats of log-likelihood per token",
    KL: "nats per token of KL divergence from the baseline",
}


@dataclass(frozen=True)
class NonInferiority:
    """A limit on the mean loss of some of the items under a rule.

    Attributes:
      name: of these items.
      applies_to: True for their strata.
      metric: LOG_P, LOG_P_PER_TOKEN, or KL, which is a loss itself.
      margin: nats; NaN if it is unknown, and then nothing exceeds it.
      safety_factor: the share of the margin that a fit or a choice may use.
      n_errors: standard errors that a choice adds to a loss.
      of_each_size: each size must keep to the margin; the result is of the size that exceeds it
        most.
    """

    name: str
    applies_to: Callable[[Stratum], bool]
    metric: Metric
    margin: float
    safety_factor: float = 1.0
    n_errors: float = 0.0
    of_each_size: bool = False

    def items(self, evidence: Evidence) -> Evidence:
        """The items under the limit; of text, those of held-out domains if there are any."""
        applies = np.array([self.applies_to(stratum) for stratum in evidence.strata], bool)
        items = evidence.where(applies[evidence.stratum])
        return items.held_out_templates if self.metric == KL else items

    def check(self, evidence: Evidence, rule: str) -> "NonInferiorityResult":
        """The loss of a rule on the items under the limit; `n` is 0 without such items."""
        items = self.items(evidence)
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
        """The loss of a rule, nats, on items to all of which the limit applies."""
        if self.metric == KL:
            return items.mean(rule, self.metric)  # that of the baseline is 0
        per_token = self.metric.per_token
        return -(items.gain_a_token(rule) if per_token else items.gain(rule, self.metric))

    def share(self, loss: float) -> float:
        """A loss as a share of the margin; infinite for any loss if the margin is 0."""
        if self.margin > 0:
            return float(loss / self.margin)
        return np.inf if loss > 0 else float(loss)


class NonInferiorityResult(NamedTuple):
    """The loss of a rule on the items under a limit."""

    limit: NonInferiority
    loss: Estimate  # nats
    n: int  # items
    size: int | None = None  # that exceeds the margin most, if each size must keep to it

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
    def text(self) -> str:
        """The loss and the margin: "in distribution (n <= 16): +0.0133 ± 0.0071 nats of ..."."""
        metric, margin, where = self.limit.metric, self.limit.margin, self.limit.name
        noun = "limit" if metric == KL else "tolerance"
        bound = f" ({noun} {margin:g})" if margin >= 0 else ""
        if not self.passed:
            bound = f" (exceeds the {noun} of {margin:g})"
        if self.size is not None:
            where = f"in distribution (n = {self.size:,})"
        shown = self.loss.shown(".4f") if metric == KL else (-self.loss).shown("+.4f")
        return f"{where}: {shown} {UNITS_OF_LOSS[metric]}{bound}"

    @property
    def cautious_loss(self) -> float:
        """The loss that a fit or a choice counts: with standard errors, over the safety factor."""
        upper = self.loss.mean + self.limit.n_errors * np.nan_to_num(self.loss.error)
        return float(upper / self.limit.safety_factor)


def retention_text(max_kl: float = MAX_KL) -> NonInferiority:
    """The limit on the KL divergence of retention text, nats per token."""
    return NonInferiority(
        "retention text", lambda stratum: stratum.protected, KL, max_kl, n_errors=N_ERRORS_OF_KL
    )


def trained_sizes(
    up_to: float, margin: float = NLL_TOLERANCE, per_token: bool = False
) -> NonInferiority:
    """The limit on the loss of NLL at the sizes that a head or a model was trained on.

    Args:
      up_to: the largest of these sizes; items, or tokens.
      margin: nats.
      per_token: the limit is on all answers of a model together, per token; else on rows of each
        size.
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
    """The limits that the file of a fit states, on items of a kind.

    A margin that the file does not state is unknown, NaN. Only the tolerance of a head's fit has a
    default.
    """
    options = fit.source.get("options", {}) if fit else {}
    yield retention_text(_number(options, "max_kl", np.nan))
    if fit and fit.of_whole_model == items.of_model:  # else one counts tokens, the other items
        up_to = _number(options, "trained_up_to", 0)
        default = np.nan if items.of_model else NLL_TOLERANCE
        yield trained_sizes(up_to, _number(options, "tolerance", default), items.of_model)


def _number(options: Mapping[str, Any], name: str, default: float) -> float:
    """An option of a file, if it is a number."""
    value: Any = options.get(name)
    return value if type(value) in (int, float) else default  # not bool, which is an int


def check_limits(evidence: Evidence, rule: str) -> list[NonInferiorityResult]:
    """The results of a rule under the limits of its file, of limits that apply to some items.

    Retention text is checked only beside answers: alone, its KL is no harm to them.
    """
    results = []
    for limit in limits_of(evidence.fits.get(rule), evidence.of.items):
        is_known = evidence.answers.n > 0 if limit.metric == KL else LOG_P in evidence.values
        if is_known:
            results.append(limit.check(evidence, rule))
    return [result for result in results if result.n]
