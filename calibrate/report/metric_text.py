"""Metrics in sentences and tables: labels, titles, means and changes as they are shown."""

from calibrate.evidence.estimate import Estimate, decimal
from calibrate.evidence.metrics import LOG_P, RIGHT, ItemKind, Metric


def capitalised(text: str) -> str:
    """A text whose first letter is a capital; the others stay."""
    return text[:1].upper() + text[1:]


def metric_label(metric: Metric, items: ItemKind) -> str:
    """The name of a metric as its means are shown: "NLL", "exact match"."""
    if metric == RIGHT:
        return items.label_of_right
    return metric.shown_as or metric.label


def metric_title(metric: Metric, items: ItemKind) -> str:
    """The name of a metric as a title, with its unit."""
    if metric == LOG_P:
        return items.nll_title
    unit = f", {metric.unit}" if metric.unit else ""
    return f"{capitalised(metric_label(metric, items))}{unit}"


def metric_note(metric: Metric) -> str:
    """A clause on how to read a table of a metric."""
    return metric.note or f"changes are in {metric.unit_of_change or 'its own unit'}"


def mean_text(mean: float, metric: Metric, more_decimals: int = 0) -> str:
    """A mean of items as it is shown, without its unit: "0.512", "67.0"."""
    return decimal(metric.factor * float(mean), f".{metric.decimals + more_decimals}f")


def estimate_text(estimate: Estimate, metric: Metric, more_decimals: int = 0) -> str:
    """A mean with its standard error: "0.512 ± 0.003"."""
    return estimate.shown(f".{metric.decimals + more_decimals}f", metric.factor)


def change_text(change: Estimate, metric: Metric, more_decimals: int = 0) -> str:
    """A difference of means with its standard error, as it is shown: "-0.031 ± 0.004"."""
    return change.shown(f"+.{metric.decimals + more_decimals}f", metric.factor)
