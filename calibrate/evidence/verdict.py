"""The verdict on a rule: use it, use it at some sizes only, or keep the baseline."""

from typing import NamedTuple

import numpy as np

from calibrate.evidence.estimate import Estimate
from calibrate.evidence.prior import MIN_GAIN, NLL_TOLERANCE
from calibrate.evidence.scores import KL, LOG_P, PLAIN, RIGHT, Evidence
from calibrate.evidence.significance import significant_fdr

GAIN = "gain"
LOSS = "loss"
SAME = "no difference"
UNKNOWN = "unknown"
OF_KL = "nats per token of KL divergence from the baseline"


class NonInferiority(NamedTuple):
    """A non-inferiority check: a part of the items where the loss of a fit has a margin."""

    where: str
    gain: Estimate  # of log p over the baseline
    unit: str
    allowed: float  # the margin: nats that the mean may fall by; NaN where it is not known

    @property
    def passed(self) -> bool:
        """True if the mean falls by no more than the margin."""
        return not self.gain.mean < -self.allowed

    def __str__(self) -> str:
        word = "limit" if self.unit == OF_KL else "tolerance"
        bound = f" ({word} {self.allowed:g})" if self.allowed >= 0 else ""
        bound = bound if self.passed else f" (exceeds the {word} of {self.allowed:g})"
        shown = (-self.gain).shown(".4f") if self.unit == OF_KL else self.gain.shown("+.4f")
        return f"{self.where}: {shown} {self.unit}{bound}"


class Verdict(NamedTuple):
    """The significant effects of a rule."""

    outcome: str  # GAIN, LOSS, SAME, or UNKNOWN where items are too few
    measure: str  # that decided
    better: list[int]  # sizes at which it is significantly better, corrected for their number
    worse: list[int]

    @property
    def use(self) -> bool:
        """True if the rule is worth using."""
        return self.outcome == GAIN


def judge(evidence: Evidence, rule: str) -> Verdict:
    """The verdict on a rule by the measure that decides: see `main_measure`."""
    answers = judged_items(evidence)
    measure = main_measure(evidence)
    gains = significant_gains(answers, rule, measure)
    better = [size for size, gain in gains.items() if gain.mean > 0]
    worse = [size for size in gains if size not in better]
    word = outcome(answers.gain(rule, measure))
    if better:
        word = GAIN
    elif worse and word != GAIN:
        word = LOSS
    return Verdict(word, measure, better, worse)


def significant_gains(items: Evidence, rule: str, measure: str) -> dict[int, Estimate]:
    """By size, gains over the baseline that are significant among the sizes, and noticeable."""
    gains = {n: part.gain(rule, measure) for n, part in items.by("size").items()}
    significant = significant_fdr([float(gain.p) for gain in gains.values()])
    least = MIN_GAIN if measure == LOG_P else 0.0  # a size where nobody notices is not named
    pairs = zip(gains.items(), significant, strict=True)
    return {n: gain for (n, gain), is_so in pairs if is_so and abs(gain.mean) > least}


def worse_sizes(items: Evidence, rule: str, measure: str) -> dict[int, Estimate]:
    """By size, gains that are significantly negative."""
    gains = significant_gains(items, rule, measure)
    return {n: gain for n, gain in gains.items() if gain.mean < 0}


def judged_items(evidence: Evidence) -> Evidence:
    """The items that decide: all but retention text, or that if there are no others.

    Where some are of held-out templates, these decide.
    """
    answers = evidence.answers
    return answers.held_out_templates if answers.n else evidence.held_out_templates


def main_measure(evidence: Evidence) -> str:
    """The measure that decides: of a head's sets accuracy, else the log-likelihood.

    Accuracy that no rule changes, as that of the item with the highest weight, cannot decide.
    """
    if LOG_P not in evidence.values:
        return RIGHT
    is_of_sets = evidence.of.items == "sets"
    return RIGHT if is_of_sets and not is_accuracy_fixed(evidence) else LOG_P


def is_accuracy_fixed(evidence: Evidence) -> bool:
    """True if every rule is right on the same items."""
    right = evidence.values[RIGHT]
    return bool((right == right[:1]).all())


def outcome(gain: Estimate) -> str:
    """The word for a gain."""
    if not np.isfinite(gain.error):
        return UNKNOWN
    return {1: GAIN, -1: LOSS}.get(int(gain.sign), SAME)


def heads_moved(evidence: Evidence, rule: str) -> tuple[int, int, int]:
    """Numbers of heads with an entry that (gain, lose, do neither) significantly."""
    measure, heads = main_measure(evidence), judged_items(evidence).by("head")
    gains = [part.gain(rule, measure) for h, part in heads.items() if evidence.names(rule, h)]
    significant = significant_fdr([float(gain.p) for gain in gains])
    signs = [np.sign(g.mean) if clear else 0 for g, clear in zip(gains, significant, strict=True)]
    return signs.count(1), signs.count(-1), signs.count(0)


def check_margins(evidence: Evidence, rule: str) -> list[NonInferiority]:
    """The checks of a rule on retention text, and at the sizes that its file says were trained."""
    fit, text = evidence.fits.get(rule), evidence.text.held_out_templates
    checks = list[NonInferiority]()
    options, items = fit.source.get("options", {}) if fit else {}, evidence.of.items
    of_model = items in ("answers", "batches")
    numbers = {key: x for key, x in options.items() if type(x) in (int, float)}
    max_kl = numbers.get("allowed_loss", np.nan if of_model else NLL_TOLERANCE)
    tolerance = numbers.get("tolerance", max_kl)
    if text.n and evidence.answers.n:
        loss, kl = text.gain(PLAIN, LOG_P, rule), text.mean(rule, KL)
        where = f"retention text (NLL {loss.shown('+.4f')} nats)"
        where = "retention batches" if items == "batches" else where  # their loss is not known
        checks.append(NonInferiority(where, kl._replace(mean=-kl.mean), OF_KL, max_kl))
    if fit and fit.of_whole_model == of_model:  # else items are no tokens, or tokens no items
        checks += where_trained(evidence, rule, numbers.get("trained_up_to", 0), tolerance)
    return checks


def where_trained(
    evidence: Evidence, rule: str, up_to: float, allowed: float = NLL_TOLERANCE
) -> list[NonInferiority]:
    """The check of a rule at the sizes that its head was trained on; empty without such items.

    Of rows each size has the margin: one that loses more stands for all of them.
    """
    trained = np.array([s.size <= up_to and not s.protected for s in evidence.strata], bool)
    part = evidence.where(trained[evidence.stratum])
    if not part.n or LOG_P not in part.values:
        return []
    gain, symbol, unit = part.gain_a_token(rule), "tokens", "nats of log-likelihood per token"
    where = f"in distribution ({{}} <= {up_to:,})"
    if part.tokens is None:
        symbol, unit = "n", "nats of log-likelihood"
        gains = {n: of_size.gain(rule, LOG_P) for n, of_size in part.by("size").items()}
        worst = min(gains, key=lambda n: float(gains[n].mean))
        if gains[worst].mean < -allowed:
            gain, where = gains[worst], f"in distribution (n = {worst:,})"
    return [NonInferiority(where.format(symbol), gain, unit, allowed)]
