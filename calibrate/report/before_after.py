"""Clauses on a rule before and after: its metrics, and where accuracy costs log-likelihood."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from calibrate.evidence.baselines import of_smaller_q
from calibrate.evidence.calibration_error import expected_calibration_error, reliability
from calibrate.evidence.evidence import PLAIN, Evidence
from calibrate.evidence.metrics import CONFIDENCE, LOG_P, NATS, RIGHT, Metric, placed
from calibrate.evidence.verdict import judge, judged_items, main_metric, worse_sizes
from calibrate.report.metric_text import change_text, mean_text, metric_label
from calibrate.store.coefficients import Coefficients

if TYPE_CHECKING:
    from calibrate.fitting.select import Selection


def metrics_before_and_after(evidence: Evidence, rule: str) -> str:
    """The metrics of a rule, that which decides first, and its ECE."""
    items = judged_items(evidence)
    metrics = dict.fromkeys([judge(evidence, rule).metric, *placed(items.values)])
    numbers = [change(items, rule, metric) for metric in metrics if metric in items.values]
    if CONFIDENCE in items.values:
        diagrams = (reliability(items, of) for of in (PLAIN, rule))
        before, after = (100 * expected_calibration_error(diagram) for diagram in diagrams)
        numbers.append(f"ECE {before:.1f} -> {after:.1f} %")
    return ", ".join(numbers)


def change(items: Evidence, rule: str, metric: Metric) -> str:
    """A metric before and after: "accuracy 67.0 -> 71.7 % (+4.8 ± 0.3 points)"."""
    means = (items.mean(name, metric).mean for name in (PLAIN, rule))
    before, after = (mean_text(mean, metric) for mean in means)
    numbers = f"{metric_label(metric, items.of.items)} {before} -> {after} {metric.unit}".rstrip()
    if metric.detail:
        return numbers
    gain = items.gain(rule, metric)
    unit = "" if metric.unit in ("", NATS) else f" {metric.unit_of_change}"
    known = "" if np.isfinite(gain.error) else ", error unknown"
    return f"{numbers} ({change_text(gain, metric)}{unit}{known})"


def nll_warning(evidence: Evidence, rule: str, rows: Evidence | None = None) -> str:
    """A warning where the NLL is significantly worse although accuracy decides; else "".

    It names the largest smaller q with which the same kind of rule would not be worse, if that was
    scored on the same items.

    Args:
      evidence: of the rule and those of smaller q.
      rule: its name in the evidence.
      rows: other items under the same rules, whose NLL is tested; None: those of the evidence.
    """
    items = judged_items(evidence)
    tested = items if rows is None else rows
    if main_metric(evidence) != RIGHT or LOG_P not in tested.values:
        return ""
    worse = worse_sizes(tested, rule, LOG_P)
    if not worse:
        return ""
    losses = [f"{(-gain).shown('+.3f')} nats at n = {size:,}" for size, gain in worse.items()]
    remedy = _remedy(items, tested, rule)
    return f"Warning: the NLL is significantly worse than the baseline's ({join(losses)}){remedy}."


def _remedy(items: Evidence, tested: Evidence, rule: str) -> str:
    """ "; with q = 0.25 it is not (accuracy 71.2 %)", or "" if no such rule was scored."""
    fit = items.fits.get(rule)
    for q, other in of_smaller_q(fit, items.fits) if fit else ():
        if not worse_sizes(tested, other, LOG_P):
            accuracy = 100 * items.mean(other, RIGHT).mean
            return f"; with q = {q:g} it is not (accuracy {accuracy:.1f} %)"
    return ""


def with_metrics(fit: Coefficients, selection: "Selection") -> Coefficients:
    """A fit of a head whose verdict has its metrics on the sets that selected q, and the warning.

    The NLL is tested on the rows that folds left out, which are more. Without such sets the fit is
    returned as it is.
    """
    sets, rule = selection.validation, selection.published.name
    if sets is None:
        return fit
    numbers = metrics_before_and_after(sets, rule)
    sentences = [
        f"{fit.quality['verdict']}.",
        f"On {sets.n:,} {sets.of.items.name} that selected q: {numbers}.",
        nll_warning(sets, rule, selection.held_out_by_q),
    ]
    verdict = " ".join(filter(None, sentences)).removesuffix(".")
    return replace(fit, quality={**fit.quality, "verdict": verdict})


def join(words: Sequence[str]) -> str:
    """Words as in a sentence: "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
