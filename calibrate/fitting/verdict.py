"""The verdict of a fit, in sentences: its gain, its freedom, and which kind to use."""

from collections.abc import Sequence

from calibrate.core.rule import CONSTANT, KINDS, POLYNOMIAL, TERMS
from calibrate.defaults import MAX_BETA, MIN_BETA
from calibrate.evidence.evidence import BASELINE
from calibrate.evidence.significance import ALPHA, MIN_GAIN
from calibrate.fitting.fit_head import HeadFit, nats, trained_gain
from calibrate.fitting.held_out import HeldOut, join_held_out
from calibrate.fitting.options import LEAST_SQUARES, FitOptions

RESCALE = 64  # of the logits, where beta is at a bound
PROCEDURES = {LEAST_SQUARES: "polynomial (least squares, the paper's procedure)"}


def verdict_of_head(head: HeadFit, options: FitOptions) -> str:
    """The verdict of a fit of one head, in sentences that end with a full stop."""
    sentences = [_gain_sentence(head, options), *_notes(head, options)]
    if head.held_out is not None:
        sentences.append(kinds_sentence(head.held_out, options.procedure, head.constant))
    return " ".join(filter(None, sentences))


def verdict_of_heads(heads: Sequence[HeadFit], options: FitOptions) -> str:
    """The verdict of a fit per head: how many gain and how much, and which kind to use."""
    name = options.procedure
    saved = [head for head in heads if head.rule]
    gains = [float(gain.mean) for head in saved if (gain := head.gain(name)) is not None]
    kept = len(heads) - len(saved)
    text = f"{len(saved)} of {len(heads)} heads have a {PROCEDURES.get(name, name)}"
    if gains:
        least, most = f"{min(gains):+.3f}", f"{max(gains):+.3f}"
        text += f", with held-out gains of {least}{f' to {most}' * (most != least)} nats"
    if not options.is_named and options.loss != LEAST_SQUARES:
        text += f" (false discovery rate {ALPHA:.0%})"
    sentences = [f"{text}." + (f" {kept} keep{'s' * (kept == 1)} softmax." if kept else "")]
    scored = [head.held_out for head in saved if head.held_out is not None]
    if scored:
        together = join_held_out(scored)
        sentences += [_in_distribution(together, options), kinds_sentence(together, name)]
    return " ".join(filter(None, sentences))


def kinds_sentence(held_out: HeldOut, name: str, constant: float | None = None) -> str:
    """The kind that is significantly better, or a constant that is as good; "" if there is neither.

    Args:
      held_out: with several procedures.
      name: of the one that is saved.
      constant: the best constant of one head; None of several heads.
    """
    gains = {
        kind: held_out.gain(kind, over=name)
        for kind in KINDS
        if kind in held_out.log_p and kind != name
    }
    better = {kind: gain for kind, gain in gains.items() if gain.sign > 0 and gain.mean >= MIN_GAIN}
    if name == LEAST_SQUARES and POLYNOMIAL in better:
        gain = better[POLYNOMIAL]
        return f"Maximum likelihood, the default, is significantly better ({nats(gain)})."
    if better:
        kind = max(better, key=lambda kind: better[kind].mean)
        return f"The kind {kind} is significantly better ({nats(better[kind])}): `--kind {kind}`."
    if CONSTANT not in gains:
        return ""
    gain = gains[CONSTANT]
    which = "A constant per head" if constant is None else f"A constant ({beta_text(constant)})"
    if not gain.sign < 0:
        return f"{which} is not significantly worse ({nats(gain)}): `--kind constant`."
    if gain.mean > -MIN_GAIN:
        loss = f"{gain.shown('+.4f')} nats"
        return f"{which} is worse by less than {MIN_GAIN} nats ({loss}): `--kind constant`."
    return ""


def beta_text(beta: float) -> str:
    """ "beta = 2.3, theta = 0.43"."""
    return f"beta = {beta:.3g}, theta = {1 / beta:.3g}"


def _gain_sentence(head: HeadFit, options: FitOptions) -> str:
    name, held_out = options.procedure, head.held_out
    label = PROCEDURES.get(name, name)
    if held_out is None:
        return (
            f"{label}, fitted to {head.fitted:,} misranked inputs. There is no verdict: the "
            "collection keeps misranked inputs only."
        )
    gain = held_out.gain(name)
    before, after = held_out.nll(BASELINE), held_out.nll(name)
    text = (
        f"{label}: NLL {before:.3f} -> {after:.3f} on {head.inputs:,} inputs, held out by folds "
        f"({nats(gain)}"
    )
    known = "" if gain.significant else ", not significant"
    return f"{text}{known})."


def _notes(head: HeadFit, options: FitOptions) -> list[str]:
    """Sentences on freedom, sizes of the training data, and betas that data do not determine."""
    assert head.rule is not None
    notes = []
    n_terms = len(TERMS[options.rule_kind])
    if n_terms > 1 and options.loss != LEAST_SQUARES:
        notes.append(
            f"Effective degrees of freedom: {head.rule.degrees_of_freedom:.1f} of {n_terms}."
        )
    if head.held_out is not None:
        notes.append(_in_distribution(head.held_out, options))
    if head.ranked_right and options.loss != LEAST_SQUARES:
        notes.append(
            "Every input is ranked right, so a larger beta is always better: beta is a constant "
            "from the median margin of the target."
        )
    return [*notes, bound_sentence(head)]


def bound_sentence(head: HeadFit) -> str:
    """The bound that beta is at in most inputs, with its remedy; "" elsewhere."""
    if not head.bound or head.rule is None:
        return ""
    rule, is_upper = head.rule.rule, head.bound == "max"
    bound = f"{rule.max_beta:g}" if is_upper else f"{rule.min_beta:.3g}"
    text = f"beta is at its {'upper' if is_upper else 'lower'} bound {bound} on most inputs."
    if is_upper and rule.max_beta < MAX_BETA:
        return f"{text} `--max-beta` moves it."
    if not is_upper and rule.min_beta > MIN_BETA:
        return f"{text} `--min-beta` moves it."
    verb = "Multiply" if is_upper else "Divide"
    return f"{text} {verb} the logits by {RESCALE} and fit again."


def _in_distribution(held_out: HeldOut, options: FitOptions) -> str:
    """The gain at sizes of the training data, with the tolerance; "" without such inputs."""
    gain = trained_gain(held_out, options.procedure, options.trained_up_to)
    if gain is None:
        return ""
    tolerance = f"tolerance -{options.tolerance:g}"
    return f"In distribution (n <= {options.trained_up_to:,}): {nats(gain)} ({tolerance})."
