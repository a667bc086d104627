"""Verdicts on a choice of rule, in sentences."""

from collections.abc import Mapping, Sequence

import numpy as np

from calibrate.maths.likelihood_profile import BELOW
from calibrate.rows.candidates import Candidate, kind_label
from calibrate.rows.gain import LEAST_GAIN, Evidence
from calibrate.rows.weighting import N_BLOCKS

NEAR_MAX_BETA = 0.99
STEP = 1e-3  # of beta above 1, for the slope of log p there
N_BELOW = 400  # betas below 1 among which the best is looked for
OVER_SHARP = "over-sharp"


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
    for reason in dict.fromkeys(left_out.values()):
        kinds = [kind_label(kind) for kind, its in left_out.items() if its == reason]
        verb = "were" if len(kinds) > 1 else "was"
        sentences.append(f"{' and '.join(kinds)} {verb} left out: {reason}")
    return sentences


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


def wanted_below_1(evidence: Evidence) -> float | None:
    """The constant beta below 1 that rows evidently want, for a gain that can be noticed, or None.

    Evident by the slope of the mean log p at beta = 1. The constant is that of the largest mean
    log p, at least 1/8; between the betas at which it is known, it is a cubic in log beta.
    """
    from scipy.interpolate import CubicHermiteSpline

    plain, step = (evidence.score(np.full(len(evidence.weight), b)) for b in (1.0, 1 + STEP))
    if evidence.gain(step, plain).high >= 0:
        return None
    at_1 = np.stack(evidence.rows.profile.derivatives(np.ones(len(evidence.weight)))[:2], axis=1)
    known = np.concatenate([evidence.rows.below, at_1[..., None]], axis=2)
    value, slope = np.tensordot(evidence.weight, known, 1)
    betas = np.append(BELOW, 1.0)
    fine = np.geomspace(betas[0], 1, N_BELOW)
    log_p = CubicHermiteSpline(np.log(betas), value, slope * betas)(np.log(fine))
    best = int(log_p.argmax())
    return float(fine[best]) if log_p[best] - log_p[-1] >= LEAST_GAIN else None


def over_sharp(beta: float) -> str:
    """What is said of rows that want this beta, below 1."""
    wanted, why = f"{beta:.2f}", ""
    if beta <= BELOW[0]:
        wanted, why = f"{BELOW[0]:g} or less", ": its logits hardly tell the target"
    return f"{OVER_SHARP}: it wants beta {wanted}, out of the range of 1 to 64{why}"


def refusal(
    candidates: Sequence[Candidate], n_groups: int, force: str | None, below: float | None = None
) -> str:
    """Why no rule is published; `below`: the beta below 1 that rows want."""
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
    if below is not None:
        advice = f"{over_sharp(below)}; check that the targets are the items that should win"
    return (
        f"not for this head: {subject} plain softmax by {LEAST_GAIN:g} nats on average and beyond "
        f"chance on held-out rows (nats of log p, sizes equal: {gains}); {advice}"
    )
