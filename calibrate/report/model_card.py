"""The model card of an exported folder or LoRA, which the Hub reads and shows.

The Hub makes the code that loads it from `library_name` and `base_model`.
"""

from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

from calibrate.errors import command, printable

if TYPE_CHECKING:
    from calibrate.export.folder import Export

_COPIED_FIELDS = ("license", "license_name", "license_link", "language")
_CARD = """\
---
{{ card_data }}
---

# Calibrated attention temperatures

A head with logits z attends by softmax(beta z) instead of softmax(z). `calibrate` fitted beta to \
`{{ base }}`.
{% if not revision %}
Before you publish it: the model was in a folder, so write its name on the Hub in place of \
`{{ base }}`,
wherever that stands {{ places }}.
{% endif %}
`{{ check }}` compares it with its fit.
`calibrate fits show ./{{ fit_file }}` prints the fit with its evidence; in short:

{{ summary }}
"""


def folder_card(export: "Export", name: str) -> str:
    """Returns the card of an exported folder of that name, in Markdown."""
    from calibrate.export.configuration import FIT_FILE

    return _render_card(
        export,
        {"library_name": "transformers", "base_model_relation": "finetune"},
        fit_file=FIT_FILE,
        places="above",
        check=command("export", check=name, engine="URL"),
    )


def lora_card(export: "Export", name: str) -> str:
    """Returns the card of a LoRA in a folder of that name, in Markdown."""
    from calibrate.export.lora import ADAPTER_CONFIG
    from calibrate.store.coefficient_file import ADAPTER_FIT

    return _render_card(
        export,
        {"library_name": "peft", "base_model_relation": "adapter", "tags": ["lora"]},
        fit_file=ADAPTER_FIT,
        places=f"above and in `{ADAPTER_CONFIG}`",
        check=command("export", check=name, model="FOLDER"),
    )


def _render_card(export: "Export", metadata: dict[str, Any], **fields: str) -> str:
    """Returns a card, given metadata and fields of the template that depend on the format."""
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
        template_str=_CARD,
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
