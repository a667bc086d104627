"""Verdicts on a fit in sentences: where it gains or loses, and how simpler rules compare."""

from collections.abc import Sequence

import numpy as np

from calibrate.evidence.baselines import kind_label, label
from calibrate.evidence.evidence import LOG_P, PLAIN, Evidence, P
from calibrate.evidence.evidence import Evidence as Comparison
from calibrate.evidence.verdict import judge
from calibrate.files.coefficients import Coefficients
from calibrate.maths.rule import LOG_SIZE
from calibrate.report.rule_curves import beta_range
from calibrate.report.selection import chosen_kind, gain_in_log_p, sharpness_tried
from calibrate.report.wording import with_error

SIGNIFICANT = 0.01
LEAST_ERRORS = 2.0  # standard errors: a gain on logits of no more is within chance
OUTCOMES = ("no difference", "gain", "loss")  # in log p of the target, over plain softmax
UNKNOWN = "unknown"  # of too few rows or groups for an error
YARDSTICKS = ("paper", "log-n", "constant", "hard")  # a sentence each
OTHERS = ("procedure", "entropy-and-size", "polynomial", "kappa-log-n")
WHY_HARD = (
    "Accuracy rewards any sharpening where one answer is right; hard attention is also sure where "
    "it is wrong, which log p counts."
)


def describe_fit(fit: Coefficients, comparison: Comparison) -> str:
    """What was fitted, and for what: the kind of rule, its range of beta, its objective."""
    least, most = beta_range(fit, fit.only)
    numbers = f"beta = {most:.2f}" if most - least < 0.005 else f"beta {least:.2f} to {most:.2f}"
    q = fit.quality.get("q")
    aim = {None: "", 0: ", fitted to log p of the target"}.get(
        q, f", fitted to p^{q} of the target: sharper than its log p alone asks for"
    )
    return f"{fit.reference} is {kind_label(chosen_kind(fit))}, {numbers}{aim}." + (
        _why_it_falls(comparison) if fit.rule.kind == LOG_SIZE and fit.only.coefficients[0] < 0
        else ""
    )  # fmt: skip


def _why_it_falls(comparison: Comparison) -> str:
    """Why beta falls with n, where the head errs more on larger sets."""
    if "hard" not in comparison.rules:
        return ""
    first, last = 100 * comparison.accuracy[comparison.rules.index("hard")][[0, -1]]
    if not last < first:
        return ""
    return (
        " Beta falls with n, as this head finds the wrong item in more of the larger sets (hard "
        f"attention is right in {first:.0f} % at n = {comparison.sizes[0]:,}, in {last:.0f} % at n "
        f"= {comparison.sizes[-1]:,}), and sharpening makes such errors sure."
    )


def verdict(comparison: Comparison, fit: Coefficients) -> str:
    """What a fit, the rule "own", gains over plain softmax, where, and what to do.

    "Measurably" is a p-value below 0.01, of a paired t-test at one size.
    """
    name = fit.reference
    i = comparison.rules.index("own")
    plain = comparison.accuracy[comparison.rules.index("plain")]
    own, gain, sizes = comparison.accuracy[i], comparison.gain[i], comparison.sizes
    better, worse = _split(gain, comparison.p_plain[i])
    if better.any():
        best = int(np.argmax(np.where(better, gain, -np.inf)))
        text = (
            f"{name} is right more often than plain softmax {_where(sizes, better)}, most at "
            f"{sizes[best]:,} ({100 * plain[best]:.1f} % to {100 * own[best]:.1f} %)"
        )
    else:
        fewest = min(comparison.sets)
        text = f"{name} is nowhere measurably better than plain softmax on {fewest:,} sets a size"
    if worse.any():
        most = int(np.argmin(np.where(worse, gain, np.inf)))
        text += (
            f"; it is right less often {_where(sizes, worse)}, by up to "
            f"{-100 * gain[most]:.1f} points"
        )
    if not better.any():
        gain = 0.0 if worse.any() else gain_in_log_p(fit)
        return text + (
            f", and gains {gain:.4f} nats of log p on rows held out from its own: score more sets "
            "(--sets) before you use it." if gain else ". Leave softmax as it is."
        )  # fmt: skip
    return f"{text}. Use it{f' {_where(sizes, better)}' if worse.any() else ''}."


def compare_rivals(comparison: Comparison) -> str:
    """Where "own" beats the yardsticks and where it loses, and which other rules do better."""
    own, sizes = comparison.accuracy[comparison.rules.index("own")], comparison.sizes
    sentences, level, ahead = [], [], []
    for rule in (*YARDSTICKS, *OTHERS, *(r for r in comparison.rules if r.startswith("q-"))):
        if rule not in comparison.rules:
            continue
        i = comparison.rules.index(rule)
        lost, won = (
            _where(sizes, part) if part.any() else ""
            for part in _split(comparison.accuracy[i] - own, comparison.p_own[i])
        )
        if rule not in YARDSTICKS:
            ahead += [f"{label(rule)} ({lost})"] * bool(lost)
        elif won:
            sentences.append(f"Beats {label(rule)} {won}" + f"; loses {lost}" * bool(lost) + ".")
        elif lost:
            sentences.append(f"Loses to {label(rule)} {lost}.")
        else:
            level.append(label(rule))
        if rule == "hard" and lost:
            sentences.append(WHY_HARD)
    if level:
        sentences.append(f"Not measurably different from {_join_words(level)}.")
    if ahead:
        sentences.append(f"Also right more often: {_join_words(ahead)}.")
    return " ".join(sentences)


def verdict_on_logits(evidence: Evidence, rule: str) -> str:
    """How a fit changes the target's probability on logits, by head, and why not by more."""
    whole = judge(evidence, rule).whole
    before, after = (100 * float(evidence.mean(name, P).mean) for name in (PLAIN, rule))
    gain, error, sign = float(whole.mean), float(whole.error), int(whole.sign)
    effect = {
        1: "makes the target more probable", -1: "makes the target less probable",
        0: "makes no measurable difference" if np.isfinite(error)
        else "makes a difference that chance may have made (too few rows or groups for an error)",
    }[sign]  # fmt: skip
    verb = {1: "rises", -1: "falls", 0: "changes"}[sign]
    change = with_error(abs(gain), error, ".4f") if sign else with_error(gain, error, "+.4f")
    seen = evidence.fits[rule].fingerprint == evidence.of.fingerprint
    origin = "the very rows it was made of" if seen else "which it was not made of"
    return (
        f"{rule} {effect}: on the {evidence.n:,} rows of {evidence.of.name}, {origin}, the "
        f"target's log-probability {verb} by {change} nats (mean probability {before:.1f} % to "
        f"{after:.1f} %){_heads_text(evidence, rule)}.{_why_behind(evidence, rule)}"
    )


def _why_behind(evidence: Evidence, rule: str) -> str:
    """That a fit with less log p than another rule was made sharper, if it was; else ""."""
    tried, chosen = sharpness_tried(evidence.fits[rule])
    best = evidence.best(LOG_P)
    if not chosen or chosen is tried[0] or best == rule:
        return ""
    mildest, kept = tried[0], chosen["gain"] / tried[0]["gain"]
    return (
        f" In log p it is behind {label(best)}: it was made sharper on purpose (q = "
        f"{chosen['q']:g}), which keeps {100 * kept:.0f} % of the gain that q = {mildest['q']:g} "
        f"has ({chosen['gain']:.4f} of {mildest['gain']:.4f} nats, held out from its own rows); "
        f"fit with --q {mildest['q']:g} (q={mildest['q']:g} in Python) for that gain."
    )


def heads_moved(evidence: Evidence, rule: str) -> tuple[int, int, int]:
    """Numbers of heads with a rule that (do not change, gain, lose) measurably."""
    signs = [
        int(part.gain(rule, LOG_P).sign)
        for head, part in evidence.by("head").items()
        if evidence.names(rule, head)
    ]
    same, up, down = (signs.count(sign) for sign in (0, 1, -1))
    return same, up, down


def _heads_text(evidence: Evidence, rule: str) -> str:
    """How many heads gain and lose, and how many have no rule; "" of one head alone."""
    if len(evidence.heads) == 1:
        return ""
    same, up, down = heads_moved(evidence, rule)
    n_rules = same + up + down
    others = len(evidence.heads) - n_rules
    if n_rules == 1:
        moves = "gains" if up else "loses" if down else "does not change"
        text = f"; the only head that it has a rule for {moves} measurably"
    else:
        text = (
            f"; of the {n_rules:,} heads that it has a rule for, {up:,} {_verb(up, 'gain')} "
            f"measurably, {down:,} {_verb(down, 'lose')}, and {same:,} {_verb(same, 'do')} neither"
        )
    unchanged = f"; {others:,} {'head is' if others == 1 else 'heads are'} unchanged"
    return text + unchanged * bool(others)


def _verb(count: int, verb: str) -> str:
    """A verb that agrees with a count."""
    return verb if count != 1 else f"{verb}es" if verb.endswith("o") else f"{verb}s"


def _join_words(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _split(gain: np.ndarray, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(where it gains, where it loses), beyond chance; NaN is no evidence."""
    evident = np.nan_to_num(p, nan=1.0) < SIGNIFICANT
    return evident & (gain > 0), evident & (gain < 0)


def _where(sizes: Sequence[int], where: np.ndarray) -> str:
    """ "from 64 to 256 and at 1,024 items": neighbours in the list of sizes make a range."""
    runs: list[list[int]] = []
    for position in np.flatnonzero(where).tolist():
        if runs and runs[-1][-1] == position - 1:
            runs[-1].append(position)
        else:
            runs.append([position])
    words = [
        f"from {sizes[run[0]]:,} to {sizes[run[-1]]:,}" if len(run) > 1 else f"at {sizes[run[0]]:,}"
        for run in runs
    ]
    return f"{_join_words(words)} items"
