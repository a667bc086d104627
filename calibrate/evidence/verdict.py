"""The verdict on a rule: use it, use it at some sizes only, or keep the baseline."""

from typing import NamedTuple

import numpy as np

from calibrate.evidence.estimate import Estimate
from calibrate.evidence.evidence import Evidence
from calibrate.evidence.metrics import LOG_P, RIGHT, Metric
from calibrate.evidence.publish_threshold import MIN_GAIN
from calibrate.evidence.significance import significant_fdr

GAIN = "gain"
LOSS = "loss"
SAME = "no difference"
UNKNOWN = "unknown"


class Verdict(NamedTuple):
    """The significant effects of a rule."""

    outcome: str  # GAIN, LOSS, SAME, or UNKNOWN where items are too few
    metric: Metric  # that decided
    better: list[int]  # sizes at which it is significantly better, corrected for their number
    worse: list[int]

    @property
    def use(self) -> bool:
        """True if the rule is worth using."""
        return self.outcome == GAIN


def judge(evidence: Evidence, rule: str) -> Verdict:
    """The verdict on a rule by the metric that decides: see `main_metric`."""
    answers = judged_items(evidence)
    metric = main_metric(evidence)
    gains = significant_gains(answers, rule, metric)
    better = [size for size, gain in gains.items() if gain.mean > 0]
    worse = [size for size in gains if size not in better]
    word = outcome(answers.gain(rule, metric))
    if better:
        word = GAIN
    elif worse and word != GAIN:
        word = LOSS
    return Verdict(word, metric, better, worse)


def significant_gains(items: Evidence, rule: str, metric: Metric) -> dict[int, Estimate]:
    """By size, gains over the baseline that are significant among the sizes, and noticeable."""
    gains = {n: part.gain(rule, metric) for n, part in items.by("size").items()}
    significant = significant_fdr([float(gain.p) for gain in gains.values()])
    least = MIN_GAIN if metric == LOG_P else 0.0  # a size where nobody notices is not named
    pairs = zip(gains.items(), significant, strict=True)
    return {n: gain for (n, gain), is_so in pairs if is_so and abs(gain.mean) > least}


def worse_sizes(items: Evidence, rule: str, metric: Metric) -> dict[int, Estimate]:
    """By size, gains that are significantly negative."""
    gains = significant_gains(items, rule, metric)
    return {n: gain for n, gain in gains.items() if gain.mean < 0}


def judged_items(evidence: Evidence) -> Evidence:
    """The items that decide: all but retention text, or that if there are no others.

    Where some are of held-out templates, these decide.
    """
    answers = evidence.answers
    return answers.held_out_templates if answers.n else evidence.held_out_templates


def main_metric(evidence: Evidence) -> Metric:
    """The metric that decides: of a head's sets accuracy, else the log-likelihood.

    Accuracy that no rule changes, as that of the item with the highest weight, cannot decide.
    """
    if LOG_P not in evidence.values:
        return RIGHT
    decides = evidence.of.items.accuracy_decides and not is_accuracy_fixed(evidence)
    return RIGHT if decides else LOG_P


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
    metric, heads = main_metric(evidence), judged_items(evidence).by("head")
    gains = [part.gain(rule, metric) for h, part in heads.items() if evidence.names(rule, h)]
    significant = significant_fdr([float(gain.p) for gain in gains])
    signs = [np.sign(g.mean) if clear else 0 for g, clear in zip(gains, significant, strict=True)]
    return signs.count(1), signs.count(-1), signs.count(0)
