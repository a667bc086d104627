"""The verdict on a fit in one sentence: how much better, where, and where not."""

from collections.abc import Sequence

import numpy as np

from calibrate.pipeline.compare import Comparison

SIGNIFICANT = 0.01


def verdict(comparison: Comparison, name: str) -> str:
    """One sentence on the rule "own", called `name`, from its accuracies and paired tests."""
    plain, own, paper = (
        comparison.accuracy[comparison.rules.index(rule)] for rule in ("plain", "own", "paper")
    )
    i = comparison.rules.index("own")
    gain = own - plain
    better, worse = _split(gain, comparison.p_plain[i])
    sizes = comparison.sizes
    if better.any():
        best = int(np.argmax(np.where(better, gain, -np.inf)))
        parts = [
            f"{name} is right more often than plain softmax at {_ranges(sizes, better)}, most at "
            f"n = {sizes[best]:,} ({100 * plain[best]:.1f} % to {100 * own[best]:.1f} %)"
        ]
    else:
        parts = [f"{name} is nowhere measurably better than plain softmax"]
    if worse.any():
        most = int(np.argmin(np.where(worse, gain, np.inf)))
        parts.append(
            f"it is right less often at {_ranges(sizes, worse)}, by up to "
            f"{-100 * gain[most]:.1f} points"
        )
    same = ~better & ~worse
    if better.any() and same.any():
        parts.append(f"it makes no measurable difference at {_ranges(sizes, same)}")
    return "; ".join([*parts, _beside_the_paper(comparison, own - paper)]) + "."


def _beside_the_paper(comparison: Comparison, gain: np.ndarray) -> str:
    better, worse = _split(gain, comparison.p_paper[comparison.rules.index("own")])
    parts = [
        f"{word} them at {_ranges(comparison.sizes, where)}"
        for word, where in (("better than", better), ("worse than", worse))
        if where.any()
    ]
    if not parts:
        return "beside the paper's numbers it is level at every size"
    rest = "" if (better | worse).all() else " and level elsewhere"
    return f"beside the paper's numbers it is {', '.join(parts)}{rest}"


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
    listed = " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
    return f"n = {listed}"
