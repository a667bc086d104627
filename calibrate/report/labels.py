"""Names of rules and metrics, and their numbers as text."""

from collections.abc import Sequence

from calibrate.core.rule import CONSTANT
from calibrate.evidence.baselines import HARD, LOG_N, PAPER
from calibrate.evidence.estimate import Estimate, decimal
from calibrate.evidence.evidence import BASELINE, OWN
from calibrate.evidence.metrics import RIGHT, ItemKind, Metric
from calibrate.fitting.head_fit import PROCEDURE_LABELS, beta_text
from calibrate.store.fit import Fit

THIS_FIT = "this fit"  # the name of the fit of a page
LABELS = {  # kinds of rule have their own names
    BASELINE: "baseline",
    PAPER: "published polynomial",
    OWN: "fitted rule",
    **PROCEDURE_LABELS,
    HARD: "argmax",
}
EXPLANATIONS = {
    BASELINE: "softmax, beta = 1",
    PAPER: "the paper's, fitted to the authors' own head",
    HARD: "all weight on the item with the highest logit, so that its NLL is infinite",
    CONSTANT: "the beta of maximum likelihood for the collected inputs",
}


def label(rule: str) -> str:
    """The name of a rule in tables, figures and sentences."""
    return LABELS.get(rule, rule)


def explanation(rule: str) -> str:
    """Explains a rule that is no fit of the user's; "" for others."""
    if rule.startswith(LOG_N):
        return f"log-n scaling for training on up to {rule.removeprefix(LOG_N)} items; beta >= 1"
    return EXPLANATIONS.get(rule, "")


def kind_and_beta(fit: Fit) -> str:
    """The kind of a fit, and its constant: "constant, beta = 2, theta = 0.5"; "" with heads."""
    if fit.has_heads:
        return ""
    beta = fit.entries[0].constant_beta(fit.rule)
    if beta is None:
        return fit.rule.kind
    return f"{CONSTANT}, {beta_text(beta)}"


def metric_label(metric: Metric, items: ItemKind) -> str:
    """The name of a metric beside its means: "NLL", "exact match"."""
    if metric == RIGHT:
        return items.label_of_right
    return metric.shown_as or metric.label


def metric_title(metric: Metric, items: ItemKind) -> str:
    """The name of a metric with its unit, above its means: "NLL, nats"."""
    return f"{metric_label(metric, items)}, {metric.unit}"


def mean_text(mean: float, metric: Metric, more_decimals: int = 0) -> str:
    """A mean without its unit: "0.512", "67.0"."""
    return decimal(metric.factor * float(mean), f".{metric.decimals + more_decimals}f")


def change_text(change: Estimate, metric: Metric) -> str:
    """A difference of means with its standard error: "-0.031 ± 0.004"."""
    return change.shown(f"+.{metric.decimals}f", metric.factor)


def capitalised(text: str) -> str:
    """A text with a capital first letter; the others stay."""
    return text[:1].upper() + text[1:]


def enumeration(words: Sequence[str]) -> str:
    """Words as in a sentence: "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
