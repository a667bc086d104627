"""The card of an exported folder or LoRA, which the Hub shows and reads."""

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrate.errors import command
from calibrate.report.blocks import Block, Facts, Heading, Table

if TYPE_CHECKING:
    from calibrate.export.preparation import Export

_KEPT = ("license", "license_name", "license_link", "language")
_MARKUP = re.compile(r"[\\\[\]<|&]")
_LORA = """\
---
{metadata}
---

# Sharper attention for {model}

An attention head with logits z attends by softmax(beta z) instead of softmax(z). This LoRA
multiplies the queries of {changed:,} of {heads:,} heads by constants beta from {least:.4g} to
{most:.4g}, which `calibrate` fitted; `fit.json` is the fit.

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({load})
model = PeftModel.from_pretrained(model, {name})
merged = model.merge_and_unload()  # if you like: plain weights, for any engine
```

Servers swap it while they run, for example `vllm serve {base} --enable-lora \
--max-lora-rank {max_rank} --lora-modules {served}={served}`. Check that the LoRA is what its fit \
asks for, of that very model: `{check}`.
{todo}
What follows is what `calibrate fits show ./fit.json` says.
"""
_FOLDER = """\
---
{metadata}
---

# Sharper attention for {model}

An attention head with logits z attends by softmax(beta z) instead of softmax(z). In this copy of
the model the weights that make the queries of {changed:,} of {heads:,} heads are multiplied by
constants beta from {least:.4g} to {most:.4g}{by_size}, which `calibrate` fitted;
`calibrate-fit.json` is the fit.

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({name})
```

Engines load it as they load any model. Check that it is as it was written, and that a server
applies the fit: `{check}`.
{todo}
What follows is what `calibrate fits show ./calibrate-fit.json` says.
"""
_BY_SIZE = """, and the engine
multiplies all queries by 1 + {ratio:.4g} log n, where n is the number of tokens so far"""
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_TODO = """
Before you publish it: the model was in a folder, so write its name on the Hub in place of `{base}`,
wherever that stands {where}.
"""


def folder_card(export: "Export", name: str) -> str:
    """The card of an exported folder of that name, in Markdown."""
    from calibrate.export.configuration import FIT

    ratio = export.plan.ratio
    return _card(
        _FOLDER,
        export,
        Path(FIT),
        "above",
        metadata=_metadata(export, name, "transformers", "finetune", ()),
        by_size=_BY_SIZE.format(ratio=ratio) if ratio else "",
        name=json.dumps(name),
        check=command("export", check=name, engine="URL"),
    )


def lora_card(export: "Export", name: str) -> str:
    """The card of a LoRA in a folder of that name, in Markdown."""
    from calibrate.export.lora import CONFIG, base_of, factors_of, rank_of
    from calibrate.store.coefficient_file import ADAPTER_FIT

    base, revision = base_of(export.folder.path)
    pin = f", revision={json.dumps(revision)}" if revision else ""
    rank = rank_of(factors_of(export.folder.config, export.queries, export.plan))
    return _card(
        _LORA,
        export,
        Path(ADAPTER_FIT),
        f"above and in `{CONFIG}`",
        metadata=_metadata(export, name, "peft", "adapter", ("lora",)),
        load=json.dumps(base) + pin,
        name=json.dumps(name),
        base=base,
        max_rank=str(next((x for x in _VLLM_RANKS if x >= rank), rank)),
        served=name,
        check=command("export", check=name, model="FOLDER"),
    )


def _card(top: str, export: "Export", fit: Path, where: str, **texts: str) -> str:
    """A card by its upper part, which names what was changed, and the evidence of the fit.

    Args:
      fit: the file of the fit, beside the card.
      where: the places of the base model's path, which is not its name on the Hub.
    """
    from calibrate.export.lora import base_of
    from calibrate.report.fit_record import FitRecord  # it loads JAX

    base, revision = base_of(export.folder.path)
    factors = export.plan.factors
    changed = [f for f in factors.values() if f != 1] or [1.0]
    filled = top.format(
        model=_plain(base if revision else export.folder.name),
        changed=len(changed),
        heads=len(factors),
        least=min(changed),
        most=max(changed),
        todo="" if revision else _TODO.format(base=base, where=where),
        **texts,
    )
    evidence = FitRecord(replace(export.fit, path=fit), of_file=True).evidence()
    return "\n".join([filled, *(line for block in evidence for line in (*_markdown(block), ""))])


def _metadata(
    export: "Export", name: str, library: str, relation: str, more_tags: tuple[str, ...]
) -> str:
    """The fields that the Hub reads from a card, in YAML, with the held-out results of the fit."""
    from huggingface_hub import EvalResult, ModelCardData

    from calibrate.export.lora import base_of
    from calibrate.export.plan import TAGS

    held_out = export.fit.evidence.get("held_out", [])
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type="held-out",
            dataset_name=f"held-out examples, size {record['n']:,} (n = {record['inputs']:,})",
            metric_type=metric_type,
            metric_name=metric_name,
            metric_value=value,
        )
        for record in held_out
        for metric_type, metric_name, value in (
            ("nll", "negative log-likelihood, nats", record["nll_after"]),
            ("nll-baseline", "negative log-likelihood of the baseline", record["nll_before"]),
        )
    ]
    fields = ModelCardData(
        base_model=base_of(export.folder.path)[0],
        library_name=library,
        pipeline_tag="text-generation",
        tags=[*more_tags, *TAGS],
        model_name=name if results else None,
        eval_results=results or None,
        base_model_relation=relation,
        **_licence(export.folder.path),
    )
    return fields.to_yaml(line_break="\n").strip()


def _licence(model: Path) -> dict[str, Any]:
    """The licence and the languages of the model's own card; those of a copy are the same."""
    from huggingface_hub import ModelCard

    from calibrate.export.checkpoint import CARD

    try:
        data = ModelCard.load(model / CARD, ignore_metadata_errors=True).data
    except Exception:  # it has none, or one that is not YAML
        return {}
    kept = {key: getattr(data, key, None) for key in _KEPT}
    return {key: value for key, value in kept.items() if value}


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
