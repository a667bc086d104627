"""The verdict on a rule: use it, use it at some sizes only, or leave softmax as it is."""

from typing import NamedTuple

import numpy as np

from calibrate.evidence.estimate import Estimate, evident_among
from calibrate.evidence.evidence import LOG_P, RIGHT, Evidence

GAIN, LOSS, SAME, UNKNOWN = "gain", "loss", "no difference", "unknown"


class Verdict(NamedTuple):
    """What a rule does beyond chance."""

    outcome: str  # GAIN, LOSS, SAME, or UNKNOWN where items are too few to tell
    measure: str  # by which it was judged
    whole: Estimate  # gain over plain softmax on all items that are not protected
    better: list[int]  # sizes at which it is better beyond chance, among so many sizes
    worse: list[int]

    @property
    def use(self) -> bool:
        """Whether to use it at all."""
        return self.outcome == GAIN


def judge(evidence: Evidence, rule: str) -> Verdict:
    """Judges a rule by log p where it is known, else by right answers."""
    answers = evidence.answers if evidence.answers.n else evidence
    measure = LOG_P if LOG_P in evidence.values else RIGHT
    whole, by_size = answers.gain(rule, measure), answers.by("size")
    gains = {n: part.gain(rule, measure) for n, part in by_size.items()}
    evident = evident_among([float(gain.p) for gain in gains.values()])
    clear = [n for n, is_evident in zip(gains, evident, strict=True) if is_evident]
    better, worse = ([n for n in clear if up * gains[n].mean > 0] for up in (1, -1))
    return Verdict(_outcome(whole, bool(better), bool(worse)), measure, whole, better, worse)


def outcome(gain: Estimate) -> str:
    """What a gain says in a word."""
    if not np.isfinite(gain.error):
        return UNKNOWN
    return {1: GAIN, -1: LOSS}.get(int(gain.sign), SAME)


def _outcome(whole: Estimate, better: bool, worse: bool) -> str:
    by_whole = outcome(whole)
    if better:
        return GAIN
    return LOSS if worse and by_whole != GAIN else by_whole
