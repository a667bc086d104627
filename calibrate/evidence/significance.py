"""Significant gains and losses of rules, by log-likelihood; accuracy never decides."""

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
    """The verdict on a rule, on the items that decide: `Evidence.judged`."""
    gains = significant_gains(evidence.judged, rule)
    better = [size for size, gain in gains.items() if gain.mean > 0]
    worse = [size for size in gains if size not in better]
    overall = outcome(evidence.judged.gain(rule, LOG_P))
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


def outcome(gain: Estimate) -> str:
    """The outcome that a gain shows."""
    if not np.isfinite(gain.error):
        return TOO_FEW
    return {1: GAIN, -1: LOSS}.get(int(gain.sign), SAME)


def is_worse(items: Evidence, rule: str, other: str) -> bool:
    """True if the NLL of a rule is significantly worse than another's, by MIN_GAIN or more."""
    gain = items.gain(other, LOG_P, rule)
    return bool(gain.sign > 0 and gain.mean >= MIN_GAIN)


def best_rules(items: Evidence, rules: Sequence[str]) -> list[str]:
    """The rule of the best mean NLL, and those that are not worse, see `is_worse`; never argmax."""
    deployable = [rule for rule in rules if rule != HARD]
    best = items.best(deployable)
    return [rule for rule in deployable if not is_worse(items, rule, best)]
