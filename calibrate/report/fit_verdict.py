"""Verdicts on a fit in sentences: where it gains or loses, and how simpler rules compare."""

from collections.abc import Sequence

import numpy as np

from calibrate.evaluation.baselines import label
from calibrate.evaluation.comparison import Comparison
from calibrate.evaluation.score_logits import LogitScores
from calibrate.report.wording import with_error

SIGNIFICANT = 0.01
LEAST_ERRORS = 2.0  # standard errors: a gain on logits of no more is within chance
OUTCOMES = ("no difference", "gain", "loss")  # in log p of the target, over plain softmax
RIVALS = (
    "paper", "procedure", "entropy-and-size", "polynomial", "kappa-log-n", "constant", "log-n",
    "hard",
)  # fmt: skip


def verdict(comparison: Comparison, name: str) -> str:
    """One sentence that compares the rule "own", called `name`, with plain softmax.

    "Measurably" is p < 0.01 of a paired t-test at one size.
    """
    i = comparison.rules.index("own")
    plain = comparison.accuracy[comparison.rules.index("plain")]
    own, gain, sizes = comparison.accuracy[i], comparison.gain[i], comparison.sizes
    better, worse = _split(gain, comparison.p_plain[i])
    if better.any():
        best = int(np.argmax(np.where(better, gain, -np.inf)))
        parts = [
            f"{name} is right more often than plain softmax at {_ranges(sizes, better)}, most at "
            f"n = {sizes[best]:,} ({100 * plain[best]:.1f} % to {100 * own[best]:.1f} %)"
        ]
    else:
        fewest = min(comparison.sets)
        parts = [
            f"{name} is nowhere measurably better than plain softmax on {fewest:,} sets of a size"
        ]
    if worse.any():
        most = int(np.argmin(np.where(worse, gain, np.inf)))
        parts.append(
            f"it is right less often at {_ranges(sizes, worse)}, by up to "
            f"{-100 * gain[most]:.1f} points"
        )
    same = ~better & ~worse
    if better.any() and same.any():
        parts.append(f"it makes no measurable difference at {_ranges(sizes, same)}")
    return "; ".join(parts) + "."


def compare_rivals(comparison: Comparison) -> str:
    """One sentence: the rival rules that are better than "own", worse, or neither."""
    own = comparison.accuracy[comparison.rules.index("own")]
    ahead: list[str] = []
    behind: list[str] = []
    level: list[str] = []
    sharper = (rule for rule in comparison.rules if rule.startswith("q-"))
    for rule in (*(rule for rule in RIVALS if rule in comparison.rules), *sharper):
        i = comparison.rules.index(rule)
        better, worse = _split(comparison.accuracy[i] - own, comparison.p_own[i])
        for where, rules in ((better, ahead), (worse, behind)):
            if where.any():
                rules.append(f"{label(rule)} ({_ranges(comparison.sizes, where)})")
        if not (better | worse).any():
            level.append(label(rule))
    groups = {"better": ahead, "worse": behind, "not measurably different": level}
    parts = [f"{group}: {_join_words(rules)}" for group, rules in groups.items() if rules]
    return f"Of its rivals, {'; '.join(parts)}."


def verdict_on_logits(scores: LogitScores, rule: int) -> str:
    """One sentence: how a fit changes the target's probability on logits on disk, and by head.

    "Measurably" is more than two standard errors.
    """
    estimate, name = scores.estimate(), scores.rules[rule]
    gain, error = estimate.of(rule, "log_p_gain")
    before, after = (100 * estimate.of(i, "p")[0] for i in (0, rule))
    direction = _direction(gain, error)
    effect = (
        "makes no measurable difference", "makes the target more probable",
        "makes the target less probable",
    )[direction]  # fmt: skip
    verb = ("changes", "rises", "falls")[direction]
    change = with_error(abs(gain), error, ".4f") if direction else with_error(gain, error, "+.4f")
    origin = "which it was not made of" if scores.held_out(rule) else "the very rows it was made of"
    return (
        f"{name} {effect}: on the {estimate.rows:,} rows of {scores.name}, {origin}, the target's "
        f"log-probability {verb} by {change} nats (mean probability {before:.1f} % to "
        f"{after:.1f} %){_heads_text(scores, rule)}."
    )


def outcome_on_logits(scores: LogitScores, rule: int) -> str:
    """What `verdict_on_logits` says in a word: one of OUTCOMES."""
    return OUTCOMES[_direction(*scores.estimate().of(rule, "log_p_gain"))]


def heads_moved(scores: LogitScores, rule: int) -> tuple[int, int, int]:
    """Numbers of heads with a rule that (do not change, gain, lose) measurably."""
    directions = [
        _direction(*scores.estimate(head=head).of(rule, "log_p_gain"))
        for head in range(len(scores.heads))
        if scores.names(rule, head)
    ]
    same, up, down = map(directions.count, range(3))
    return same, up, down


def _heads_text(scores: LogitScores, rule: int) -> str:
    """How many heads gain and lose, and how many have no rule; "" of one head alone."""
    if len(scores.heads) == 1:
        return ""
    same, up, down = heads_moved(scores, rule)
    n_rules = same + up + down
    others = len(scores.heads) - n_rules
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


def _direction(gain: float, error: float) -> int:
    """1 up, 2 down, 0 neither beyond chance."""
    if not abs(gain) > LEAST_ERRORS * error:
        return 0
    return 1 if gain > 0 else 2


def _join_words(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _split(gain: np.ndarray, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(where it gains, where it loses), beyond chance; NaN is no evidence."""
    evident = np.nan_to_num(p, nan=1.0) < SIGNIFICANT
    return evident & (gain > 0), evident & (gain < 0)


def _ranges(sizes: Sequence[int], where: np.ndarray) -> str:
    """ "n = 64 to 256 and 1,024": neighbours in the list of sizes make a range."""
    runs: list[list[int]] = []
    for position in np.flatnonzero(where).tolist():
        if runs and runs[-1][-1] == position - 1:
            runs[-1].append(position)
        else:
            runs.append([position])
    words = [
        f"{sizes[run[0]]:,}" + (f" to {sizes[run[-1]]:,}" if len(run) > 1 else "") for run in runs
    ]
    return f"n = {_join_words(words)}"
