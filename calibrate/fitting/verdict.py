"""Verdicts on a choice of rule, in sentences."""

from collections.abc import Mapping, Sequence

import numpy as np

from calibrate.fitting.candidates import Candidate, kind_label
from calibrate.fitting.gain import LEAST_GAIN, Evidence
from calibrate.fitting.weighting import N_BLOCKS

NEAR_MAX_BETA = 0.99
STEP, FAR = 1e-3, 0.1  # of beta above 1: for the slope of log p there, and for its curvature
OVER_SHARP = "over-sharp: it wants beta below 1, which is out of range"


def gain_sentences(best: Candidate, unforced: Candidate, left_out: Mapping[str, str]) -> list[str]:
    """The choice, its gain over plain softmax, and kinds left out."""
    mean, low, high, _ = best.gain
    gain = (
        f"{kind_label(best.kind)} gains {mean:.4f} nats of log p over plain softmax "
        f"(95 % interval {low:.4f} to {high:.4f})"
    )
    if best.kind == unforced.kind == "constant" and not left_out:
        gain = f"no other kind is better than one constant beyond chance: {gain}"
    sentences = [gain]
    if best.kind != unforced.kind:
        sentences.append(f"forced: it does not beat {kind_label(unforced.kind)} beyond chance")
    return sentences + [
        f"{kind_label(kind)} was left out: {reason}" for kind, reason in left_out.items()
    ]


def sharpness_sentence(chosen: Candidate, trade: Sequence[Candidate]) -> str:
    """How sharp the rule is, and what that costs and gives."""
    mildest = trade[0]
    if chosen.q == 0 or len(trade) == 1:
        return f"fitted with q = {chosen.q:g}"
    return (
        f"fitted with q = {chosen.q:g}, which gives the target {chosen.mean_p:.1%} of the "
        f"attention ({mildest.mean_p:.1%} with q = {mildest.q:g}) for "
        f"{mildest.mean_log_p - chosen.mean_log_p:.4f} nats of log p"
    )


def warnings(best: Candidate) -> list[str]:
    """Caveats on a gain."""
    if np.median(best.scores.beta) > NEAR_MAX_BETA * best.fit.rule.max_beta:
        return ["beta is at its upper bound: on this head hard attention may do as well"]
    return []


def wants_less(evidence: Evidence) -> bool:
    """Whether rows evidently want beta below 1, for a gain that can be noticed.

    By the slope of the mean log p at beta = 1, and the gain of its parabola.
    """
    plain, step, far = (
        evidence.score(np.full(len(evidence.weight), beta)) for beta in (1.0, 1 + STEP, 1 + FAR)
    )
    first, further = evidence.gain(step, plain), evidence.gain(far, plain)
    slope = first.mean / STEP
    curvature = 2 * (FAR * slope - further.mean) / FAR**2
    return first.high < 0 and slope**2 >= 2 * curvature * LEAST_GAIN


def refusal(
    candidates: Sequence[Candidate], n_groups: int, force: str | None, less: bool = False
) -> str:
    """Why no rule is published; `less`: rows want beta below 1."""
    gains = ", ".join(
        f"{kind_label(c.kind)} {c.gain.mean:+.4f} ({c.gain.low:+.4f} to {c.gain.high:+.4f})"
        for c in candidates
    )
    subject = "no rule beats" if force is None else f"{kind_label(force)} does not beat"
    advice = "leave its softmax as it is, or check that the targets are the items that should win"
    if n_groups < N_BLOCKS and any(c.gain.mean >= LEAST_GAIN for c in candidates):
        advice = (
            f"{n_groups} prompts (groups) are too few to rule out failures that they do not show: "
            "collect more"
        )
    if less:
        advice = f"{OVER_SHARP}; check that the targets are the items that should win"
    return (
        f"not for this head: {subject} plain softmax by {LEAST_GAIN:g} nats on average and beyond "
        f"chance on held-out rows (nats of log p, sizes equal: {gains}); {advice}"
    )
