"""Why no rule is published for a head: gains, the option that is the cause, or advice."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from calibrate.core.rule_kinds import kind_label
from calibrate.evidence.publish_threshold import MIN_GAIN
from calibrate.fitting.cross_validate import Candidate, CrossValidation

# Options that may keep a rule from gaining, and their values without a constraint. Where no rule is
# published, rows are fitted again without each, as "no rule gains" alone would send a user to
# collect more in vain: `trained_up_to` and `rows` may come from the collection.
RELAXED_OPTIONS: dict[str, Any] = {
    "trained_up_to": 0,
    "q": 0.0,
    "min_entropy": 0.0,
    "rows": "all",
}
REFUSAL_PARAMETERS = (*RELAXED_OPTIONS, "min_beta")  # that a refusal may name

# Selects the rule to publish, of candidates, or None: see `select.select_simplest`.
Select = Callable[[Sequence[Candidate]], Candidate | None]


def refusal(validation: CrossValidation, candidates: Sequence[Candidate], select: Select) -> str:
    """Why no rule is published: the gains of all kinds, and a cause or a remedy."""
    gains = ", ".join(
        f"{kind_label(c.kind)} {c.gain.mean:+.4f} ({c.gain.low:+.4f} to {c.gain.high:+.4f})"
        for c in candidates
    )
    cause = cause_of_refusal(validation, [c.kind for c in candidates], select)
    return (
        f"not for this head: no rule beats the baseline by {MIN_GAIN:g} nats on average and "
        f"significantly on held-out rows (nats of log-likelihood, sizes equal: {gains}); "
        f"{cause or _remedy(validation)}"
    )


def _remedy(validation: CrossValidation) -> str:
    """Advice where no option keeps a rule from gaining."""
    advice = (
        "leave its softmax as it is, check that the targets are the items that should win, or give "
        "more rows"
    )
    if not _gains_below_min_beta(validation):
        return advice
    least = validation.options.min_beta
    return f"{advice}; its best beta is below {least:g}: give a smaller min_beta="


def _gains_below_min_beta(validation: CrossValidation) -> bool:
    """True if rows gain enough, to second order, by one beta below the least that is allowed.

    With slope s < 0 and curvature c < 0 of the mean log p at that least beta, a change of beta by d
    gains s d + c d^2 / 2: at most s^2 / (-2 c), at d = -s / c < 0.
    """
    folded = validation.folded
    weight = folded.baseline.design.item_weight
    beta = np.full(len(weight), validation.options.min_beta)
    _, slope, curvature = (weight @ x for x in folded.rows.profile.derivatives(beta))
    return bool(slope < 0 and slope**2 >= -2 * curvature * MIN_GAIN)


def cause_of_refusal(validation: CrossValidation, kinds: Sequence[str], select: Select) -> str:
    """The option without which a rule of these kinds gains, as a clause; "" if there is none.

    Rows are fitted again, cross-validated, without each option that is set.
    """
    for name, relaxed in RELAXED_OPTIONS.items():
        value = getattr(validation.options, name)
        if value in (None, relaxed):
            continue
        candidates, _ = validation.with_option(name, relaxed).of_kinds(kinds)
        if selected := select(candidates):
            # Not every command has this one, which the head or the collection may set.
            is_of_head = name == "trained_up_to"
            option = f"{name} = {value}" if is_of_head else f"{name}={json.dumps(value)}"
            return (
                f"{option} is the cause: with {relaxed} "
                f"{kind_label(selected.kind)} gains {selected.gain.mean:.4f} nats"
            )
    return ""
