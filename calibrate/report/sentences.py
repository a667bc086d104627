"""The verdict on a rule in sentences: better or worse than the baseline, by how much, and where."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from calibrate.core.rule import KINDS, VARIABLES
from calibrate.evidence.baselines import PAPER, is_infinite
from calibrate.evidence.calibration_error import expected_calibration_error, reliability_of
from calibrate.evidence.evidence import BASELINE, OWN, Evidence, Stratum
from calibrate.evidence.harm_limits import (
    NOT_JUDGED,
    NonInferiorityResult,
    check_limits,
    items_name,
    margin_clause,
)
from calibrate.evidence.metrics import CONFIDENCE, KL, LOG_P, NATS, RIGHT, Metric, placed
from calibrate.evidence.verdict import (
    LOSS,
    SAME,
    TOO_FEW,
    Verdict,
    heads_moved,
    is_worse,
    judge,
    judged_items,
)
from calibrate.report.comparison import scored_items
from calibrate.report.fit_tables import over_constant
from calibrate.report.labels import (
    LOG_N,
    LOG_N_OF_MODEL,
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
SIMPLER = {*(kind for kind in KINDS if "H" not in VARIABLES[kind]), LOG_N, PAPER}
MAX_NAMED = 3  # better rules in a sentence
MIN_ITEMS = 30  # the standard error of fewer is itself uncertain


def sentences(evidence: Evidence, rule: str, name: str = "") -> list[str]:
    """The verdict on a rule: the finding, its limits, and other rules that are as good or better.

    Args:
      evidence: of the rule, the baseline and other rules.
      rule: its name in the evidence.
      name: its name for people.
    """
    texts = (
        first_sentence(evidence, rule, name),
        _on_few_items(evidence),
        _on_calibration_templates(evidence, rule),
        _on_heads(evidence, rule),
        *(f"{capitalised(text)}." for text in margin_clauses(evidence, rule)),
        _on_other_rules(evidence, rule),
    )
    return [text for text in texts if text]


def first_sentence(evidence: Evidence, rule: str, name: str = "") -> str:
    """Compares a rule with the baseline, with its metrics and ECE before and after."""
    items, verdict = judged_items(evidence), judge(evidence, rule)
    numbers = _metrics_before_and_after(evidence, rule)
    name, fit = name or label(rule), evidence.fits.get(rule)
    kind = kind_and_beta(fit) if fit is not None else ""
    if kind:
        name = f"{name} ({kind})"
    scored = f"{items.n:,} {items.of.items.name}{_source(evidence, rule)}"
    return f"{_finding(items, verdict, name)}: {numbers} on {scored}."


def _metrics_before_and_after(evidence: Evidence, rule: str) -> str:
    """The metrics of a rule on the items that decide, the NLL first, and its ECE."""
    items = judged_items(evidence)
    numbers = [_before_and_after(items, rule, metric) for metric in placed(items.values)]
    if CONFIDENCE in items.values:
        diagrams = (reliability_of(items, name) for name in (BASELINE, rule))
        before, after = (100 * expected_calibration_error(diagram) for diagram in diagrams)
        numbers.append(f"ECE {before:.1f} -> {after:.1f} %")
    return ", ".join(numbers)


def _before_and_after(items: Evidence, rule: str, metric: Metric) -> str:
    """A metric before and after: "accuracy 67.0 -> 71.7 % (+4.8 ± 0.3 points)"."""
    means = (items.mean(name, metric).mean for name in (BASELINE, rule))
    before, after = (mean_text(mean, metric) for mean in means)
    numbers = f"{metric_label(metric, items.of.items)} {before} -> {after} {metric.unit}".rstrip()
    gain = items.gain(rule, metric)
    unit = "" if metric.unit in ("", NATS) else f" {metric.unit_of_change}"
    known = "" if np.isfinite(gain.error) else ", error unknown"
    return f"{numbers} ({change_text(gain, metric)}{unit}{known})"


def harm_sentence(items: Evidence, names: Mapping[str, str]) -> str:
    """Names the rules whose NLL is significantly worse than the baseline's; "" if none is.

    Args:
      items: that decide.
      names: of the rules, for people.
    """
    gains = {rule: items.gain(rule, LOG_P) for rule in names if not is_infinite(rule, LOG_P)}
    harms = [
        f"{names[rule]} ({gain.shown('+.3f')} nats of log-likelihood)"
        for rule, gain in gains.items()
        if gain.sign < 0
    ]
    if not harms:
        return ""
    return f"Significantly worse than the baseline on {scored_items(items)}: {enumeration(harms)}."


def with_verdict(fit: Fit, evidence: Evidence) -> Fit:
    """A fit through a model with its verdict, that on OWN, in its evidence."""
    texts = sentences(evidence, OWN, fit.name)
    if (gain := over_constant(fit)) is not None:
        texts.append(f"Gain over one constant for all heads: {gain.shown('+.3f')} nats.")
    texts.append(f"Interpolation weight: {fit.source['options']['interpolation']:g}.")
    return replace(fit, evidence={**fit.evidence, "verdict": " ".join(texts)})


def margin_clauses(evidence: Evidence, rule: str) -> list[str]:
    """A clause on each limit on the harm of a rule that applies to some items."""
    return [
        margin_clause(result, limited_items(evidence, rule, result))
        for result in check_limits(evidence, rule)
    ]


def limited_items(evidence: Evidence, rule: str, result: NonInferiorityResult) -> str:
    """The items under a limit; for retention text also the NLL that it loses, if that is known."""
    if result.limit.metric != KL:
        return items_name(result)
    if not evidence.of.items.knows_nll_of_text:
        return "retention batches"
    lost = evidence.text.held_out_templates.gain(BASELINE, LOG_P, rule)
    return f"{items_name(result)} (NLL {lost.shown('+.4f')} nats)"


def _finding(items: Evidence, verdict: Verdict, name: str) -> str:
    if verdict.outcome == TOO_FEW:
        n_groups = items.n_groups
        groups = f" of {n_groups:,} group{'s' * (n_groups != 1)}" if n_groups else ""
        return f"Unknown: {items.n:,} {items.of.items.name}{groups} are too few to judge {name}"
    if verdict.outcome == SAME:
        return f"{name} is not significantly different from the baseline"
    if verdict.outcome == LOSS:
        return f"{name} is significantly worse than the baseline"
    better = f"{name} is significantly better than the baseline"
    if verdict.better and (verdict.worse or len(verdict.better) < len(items.by("size"))):
        better = f"{better} {_where(items, verdict.better)}"
    return better + (f", and worse {_where(items, verdict.worse)}" if verdict.worse else "")


def _source(evidence: Evidence, rule: str) -> str:
    """The source of the scored items; "held out", or that the rule was fitted to them."""
    of, fit = evidence.of, evidence.fits.get(rule)
    name = f" of {of.name}" if of.name else ""
    judged = _strata_of(judged_items(evidence))
    if any(stratum.unseen for stratum in judged):
        n = len({stratum.template for stratum in judged})
        name += f" in {n} held-out prompt {_verb(n, 'template', 'templates')}"
    if fit is None or not of.items.fingerprinted:
        return name
    return name + (" (held out)" if evidence.is_held_out(rule) else " (those it was fitted to)")


def _on_heads(evidence: Evidence, rule: str) -> str:
    """Numbers of heads that gain, lose and have no rule; "" for rows that name no heads."""
    if evidence.heads == ((None, None),):
        return ""
    if len(evidence.heads) == 1:
        return f"{NOT_JUDGED}."
    up, down, same = heads_moved(evidence, rule)
    n_rules = up + down + same
    heads = judged_items(evidence).by("head")
    others = sum(not evidence.names(rule, head) for head in heads)
    unchanged = (
        f"; {others:,} without a rule {_verb(others, 'is', 'are')} unchanged" if others else ""
    )
    return (
        f"Of {n_rules:,} {_verb(n_rules, 'head', 'heads')} with a rule, {up:,} "
        f"{_verb(up, 'gains', 'gain')} and {down:,} {_verb(down, 'loses', 'lose')} significantly "
        f"(false discovery rate 5 %), {same:,} {_verb(same, 'does', 'do')} neither{unchanged}. "
        f"{NOT_JUDGED}."
    )


def _on_few_items(evidence: Evidence) -> str:
    """A caution about few items; "" if there are enough."""
    items = judged_items(evidence)
    n = items.n_groups or items.n
    if n >= MIN_ITEMS:
        return ""
    of_groups = "groups of " if items.n_groups else ""
    return (
        f"Caution: {n:,} {of_groups}{items.of.items.name} are few for a verdict; collect "
        f"{MIN_ITEMS} or more for the test split."
    )


def _on_other_rules(evidence: Evidence, rule: str) -> str:
    """Names rules that are better, and simpler ones that do as well; see `is_worse`."""
    items = judged_items(evidence)
    others = [x for x in items.rules if x not in (rule, BASELINE)]
    gains = {x: items.gain(x, LOG_P, rule).mean for x in others if is_worse(items, rule, x)}
    better = sorted(gains, key=lambda x: -gains[x])
    level = [x for x in others if _is_simpler(x) and x not in better]
    level = [x for x in level if not is_worse(items, x, rule)]
    texts = []
    if better:
        names = [f"{label(x)} ({gains[x]:+.3f} nats)" for x in better[:MAX_NAMED]]
        texts.append(f"Significantly better: {enumeration(names)}.")
    if level:
        names = [_with_constant(evidence, x) for x in level]
        texts.append(f"Simpler, and as good: {enumeration(names)}.")
    return " ".join(texts)


def _with_constant(evidence: Evidence, rule: str) -> str:
    """The name of a rule; for a constant, also the line of code that applies it."""
    fit = evidence.fits.get(rule)
    beta = fit.entries[0].constant_beta(fit.rule) if fit and not fit.has_heads else None
    return label(rule) if beta is None else f"{label(rule)} (`query = {beta:.3g} * query`)"


def _is_simpler(rule: str) -> bool:
    return rule in SIMPLER or rule.startswith(LOG_N_OF_MODEL)


def _strata_of(evidence: Evidence) -> list[Stratum]:
    """The strata that have items."""
    return [evidence.strata[i] for i in np.unique(evidence.stratum)]


def _on_calibration_templates(evidence: Evidence, rule: str) -> str:
    """Scores on new prompts of the templates of the calibration split; "" if all are."""
    answers = evidence.answers
    known = answers.calibration_templates
    if known.n in (0, answers.n):
        return ""
    n = len({stratum.template for stratum in _strata_of(known)})
    changes = [
        _before_and_after(known, rule, metric)
        for metric in (LOG_P, RIGHT)
        if metric in known.values
    ]
    return (
        f"In the {n} prompt {_verb(n, 'template', 'templates')} of the calibration split, on "
        f"{known.n:,} new {evidence.of.items.name}: {', '.join(changes)}."
    )


def _where(items: Evidence, chosen: Sequence[int]) -> str:
    """Sizes as ranges of neighbours: "from 64 to 256 and at 1,024 items"."""
    sizes, unit = list(items.by("size")), "tokens" if items.of.items.in_tokens else "items"
    fewest = [items.fewest.get(size, size) for size in sizes]
    runs: list[list[int]] = []
    for i in (sizes.index(n) for n in chosen):
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    if len(runs) == 1 and runs[0][-1] == len(sizes) - 1 and 0 < runs[0][0] < len(sizes) - 1:
        return f"for long inputs, from {fewest[runs[0][0]]:,} {unit} on"
    ranges = [
        f"from {fewest[run[0]]:,} to {sizes[run[-1]]:,}"
        if run[1:]
        else f"at {items.span(sizes[run[0]])}"
        for run in runs
    ]
    return f"{enumeration(ranges)} {unit}"


def _verb(count: int, one: str, many: str) -> str:
    return one if count == 1 else many
