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
from calibrate.report.fit_facts import input_facts, rule_facts, source_facts
from calibrate.report.interpolation_table import interpolation_tables
from calibrate.report.kinds_table import kinds_table
from calibrate.report.sentences import over_constant
from calibrate.report.solved_record import (
    misranked_by_size,
    spans_by_size,
    theta_facts,
    theta_json,
)
from calibrate.solver.solved_rows import head_label
from calibrate.store.coefficient_file import digest, dumps
from calibrate.store.entry import Entry
from calibrate.store.fit import Fit
from calibrate.store.fits_store import load, shipped_files

if TYPE_CHECKING:
    from calibrate.datasets.row_collection import RowCollection
    from calibrate.fitting.fit_head import HeadFit
    from calibrate.model.fit import ModelFit
    from calibrate.report.scores_record import ScoresRecord
    from calibrate.solver.solved_rows import Rows

HELD_OUT = ("n", "inputs", "nll_before", "nll_after")  # of a record in the file


@dataclass(frozen=True)
class FitRecord:
    """The result of `calibrate fit` and of `calibrate fits show`.

    Attributes:
      fit: as saved.
      heads: of a fit per head: every head, with or without a rule.
      collection: that it was fitted to; None of a file alone.
      rows: the inputs of a fit of one head, solved.
      scores: of a fit through a model: on the test split.
      more: in JSON, of a fit through a model: beta of every head, and losses.
      of_file: whether all that the file has is shown, and no details left out.
    """

    fit: Fit
    heads: Sequence["HeadFit"] = ()
    collection: "RowCollection | None" = None
    rows: "Rows | None" = None
    scores: "ScoresRecord | None" = None
    more: Mapping[str, Any] = field(default_factory=dict)
    of_file: bool = False

    def as_json(self) -> dict[str, Any]:
        """The file as it is, its place and the line that loads it; what is known beside it."""
        record = {
            "reference": self.fit.reference,
            "path": self.fit.place,
            "load": load_line(self.fit),
            "fit": json.loads(dumps(self.fit)),
        }
        if self.collection is not None:
            record["sizes"] = self.collection.manifest["sizes"]
        if self.rows is not None:
            record["theta"] = theta_json(self.rows)
        if len(self.heads) > 1:
            record["heads"] = [_head_json(head) for head in self.heads]
        return record | ({"scores": self.scores} if self.scores else {}) | dict(self.more)

    def blocks(self) -> Iterable[Block]:
        """The verdict, the inputs, the rule, its gain held out, and the Python that uses it."""
        yield from self.evidence()
        yield usage(self.fit)

    def evidence(self) -> Iterable[Block]:
        """The verdict, the inputs, the rule, and its gain on held-out inputs or answers."""
        fit = self.fit
        yield Heading(f"Fit {fit.reference}")
        if fit.verdict:
            yield Facts([("verdict", rules.value_text(fit.verdict))])
        theta = [] if self.rows is None else [*theta_facts(self.rows)]
        yield Facts([*input_facts(fit), *theta])
        yield Facts([*self.head_facts(), *rule_facts(fit), *over_constant_facts(fit)])
        yield Facts([("file", fit.place)])
        if len(fit.entries) > 1:
            yield self._entries()
        spans = {} if self.rows is None else spans_by_size(self.rows)
        if self.scores:
            yield from self.scores.tables()
        else:
            yield from held_out_tables(fit, self.misranked, spans)
        if table := kinds_table(fit):
            yield table
        yield from interpolation_tables(fit)
        details = [Facts([*source_facts(fit), ("id", digest(fit))])]
        yield from details if self.of_file else as_detail(details)

    @property
    def misranked(self) -> Mapping[int, str]:
        """The number of misranked inputs of a fit of one head, by size; empty of a file alone."""
        if self.rows is None or self.collection is None:
            return {}
        return misranked_by_size(self.collection)

    def head_facts(self) -> Iterable[tuple[str, str]]:
        """The number of heads that have a rule."""
        first, *others = self.fit.entries
        rest = "; other heads keep the baseline"
        if len(self.heads) > 1:
            which = "" if others else f": {head_label(first.layer, first.head)}"
            yield "heads", f"{len(self.fit.entries):,} of {len(self.heads):,} have a rule{which}"
        elif others:
            yield "rules", f"{len(self.fit.entries):,} entries{rest}"
        elif (first.layer, first.head) != (None, None):
            yield "for", head_label(first.layer, first.head) + rest

    def _entries(self) -> Table:
        """A row for each head: its beta, and its gain where that is known; the largest first."""
        fit = self.fit
        gains = _gains_of_heads(fit)

        def rank(entry: Entry) -> float:
            if gains:
                gain = gains.get((entry.layer, entry.head))
                return -gain.mean if gain else math.inf
            return -float(np.abs(np.log(rules.beta_range(fit, entry))).max())

        columns, note = ["head", rules.entry_heading(fit)], and_more(len(fit.entries)).strip()
        if gains:
            columns.append("gain ± SE")
            note = f"Gain: held-out log-likelihood over the baseline, nats. {note}".strip()
        rows = []
        for entry in sorted(fit.entries, key=rank)[:SHOWN_HEADS]:
            row = [head_label(entry.layer, entry.head), rules.entry_text(fit, entry)]
            if gains:
                gain = gains.get((entry.layer, entry.head), Estimate(math.nan, math.nan))
                row.append(gain.shown("+.3f"))
            rows.append(row)
        return Table(columns, rows, note=note, left=columns[:2])


def _gains_of_heads(fit: Fit) -> dict[tuple[int | None, int | None], Estimate]:
    """The held-out gain of each head, by its file; empty of a model's, whose heads have none."""
    return {
        (record.get("layer"), record.get("head")): _gain(record["gain"], record.get("se"))
        for record in fit.evidence.get("heads", [])
        if "gain" in record
    }


def _gain(mean: float, error: float | None) -> Estimate:
    """A gain of a file, whose error it may not have."""
    return Estimate(mean, math.nan if error is None else error)


def over_constant_facts(fit: Fit) -> Iterable[tuple[str, str]]:
    """The gain of a fit of a model over one constant for all heads, if its file has it."""
    if (gain := over_constant(fit)) is not None:
        yield "gain over one constant for all heads", f"{gain.shown('+.3f')} nats"


def through_model(result: "ModelFit", fit: Fit) -> FitRecord:
    """The record of a fit through a model, as it was saved."""
    from calibrate.report.scores_record import ScoresRecord

    size = round(math.exp(result.solution.family.basis.center))
    betas = rules.typical_betas(fit, result.heads, size)
    heads = [{"layer": i, "head": j, "beta": beta or 1.0} for (i, j), beta in betas.items()]
    more = {"heads": heads, "losses": result.losses}
    scores = ScoresRecord(result.evidence, (OWN,), fit.reference)
    return FitRecord(fit, scores=scores, more=more)


def show_fit(reference: str, store: Path | None) -> FitRecord:
    """Loads a fit; raises CoefficientsError if there is no such fit."""
    return FitRecord(load(reference, store), of_file=True)


def held_out_tables(
    fit: Fit, misranked: Mapping[int, str] | None = None, spans: Mapping[int, str] | None = None
) -> list[Table]:
    """NLL by set size or length, without and with a fit, as its file has it; none without.

    Args:
      fit: of a head, heads or a model.
      misranked: numbers of misranked inputs by size, which are shown, too.
      spans: ranges of n by size, where inputs of several n share a size.
    """
    records = [x for x in fit.evidence.get("held_out", []) if set(HELD_OUT) <= x.keys()]
    if not records:
        return []
    n, items, what = ("n", "inputs", "target")
    if fit.of_whole_model:
        n, items, what = ("tokens", "answers", "answer")
    rows = []
    for x in records:
        before, after = x["nll_before"], x["nll_after"]
        gain = _gain(before - after, x.get("se")).shown("+.3f")
        numbers = [decimal(before, ".3f"), decimal(after, ".3f"), gain]
        of_size = [misranked.get(x["n"], "")] if misranked else []
        name = (spans or {}).get(x["n"], f"{x['n']:,}")
        rows.append([name, f"{x['inputs']:,}", *of_size, *numbers])
    columns = [n, items, *(["misranked"] if misranked else []), "baseline", "this fit", "gain ± SE"]
    note = f"Held out: {items} that the scored rule was not fitted to. NLL: lower is better."
    return [Table(columns, rows, f"NLL of the {what} in nats, held out", note)]


def _head_json(head: "HeadFit") -> dict[str, Any]:
    """What the file does not say of a head: why it has no rule."""
    return {
        "layer": head.layer,
        "head": head.head,
        "inputs": head.inputs,
        "misranked": head.misranked,
        "has_rule": head.rule is not None,
        "refusal": head.refusal,
    }


def usage(fit: Fit) -> Code:
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


def load_line(fit: Fit) -> str:
    """The Python expression that loads exactly this version, from any folder."""
    place = fit.address or (fit.reference if _is_shipped(fit) else os.path.abspath(fit.place))
    return f"calibrate.load({json.dumps(place, ensure_ascii=False)})"


def _is_shipped(fit: Fit) -> bool:
    """True of a fit of the package, which its reference names wherever that is installed."""
    assert fit.path is not None
    return os.path.realpath(fit.path) in map(os.path.realpath, shipped_files())
