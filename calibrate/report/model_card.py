"""The model card of an exported folder or LoRA, which the Hub reads and shows."""

import json
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

from calibrate.errors import command, printable

if TYPE_CHECKING:
    from calibrate.export.folder import Export

_COPIED_FIELDS = ("license", "license_name", "license_link", "language")
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_LORA_TEXT = """\
This LoRA scales the logits of attention heads of `{{ base }}`.

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({{ load }})
model = PeftModel.from_pretrained(model, {{ quoted_name }})
merged = model.merge_and_unload()  # if you like: plain weights, for any engine
```

Servers swap it while they run, for example `vllm serve {{ base }} --enable-lora \
--max-lora-rank {{ max_rank }} --lora-modules {{ name }}={{ name }}`. Check that the LoRA is what \
its fit asks for, of that very model: `{{ check }}`.
"""
_FOLDER_TEXT = """\
This copy of `{{ base }}` scales the logits of its attention heads.

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({{ quoted_name }})
```

Engines load it as they load any model. Check that it is as it was written, and that a server
applies the fit: `{{ check }}`.
"""
_CARD = """\
---
{{ card_data }}
---

# Calibrated attention temperatures

A head with logits z attends by softmax(beta z) instead of softmax(z). `calibrate` fitted beta.
TEXT
{% if not revision %}
Before you publish it: the model was in a folder, so write its name on the Hub in place of \
`{{ base }}`,
wherever that stands {{ places }}.
{% endif %}
`calibrate fits show ./{{ fit_file }}` prints the fit with its evidence; in short:

{{ summary }}
"""


def folder_card(export: "Export", name: str) -> str:
    """Returns the card of an exported folder of that name, in Markdown."""
    from calibrate.export.configuration import FIT_FILE

    return _render_card(
        export,
        {"library_name": "transformers", "base_model_relation": "finetune"},
        _FOLDER_TEXT,
        name=name,
        fit_file=FIT_FILE,
        places="above",
        check=command("export", check=name, engine="URL"),
    )


def lora_card(export: "Export", name: str) -> str:
    """Returns the card of a LoRA in a folder of that name, in Markdown."""
    from calibrate.export.lora import ADAPTER_CONFIG, lora_rank, name_base_model, output_factors
    from calibrate.store.coefficient_file import ADAPTER_FIT

    base, revision = name_base_model(export.folder.path)
    pin = f", revision={json.dumps(revision)}" if revision else ""
    rank = lora_rank(output_factors(export.folder.config, export.queries, export.plan))
    return _render_card(
        export,
        {"library_name": "peft", "base_model_relation": "adapter", "tags": ["lora"]},
        _LORA_TEXT,
        name=name,
        fit_file=ADAPTER_FIT,
        places=f"above and in `{ADAPTER_CONFIG}`",
        load=json.dumps(base) + pin,
        max_rank=next((x for x in _VLLM_RANKS if x >= rank), rank),
        check=command("export", check=name, model="FOLDER"),
    )


def _render_card(
    export: "Export", metadata: dict[str, Any], text: str, name: str, **fields: Any
) -> str:
    """Returns a card: its metadata, what the export changes, and a summary of the fit.

    Args:
      metadata: fields of the Hub that depend on the format.
      text: template of the part that depends on the format.
      name: of the exported folder.
      fields: other fields of the template.
    """
    from huggingface_hub import ModelCard, ModelCardData

    from calibrate.export.lora import name_base_model
    from calibrate.export.plan import TAGS

    base, revision = name_base_model(export.folder.path)
    metadata = metadata | _licence(export.folder.path)
    card_data = ModelCardData(
        base_model=base,
        pipeline_tag="text-generation",
        tags=[*metadata.pop("tags", []), *TAGS],
        **metadata,
    )
    card = ModelCard.from_template(
        card_data,
        template_str=_CARD.replace("TEXT\n", text),
        name=name,
        quoted_name=json.dumps(name),
        base=base,
        revision=revision,
        summary=indent(printable(str(export.fit), "\n"), "    "),
        **fields,
    )
    return str(card)


def _licence(model: Path) -> dict[str, Any]:
    """Returns the licence and the languages on the model's own card, which hold for a copy."""
    from huggingface_hub import ModelCard

    from calibrate.export.folder import CARD

    try:
        data = ModelCard.load(model / CARD, ignore_metadata_errors=True).data
    except Exception:  # there is no card, or its metadata is not YAML
        return {}
    fields = {key: getattr(data, key, None) for key in _COPIED_FIELDS}
    return {key: value for key, value in fields.items() if value}
