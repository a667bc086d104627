"""A fit as the result of a command or as its file has it, and the Python code that uses it."""

import contextlib
import json
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrate.core.rule import CONSTANT
from calibrate.errors import CoefficientsError
from calibrate.evidence.evidence import OWN
from calibrate.report.blocks import Block, Code, Facts, Heading, Result, Table, Text
from calibrate.report.collection_record import theta_facts
from calibrate.report.fit_tables import entries_table, held_out_tables, kinds_tables
from calibrate.report.labels import THIS_FIT
from calibrate.report.rule_text import beta_fact, rule_facts
from calibrate.report.score_tables import NEW_INPUTS_NOTE
from calibrate.rows.rows import head_label
from calibrate.store.fit import Fit, digest, dumps
from calibrate.store.references import find

if TYPE_CHECKING:
    from calibrate.fitting.head_fit import HeadFit
    from calibrate.model.fit import ModelFit
    from calibrate.report.scores_record import ScoresRecord
    from calibrate.rows.collection import RowCollection
    from calibrate.rows.solve import SolvedInputs


IN_YOUR_CODE = "In your code"


@dataclass(frozen=True)
class FitRecord:
    """The result of `calibrate fit` and of `calibrate fits show`.

    Attributes:
      fit: as saved.
      heads: every head of a fit per head, with or without a rule.
      collection: the inputs that it was fitted to; None for a file alone.
      rows: the same inputs, solved, for a fit of one head.
      scores: on the test split, for a fit through a model.
      of_file: print source and id, too.
    """

    fit: Fit
    heads: Sequence["HeadFit"] = ()
    collection: "RowCollection | None" = None
    rows: "SolvedInputs | None" = None
    scores: "ScoresRecord | None" = None
    of_file: bool = False

    def as_json(self) -> dict[str, Any]:
        """The file, its path and the line that loads it; and the results that it does not hold."""
        record = {
            "reference": self.fit.reference,
            "path": self.fit.place,
            "load": load_line(self.fit),
            "fit": json.loads(dumps(self.fit)),
        }
        if len(self.heads) > 1:
            record["heads"] = [_head_json(head) for head in self.heads]
        return record | ({"scores": self.scores} if self.scores else {})

    def blocks(self) -> Iterable[Block]:
        """The evidence, and the Python code that uses the fit."""
        yield from self.evidence()
        yield Heading(IN_YOUR_CODE)
        yield usage(self.fit)

    def evidence(self) -> Iterable[Block]:
        """The verdict, the inputs, the rule, and its gain on held-out inputs or answers."""
        fit = self.fit
        yield Heading(f"Fit {fit.reference}")
        if fit.verdict:
            first, *others = fit.verdict.split("\n")
            yield Facts([("verdict", first), *(("", line) for line in others)])
        theta = [] if self.rows is None else [*theta_facts(self.rows)]
        yield Facts([*input_facts(fit), *theta])
        yield Facts([*self.head_facts(), *rule_facts(fit)])
        yield Facts([("file", fit.place)])
        if len(fit.entries) > 1:
            yield entries_table(fit)
        yield from self.scores.tables() if self.scores else held_out_tables(fit)
        yield from kinds_tables(fit)
        if self.of_file:
            yield Facts([*source_facts(fit), ("id", digest(fit))])

    def head_facts(self) -> Iterable[tuple[str, str]]:
        """The number of heads that have a rule, or the only one."""
        first, *others = self.fit.entries
        name, n = head_label(first.layer, first.head), f"{len(self.fit.entries):,}"
        if len(self.heads) > 1:
            yield "heads", f"{n} of {len(self.heads):,} have a rule{f': {name}' * (not others)}"
        elif others or name:
            rules = f"{n} entries" if others else name
            yield "rules for", f"{rules}; other heads keep the baseline"


def input_facts(fit: Fit) -> Iterable[tuple[str, str]]:
    """(label, text) of the numbers of inputs by class, if the file has them."""
    inputs = fit.evidence.get("inputs", {})
    if not {"seen", "misranked"} <= inputs.keys():
        return
    bad = inputs.get("bad", 0)
    right = inputs["seen"] - inputs["misranked"] - bad
    text = f"{inputs['seen']:,}: {inputs['misranked']:,} misranked, {right:,} ranked correctly"
    yield "inputs", text + (f", {bad:,} left out (NaN, +inf or a masked target)" if bad else "")
    if "fitted" in inputs:
        yield "fitted to", f"{inputs['fitted']:,} inputs"


def source_facts(fit: Fit) -> Iterable[tuple[str, str]]:
    """(label, text) of the source and the provenance in the file."""
    source, provenance = fit.source, fit.provenance
    for key in ("head", "fingerprint", "collection", "seed", "citation"):
        if key in source:
            yield key, str(source[key])
    if "options" in source:
        options = [(name.replace("_", "-"), value) for name, value in source["options"].items()]
        yield "options", ", ".join(f"{name} {value}" for name, value in options)
    if provenance:
        tools = provenance.get("versions", {}).items()
        versions = ", ".join(f"{tool} {version}" for tool, version in tools)
        yield "made", ", ".join(filter(None, (provenance.get("created"), versions)))


def through_model(result: "ModelFit", fit: Fit) -> FitRecord:
    """The record of a saved fit through a model."""
    from calibrate.report.scores_record import ScoresRecord

    return FitRecord(fit, scores=ScoresRecord(result.evidence, (OWN,), fit.reference))


def _head_json(head: "HeadFit") -> dict[str, Any]:
    """A head of the collection; the file does not name those without a rule, nor say why."""
    return {
        "layer": head.layer,
        "head": head.head,
        "inputs": head.inputs,
        "misranked": head.misranked,
        "has_rule": head.rule is not None,
        "refusal": head.refusal,
    }


def usage(fit: Fit) -> Code:
    """The Python code that uses a fit; a fit of a whole model is applied with Transformers."""
    layers = [entry.layer for entry in fit.entries if entry.layer is not None]
    of_layer = f".layer({layers[0]})" if layers else ""
    lines = ["import calibrate", f"fit = {load_line(fit)}"]
    if layers or fit.of_whole_model:
        lines += ["from calibrate import transformers"]
        lines += ["# raises if some attention stays uncalibrated:"]
        lines += ["transformers.apply(model, fit)"]
    if fit.has_heads:
        lines += ["# logits: (..., heads, queries, items)"]
    lines += ["# JAX; in PyTorch: calibrate.torch.adaptive_softmax"]
    lines += [f"probs = calibrate.adaptive_softmax(logits, fit{of_layer})"]
    beta = None if fit.has_heads else fit.entries[0].constant_beta(fit.rule)
    if beta is not None:
        lines = [*constant_lines(beta), "# or from the file:", *lines]
    return Code("\n".join(lines))


def constant_lines(beta: float) -> list[str]:
    """The code that applies a constant without any library."""
    return [
        "# before attention, in any framework:",
        f"query = {beta:.4g} * query",
        f"# or torch.softmax({beta:.4g} * logits, -1):",
        f"probs = jax.nn.softmax({beta:.4g} * logits)",
    ]


def advises_constant(fit: Fit) -> bool:
    """True if the verdict of a fit names a constant that does as well."""
    return bool(fit.evidence.get("advised_kind") == CONSTANT)


def load_line(fit: Fit) -> str:
    """The Python expression that loads exactly this version, as a person in this folder types it.

    An address; else NAME@VERSION, if this folder finds the file by it; else a path.
    """
    place = fit.address
    if place is None:
        assert fit.path is not None
        relative = os.path.relpath(fit.path)
        place = os.path.abspath(fit.path) if relative.startswith(os.pardir) else relative
        with contextlib.suppress(CoefficientsError):
            if os.path.realpath(find(fit.reference)) == os.path.realpath(fit.path):
                place = fit.reference
    return f"calibrate.load({json.dumps(place, ensure_ascii=False)})"


def run_result(record: FitRecord, scores: "ScoresRecord | None", page: Path | None) -> Result:
    """The verdict of a fit, its scores by n, the rule, and the line that loads it.

    Args:
      record: of the saved fit.
      scores: of a head on new inputs; None shows the held-out scores of the fit itself.
      page: path of the report; None if it could not be written.
    """
    fit = record.fit
    shown: list[Block] = [Text(fit.verdict)]
    if scores is None:
        shown += [block for block in record.evidence() if isinstance(block, Table)]
    else:
        scores = replace(scores, own=THIS_FIT)
        by_size, *_ = scores.tables()  # accuracy, or NLL if the head has none
        shown += [by_size, replace(scores.comparison(NEW_INPUTS_NOTE), more="")]
    facts = [*record.head_facts(), *([] if len(fit.entries) > 1 else [beta_fact(fit)])]
    if advises_constant(fit) and record.collection is not None:
        folder = shlex.quote(str(record.collection.folder))
        line = f"calibrate fit {folder} --kind {CONSTANT} --name {fit.name}-{CONSTANT}"
        facts.append(("advice", line))
    facts += [("load", f"fit = {load_line(fit)}"), ("report", str(page or "not written"))]
    shown.append(Facts(facts))
    data: dict[str, Any] = {"verdict": fit.verdict, "report": page}
    if scores is not None:
        data["scores"] = scores.as_json()
    return Result(shown, record.as_json() | data)


def report_result(fit: Fit, scores: "ScoresRecord | None", page: Path) -> Result:
    """The verdicts of a fit, in its file and on its new scores, and the path of the page."""
    texts = [] if scores is None else [" ".join(x) for x in scores.verdict_sentences().values()]
    shown: list[Block] = [Text(text) for text in filter(None, [fit.verdict, *texts])]
    shown.append(Facts([("report", str(page))]))
    return Result(shown, {"verdict": fit.verdict, "scores": texts, "report": page})
