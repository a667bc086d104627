"""What a rule does to a model's examples, in sentences; "beyond chance" is two standard errors."""

import math
from collections.abc import Sequence

from calibrate.files.examples import Cell
from calibrate.model.comparison import LOG_P, PLAIN, RIGHT, Estimate, ExampleComparison

NAMED = 4  # cells in a sentence
NEGLIGIBLE = 0.001  # nats of an answer
NOTHING_LEFT = 0.01  # the same: too little to fit for


def verdict(comparison: ExampleComparison, rule: str, constants: Sequence[str] = ()) -> list[str]:
    """A fit's gains and losses, and whether one constant on every head does as well.

    Args:
      comparison: with plain softmax, the rule, and the constants.
      rule: the fit's name in it.
      constants: the names of rules that are one constant on every head.
    """
    cells, sentences = comparison.members(), list[str]()
    if cells:
        sentences.append(_gain(comparison, rule, cells))
        if len(lengths := comparison.lengths()) > 1:
            of_each = [
                f"{shares(comparison, rule, comparison.members(length=n))} at {n:,} tokens"
                for n in lengths
            ]
            sentences.append(f"answers right {'; '.join(of_each)}")
        if constants:
            sentences.append(_beside_constants(comparison, rule, constants))
        sentences += _losses(comparison, rule, cells)
    if text := comparison.members(text=True):
        sentences.append(_of_text(comparison.gain(rule, LOG_P, text)))
    return sentences


def by_length(comparison: ExampleComparison) -> list[str]:
    """Answers right and log p at each length, with plain softmax and with the rule after it."""
    plain, *rules = comparison.rules[:2]
    lines = []
    for length in comparison.lengths():
        cells = comparison.members(length=length)
        right, log_p = (comparison.mean(plain, m, cells).mean for m in (RIGHT, LOG_P))
        line = f"plain softmax answers {100 * right:.1f} % right, log p {log_p:.3f}"
        for rule in rules:
            gain = _signed(comparison.gain(rule, LOG_P, cells), 3)
            line = f"answers right {shares(comparison, rule, cells)}, log p {gain} nats"
        full = ": nothing left to gain" * (-log_p < NOTHING_LEFT)
        lines.append(f"at {length:,} tokens {line}{full}")
    return lines


def best_sentence(comparison: ExampleComparison, measure: str) -> str:
    """Which rule is best for the answers, or for text without any, and whether beyond chance."""
    cells = comparison.members() or comparison.members(text=True)
    best = comparison.best(measure, cells)
    rivals = comparison.rivals(best, measure, cells)
    name = {LOG_P: "log p", RIGHT: "answers right" if comparison.members() else "tokens right"}
    if rivals:
        return f"by {name[measure]}: {best}; within chance of it: {', '.join(rivals)}"
    return f"by {name[measure]}: {best}, beyond chance of every other rule"


def _gain(comparison: ExampleComparison, rule: str, cells: Sequence[int]) -> str:
    gain = comparison.gain(rule, LOG_P, cells)
    before, after = (comparison.mean(name, LOG_P, cells).mean for name in (PLAIN, rule))
    head = "" if gain.sign > 0 else "not for this model: "
    tail = {1: "", 0: "; no gain in log p beyond chance", -1: "; log p is worse beyond chance"}
    return (
        f"{head}answers right {shares(comparison, rule, cells)}, log p {before:.3f} -> {after:.3f} "
        f"({_signed(gain, 3)} nats){tail[gain.sign]}"
    )


def _beside_constants(comparison: ExampleComparison, rule: str, constants: Sequence[str]) -> str:
    """The best constant is chosen on these examples: it is a rival, not a rule to publish."""
    cells = comparison.members()
    best = comparison.best(LOG_P, cells, among=constants)
    gain, points = (comparison.gain(rule, m, cells, over=best) for m in (LOG_P, RIGHT))
    differences = f"{_signed(gain, 3)} nats, {_signed(points, 1, 100)} points"
    if gain.sign > 0:
        return f"ahead of the best constant on every head, {best}: {differences}"
    word = "better" if gain.sign < 0 else "as well"
    return f"one constant on every head does {word}: {best}; this fit less that: {differences}"


def _losses(comparison: ExampleComparison, rule: str, cells: Sequence[int]) -> list[str]:
    """Templates and lengths at which the rule is worse beyond chance."""
    worse = [
        f"{_name(comparison.cells[i])} ({_signed(gain, 3)} nats)"
        for i in cells
        if ((gain := comparison.gain(rule, LOG_P, [i])).sign < 0 and gain.mean < -NEGLIGIBLE)
        or comparison.gain(rule, RIGHT, [i]).sign < 0
    ]
    more = f", and {len(worse) - NAMED} more" * (len(worse) > NAMED)
    return [f"worse beyond chance: {', '.join(worse[:NAMED])}{more}"] if worse else []


def _of_text(gain: Estimate) -> str:
    if gain.sign == 0:
        return f"plain text is the same within chance ({_signed(gain, 4)} nats a token)"
    word = "better" if gain.sign > 0 else "worse"
    return f"plain text is {abs(gain.mean):.4f} ± {gain.error:.4f} nats a token {word}"


def shares(comparison: ExampleComparison, rule: str, cells: Sequence[int]) -> str:
    """Answers right before and after, and the difference with its error: "27.0 -> 58.5 % (...)"."""
    before, after = (100 * comparison.mean(name, RIGHT, cells).mean for name in (PLAIN, rule))
    points = comparison.gain(rule, RIGHT, cells)
    word = {1: "", 0: ", no difference beyond chance", -1: ", fewer beyond chance"}[points.sign]
    return f"{before:.1f} -> {after:.1f} % ({_signed(points, 1, 100)} points{word})"


def _name(cell: Cell) -> str:
    return f"{cell.template} at {cell.length:,} tokens"


def _signed(estimate: Estimate, digits: int, factor: int = 1) -> str:
    mean = f"{factor * estimate.mean:+.{digits}f}"
    known = math.isfinite(estimate.error)
    return mean + (f" ± {factor * estimate.error:.{digits}f}" if known else ", error unknown")
