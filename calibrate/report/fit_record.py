"""A fit as a result to show, as made or as its file has it: of one head, of many, of a model."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.evidence.estimate import NOTHING, Estimate
from calibrate.evidence.evidence import OWN
from calibrate.export.plan import ALIKE
from calibrate.files.coefficient_file import digest, dumps
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.files.store import load
from calibrate.report.blocks import SHOWN_HEADS, Block, Facts, Heading, Table, and_more, as_detail
from calibrate.report.rule_curves import (
    all_constant,
    beta_at,
    beta_range,
    beta_text,
    constant_text,
    joint_domain,
    of_both,
    shown_sizes,
    typical_betas,
)
from calibrate.report.rule_words import (
    FORMS,
    SYMBOLS,
    facts,
    guards,
    outside,
    polynomial,
    span,
    through_a_model,
    value_text,
)
from calibrate.report.selection import selection_tables
from calibrate.report.usage import load_line, usage
from calibrate.rows.solved_rows import head_label

if TYPE_CHECKING:
    from calibrate.model.fit import ModelFit
    from calibrate.report.scores_record import ScoresRecord
    from calibrate.rows.per_head import HeadFit

WORTH_COLLECTING = 0.001  # nats, by twice the rows
SHOWN_ENTROPIES = 7
HELD_OUT = ("size", "rows", "before", "after", "error")  # of a record in the file


@dataclass(frozen=True)
class FitRecord:
    """The result of `calibrate fit` and of `calibrate fits show`.

    Attributes:
      coefficients: the fit, as published.
      heads: of a fit per head: every head, with or without a rule.
      scores: of a fit through a model: on the examples that no fit has seen.
      more: in JSON, of a fit through a model: what it was chosen among.
      of_file: whether all that the file has is shown, and no details left out.
    """

    coefficients: Coefficients
    heads: Sequence["HeadFit"] = ()
    scores: "ScoresRecord | None" = None
    more: Mapping[str, Any] = field(default_factory=dict)
    of_file: bool = False

    def as_json(self) -> dict[str, Any]:
        """The file as it is, its path and the line that loads it; what is known beside it."""
        found = {
            "reference": self.coefficients.reference,
            "path": str(self.coefficients.path),
            "load": load_line(self.coefficients),
            "fit": json.loads(dumps(self.coefficients)),
        }
        if self.heads:
            found["heads"] = [_head_json(head) for head in self.heads]
        return found | ({"scores": self.scores} if self.scores else {}) | dict(self.more)

    def blocks(self) -> Iterable[Block]:
        """The rule, the gain held out, the verdict, and the Python that uses the fit."""
        yield from self.evidence()
        yield usage(self.coefficients)

    def evidence(self) -> Iterable[Block]:
        """The rule, its gain on rows or answers held out, and the verdict."""
        fit, quality = self.coefficients, self.coefficients.quality
        yield Heading(f"Fit {fit.reference}")
        yield Facts([*self._rule(), ("file", str(fit.path))])
        if len(fit.entries) > 1:
            yield self._entries()
        yield from self.scores.tables() if self.scores else held_out_tables(fit)
        if "verdict" in quality:
            yield Facts([("verdict", value_text(quality["verdict"]))])
        details = self._details()
        yield from details if self.of_file else as_detail(details)

    def _rule(self) -> Iterable[tuple[str, str]]:
        """How many heads have a rule, and the rule."""
        fit, (first, *others) = self.coefficients, self.coefficients.entries
        rest = "; other heads keep plain softmax"
        if self.heads:
            yield "heads", f"{len(fit.entries):,} of {len(self.heads):,} have a rule"
        elif others:
            yield "rules", f"{len(fit.entries):,} entries{rest}"
        elif (first.layer, first.head) != (None, None):
            yield "for", head_label(first.layer, first.head) + rest
        yield from rule_facts(fit)

    def _entries(self) -> Table:
        """A row for each head: its beta, and its gain where that is known."""
        fit, known = self.coefficients, {(h.layer, h.head): h for h in self.heads if h.rule}
        entries = sorted(
            fit.entries, key=lambda e: -_importance(fit, e, known.get((e.layer, e.head)))
        )[:SHOWN_HEADS]
        rule = entry_heading(fit)
        columns = ["layer", "head", *(["rows", "misranked", "gain"] if known else []), rule]
        rows = [
            [*map(_index, (e.layer, e.head)), *_head_cells(known, e), entry_text(fit, e)]
            for e in entries
        ]
        note = and_more(len(fit.entries))
        if known:
            note = f"Gain in nats of log p, held out (five folds), and its 95 % interval.{note}"
        return Table(columns, rows, note=note, left=[rule])

    def _details(self) -> Iterable[Block]:
        fit = self.coefficients
        if len(fit.entries) == 1 and of_both(fit.rule):
            yield beta_table(fit, fit.entries[0])
        yield from selection_tables(fit)
        rows = [] if all_constant(fit) else [("guards", guards(fit.rule))]
        if advice := advice_on_rows(fit.quality):
            rows.append(("more rows", advice))
        rows += [*facts(fit), ("id", digest(fit))]
        yield Facts(rows)


def rule_facts(fit: Coefficients) -> Iterable[tuple[str, str]]:
    """The rule of the only entry, or what the rules of several have in common."""
    rule, (first, *others) = fit.rule, fit.entries
    if all_constant(fit):
        yield "rule", "a constant for each head" if others else constant_text(first)
        return
    formula = polynomial(first.coefficients)
    if others:
        formula = f"{FORMS[rule.kind]}, with coefficients of its own for each head"
    yield f"beta({SYMBOLS[rule.kind]})", formula
    yield "domain", span(joint_domain(fit.entries), rule.kind)
    yield "outside", outside(rule, fit.entries)


def through_model(fit: "ModelFit", coefficients: Coefficients) -> FitRecord:
    """The record of a fit through a model, as it was published."""
    from calibrate.report.scores_record import ScoresRecord

    betas = typical_betas(coefficients, fit.heads, round(math.exp(fit.published.form.center)))
    heads = [{"layer": i, "head": j, "beta": beta or 1.0} for (i, j), beta in betas.items()]
    candidates = [
        {
            "kind": s.form.kind, "each_head": s.form.of != ALIKE,
            "heads": len(s.heads_changed(fit.heads)), "gain": s.value.gain,
            "losses": s.value.losses,
        }
        for s in fit.solved
    ]  # fmt: skip
    more = {
        "heads": heads, "candidates": candidates, "losses": fit.losses,
        "export_cost": fit.export_cost,
    }  # fmt: skip
    scores = ScoresRecord(fit.evidence, (OWN,), coefficients.reference)
    return FitRecord(coefficients, scores=scores, more=more)


def show_fit(reference: str, store: Path | None) -> FitRecord:
    """Loads a fit; raises CoefficientsError if there is no such fit."""
    return FitRecord(load(reference, store), of_file=True)


def entry_heading(fit: Coefficients) -> str:
    """The heading of a column of `entry_text`."""
    if all_constant(fit):
        return "beta"
    return f"beta({SYMBOLS[fit.rule.kind]}){', range' if of_both(fit.rule) else ''}"


def entry_text(fit: Coefficients, entry: Entry | None) -> str:
    """The rule of a head in a table: a formula, or the least and most beta of a long one."""
    if entry is None:
        return "1"
    if all_constant(fit) or of_both(fit.rule):
        return beta_text(fit, entry)
    return polynomial(entry.coefficients)


def held_out_tables(fit: Coefficients) -> list[Table]:
    """log p by set size or length, without and with a fit, as its file has it; none without."""
    sizes = [of for of in fit.quality.get("held_out", []) if set(HELD_OUT) <= of.keys()]
    if not sizes:
        return []
    n, items, what = ("n", "rows", "target")
    if through_a_model(fit):
        n, items, what = ("tokens", "answers", "answer")
    rows = [
        (f"{of['size']:,}", f"{of['rows']:,}", f"{of['before']:.3f}", f"{of['after']:.3f}",
         Estimate(of["after"] - of["before"], of["error"]).shown("+.3f"))
        for of in sizes
    ]  # fmt: skip
    columns = (n, items, "plain softmax", "this fit", "gain ± standard error")
    note = f"Held out: {items} that this fit was not made of. Nats: 0 is certain."
    return [Table(columns, rows, f"log p of the {what} in nats, held out", note)]


def advice_on_rows(quality: Mapping[str, Any]) -> str:
    """Whether more rows would improve the fit, by its learning curve; "" without one."""
    curve = quality.get("learning_curve", [])
    if not curve:
        return ""
    if len(curve) < 2:
        return "too few to tell"
    half, full = curve[-2], curve[-1]
    gain = full["log_p"] - half["log_p"]
    advice = "more would help" if gain > WORTH_COLLECTING else "more would add little"
    if gain < -WORTH_COLLECTING:
        advice = "too few rows to tell it from noise"
    return f"from {half['rows']:,} to {full['rows']:,} changes log p by {gain:+.4f} nats: {advice}"


def beta_table(fit: Coefficients, entry: Entry) -> Table:
    """beta of a rule of entropy and size: a row per set size, a column per entropy."""
    lo, hi, _, large = entry.domain
    H = np.linspace(lo, min(hi, large), SHOWN_ENTROPIES)
    rows = []
    for n in shown_sizes(entry.domain[2:]):
        beta = beta_at(fit, entry, H, n)
        cells = [f"{b:.2f}" if h <= np.log(n) else NOTHING for h, b in zip(H, beta, strict=True)]
        rows.append([f"{n:,}", *cells])
    columns = ["n", *(f"H = {h:.3g}" for h in H)]
    note = "No set of n items has an entropy above log n. The last row is beyond the fitted sizes."
    return Table(columns, rows, "beta by set size n and entropy H in nats", note)


def _importance(fit: Coefficients, entry: Entry, head: "HeadFit | None") -> float:
    """What heads are ranked by: the gain, or how far beta is from 1."""
    return head.gain if head else float(np.abs(np.log(beta_range(fit, entry))).max())


def _head_cells(known: Mapping[Any, "HeadFit"], entry: Entry) -> list[str]:
    head = known.get((entry.layer, entry.head))
    if head is None or head.rule is None:
        return []
    mean, low, high, _ = head.rule.gain
    return [f"{head.rows:,}", f"{head.misranked:.1%}", f"{mean:+.4f} ({low:+.4f} to {high:+.4f})"]


def _index(number: int | None) -> str:
    return "all" if number is None else str(number)


def _head_json(head: "HeadFit") -> dict[str, Any]:
    rule = head.rule
    return {
        "layer": head.layer, "head": head.head, "rows": head.rows, "misranked": head.misranked,
        "kind": rule and rule.kind, "gain": rule and rule.gain, "why": head.verdict,
    }  # fmt: skip
