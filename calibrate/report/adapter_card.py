"""The card of an adapter, a README.md with the Hub's front matter."""

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from calibrate.report.blocks import Block, Code, Facts, Heading, Table, Text
from calibrate.report.fit_record import FitRecord

if TYPE_CHECKING:
    from calibrate.export.checkpoint import Export

_MARKUP = re.compile(r"[\\\[\]<|&]")
_FRONT = """\
---
base_model: {}
base_model_relation: adapter
library_name: peft
tags: [ia3, calibrate, attention-temperature]
---
"""
_LOAD = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({})
model = PeftModel.from_pretrained(model, {})
merged = model.merge_and_unload()  # if you like: the same in plain weights, for any engine"""
_TELL = (
    "vLLM and llama.cpp load no adapters but LoRA: give them the merged model, or what "
    "`calibrate export` writes without `--as adapter`."
)


def adapter_card(export: "Export", base: str, revision: str | None, name: str) -> str:
    """The card of an adapter, in Markdown.

    Args:
      base: the name of the model on the Hub, or the path of its folder.
      revision: of the model on the Hub; None if it is not known.
      name: of the adapter's folder.
    """
    fit = replace(export.fit, path=Path("fit.json"))
    blocks = [*_what(export, base, revision, name), *FitRecord(fit, of_file=True).evidence()]
    front = _FRONT.format(json.dumps(base))
    return "\n".join([front, *(part for block in blocks for part in (*_markdown(block), ""))])


def _what(export: "Export", base: str, revision: str | None, name: str) -> Iterable[Block]:
    """What the adapter does, and how to load and check it."""
    factors = export.plan.factors
    changed = [f for f in factors.values() if f != 1]
    yield Heading(f"{name}: sharper attention for {base}")
    yield Text(
        "An attention head with logits z attends by softmax(beta z) instead of softmax(z). This "
        f"adapter (IA3) multiplies the queries of {len(changed):,} of {len(factors):,} heads by "
        f"constants beta from {min(changed):.4g} to {max(changed):.4g}. They were fitted with "
        "calibrate; fit.json is the fit."
    )
    if revision is None:
        yield Text(
            "Before you publish it: write the model's name on the Hub for its path, above, below "
            "and in adapter_config.json."
        )
    model = json.dumps(base) + (f', revision="{revision}"' if revision else "")
    yield Code("Load it:", _LOAD.format(model, json.dumps(name)))
    yield Text(_TELL)
    yield Text(f"Made for the model whose weights and configuration are {export.model}.")
    yield Text(
        f"Check that its files are what the fit asks for: `calibrate export --check {name}`."
    )


def _markdown(block: Block) -> Iterable[str]:
    """The lines of a block."""
    if isinstance(block, Heading):
        yield f"## {_plain(block.text)}"
    elif isinstance(block, Facts):
        yield from (f"- {_plain(label)}: {_plain(text)}" for label, text in block.rows)
    elif isinstance(block, Table):
        yield from (f"**{_plain(block.title)}**", "") if block.title else ()
        sides = [":---" if heading in block.left else "---:" for heading in block.columns]
        rows = [block.columns, sides, *block.rows]
        yield from (f"| {' | '.join(map(_plain, row))} |" for row in rows)
        yield from ("", _plain(block.note)) if block.note else ()
    elif isinstance(block, Code):
        yield from (block.purpose, "", "```python", block.text, "```")
    else:
        yield block.text


def _plain(text: str) -> str:
    """A text without markup of its own, but for code in backticks."""
    return _MARKUP.sub(r"\\\g<0>", text)
