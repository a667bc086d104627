"""Sentences on a rule and the baseline: which is better, and the numbers before and after."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from calibrate.core.rule import KINDS, VARIABLES
from calibrate.evidence.baselines import PAPER
from calibrate.evidence.estimate import Estimate
from calibrate.evidence.evidence import BASELINE, OWN, Evidence, Stratum
from calibrate.evidence.limit_clauses import NOT_JUDGED, items_name, margin_clause
from calibrate.evidence.metrics import KL, LOG_P, RIGHT
from calibrate.evidence.non_inferiority import NonInferiorityResult, check_limits
from calibrate.evidence.verdict import (
    LOSS,
    SAME,
    UNKNOWN,
    Verdict,
    heads_moved,
    judge,
    judged_items,
)
from calibrate.report.before_after import change, join, metrics_before_and_after
from calibrate.report.labels import described, label
from calibrate.report.metric_text import capitalised
from calibrate.report.text_harm import text_harm_sentence
from calibrate.store.fit import Fit

# Rules that are simpler than a fit: one of them that is not significantly worse is named.
_WITHOUT_ENTROPY = [kind for kind in KINDS if "H" not in VARIABLES[kind]]
SIMPLER = {*_WITHOUT_ENTROPY, "log-n", PAPER}
MAX_NAMED = 3  # better rules in a sentence
MIN_ITEMS = 30  # that decide: the standard error of fewer is itself uncertain


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
        _on_few_items(evidence),
        _on_calibration_templates(evidence, rule),
        _on_heads(evidence, rule),
        *(f"{capitalised(text)}." for text in margin_clauses(evidence, rule)),
        text_harm_sentence(evidence, rule),
        _on_other_rules(evidence, rule) if baselines else "",
    )
    return [text for text in every if text]


def sentence(evidence: Evidence, rule: str, name: str = "") -> str:
    """Compares a rule with the baseline, with its metrics and ECE before and after."""
    items, verdict = judged_items(evidence), judge(evidence, rule)
    numbers = metrics_before_and_after(evidence, rule)
    name, fit = name or label(rule), evidence.fits.get(rule)
    words = described(fit) if fit is not None else ""
    if words:
        name = f"{name} ({words})"
    on = f"on {items.n:,} {items.of.items.name}{_source(evidence, rule)}"
    return f"{_finding(items, verdict, name)}: {numbers} {on}."


def with_verdict(fit: Fit, evidence: Evidence) -> Fit:
    """A fit through a model with the verdict on it, as OWN, in its evidence."""
    texts = sentences(evidence, OWN, fit.name)
    if (gain := over_constant(fit)) is not None:
        texts.append(f"Gain over one constant for all heads: {gain.shown('+.3f')} nats.")
    texts.append(f"Interpolation weight: {fit.source['options']['interpolation']:g}")
    return replace(fit, evidence={**fit.evidence, "verdict": " ".join(texts)})


def over_constant(fit: Fit) -> Estimate | None:
    """The gain of a fit of a model over one constant for all heads; None if its file has none."""
    records = fit.evidence.get("kinds", []) if fit.of_whole_model else []
    if not records:
        return None
    return Estimate(records[0]["gain"], records[0].get("se", np.nan))


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
    lost = evidence.text.held_out_templates.gain(BASELINE, LOG_P, rule)
    return f"{items_name(result)} (NLL {lost.shown('+.4f')} nats)"


def _finding(items: Evidence, verdict: Verdict, name: str) -> str:
    if verdict.outcome == UNKNOWN:
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


def _on_few_items(evidence: Evidence) -> str:
    """A caution where few items decide; "" otherwise."""
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
    """Rules that are better, and simpler ones that are not significantly worse; "" without any."""
    items = judged_items(evidence)
    others = [x for x in items.not_significantly_better(rule, LOG_P) if x != BASELINE]
    gains = {other: items.gain(other, LOG_P, rule) for other in others}
    ahead = sorted((r for r in others if gains[r].sign > 0), key=lambda r: -gains[r].mean)
    level = [r for r in others if r not in ahead and _is_simpler(r)]
    clauses = []
    if ahead:
        better = [f"{label(r)} ({gains[r].mean:+.3f} nats)" for r in ahead[:MAX_NAMED]]
        clauses.append(f"{join(better)} {_verb(len(better), 'is', 'are')} significantly better")
    if level:
        names = [_with_number(evidence, rule) for rule in level]
        clauses.append(f"{join(names)} {_verb(len(level), 'is', 'are')} not significantly worse")
    text = ", and ".join(clauses)
    return f"{capitalised(text)}." if text else ""


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
    known = answers.calibration_templates
    if known.n in (0, answers.n):
        return ""
    n = len({stratum.template for stratum in _strata_of(known)})
    changes = [change(known, rule, metric) for metric in (LOG_P, RIGHT) if metric in known.values]
    return (
        f"In the {n} prompt {_verb(n, 'template', 'templates')} of the calibration split, on "
        f"{known.n:,} new {evidence.of.items.name}: {', '.join(changes)}."
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
