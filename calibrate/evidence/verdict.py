"""The verdict on a rule: use it, use it at some sizes only, or keep the baseline.

The log-likelihood decides. Accuracy is shown beside it.
"""

from typing import NamedTuple

import numpy as np

from calibrate.evidence.estimate import Estimate
from calibrate.evidence.evidence import Evidence
from calibrate.evidence.metrics import LOG_P
from calibrate.evidence.significance import MIN_GAIN, significant_fdr

GAIN = "gain"
LOSS = "loss"
SAME = "no difference"
UNKNOWN = "unknown"


class Verdict(NamedTuple):
    """The significant effects of a rule."""

    outcome: str  # GAIN, LOSS, SAME, or UNKNOWN where items are too few
    better: list[int]  # sizes at which it is significantly better, corrected for their number
    worse: list[int]

    @property
    def use(self) -> bool:
        """True if the rule is worth using."""
        return self.outcome == GAIN


def judge(evidence: Evidence, rule: str) -> Verdict:
    """The verdict on a rule by its log-likelihood on the items that decide."""
    answers = judged_items(evidence)
    gains = significant_gains(answers, rule)
    better = [size for size, gain in gains.items() if gain.mean > 0]
    worse = [size for size in gains if size not in better]
    word = outcome(answers.gain(rule, LOG_P))
    if better:
        word = GAIN
    elif worse and word != GAIN:
        word = LOSS
    return Verdict(word, better, worse)


def significant_gains(items: Evidence, rule: str) -> dict[int, Estimate]:
    """By size, gains over the baseline that are significant among the sizes, and noticeable."""
    gains = {n: part.gain(rule, LOG_P) for n, part in items.by("size").items()}
    significant = significant_fdr([float(gain.p_value) for gain in gains.values()])
    pairs = zip(gains.items(), significant, strict=True)
    return {n: gain for (n, gain), is_so in pairs if is_so and abs(gain.mean) > MIN_GAIN}


def judged_items(evidence: Evidence) -> Evidence:
    """The items that decide: all but retention text, or that if there are no others.

    Where some are of held-out templates, these decide.
    """
    answers = evidence.answers
    return answers.held_out_templates if answers.n else evidence.held_out_templates


def outcome(gain: Estimate) -> str:
    """The word for a gain."""
    if not np.isfinite(gain.error):
        return UNKNOWN
    return {1: GAIN, -1: LOSS}.get(int(gain.sign), SAME)


def heads_moved(evidence: Evidence, rule: str) -> tuple[int, int, int]:
    """Numbers of heads with an entry that (gain, lose, do neither) significantly."""
    heads = judged_items(evidence).by("head")
    gains = [part.gain(rule, LOG_P) for h, part in heads.items() if evidence.names(rule, h)]
    significant = significant_fdr([float(gain.p_value) for gain in gains])
    signs = [np.sign(g.mean) if clear else 0 for g, clear in zip(gains, significant, strict=True)]
    return signs.count(1), signs.count(-1), signs.count(0)
