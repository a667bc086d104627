"""The verdict on a rule: use it, use it at some sizes, or keep the baseline.

The log-likelihood decides, not the accuracy.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from calibrate.evidence.baselines import HARD
from calibrate.evidence.estimate import MIN_GAIN, Estimate, significant_fdr
from calibrate.evidence.evidence import Evidence
from calibrate.evidence.metrics import LOG_P

GAIN = "gain"
LOSS = "loss"
SAME = "no difference"
TOO_FEW = "unknown"  # items


class Verdict(NamedTuple):
    """The significant effects of a rule."""

    outcome: str  # GAIN, LOSS, SAME, or TOO_FEW
    better: list[int]  # sizes with a significant gain, corrected for the number of sizes
    worse: list[int]  # sizes with a significant loss, likewise

    @property
    def use(self) -> bool:
        """True if the rule is worth using."""
        return self.outcome == GAIN


def judge(evidence: Evidence, rule: str) -> Verdict:
    """The verdict on a rule, by its log-likelihood on `judged_items`."""
    answers = judged_items(evidence)
    gains = significant_gains(answers, rule)
    better = [size for size, gain in gains.items() if gain.mean > 0]
    worse = [size for size in gains if size not in better]
    overall = outcome(answers.gain(rule, LOG_P))
    if better:
        overall = GAIN
    elif worse and overall != GAIN:
        overall = LOSS
    return Verdict(overall, better, worse)


def significant_gains(items: Evidence, rule: str) -> dict[int, Estimate]:
    """The gains over the baseline above MIN_GAIN that are significant among the sizes, by size."""
    gains = {n: part.gain(rule, LOG_P) for n, part in items.by("size").items()}
    significant = significant_fdr([float(gain.p_value) for gain in gains.values()])
    return {
        n: gain
        for (n, gain), is_significant in zip(gains.items(), significant, strict=True)
        if is_significant and abs(gain.mean) > MIN_GAIN
    }


def judged_items(evidence: Evidence) -> Evidence:
    """The items that decide: of held-out templates, if there are any; else all.

    Retention text decides only if there are no other items.
    """
    answers = evidence.answers
    return answers.held_out_templates if answers.n else evidence.held_out_templates


def outcome(gain: Estimate) -> str:
    """The outcome that a gain shows."""
    if not np.isfinite(gain.error):
        return TOO_FEW
    return {1: GAIN, -1: LOSS}.get(int(gain.sign), SAME)


def heads_moved(evidence: Evidence, rule: str) -> tuple[int, int, int]:
    """Numbers of heads with an entry: with a significant gain, a significant loss, and neither."""
    heads = judged_items(evidence).by("head")
    gains = [part.gain(rule, LOG_P) for h, part in heads.items() if evidence.names(rule, h)]
    significant = significant_fdr([float(gain.p_value) for gain in gains])
    signs = [
        np.sign(gain.mean) if is_significant else 0
        for gain, is_significant in zip(gains, significant, strict=True)
    ]
    return signs.count(1), signs.count(-1), signs.count(0)


def is_worse(items: Evidence, rule: str, other: str) -> bool:
    """True if the NLL of a rule is significantly worse than another's, by MIN_GAIN or more."""
    gain = items.gain(other, LOG_P, rule)
    return bool(gain.sign > 0 and gain.mean >= MIN_GAIN)


def best_rules(items: Evidence, rules: Sequence[str]) -> list[str]:
    """The rule of the best mean NLL, and those that are not worse, see `is_worse`; never argmax."""
    deployable = [rule for rule in rules if rule != HARD]
    best = items.best(deployable)
    return [rule for rule in deployable if not is_worse(items, rule, best)]
