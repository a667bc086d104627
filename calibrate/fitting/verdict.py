"""The verdict on a fit: whether it is saved, and in what words."""

from collections.abc import Sequence

from calibrate.core.rule import CONSTANT, KINDS, POLYNOMIAL, TERMS
from calibrate.defaults import MAX_BETA, MIN_BETA
from calibrate.evidence.estimate import ALPHA, MIN_GAIN, Estimate, per_cent
from calibrate.evidence.evidence import BASELINE
from calibrate.fitting.head_fit import HeadFit
from calibrate.fitting.held_out import HeldOut, join_held_out
from calibrate.fitting.options import LEAST_SQUARES, LIKELIHOOD, FitOptions

RESCALE = 64  # a user is told to scale the logits by this where beta reaches its widest bound
PROCEDURE_LABELS = {LEAST_SQUARES: "polynomial (least squares, the paper's procedure)"}


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


def verdict_of_head(head: HeadFit, options: FitOptions) -> str:
    """The verdict of a fit of one head: a line on its gain, one on other kinds, one of notes."""
    lines = [_gain_sentence(head, options)]
    if head.held_out is not None:
        lines.append(kinds_sentence(head.held_out, options.procedure, head.constant))
    return "\n".join(filter(None, [*lines, " ".join(filter(None, _notes(head, options)))]))


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
        f"{label}: NLL {before:.3f} -> {after:.3f} on {head.inputs:,} inputs, held out by folds "
        f"({nats_text(gain)}{significance})."
    )


def _notes(head: HeadFit, options: FitOptions) -> list[str]:
    """Sentences on the freedom, the trained sizes, and betas that the inputs do not determine."""
    assert head.rule is not None
    notes = []
    n_terms = len(TERMS[options.rule_kind])
    if n_terms > 1 and options.loss == LIKELIHOOD:
        freedom = head.rule.degrees_of_freedom
        notes.append(f"Effective degrees of freedom: {freedom:.1f} of {n_terms}.")
    if head.held_out is not None:
        notes.append(_in_distribution(head.held_out, options))
    if head.ranked_right and options.loss == LIKELIHOOD:
        notes.append(
            "Every input is ranked right, so a larger beta is always better: beta is a constant "
            "from the median margin of the target."
        )
    return [*notes, bound_sentence(head)]


def bound_sentence(head: HeadFit) -> str:
    """The bound that beta reaches in most inputs, with its remedy; "" if there is none."""
    if not head.bound or head.rule is None:
        return ""
    form, is_upper = head.rule.form, head.bound == "max"
    bound = f"{form.max_beta:g}" if is_upper else f"{form.min_beta:.3g}"
    text = f"beta is at its {'upper' if is_upper else 'lower'} bound {bound} on most inputs."
    if is_upper and form.max_beta < MAX_BETA:
        return f"{text} `--max-beta` moves it."
    if not is_upper and form.min_beta > MIN_BETA:
        return f"{text} `--min-beta` moves it."
    verb = "Multiply" if is_upper else "Divide"
    return f"{text} {verb} the logits by {RESCALE} and fit again."


def _in_distribution(held_out: HeldOut, options: FitOptions) -> str:
    """The gain at the sizes of the training data, with its tolerance; "" without such inputs."""
    gain = trained_gain(held_out, options)
    if gain is None:
        return ""
    tolerance = f"tolerance {options.tolerance:g}"
    return f"In distribution (n <= {options.trained_up_to:,}): {nats_text(gain)} ({tolerance})."


def verdict_of_heads(heads: Sequence[HeadFit], options: FitOptions) -> str:
    """The verdict of a fit per head: how many gain and how much, and which kind to use."""
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
    text += "."
    if kept := len(heads) - len(saved):
        text += f" {kept} keep{'s' * (kept == 1)} softmax."
    lines = [text]
    scored = [head.held_out for head in saved if head.held_out is not None]
    if scored:
        together = join_held_out(scored)
        lines += [kinds_sentence(together, procedure), _in_distribution(together, options)]
    return "\n".join(filter(None, lines))


def kinds_sentence(held_out: HeldOut, procedure: str, constant: float | None = None) -> str:
    """The kind that is significantly better, or a constant that is as good; "" if there is neither.

    Args:
      held_out: with several procedures.
      procedure: the one that is saved.
      constant: the best constant of one head; None of several heads.
    """
    kinds = [kind for kind in KINDS if kind in held_out.log_p and kind != procedure]
    gains = {kind: held_out.gain(kind, over=procedure) for kind in kinds}
    better = {kind: gain for kind, gain in gains.items() if gain.sign > 0 and gain.mean >= MIN_GAIN}
    if procedure == LEAST_SQUARES and POLYNOMIAL in better:
        gain = better[POLYNOMIAL]
        return f"Maximum likelihood, the default, is significantly better ({nats_text(gain)})."
    if better:
        kind = max(better, key=lambda kind: better[kind].mean)
        return (
            f"The kind {kind} is significantly better ({nats_text(better[kind])}): `--kind {kind}`."
        )
    if CONSTANT not in gains:
        return ""
    gain = gains[CONSTANT]
    subject = "A constant per head" if constant is None else f"A constant ({beta_text(constant)})"
    difference = f"{gain.shown('+.4f')} nats"
    if gain.mean > -MIN_GAIN:
        return f"{subject} does as well within {MIN_GAIN} nats ({difference}): `--kind constant`."
    if not gain.sign < 0:
        return f"{subject} is not significantly worse ({difference}): `--kind constant`."
    return ""
