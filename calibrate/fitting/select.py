"""Selection of the kind of rule of a head, and of q, by scores on held-out rows; the verdict.

q is the exponent of generalised cross-entropy: a fit maximises the mean of p^q, and of log p at
q = 0, maximum likelihood. Rows show the probability of the target alone, for which q = 0 is best. A
head that can be scored may have a higher accuracy with a larger q, which is chosen by that.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from calibrate.core.rule_kinds import KINDS, RuleKind, kind_label
from calibrate.errors import QualityError
from calibrate.evidence.metrics import RIGHT
from calibrate.evidence.scores import OWN, PLAIN, Evidence
from calibrate.evidence.selection_criterion import MIN_GAIN, min_improvement, simplest_unbeaten
from calibrate.fitting.cross_validate import (
    Candidate,
    CrossValidation,
    cross_validate,
)
from calibrate.fitting.fit_rule import applied_beta
from calibrate.fitting.options import MIN_BETA_LIMIT, LogLikelihood, Options
from calibrate.fitting.verdict_clauses import margin_clause
from calibrate.solver.solved_rows import Rows
from calibrate.store.coefficients import Coefficients

LARGER_Q = (0.25, 0.5, 0.75, 1.0)  # values of q that are tried beyond 0
AT_BOUND = 0.95  # of a bound: a rule within the solver's tolerance of the best may stop short
RESCALE = 64  # of the logits, where beta is at a bound
STEP_OF_Q = 1 / 32  # to which the largest q that costs no log p is found
# Options that may keep a rule from gaining, and their values without a constraint. Where no rule is
# published, rows are fitted again without each, as "no rule gains" alone would send a user to
# collect more in vain: `trained_up_to` and `rows` may come from the collection.
UNCONSTRAINED: dict[str, Any] = {"trained_up_to": 0, "q": 0.0, "min_entropy": 0.0, "rows": "all"}

# Scores rules, by name, on validation sets: Evidence with RIGHT.
Accuracy = Callable[[Mapping[str, Coefficients]], Evidence]


@dataclass(frozen=True, eq=False)
class Choice:
    """The rule to publish, and why."""

    chosen: Candidate
    candidates: list[Candidate]  # of each kind, simplest first
    by_q: list[Candidate]  # of the chosen kind, smallest q first
    left_out: dict[str, str]  # kind -> why it could not be fitted
    verdict: str

    @property
    def held_out(self) -> Evidence:
        """log p of the baseline and, as OWN, of the chosen rule, held out."""
        return self.chosen.held_out


def choose(rows: Rows, options: Options, accuracy: Accuracy | None = None) -> Choice:
    """Fits every kind of rule, and chooses one; see `choose_from`."""
    validation = cross_validate(rows, tuple(KINDS.values()), options)
    return choose_from(validation, tuple(KINDS), accuracy)


def choose_from(
    validation: CrossValidation, kinds: Sequence[str], accuracy: Accuracy | None = None
) -> Choice:
    """The simplest rule that no other is significantly better than, and its q.

    The kind is chosen at q = 0, or the q of the options. Where they leave q open and `accuracy` is
    known, q is the one of highest accuracy, of those that cost no held-out log p.
    A kind that the options name is published whatever its scores; the verdict says what they are.

    Raises:
      QualityError: too few rows for any fit, or for the kind named; or none is named, and none is
        significantly better than the baseline.
    """
    named, (candidates, left_out) = validation.options.kind, validation.of_kinds(kinds)
    if not candidates or named in left_out:
        cause = _cause_of_refusal(validation, kinds)
        raise QualityError(left_out[named or kinds[0]] + (cause and f"; {cause}"))
    simplest = select_simplest(candidates)
    best = next((c for c in candidates if c.kind == named), simplest)
    if best is None:
        raise QualityError(_refusal(validation, candidates))
    choice = Choice(best, candidates, [best], left_out, "")
    accuracy_text = ""
    if validation.options.q is None and accuracy is not None:
        choice, accuracy_text = _with_most_accurate_q(choice, validation, accuracy)
    return replace(choice, verdict=_verdict(choice, simplest, accuracy_text))


def select_simplest(candidates: Sequence[Candidate]) -> Candidate | None:
    """The simplest rule that no other is significantly better than; None for the baseline."""
    return simplest_unbeaten(
        candidates,
        Candidate.gain_over,
        lambda candidate: min_improvement(candidate.fitted.kind.depends_on_both),
    )


def _with_most_accurate_q(
    choice: Choice, validation: CrossValidation, accuracy: Accuracy
) -> tuple[Choice, str]:
    """The chosen kind at the q with the highest accuracy; and a clause that says what it is."""
    by_q = _with_larger_q(choice.chosen, validation)
    evidence = accuracy({c.name: c.fit for c in by_q})
    chosen = evidence.best(RIGHT, [c.name for c in by_q])
    own, plain = (evidence.mean(name, RIGHT).mean for name in (chosen, PLAIN))
    clause = (
        f", for which the head is right on {own:.1%} of sets that selected q (baseline {plain:.1%})"
    )
    return replace(choice, chosen=next(c for c in by_q if c.name == chosen), by_q=by_q), clause


def _with_larger_q(best: Candidate, validation: CrossValidation) -> list[Candidate]:
    """Rules of the same kind with larger q, up to where log p is that of the baseline."""
    accepted, least_rejected, untried = [best], LARGER_Q[-1], list(LARGER_Q)
    while untried or least_rejected - accepted[-1].q > STEP_OF_Q:
        q = untried.pop(0) if untried else (accepted[-1].q + least_rejected) / 2
        if candidate := _at_no_cost(best.fitted.kind, q, validation):
            accepted.append(candidate)
        else:
            least_rejected, untried = q, []
    return accepted


def _at_no_cost(kind: RuleKind, q: float, validation: CrossValidation) -> Candidate | None:
    """The rule of a kind with this q; None if it costs log p, held out."""
    try:
        candidate = validation.fit(kind, LogLikelihood(q))
    except QualityError:  # too much at sizes that the head was trained on
        return None
    return candidate if candidate.gain.mean >= 0 else None


def _verdict(choice: Choice, simplest: Candidate | None, accuracy_text: str) -> str:
    """The choice, its gain over the baseline and at trained sizes, and the kinds left out."""
    best, (mean, low, high, _) = choice.chosen, choice.chosen.gain
    clauses = [
        f"{kind_label(best.kind)} gains {mean:.4f} nats of log-likelihood over the baseline "
        f"(95 % interval {low:.4f} to {high:.4f}), fitted with q = {best.q:.3g}{accuracy_text}"
    ]
    if not best.gain.significant:
        # Without a name, the kind is significantly better at q = 0; a larger q is for accuracy.
        why = "published on request" if choice.chosen.options.kind else "tuned for accuracy"
        clauses.append(
            f"{why}: log-likelihood not significantly better than the baseline's (p-value "
            f"{best.gain.p:.2g})"
        )
    elif simplest is not None and best.kind != simplest.kind:
        difference = best.gain_over(simplest)
        clauses.append(
            f"published on request: not significantly better than {kind_label(simplest.kind)} "
            f"({difference.mean:+.4f} nats, p-value {difference.p:.2g})"
        )
    trained = choice.chosen.options.trained_limit().check(choice.held_out, OWN)
    clauses += [margin_clause(trained)] if trained.n else []
    clauses += filter(None, [bound_note(choice.chosen.rows, best.fit)])
    for reason in dict.fromkeys(choice.left_out.values()):
        kinds = [kind_label(kind) for kind, why in choice.left_out.items() if why == reason]
        clauses.append(f"without {' and '.join(kinds)}: {reason}")
    return "; ".join(clauses)


def bound_note(rows: Rows, fit: Coefficients) -> str:
    """Advice where most rows have a beta at a bound that no option moves; "" elsewhere."""
    beta, weight, rule = applied_beta(fit, rows), rows.shares(), fit.rule
    if weight @ (beta >= AT_BOUND * rule.max_beta) > 1 / 2:
        return (
            f"beta is at its upper bound {rule.max_beta:g} on most rows: multiply the logits by "
            f"{RESCALE} and fit again"
        )
    if rule.min_beta == MIN_BETA_LIMIT and weight @ (AT_BOUND * beta <= rule.min_beta) > 1 / 2:
        return (
            f"beta is at its lower bound 1/{1 / rule.min_beta:g} on most rows: divide the logits "
            f"by {RESCALE} and fit again"
        )
    return ""


def _refusal(validation: CrossValidation, candidates: Sequence[Candidate]) -> str:
    """Why no rule is published."""
    gains = ", ".join(
        f"{kind_label(c.kind)} {c.gain.mean:+.4f} ({c.gain.low:+.4f} to {c.gain.high:+.4f})"
        for c in candidates
    )
    least = validation.options.min_beta
    remedy = "leave its softmax as it is, check that the targets are the items that should win, or "
    remedy += "give more prompts"
    if _gains_below_min_beta(validation):
        remedy += f"; its best beta is below min_beta = {least:g}: allow less beta"
    return (
        f"not for this head: no rule beats the baseline by {MIN_GAIN:g} nats on average and "
        f"significantly on held-out rows (nats of log-likelihood, sizes equal: {gains}); "
        f"{_cause_of_refusal(validation, [c.kind for c in candidates]) or remedy}"
    )


def _gains_below_min_beta(validation: CrossValidation) -> bool:
    """True if rows gain enough, to second order, by one beta below the least that is allowed."""
    weight = validation.baseline.design.item_weight
    beta = np.full(len(weight), validation.options.min_beta)
    _, slope, curvature = (weight @ x for x in validation.rows.profile.derivatives(beta))
    return bool(slope < 0 and slope**2 >= -2 * curvature * MIN_GAIN)


def _cause_of_refusal(validation: CrossValidation, kinds: Sequence[str]) -> str:
    """The option without which a rule of these kinds gains; "" if there is none."""
    for name, unconstrained in UNCONSTRAINED.items():
        value = getattr(validation.options, name)
        if value in (None, unconstrained):
            continue
        candidates, _ = validation.with_option(name, unconstrained).of_kinds(kinds)
        if best := select_simplest(candidates):
            return (
                f"{name} = {value} is the cause: with {unconstrained} "
                f"{kind_label(best.kind)} gains {best.gain.mean:.4f} nats"
            )
    return ""
