"""An export as a result to show: what it carries, and what engines apply; an adapter's card."""

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibrate.errors import CalibrateError, QualityError, as_option, command, parameter
from calibrate.report.blocks import Block, Facts, Heading, Result, Table, Text

if TYPE_CHECKING:
    from calibrate.export.adapter_method import AdapterMethod
    from calibrate.export.checkpoint import Export
    from calibrate.export.engine_check import EngineCheck
    from calibrate.export.plan import ExportContents

_SAID = (("fit", "fit"), ("fit id", "id"), ("made from", "model"), ("digest", "digest"))
_COLUMNS = ("layer", "least", "median", "most", "heads changed")

_MARKUP = re.compile(r"[\\\[\]<|&]")
_TOP = """\
---
{metadata}
---

# Sharper attention for {model}

An attention head with logits z attends by softmax(beta z) instead of softmax(z). This adapter
({method}) multiplies the queries of {changed:,} of {heads:,} heads by constants beta from
{least:.4g} to {most:.4g}, which `calibrate` fitted; `fit.json` is the fit.

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({load})
model = PeftModel.from_pretrained(model, {adapter})
merged = model.merge_and_unload()  # if you like: plain weights, for any engine
```

{engines} Check that the adapter is what its fit asks for, of that very model: `{check}`.
{todo}
What follows is what `calibrate fits show ./fit.json` says.
"""
# By the method of an adapter.
_ENGINES = {
    "IA3": (
        "vLLM, SGLang and llama.cpp load no adapters but LoRA: give them the merged model, or what "
        "`calibrate export` writes with `{as_lora}` or without `{as_adapter}`."
    ),
    "LoRA": (
        "Servers swap it while they run, for example `vllm serve {base} --enable-lora "
        "--max-lora-rank {max_rank} --lora-modules {name}={name}`."
    ),
}
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_TODO = """
Before you publish it: the model was in a folder, so write its name on the Hub, twice above and in
`adapter_config.json`.
"""


def export_result(carried: "ExportContents") -> Result:
    """The fit, what engines apply by layer, and what is not as it was written.

    JSON has the factors of all heads by layer.
    """
    plan, faults = carried.plan, carried.problems
    layers = sorted({layer for layer, _ in plan.factors}) if plan else []
    factors = {layer: plan.of_layer(layer) for layer in layers} if plan else {}
    found = {
        "path": carried.path,
        **carried.metadata,
        "model_type": carried.model_type,
        "ratio": plan and plan.ratio,
        "factors": factors,
        "faults": faults,
        "notes": carried.notes,
    }
    facts = [("path", str(carried.path))]
    facts += [(label, str(carried.metadata.get(key))) for label, key in _SAID]
    tables = []
    if plan:
        by_size = f" (1 + {plan.ratio:.6g} log n)" if plan.ratio else ""
        facts.append(("engines", f"a {carried.model_type}, queries times factors{by_size}"))
        rows = [_cells(layer, np.array(f)) for layer, f in factors.items()]
        tables = [Table(_COLUMNS, rows, title="Factors of heads")]
    texts = [*carried.notes, *(f"FAILED  {fault}" for fault in faults)]
    failure = None
    if faults:
        said = f"{carried.path} is not what was exported: {'; '.join(faults)}; export again"
        failure = CalibrateError(said)
    else:
        texts.append(f"{carried.holds.capitalize()} are as they were written.")
    return Result([Facts(facts), *tables, *map(Text, texts)], found, failure)


def _cells(layer: int, f: np.ndarray) -> tuple[str, ...]:
    ends = (f"{x:.4f}" for x in (f.min(), np.median(f), f.max()))
    return (str(layer), *ends, f"{int((f != 1).sum())} of {len(f)}")


def adapter_card(export: "Export", name: str, method: "AdapterMethod") -> str:
    """The card of an adapter in a folder of that name, in Markdown."""
    from calibrate.export.adapter import base_of
    from calibrate.report.fit_record import FitRecord  # it loads JAX

    base, revision = base_of(export.folder.path)
    factors = export.plan.factors
    changed = [f for f in factors.values() if f != 1] or [1.0]
    pin = f", revision={json.dumps(revision)}" if revision else ""
    title = _plain(base if revision else export.folder.name)
    top = _TOP.format(
        metadata=_card_metadata(export, name, base, method.label),
        method=method.label,
        model=title,
        changed=len(changed),
        heads=len(factors),
        least=min(changed),
        most=max(changed),
        load=json.dumps(base) + pin,
        adapter=json.dumps(name),
        todo="" if revision else _TODO,
        engines=_engines(export, name, base, method),
        check=command("export", check=name, model="FOLDER"),
    )
    evidence = FitRecord(replace(export.fit, path=Path("fit.json")), of_file=True).evidence()
    return "\n".join([top, *(line for block in evidence for line in (*_markdown(block), ""))])


def _engines(export: "Export", name: str, base: str, method: "AdapterMethod") -> str:
    """How servers load the adapter."""
    from calibrate.export.adapter import factors_of
    from calibrate.export.lora import rank_of

    factors = factors_of(export.folder.config, export.queries, export.plan, method)
    rank = rank_of(factors)
    return _ENGINES[method.label].format(
        as_lora=as_option("as", "lora"),
        as_adapter=as_option("as", "adapter"),
        base=base,
        name=name,
        max_rank=next((x for x in _VLLM_RANKS if x >= rank), rank),
    )


def _card_metadata(export: "Export", name: str, base: str, label: str) -> str:
    """The fields that the Hub reads from a card, in YAML, with the held-out results of the fit."""
    from huggingface_hub import EvalResult, ModelCardData

    held_out = (export.fit.quality or {}).get("held_out") or []
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type="held-out",
            dataset_name=f"held-out examples, size {record['size']} (n = {record['rows']})",
            metric_type=metric_type,
            metric_name=metric_name,
            metric_value=value,
        )
        for record in held_out
        for metric_type, metric_name, value in (
            ("nll", "negative log-likelihood, nats", -record["after"]),
            ("nll-baseline", "negative log-likelihood of the baseline", -record["before"]),
        )
    ]
    fields = ModelCardData(
        base_model=base,
        library_name="peft",
        tags=[label.lower(), "calibrate", "attention-temperature"],
        model_name=name if results else None,
        eval_results=results or None,
        base_model_relation="adapter",
    )
    return fields.to_yaml(line_break="\n").strip()


def _markdown(block: Block) -> Iterable[str]:
    """The lines of a heading, facts or a table."""
    if isinstance(block, Heading):
        yield f"## {_plain(block.text)}"
    elif isinstance(block, Facts):
        yield from (f"- {_plain(label)}: {_plain(text)}" for label, text in block.rows)
    elif isinstance(block, Table):
        sides = [":---" if heading in block.left else "---:" for heading in block.columns]
        rows = [block.columns, sides, *block.rows]
        yield from (f"{_plain(block.title)}", "") if block.title else ()
        yield from (f"| {' | '.join(map(_plain, row))} |" for row in rows)
        yield from ("", _plain(block.note)) if block.note else ()


def _plain(text: str) -> str:
    """A text without markup of its own, but for code in backticks."""
    return _MARKUP.sub(r"\\\g<0>", text)


def engine_result(carried: "ExportContents", check: "EngineCheck") -> Result:
    """Reports what an engine applies; a failure unless it is the fit: exit 3, or 1 if undecided."""
    from calibrate.export.engine_check import CONSTANTS, FIT, OTHER, PLAIN, UNKNOWN

    rows = [(f"{n:,}", *(f"{x:.4f}" for x in off.values())) for n, off in check.prompts]
    columns = ("tokens", *(f"off {name}" for name in check.off))
    table = Table(columns, rows, title="Its log p, in nats (root mean square)")
    what = {FIT: "applies the fit", PLAIN: "applies plain softmax", UNKNOWN: "may apply it or not"}
    said = what.get(check.applies, f"applies {OTHER}")
    if check.applies == OTHER:
        said += f" from {check.off_from:,} tokens on"
        if min(check.off, key=check.off.__getitem__) == CONSTANTS:
            said += ", most like the fit without its part of log n"
    noise = f"{check.noise:.2g}" if check.noise else "not known"
    share = round(check.share, 2) + 0.0  # no -0
    said = (
        f"{check.engine} {said}: it goes {share:.2f} ± {check.error:.2f} of the way from plain "
        f"softmax to {carried.metadata['fit']}, which differ by {check.effect:.2g} nats; its noise "
        f"is {noise}"
    )
    failure: CalibrateError | None = None
    if check.applies == UNKNOWN:
        failure = CalibrateError(f"{said}; give more or longer {parameter('prompts')}")
    elif check.applies != FIT:
        failure = QualityError(f"{said}; serve {carried.path} as fits/serving.md says")
    found = {"path": carried.path, **carried.metadata, **check._asdict()}
    del found["untold"]  # one alternative: `applies` says it
    return Result([table] if failure else [table, Text(f"{said}.")], found, failure)
