"""A fit as a result to show, as made or as its file has it, and the Python that uses it."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.evidence.estimate import Estimate, decimal
from calibrate.evidence.evidence import OWN
from calibrate.report import rules
from calibrate.report.blocks import (
    SHOWN_HEADS,
    Block,
    Code,
    Facts,
    Heading,
    Table,
    and_more,
    as_detail,
)
from calibrate.report.selection import gain_kl_tables, selection_tables
from calibrate.report.sentences import over_constant
from calibrate.solver.solved_rows import head_label
from calibrate.store.coefficient_file import digest, dumps
from calibrate.store.coefficients import Coefficients
from calibrate.store.entry import Entry
from calibrate.store.fits_store import load, shipped_files

if TYPE_CHECKING:
    from calibrate.fitting.per_head import HeadFit
    from calibrate.model.fit import ModelFit
    from calibrate.report.scores_record import ScoresRecord

HELD_OUT = ("size", "rows", "before", "after", "error")  # of a record in the file


@dataclass(frozen=True)
class FitRecord:
    """The result of `calibrate fit` and of `calibrate fits show`.

    Attributes:
      coefficients: the fit, as published.
      heads: of a fit per head: every head, with or without a rule.
      scores: of a fit through a model: on the test split.
      more: in JSON, of a fit through a model: beta of every head, and losses.
      of_file: whether all that the file has is shown, and no details left out.
    """

    coefficients: Coefficients
    heads: Sequence["HeadFit"] = ()
    scores: "ScoresRecord | None" = None
    more: Mapping[str, Any] = field(default_factory=dict)
    of_file: bool = False

    def as_json(self) -> dict[str, Any]:
        """The file as it is, its place and the line that loads it; what is known beside it."""
        record = {
            "reference": self.coefficients.reference,
            "path": self.coefficients.place,
            "load": load_line(self.coefficients),
            "fit": json.loads(dumps(self.coefficients)),
        }
        if self.heads:
            record["heads"] = [_head_json(head) for head in self.heads]
        return record | ({"scores": self.scores} if self.scores else {}) | dict(self.more)

    def blocks(self) -> Iterable[Block]:
        """The verdict, the rule, the gain held out, and the Python that uses the fit."""
        yield from self.evidence()
        yield usage(self.coefficients)

    def evidence(self) -> Iterable[Block]:
        """The verdict, the rule, and its gain on rows or answers held out."""
        fit, quality = self.coefficients, self.coefficients.quality
        yield Heading(f"Fit {fit.reference}")
        if "verdict" in quality:
            yield Facts([("verdict", rules.value_text(quality["verdict"]))])
        yield Facts([*self._rule(), *over_constant_facts(fit), ("file", fit.place)])
        if len(fit.entries) > 1:
            yield self._entries()
        yield from self.scores.tables() if self.scores else held_out_tables(fit)
        yield from gain_kl_tables(fit)
        details = self._details()
        yield from details if self.of_file else as_detail(details)

    def _rule(self) -> Iterable[tuple[str, str]]:
        """The number of heads that have a rule, and the rule."""
        fit, (first, *others) = self.coefficients, self.coefficients.entries
        rest = "; other heads keep the baseline"
        if self.heads:
            which = "" if others else f": {head_label(first.layer, first.head)}"
            yield "heads", f"{len(fit.entries):,} of {len(self.heads):,} have a rule{which}"
        elif others:
            yield "rules", f"{len(fit.entries):,} entries{rest}"
        elif (first.layer, first.head) != (None, None):
            yield "for", head_label(first.layer, first.head) + rest
        yield from rule_facts(fit)

    def _entries(self) -> Table:
        """A row for each head: its beta, and its gain where that is known; the largest first."""
        fit = self.coefficients
        gains = {(head.layer, head.head): head.gain for head in self.heads if head.gain}

        def rank(entry: Entry) -> float:
            if gains:
                return -gains[entry.layer, entry.head].mean
            return -float(np.abs(np.log(rules.beta_range(fit, entry))).max())

        columns, note = ["head", rules.entry_heading(fit)], and_more(len(fit.entries))
        if gains:
            columns.append("gain")
            note = (
                "Gain in nats of log-likelihood, held out (five folds), with its 95 % interval."
                f"{note}"
            )
        rows = []
        for entry in sorted(fit.entries, key=rank)[:SHOWN_HEADS]:
            row = [head_label(entry.layer, entry.head), rules.entry_text(fit, entry)]
            if gains:
                gain = gains[entry.layer, entry.head]
                mean, low, high = (decimal(x, "+.4f") for x in gain[:3])
                row.append(f"{mean} ({low} to {high})")
            rows.append(row)
        return Table(columns, rows, note=note, left=columns[:2])

    def _details(self) -> Iterable[Block]:
        fit = self.coefficients
        yield from selection_tables(fit)
        rows = [] if fit.ignores_inputs else [("guards", rules.guards(fit.rule))]
        rows += [*rules.facts(fit), ("id", digest(fit))]
        yield Facts(rows)


def rule_facts(fit: Coefficients) -> Iterable[tuple[str, str]]:
    """The rule of the only entry, or what the rules of several have in common."""
    rule, (first, *others) = fit.rule, fit.entries
    bare = rules.polynomial(rule, first.coefficients)
    if fit.ignores_inputs:
        yield "rule", "a constant for each head" if others else f"beta = {bare} for every row"
        return
    formula = "coefficients of its own for each head" if others else bare
    yield f"beta({rules.symbols(rule)})", formula
    yield "domain", rules.span(rules.joint_domain(fit.entries), rule)
    yield "outside", rules.outside(rule)


def over_constant_facts(fit: Coefficients) -> Iterable[tuple[str, str]]:
    """The gain of a fit of a model over one constant for all heads, if its file has it."""
    if (gain := over_constant(fit)) is not None:
        yield "gain over one constant for all heads", f"{gain.shown('+.3f')} nats"


def through_model(fit: "ModelFit", coefficients: Coefficients) -> FitRecord:
    """The record of a fit through a model, as it was published."""
    from calibrate.report.scores_record import ScoresRecord

    size = round(math.exp(fit.solution.family.basis.center))
    betas = rules.typical_betas(coefficients, fit.heads, size)
    heads = [{"layer": i, "head": j, "beta": beta or 1.0} for (i, j), beta in betas.items()]
    more = {"heads": heads, "losses": fit.losses}
    scores = ScoresRecord(fit.evidence, (OWN,), coefficients.reference)
    return FitRecord(coefficients, scores=scores, more=more)


def show_fit(reference: str, store: Path | None) -> FitRecord:
    """Loads a fit; raises CoefficientsError if there is no such fit."""
    return FitRecord(load(reference, store), of_file=True)


def held_out_tables(fit: Coefficients) -> list[Table]:
    """NLL by set size or length, without and with a fit, as its file has it; none without."""
    sizes = [of for of in fit.quality.get("held_out", []) if set(HELD_OUT) <= of.keys()]
    if not sizes:
        return []
    n, items, what = ("n", "rows", "target")
    if fit.of_whole_model:
        n, items, what = ("tokens", "answers", "answer")
    rows = [
        (
            f"{of['size']:,}",
            f"{of['rows']:,}",
            *(decimal(0.0 - of[key], ".3f") for key in ("before", "after")),
            Estimate(of["before"] - of["after"], of["error"]).shown("+.3f"),
        )
        for of in sizes
    ]
    columns = (n, items, "baseline", "this fit", "change ± standard error")
    note = f"Held out: {items} that this fit was not fitted to. NLL: lower is better."
    return [Table(columns, rows, f"NLL of the {what} in nats, held out", note)]


def _head_json(head: "HeadFit") -> dict[str, Any]:
    return {
        "layer": head.layer,
        "head": head.head,
        "rows": head.rows,
        "misranked": head.misranked,
        "kind": head.kind,
        "gain": head.gain,
        "why": head.verdict,
    }


def usage(fit: Coefficients) -> Code:
    """The Python that uses a fit; what is of a whole model starts with Transformers."""
    layers = [entry.layer for entry in fit.entries if entry.layer is not None]
    of_layer = f".layer({layers[0]})" if layers else ""
    lines = ["import calibrate", f"fit = {load_line(fit)}"]
    if layers or fit.of_whole_model:
        lines += ["from calibrate import transformers"]
        lines += ["transformers.apply(model, fit)  # raises if some attention stays uncalibrated"]
    call = f"probs = calibrate.adaptive_softmax(logits, fit{of_layer})"
    lines += [f"{call}  # JAX; PyTorch: from calibrate.torch import adaptive_softmax"]
    beta = None if fit.has_heads else fit.entries[0].constant_beta(fit.rule)
    if beta is not None:
        first, *others = lines
        lines = [*constant_lines(beta), f"{first}  # or from the file:", *others]
    shape = ", logits being (..., heads, queries, items)" if fit.has_heads else ""
    stays = fit.address or _is_shipped(fit)
    ship = "" if stays else "; ship this one file, and load it by its new path"
    return Code(f"How to use it{shape}{ship}:", "\n".join(lines))


def constant_lines(beta: float) -> list[str]:
    """The code of a constant, which needs no library."""
    return [
        f"query = {beta:.4g} * query  # before attention, in any framework or engine",
        f"probs = jax.nn.softmax({beta:.4g} * logits)  # or torch.softmax({beta:.4g} * logits, -1)",
    ]


def load_line(fit: Coefficients) -> str:
    """The Python expression that loads exactly this version, from any folder."""
    place = fit.address or (fit.reference if _is_shipped(fit) else os.path.abspath(fit.place))
    return f"calibrate.load({json.dumps(place, ensure_ascii=False)})"


def _is_shipped(fit: Coefficients) -> bool:
    """True of a fit of the package, which its reference names wherever that is installed."""
    assert fit.path is not None
    return os.path.realpath(fit.path) in map(os.path.realpath, shipped_files())
