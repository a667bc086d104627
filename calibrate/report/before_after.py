"""Clauses on a rule before and after: its metrics, the NLL first, and its ECE."""

from collections.abc import Sequence

import numpy as np

from calibrate.evidence.calibration_error import expected_calibration_error, reliability_of
from calibrate.evidence.evidence import BASELINE, Evidence
from calibrate.evidence.metrics import CONFIDENCE, NATS, Metric, placed
from calibrate.evidence.verdict import judged_items
from calibrate.report.metric_text import change_text, mean_text, metric_label


def metrics_before_and_after(evidence: Evidence, rule: str) -> str:
    """The metrics of a rule, and its ECE, on the items that decide."""
    items = judged_items(evidence)
    numbers = [change(items, rule, metric) for metric in placed(items.values)]
    if CONFIDENCE in items.values:
        diagrams = (reliability_of(items, of) for of in (BASELINE, rule))
        before, after = (100 * expected_calibration_error(diagram) for diagram in diagrams)
        numbers.append(f"ECE {before:.1f} -> {after:.1f} %")
    return ", ".join(numbers)


def change(items: Evidence, rule: str, metric: Metric) -> str:
    """A metric before and after: "accuracy 67.0 -> 71.7 % (+4.8 ± 0.3 points)"."""
    means = (items.mean(name, metric).mean for name in (BASELINE, rule))
    before, after = (mean_text(mean, metric) for mean in means)
    numbers = f"{metric_label(metric, items.of.items)} {before} -> {after} {metric.unit}".rstrip()
    if metric.detail:
        return numbers
    gain = items.gain(rule, metric)
    unit = "" if metric.unit in ("", NATS) else f" {metric.unit_of_change}"
    known = "" if np.isfinite(gain.error) else ", error unknown"
    return f"{numbers} ({change_text(gain, metric)}{unit}{known})"


def join(words: Sequence[str]) -> str:
    """Words as in a sentence: "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
