"""Sentences of a verdict: what to do with a rule, its numbers before and after, and warnings."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from calibrate.core.rule_kinds import ENTROPY, KINDS
from calibrate.errors import QualityError
from calibrate.evidence.baselines import HARD, PAPER
from calibrate.evidence.estimate import Estimate
from calibrate.evidence.evidence import OWN, PLAIN, Evidence, Stratum
from calibrate.evidence.metrics import KL, LOG_P, RIGHT, Metric
from calibrate.evidence.non_inferiority import NonInferiorityResult, check_limits
from calibrate.evidence.verdict import (
    LOSS,
    SAME,
    UNKNOWN,
    Verdict,
    heads_moved,
    is_accuracy_fixed,
    judge,
    judged_items,
    main_metric,
)
from calibrate.fitting.verdict_clauses import NOT_JUDGED, items_name, margin_clause
from calibrate.report.before_after import change, join, metrics_before_and_after, nll_warning
from calibrate.report.labels import described, label
from calibrate.report.metric_text import capitalised
from calibrate.report.text_harm import text_harm_sentence
from calibrate.store.coefficients import Coefficients

# Rules that are simpler than a fit: one of them that is not significantly worse is named.
_SIMPLER_KINDS = [kind.score_name for kind in KINDS.values() if ENTROPY not in kind.needs]
SIMPLER = {*_SIMPLER_KINDS, "log-n", PAPER, "one constant", "one line in log n"}
WHY_HARD = "argmax is as confident where it is wrong, which the NLL counts and accuracy does not"
MAX_NAMED = 3  # better rules in a sentence


def sentences(evidence: Evidence, rule: str, name: str = "", baselines: bool = True) -> list[str]:
    """The verdict on a rule, one sentence on each subject that there is something to say about.

    Args:
      evidence: of the rule, the baseline and other rules.
      rule: its name in the evidence.
      name: the same, for people.
      baselines: name other rules that are better, or simpler and not significantly worse.
    """
    every = (
        sentence(evidence, rule, name),
        _on_fixed_accuracy(evidence),
        nll_warning(evidence, rule),
        _on_calibration_templates(evidence, rule),
        _on_heads(evidence, rule),
        *(f"{capitalised(text)}." for text in margin_clauses(evidence, rule)),
        text_harm_sentence(evidence, rule),
        _on_other_rules(evidence, rule) if baselines else "",
    )
    return [text for text in every if text]


def sentence(evidence: Evidence, rule: str, name: str = "") -> str:
    """Advice on a rule, and its metrics and ECE before and after, in one sentence."""
    items, verdict = judged_items(evidence), judge(evidence, rule)
    numbers = metrics_before_and_after(evidence, rule)
    name, fit = name or label(rule), evidence.fits.get(rule)
    words = described(fit) if fit is not None else ""
    if words:
        name = f"{name} ({words})"
    on = f"on {items.n:,} {items.of.items.name}{_source(evidence, rule)}"
    return f"{_advice(items, verdict, name)}: {numbers} {on}."


def require_gain(evidence: Evidence, rule: str, name: str = "") -> None:
    """Raises QualityError, with the verdict, unless that is to use the rule.

    Args:
      evidence: of the rule, on items that were held out.
      rule: its name in the evidence.
      name: the same, for people.
    """
    if not judge(evidence, rule).use:
        verdict = sentence(evidence, rule, name).removesuffix(".")
        raise QualityError(f"{verdict}; give more {evidence.of.items.name}")


def with_verdict(fit: Coefficients, evidence: Evidence) -> Coefficients:
    """A fit through a model with the verdict on it, as OWN, in the quality of its file."""
    texts = sentences(evidence, OWN, fit.name)
    if (gain := over_constant(fit)) is not None:
        texts.append(f"Gain over one constant for all heads: {gain.shown('+.3f')} nats.")
    texts.append(f"Interpolation weight: {fit.source['options']['strength']:g}")
    verdict = " ".join(texts)
    return replace(fit, quality={**fit.quality, "verdict": verdict})


def over_constant(fit: Coefficients) -> Estimate | None:
    """The gain of a fit of a model over one constant for all heads; None if its file has none."""
    if not (record := fit.quality.get("over_constant")):
        return None
    return Estimate(*(record.get(key, np.nan) for key in ("gain", "gain_error")))


def margin_clauses(evidence: Evidence, rule: str) -> list[str]:
    """A clause on each limit on the harm of a rule that some items are under."""
    return [
        margin_clause(result, limited_items(evidence, rule, result))
        for result in check_limits(evidence, rule)
    ]


def limited_items(evidence: Evidence, rule: str, result: NonInferiorityResult) -> str:
    """The items under a limit; of retention text also the NLL that it loses, where it is known."""
    if result.limit.metric != KL:
        return items_name(result)
    if not evidence.of.items.knows_nll_of_text:
        return "retention batches"
    lost = evidence.text.held_out_templates.gain(PLAIN, LOG_P, rule)
    return f"{items_name(result)} (NLL {lost.shown('+.4f')} nats)"


def _on_fixed_accuracy(evidence: Evidence) -> str:
    """A note where no rule changes the accuracy of a head; else ""."""
    decides = evidence.of.items.accuracy_decides and LOG_P in evidence.values
    if not decides or not is_accuracy_fixed(evidence):
        return ""
    return "No rule changes this head's accuracy (`correct`), so the NLL decides."


def _advice(items: Evidence, verdict: Verdict, name: str) -> str:
    if verdict.outcome == UNKNOWN:
        n_groups = items.n_groups
        groups = f" of {n_groups:,} group{'s' * (n_groups != 1)}" if n_groups else ""
        return f"Unknown: {items.n:,} {items.of.items.name}{groups} are too few to judge {name}"
    if verdict.outcome == SAME:
        return f"Keep the baseline: {name} makes no significant difference"
    if verdict.outcome == LOSS:
        return f"Keep the baseline: {name} is significantly worse"
    if not verdict.better:
        return f"Use {name}" + (
            f", but not {_where(items, verdict.worse)}" if verdict.worse else ""
        )
    where = _where(items, verdict.better)
    if verdict.worse:
        return f"Use {name} only {where}"
    everywhere = len(verdict.better) == len(items.by("size"))
    return f"Use {name}" + ("" if everywhere else f", which gains {where}")


def _source(evidence: Evidence, rule: str) -> str:
    """The name of what was scored, and whether the rule was fitted to it."""
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
    """Numbers of heads that gain and lose, and that have no rule; "" of rows that name none."""
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


def _on_other_rules(evidence: Evidence, rule: str) -> str:
    """Rules that are better, and simpler ones that are not significantly worse; "" without any."""
    items, metric = judged_items(evidence), main_metric(evidence)
    others = [other for other in items.not_significantly_better(rule, metric) if other != PLAIN]
    gains = {other: items.gain(other, metric, rule) for other in others}
    ahead = sorted((r for r in others if gains[r].sign > 0), key=lambda r: -gains[r].mean)
    level = [r for r in others if r not in ahead and _is_simpler(r)]
    clauses = []
    if ahead:
        better = [f"{label(r)} ({_lead(gains[r], metric)})" for r in ahead[:MAX_NAMED]]
        clauses.append(f"{join(better)} {_verb(len(better), 'is', 'are')} significantly better")
    if level:
        names = [_with_number(evidence, rule) for rule in level]
        clauses.append(f"{join(names)} {_verb(len(level), 'is', 'are')} not significantly worse")
    text = ", and ".join(clauses)
    why = f"; {WHY_HARD}" if HARD in ahead and metric == RIGHT else ""
    return f"{capitalised(text)}{why}." if text else ""


def _lead(gain: Estimate, metric: Metric) -> str:
    """ "+0.012 nats", "+0.7 points"."""
    return f"{abs(metric.factor) * gain.mean:+.{metric.decimals}f} {metric.unit_of_change}"


def _with_number(evidence: Evidence, rule: str) -> str:
    """The name of a rule, and of a constant the line of code that it comes to."""
    fit = evidence.fits.get(rule)
    beta = fit.entries[0].constant_beta(fit.rule) if fit and not fit.has_heads else None
    return label(rule) if beta is None else f"{label(rule)} (`query = {beta:.3g} * query`)"


def _is_simpler(rule: str) -> bool:
    return rule in SIMPLER or rule.startswith(("constant ", "log n / "))


def _strata_of(evidence: Evidence) -> list[Stratum]:
    """The strata that have items."""
    return [evidence.strata[i] for i in np.unique(evidence.stratum)]


def _on_calibration_templates(evidence: Evidence, rule: str) -> str:
    """Scores on new prompts of the calibration split's templates; "" without others."""
    answers = evidence.answers
    known, metric = answers.calibration_templates, main_metric(evidence)
    if known.n in (0, answers.n):
        return ""
    n = len({stratum.template for stratum in _strata_of(known)})
    changes = [change(known, rule, m) for m in (metric, RIGHT) if m in known.values]
    return (
        f"In the {n} prompt {_verb(n, 'template', 'templates')} of the calibration split, on "
        f"{known.n:,} new {evidence.of.items.name}: {', '.join(dict.fromkeys(changes))}."
    )


def _where(items: Evidence, chosen: Sequence[int]) -> str:
    """ "from 64 to 256 and at 1,024 items", "from 256 items on": neighbours make a range."""
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
    return f"{join(ranges)} {unit}"


def _verb(count: int, one: str, many: str) -> str:
    return one if count == 1 else many
