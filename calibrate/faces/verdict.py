"""The verdict on a fit: how much better, where, and where not; and beside its rivals."""

from collections.abc import Sequence

import numpy as np

from calibrate.pipeline.compare import Comparison
from calibrate.pipeline.rules import label

SIGNIFICANT = 0.01
RIVALS = ("paper", "procedure", "polynomial", "kappa-log-n", "constant", "log-n", "hard")


def verdict(comparison: Comparison, name: str) -> str:
    """One sentence on the rule "own", called `name`, beside plain softmax.

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


def beside_rivals(comparison: Comparison) -> str:
    """One sentence: which of the simpler rules are better than "own", worse, or neither."""
    own = comparison.accuracy[comparison.rules.index("own")]
    ahead: list[str] = []
    behind: list[str] = []
    level: list[str] = []
    for rule in (rule for rule in RIVALS if rule in comparison.rules):
        i = comparison.rules.index(rule)
        better, worse = _split(comparison.accuracy[i] - own, comparison.p_own[i])
        for where, found in ((better, ahead), (worse, behind)):
            if where.any():
                found.append(f"{label(rule)} ({_ranges(comparison.sizes, where)})")
        if not (better | worse).any():
            level.append(label(rule))
    words = (("better", ahead), ("worse", behind), ("not measurably different", level))
    said = "; ".join(f"{word}: {_listed(names)}" for word, names in words if names)
    return f"Of its rivals, {said}."


def _listed(words: Sequence[str]) -> str:
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
    return f"n = {_listed(words)}"
