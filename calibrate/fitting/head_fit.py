"""The fit of a head: whether it is saved, and the verdict on one or several heads in words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from calibrate.core.rule import CONSTANT, KINDS, POLYNOMIAL, TERMS, RuleForm
from calibrate.defaults import MAX_BETA, MIN_BETA
from calibrate.evidence.estimate import ALPHA, MIN_GAIN, Estimate, per_cent
from calibrate.evidence.evidence import BASELINE
from calibrate.fitting.fit_rule import FittedRule
from calibrate.fitting.held_out import HeldOut
from calibrate.fitting.options import LEAST_SQUARES, LIKELIHOOD, FitOptions

RESCALE = 64  # a user is told to scale the logits by this where beta reaches its widest bound
PROCEDURE_LABELS = {LEAST_SQUARES: "polynomial (least squares, the paper's procedure)"}


@dataclass(frozen=True)
class HeadFit:
    """The fit of one head.

    Attributes:
      layer, head: None where unknown.
      inputs: number of inputs of positive weight.
      misranked: share of them that is misranked, by weight.
      rule: None: the head keeps softmax.
      refusal: why it does; "" where it has a rule.
      constant: the constant of highest likelihood; None where it was not fitted.
      fitted: number of inputs that the rule was fitted to.
      r_squared: see `r_squared_of_log_beta`.
      bound: the bound that beta reaches in most inputs, "min" or "max"; else "". Of likelihood.
      ranked_right: no input is misranked.
      near_ties: misranked inputs whose optimal beta is above the rule's bound.
      held_out: scores by folds; None where only misranked inputs were kept, or too few inputs.
    """

    layer: int | None
    head: int | None
    inputs: int
    misranked: float
    rule: FittedRule | None = None
    refusal: str = ""
    constant: float | None = None
    fitted: int = 0
    r_squared: float | None = None
    bound: str = ""
    ranked_right: bool = False
    near_ties: int = 0
    held_out: HeldOut | None = field(default=None, compare=False, repr=False)

    def gain(self, procedure: str) -> Estimate | None:
        """The held-out gain of the rule over softmax, nats; None if there are no scores."""
        return None if self.held_out is None else self.held_out.gain(procedure)

    def record(self, procedure: str) -> dict[str, Any]:
        """Its record in a coefficient file; without a rule, neither penalty nor freedom."""
        record: dict[str, Any] = {"layer": self.layer, "head": self.head, "inputs": self.inputs}
        gain = self.gain(procedure)
        if gain is not None:
            record |= {"gain": float(gain.mean), "se": float(np.nan_to_num(gain.error))}
        if self.rule is None:
            return record
        return record | {
            "penalty": "infinite" if self.rule.penalty == math.inf else self.rule.penalty,
            "degrees_of_freedom": self.rule.degrees_of_freedom,
            "r_squared_log_beta": self.r_squared,
            "at_bound": self.bound,
        }

    def without_rule(self, refusal: str) -> "HeadFit":
        """The head with softmax, for this reason."""
        return replace(self, rule=None, refusal=refusal)


def find_refusal(head: HeadFit, options: FitOptions, is_significant: bool) -> str:
    """The reason why the rule of a head is not saved; "" if it is.

    Args:
      head: with its rule.
      options: resolved.
      is_significant: the held-out gain differs from 0, corrected for the number of heads.
    """
    held_out, procedure = head.held_out, options.procedure
    if held_out is None:
        return ""
    scores = held_out.log_p[procedure], held_out.unbounded
    if not any(held_out.estimate(log_p - held_out.uniform).sign > 0 for log_p in scores):
        return (
            "these logits tell nothing of the targets: the held-out NLL is not significantly below "
            "that of the uniform distribution; check that target holds the positions of the right "
            "items"
        )
    gain = held_out.gain(procedure)
    if options.loss == LEAST_SQUARES and is_significant and gain.mean < 0:
        return (
            f"the paper's procedure is significantly worse than softmax ({nats_text(gain)} of "
            f"log-likelihood; {head.near_ties:,} near ties have an optimal beta above "
            f'{options.max_beta:g}); use the default, loss="{LIKELIHOOD}"'
        )
    if options.is_named or options.loss == LEAST_SQUARES:
        return ""
    if not is_significant or gain.mean < MIN_GAIN:
        return (
            f"no significant gain over softmax of {MIN_GAIN} nats or more: {nats_text(gain)} of "
            f"held-out log-likelihood (p-value {gain.p_value:.2g}); keep softmax, or name a kind "
            "to save it anyway"
        )
    trained = trained_gain(held_out, options)
    if trained is not None and -trained.mean > options.tolerance:
        return (
            f"in distribution (n <= {options.trained_up_to:,}) the rule loses "
            f"{nats_text(-trained, '')}, more than tolerance={options.tolerance:g}; name a kind to "
            "save it anyway"
        )
    return ""


def trained_gain(held_out: HeldOut, options: FitOptions) -> Estimate | None:
    """The gain at the sizes of the training data; None without such inputs."""
    trained = held_out.size <= (options.trained_up_to or 0)
    return held_out.gain(options.procedure, some=trained) if trained.any() else None


def nats_text(estimate: Estimate, sign: str = "+") -> str:
    """An estimate as text, "+0.120 ± 0.004 nats"."""
    return f"{estimate.shown(f'{sign}.3f')} nats"


def beta_text(beta: float) -> str:
    """A constant as text, "beta = 2.3, theta = 0.43"."""
    return f"beta = {beta:.3g}, theta = {1 / beta:.3g}"


def verdict_text(heads: Sequence[HeadFit], options: FitOptions, held_out: HeldOut | None) -> str:
    """The verdict on a fit: a line on its gain, one on other kinds, one of notes.

    Args:
      heads: all of the fit; a single one without a number has the longer verdict.
      options: resolved.
      held_out: scores of the heads with a rule, together.
    """
    first = heads[0]
    is_one = (first.layer, first.head) == (None, None)
    lines = [_gain_sentence(first, options) if is_one else _heads_sentence(heads, options)]
    if held_out is not None:
        lines.append(
            kinds_sentence(held_out, options.procedure, first.constant if is_one else None)
        )
    is_smoothed = is_one and options.loss == LIKELIHOOD
    notes = [
        _freedom_sentence(first) if is_smoothed else "",
        "" if held_out is None else _in_distribution(held_out, options),
        *(_cautions(first) if is_smoothed else []),
    ]
    return "\n".join(filter(None, [*lines, " ".join(filter(None, notes))]))


def _gain_sentence(head: HeadFit, options: FitOptions) -> str:
    procedure, held_out = options.procedure, head.held_out
    label = PROCEDURE_LABELS.get(procedure, procedure)
    if held_out is None:
        return (
            f"{label}, fitted to {head.fitted:,} misranked inputs. There is no verdict: the "
            "collection keeps misranked inputs only."
        )
    gain = held_out.gain(procedure)
    before, after = held_out.nll(BASELINE), held_out.nll(procedure)
    significance = "" if gain.significant else ", not significant"
    return (
        f"{label.capitalize()}: NLL {before:.3f} -> {after:.3f} nats in cross-validation on "
        f"{head.inputs:,} inputs (gain {gain.shown('.3f')}{significance})."
    )


def _heads_sentence(heads: Sequence[HeadFit], options: FitOptions) -> str:
    """How many heads gain, and how much."""
    procedure = options.procedure
    saved = [head for head in heads if head.rule]
    gains = [float(gain.mean) for head in saved if (gain := head.gain(procedure)) is not None]
    label = PROCEDURE_LABELS.get(procedure, procedure)
    text = f"{len(saved)} of {len(heads)} heads have a {label}"
    if gains:
        least, most = f"{min(gains):+.3f}", f"{max(gains):+.3f}"
        text += f", with held-out gains of {least}{f' to {most}' * (most != least)} nats"
    if not options.is_named and options.loss == LIKELIHOOD:
        text += f" (false discovery rate {per_cent(ALPHA, 0)})"
    kept = len(heads) - len(saved)
    return f"{text}." + (f" {kept} keep{'s' * (kept == 1)} softmax." if kept else "")


def _freedom_sentence(head: HeadFit) -> str:
    """The effective degrees of freedom; "" for a constant, which has one."""
    assert head.rule is not None
    n_terms = len(TERMS[head.rule.form.kind])
    if n_terms == 1:
        return ""
    return f"Effective degrees of freedom: {head.rule.degrees_of_freedom:.1f} of {n_terms}."


def _cautions(head: HeadFit) -> list[str]:
    """Sentences on betas that the inputs do not determine; "" where they do."""
    assert head.rule is not None
    ranked_right = (
        "Every input is ranked correctly, as targets made from the same logits are, so a larger "
        "beta is always better: beta is a constant from the median margin of the target."
    )
    return [ranked_right if head.ranked_right else "", _bound_sentence(head.rule.form, head.bound)]


def _bound_sentence(form: RuleForm, bound: str) -> str:
    """The bound that beta reaches in most inputs, with its remedy; "" if there is none."""
    if not bound:
        return ""
    beta, widest, side, verb = form.max_beta, MAX_BETA, "upper", "Multiply"
    if bound == "min":
        beta, widest, side, verb = form.min_beta, MIN_BETA, "lower", "Divide"
    text = f"beta is at its {side} bound {beta:.4g} on most inputs."
    if beta != widest:
        return f"{text} `--{bound}-beta` moves it."
    return f"{text} {verb} the logits by {RESCALE} and fit again."


def _in_distribution(held_out: HeldOut, options: FitOptions) -> str:
    """The gain at the sizes of the training data, with its tolerance; "" without such inputs."""
    gain = trained_gain(held_out, options)
    if gain is None:
        return ""
    tolerance = f"tolerance {options.tolerance:g}"
    gained = f"gain {nats_text(gain, '')}"
    return f"In distribution (n <= {options.trained_up_to:,}): {gained} ({tolerance})."


def advise_kind(held_out: HeldOut, procedure: str) -> tuple[str, Estimate] | None:
    """The kind to use instead of the saved one, with its gain over it; None if there is none.

    It is the kind that is significantly better, or else a constant that is as good.
    """
    gains = {
        kind: held_out.gain(kind, over=procedure)
        for kind in KINDS
        if kind in held_out.log_p and kind != procedure
    }
    better = {kind: gain.mean for kind, gain in gains.items() if _is_better(gain)}
    if better:
        kind = max(better, key=lambda kind: better[kind])
        if procedure == LEAST_SQUARES and POLYNOMIAL in better:
            kind = POLYNOMIAL  # of the default loss
        return kind, gains[kind]
    constant = gains.get(CONSTANT)
    if constant is not None and (constant.mean > -MIN_GAIN or not constant.sign < 0):
        return CONSTANT, constant
    return None


def _is_better(gain: Estimate) -> bool:
    return bool(gain.sign > 0 and gain.mean >= MIN_GAIN)


def kinds_sentence(held_out: HeldOut, procedure: str, constant: float | None = None) -> str:
    """The sentence on `advise_kind`; "" if it advises none.

    Args:
      held_out: with several procedures.
      procedure: the one that is saved.
      constant: the best constant of one head; None of several heads.
    """
    advice = advise_kind(held_out, procedure)
    if advice is None:
        return ""
    kind, gain = advice
    if procedure == LEAST_SQUARES and kind == POLYNOMIAL:
        return f"Maximum likelihood, the default, is significantly better ({nats_text(gain)})."
    if _is_better(gain):
        better = f"The kind {kind} is significantly better ({nats_text(gain)})"
        return f"{better}: prefer it (`--kind {kind}`)."
    subject = "A constant per head" if constant is None else f"A constant ({beta_text(constant)})"
    finding = "is not significantly worse"
    if gain.mean > -MIN_GAIN:
        finding = f"does as well, within {MIN_GAIN} nats"
    difference = f"difference {gain.shown('+.4f')}"
    return f"{subject} {finding} ({difference}): prefer it (`--kind {CONSTANT}`)."
