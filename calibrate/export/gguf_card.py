"""The keys `general.*` by which a .gguf file says what it is, as a model card does on the Hub.

llama.cpp shows them and computes nothing from them. The base model of an export is the file that it
was made of, whose own base models, if it names any, are not those of the export.
"""

import struct

from gguf import GGUFValueType as Kind

from calibrate.export.gguf_model import GgufModel
from calibrate.export.plan import TAGS
from calibrate.storage.gguf_header import Key, packed_key, packed_texts
from calibrate.store.fit import Fit

_NAME = "general.name"
_TAGS = "general.tags"
_BASES = "general.base_model."
_OF_BASE = ("name", "author", "version", "organization", "url", "repo_url")  # of general.*, too
_START_OF_TEXTS = struct.Struct("<IIQ")


def has_card_of_export(model: GgufModel) -> bool:
    """True if the tags of a file are those of an export's card.

    llama.cpp's converter takes the tags from the card of an exported folder, and nothing else.
    """
    return {*TAGS} <= {*_texts(model.file.keys.get(_TAGS))}


def is_of_card(name: str) -> bool:
    """True for a key that a card writes."""
    return name in (_NAME, _TAGS) or name.startswith(_BASES)


def card_keys(model: GgufModel, fit: Fit) -> dict[str, bytes]:
    """The keys of an export of a fit for a model, as stored, beside those that are copied."""
    own = {name: model.key(f"general.{name}") for name in _OF_BASE}
    base = {name: text for name, text in own.items() if isinstance(text, str)}
    base.setdefault("name", model.architecture)
    of_base = {f"{_BASES}0.{name}": packed_key(x, Kind.STRING) for name, x in base.items()}
    tags = dict.fromkeys([*_texts(model.file.keys.get(_TAGS)), *TAGS])
    return {
        _NAME: packed_key(f"{base['name']} with {fit.reference}", Kind.STRING),
        f"{_BASES}count": packed_key(1, Kind.UINT32),
        **of_base,
        _TAGS: packed_texts(list(tags)),
    }


def _texts(key: Key | None) -> list[str]:
    """The texts of a key that is an array of texts; none of any other."""
    if key is None or len(key.stored) < _START_OF_TEXTS.size:
        return []
    kind, of_each, count = _START_OF_TEXTS.unpack_from(key.stored)
    if (kind, of_each) != (Kind.ARRAY, Kind.STRING):
        return []
    texts, at = list[str](), _START_OF_TEXTS.size
    for _ in range(count):
        (size,) = struct.unpack_from("<Q", key.stored, at)
        texts.append(key.stored[at + 8 : at + 8 + size].decode(errors="replace"))
        at += 8 + size
    return texts
