"""The verdict on a rule: the finding, its limits on harm, and rules that are better or simpler."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from calibrate.core.rule import KINDS, VARIABLES
from calibrate.evidence.baselines import LOG_N, PAPER
from calibrate.evidence.calibration_error import expected_calibration_error, reliability_of
from calibrate.evidence.evidence import BASELINE, OWN, Evidence
from calibrate.evidence.harm_limits import check_limits
from calibrate.evidence.metrics import CONFIDENCE, LOG_P, NATS, ROWS, SUMMARY, Metric
from calibrate.evidence.significance import LOSS, SAME, TOO_FEW, Verdict, is_worse, judge
from calibrate.report.fit_tables import gain_of
from calibrate.report.labels import (
    capitalised,
    change_text,
    enumeration,
    kind_and_beta,
    label,
    mean_text,
    metric_label,
)
from calibrate.store.fit import Fit

# Rules that are simpler than a fit: one of them that does as well is named.
MIN_ITEMS = 30  # the standard error of fewer is itself uncertain
SIMPLER = {*(kind for kind in KINDS if "H" not in VARIABLES[kind]), PAPER}


def sentences(evidence: Evidence, rule: str, name: str = "") -> list[str]:
    """The verdict on a rule: the finding, its limits, and other rules that are as good or better.

    Args:
      evidence: of the rule, the baseline and other rules.
      rule: its name in the evidence.
      name: its name for people.
    """
    limits = (f"{capitalised(result.text)}." for result in check_limits(evidence, rule))
    texts = (
        finding(evidence, rule, name),
        _on_few_items(evidence.judged),
        *limits,
        _on_other_rules(evidence, rule),
    )
    return [text for text in texts if text]


def finding(evidence: Evidence, rule: str, name: str = "") -> str:
    """Compares a rule with the baseline, with its metrics and ECE before and after."""
    items, verdict, fit = evidence.judged, judge(evidence, rule), evidence.fits.get(rule)
    name = name or label(rule)
    if fit is not None and (kind := kind_and_beta(fit)):
        name = f"{name} ({kind})"
    numbers = [_before_and_after(items, rule, x) for x in SUMMARY if x in items.values]
    if CONFIDENCE in items.values:
        diagrams = (reliability_of(items, x) for x in (BASELINE, rule))
        before, after = (100 * expected_calibration_error(diagram) for diagram in diagrams)
        numbers.append(f"ECE {before:.1f} -> {after:.1f} %")
    scored = f"{items.n:,} {items.of.items.name}{_source(items)}"
    if items.of.items == ROWS and not evidence.is_held_out(rule):
        scored += " (those that it was fitted to)"
    return f"{_outcome(items, verdict, name)}: {', '.join(numbers)} on {scored}."


def _before_and_after(items: Evidence, rule: str, metric: Metric) -> str:
    """A metric before and after: "accuracy 67.0 -> 71.7 % (+4.8 ± 0.3 points)"."""
    means = (items.mean(name, metric).mean for name in (BASELINE, rule))
    before, after = (mean_text(mean, metric) for mean in means)
    gain = items.gain(rule, metric)
    unit = "" if metric.unit == NATS else f" {metric.unit_of_change}"
    known = "" if np.isfinite(gain.error) else ", error unknown"
    name = metric_label(metric, items.of.items)
    return f"{name} {before} -> {after} {metric.unit} ({change_text(gain, metric)}{unit}{known})"


def _outcome(items: Evidence, verdict: Verdict, name: str) -> str:
    if verdict.outcome == TOO_FEW:
        return f"Unknown: {items.n:,} {items.of.items.name} are too few to judge {name}"
    if verdict.outcome == SAME:
        return f"{name} is not significantly different from the baseline"
    if verdict.outcome == LOSS:
        return f"{name} is significantly worse than the baseline"
    text = f"{name} is significantly better than the baseline"
    if verdict.better and len(verdict.better) < len(items.by("size")):
        text += f" {_at(items, verdict.better)}"
    return text + (f", and worse {_at(items, verdict.worse)}" if verdict.worse else "")


def _at(items: Evidence, sizes: Sequence[int]) -> str:
    """Sizes as text: "at n = 64, 128 and 256"."""
    return f"at {items.of.items.unit_of_size} = {enumeration([items.span(n) for n in sizes])}"


def _source(items: Evidence) -> str:
    """The source of the items that decide, and the number of held-out templates."""
    name = f" of {items.of.name}" if items.of.name else ""
    strata = [items.strata[i] for i in np.unique(items.stratum)]
    if n := len({stratum.template for stratum in strata if stratum.unseen}):
        name += f" in {n} held-out prompt template{'s' * (n > 1)}"
    return name


def _on_few_items(items: Evidence) -> str:
    """A caution about few items, or groups of them; "" if there are enough."""
    n, groups = items.n_groups or items.n, "groups of " if items.n_groups else ""
    if n >= MIN_ITEMS:
        return ""
    return f"Caution: {n:,} {groups}{items.of.items.name} are few for a verdict."


def _on_other_rules(evidence: Evidence, rule: str) -> str:
    """Names the rules that are better, and simpler ones that do as well; see `is_worse`."""
    items = evidence.judged
    others = [x for x in items.rules if x not in (rule, BASELINE)]
    gains = {x: items.gain(x, LOG_P, rule).mean for x in others if is_worse(items, rule, x)}
    better = [f"{label(x)} ({gains[x]:+.3f} nats)" for x in sorted(gains, key=lambda x: -gains[x])]
    simpler = [x for x in others if x in SIMPLER or x.startswith(LOG_N)]
    level = [label(x) for x in simpler if x not in gains and not is_worse(items, x, rule)]
    texts = [f"Significantly better: {enumeration(better)}."] if better else []
    texts += [f"Simpler, and as good: {enumeration(level)}."] if level else []
    return " ".join(texts)


def with_verdict(fit: Fit, evidence: Evidence) -> Fit:
    """A fit through a model with its verdict, that on OWN, in its evidence."""
    texts = sentences(evidence, OWN, fit.name)
    for record in fit.evidence.get("kinds", []):
        gain = gain_of(record).shown("+.3f")
        texts.append(f"Gain over one constant for all heads: {gain} nats.")
    texts.append(f"Interpolation weight: {fit.source['options']['interpolation']:g}.")
    return replace(fit, evidence={**fit.evidence, "verdict": " ".join(texts)})
