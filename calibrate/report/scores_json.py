"""Means and gains of rules on the same items as JSON; shares, not per cent."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from calibrate.evidence.scores import KL, LOG_P, PLAIN, RIGHT, Evidence, Head, P
from calibrate.evidence.verdict_text import HARD

MEASURES = (LOG_P, P, RIGHT, KL)
NUMBERS = ("mean", "error", "gain", "gain_error", "p")  # p: of no gain over the baseline


def scores_json(items: Evidence) -> dict[str, Any]:
    """The number of items, and the `NUMBERS` of each rule and measure."""
    rules: dict[str, dict[str, Any]] = {rule: {} for rule in items.rules}
    for measure in items.values.keys() & MEASURES:
        if measure == KL and not items.text.n:
            continue
        values = items.values[measure].astype(float)
        mean = items.design.estimate(values)
        gain = items.design.estimate(values - values[items.rules.index(PLAIN)])
        columns = np.transpose([mean.mean, mean.error, gain.mean, gain.error, gain.p]).tolist()
        for rule, numbers in zip(items.rules, columns, strict=True):
            if (rule, measure) != (HARD, LOG_P):  # infinite wherever argmax is wrong
                rules[rule][measure] = dict(zip(NUMBERS, numbers, strict=True))
    return {"items": items.n, "rules": rules}


def sizes_json(items: Evidence) -> list[dict[str, Any]]:
    """The scores of each size."""
    return [{"size": n} | scores_json(part) for n, part in items.by("size").items()]


def heads_json(heads: Iterable[tuple[Head, Evidence]]) -> list[dict[str, Any]]:
    """The scores of heads, in the order given, and of each at each size."""
    return [
        {"layer": layer, "head": head} | scores_json(part) | {"sizes": sizes_json(part)}
        for (layer, head), part in heads
    ]
