"""The coefficient file, schema 1: strict reading, canonical writing.

JSON in UTF-8, at most 1 MiB; every field is explained in fits/README.md, and the JSON Schema of
each released version lies in `schemas`. `check` holds [H, p(H)] of the bare polynomial at five
points of the domain, so that reversed, rescaled or rounded numbers are refused. `id` is the sha256
of the canonical JSON of rule, entries and source: it detects damage, it does not say who wrote the
file.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from calibrate.errors import CoefficientsError
from calibrate.files.about import PROVENANCE, QUALITY, SOURCE
from calibrate.files.check_pairs import verify
from calibrate.files.coefficients import N_COEFFICIENTS, SCHEMA_VERSION, Coefficients, Entry
from calibrate.files.strict_json import (
    Where,
    check_float,
    check_floats,
    check_free,
    check_integer,
    check_keys,
    check_pattern,
    check_required,
    check_shape,
    check_word,
    parse,
    refuse,
    refuse_state,
    spell,
)
from calibrate.files.whole import read_file
from calibrate.maths.rule import Rule

FORMAT = "calibrate.fit"
MAX_BYTES = 1 << 20
MAX_VERSION = 999_999_999
MAX_INDEX = 32_767  # of a layer or head: collections hold them as int16
NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")

NAME_REMEDY = (
    "use lower-case letters, digits, '.', '_' and '-', at most 64, the first a letter or digit"
)

_MINOR_VERSION = re.compile(r"1\.(0|[1-9][0-9]{0,8})")
# Line breaks are layout: within JSON texts they are escaped.
_NUMBERS = re.compile(r"\[\n([^\[\]{}\"]*)\n *\]")
_RULE_WORDS = {
    "kind": "entropy-polynomial",
    "quantity": "beta",
    "order": "descending",
    "entropy_unit": "nats",
}
_RULE_NUMBERS = ("min_entropy", "min_beta", "max_beta")
_RULE_KEYS = (*_RULE_WORDS, *_RULE_NUMBERS, "outside")
_TOP_KEYS = (
    "format", "schema_version", "name", "version", "id", "rule", "entries", "quality", "source",
    "provenance",
)  # fmt: skip
_TOP_KEY_SET = frozenset(_TOP_KEYS)
_ENTRY_KEYS = ("layer", "head", "coefficients", "domain", "check")

_encode = json.JSONEncoder(
    check_circular=False, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
).encode


def dumps(coefficients: Coefficients) -> str:
    """The text of the coefficient file; the same fit gives the same text.

    Raises:
      CoefficientsError: quality, source, provenance or extra hold what JSON has no word for.
    """
    try:
        digested = _digested(coefficients)
        document = {
            "format": FORMAT,
            "schema_version": coefficients.schema_version,
            "name": coefficients.name,
            "version": coefficients.version,
            "id": _digest(digested),
            "rule": digested["rule"],
            "entries": digested["entries"],
            "quality": dict(coefficients.quality),
            "source": digested["source"],
            "provenance": dict(coefficients.provenance),
        }
        document |= {k: v for k, v in coefficients.extra.items() if k not in document}
        return layout(document)
    except (TypeError, ValueError, RecursionError) as failure:
        raise CoefficientsError(
            f"{coefficients.reference} cannot be written as JSON ({failure}); "
            "give texts, finite numbers, lists and dicts of them"
        ) from failure


def layout(document: dict[str, Any]) -> str:
    """The text of a document: an indent of 1, lists of numbers on one line; all in one if large."""
    text = json.dumps(document, indent=1, ensure_ascii=True, allow_nan=False) + "\n"
    text = _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text)
    if len(text) <= MAX_BYTES:
        return text
    return json.dumps(document, separators=(",", ":"), ensure_ascii=True, allow_nan=False) + "\n"


def digest(coefficients: Coefficients) -> str:
    """The fit's `id`: sha256 of the canonical JSON of rule, entries and source."""
    return _digest(_digested(coefficients))


def _digested(coefficients: Coefficients) -> dict[str, Any]:
    numbers = {key: float(getattr(coefficients.rule, key)) for key in _RULE_NUMBERS}
    return {
        "rule": _RULE_WORDS | numbers | {"outside": coefficients.rule.outside},
        "entries": [_entry_document(entry) for entry in coefficients.entries],
        "source": dict(coefficients.source),
    }


def _entry_document(entry: Entry) -> dict[str, Any]:
    return {
        "layer": entry.layer,
        "head": entry.head,
        "coefficients": list(map(float, entry.coefficients)),
        "domain": list(map(float, entry.domain)),
        "check": [list(pair) for pair in entry.check],
    }


def _digest(digested: dict[str, Any]) -> str:
    return "sha256:" + hashlib.sha256(_encode(digested).encode()).hexdigest()


def read(path: Path) -> Coefficients:
    """Reads and verifies a coefficient file.

    Raises:
      CoefficientsError: the file cannot be read or breaks the format; says where, what and how to
        mend it.
    """
    try:
        data = read_file(path, MAX_BYTES)
    except FileNotFoundError:
        raise CoefficientsError(f"{path} does not exist; check the path") from None
    except (OSError, ValueError) as failure:  # ValueError: a NUL in the path
        reason = getattr(failure, "strerror", None) or failure
        raise CoefficientsError(f"cannot read {path}: {reason}; check the path") from failure
    try:
        return loads(data, path)
    except CoefficientsError as refusal:
        raise CoefficientsError(f"{path}: {refusal}") from None


def loads(data: bytes, path: Path | None = None) -> Coefficients:
    """Verifies the bytes of a coefficient file, which lie at `path`.

    Raises:
      CoefficientsError: they break the format; says where, what and how to mend it.
    """
    if len(data) > MAX_BYTES:
        refuse_state((), "longer than 1 MiB", "give a coefficient file, which never is")
    document = parse(data)
    extra = _check_top(document)
    source, quality, provenance = document["source"], document["quality"], document["provenance"]
    newer = document["schema_version"] != SCHEMA_VERSION
    check_shape(source, ("source",), SOURCE)
    check_shape(quality, ("quality",), QUALITY, newer)
    check_shape(provenance, ("provenance",), PROVENANCE, newer)
    coefficients = Coefficients(
        rule=_rule(document["rule"]),
        entries=_entries(document["entries"]),
        name=document["name"],
        version=document["version"],
        quality=quality,
        source=source,
        provenance=provenance,
        path=path,
        extra=extra,
        schema_version=document["schema_version"],
    )
    digested = {"rule": document["rule"], "entries": document["entries"], "source": source}
    expected = _digest(digested)
    if document["id"] != expected:
        refuse(("id",), document["id"], f"rule, entries and source give {expected}; they changed "
               "since the fit was published: restore the file")  # fmt: skip
    return coefficients


def _check_top(document: Any) -> dict[str, Any]:
    """The top level but for its objects; returns the fields that are not interpreted."""
    check_required(document, (), ("format", "schema_version"))
    if document["format"] != FORMAT:
        refuse(("format",), document["format"], f'give a coefficient file, which has "{FORMAT}"')
    version = document["schema_version"]
    check_pattern(
        version, ("schema_version",), _MINOR_VERSION,
        "this calibrate reads 1.x: upgrade it if the file is newer, fit again if it is 0.x",
    )  # fmt: skip
    extra = {}
    if document.keys() != _TOP_KEY_SET:
        extra = {
            key: value for key, value in document.items()
            if key not in _TOP_KEY_SET and (key.startswith("x-") or version != SCHEMA_VERSION)
        }  # fmt: skip
        check_keys(document, (), _TOP_KEYS, extra)
        for key, value in extra.items():
            check_free(value, (key,))
    check_pattern(document["name"], ("name",), NAME_PATTERN, NAME_REMEDY)
    check_integer(document["version"], ("version",), 1, MAX_VERSION)
    return extra


def _rule(value: Any) -> Rule:
    check_keys(value, ("rule",), _RULE_KEYS)
    for key, word in _RULE_WORDS.items():
        if value[key] != word:
            refuse(("rule", key), value[key], f'this calibrate reads "{word}", and exchanging the '
                   "word converts no numbers: fit again")  # fmt: skip
    check_word(value["outside"], ("rule", "outside"), ("clamp", "identity"))
    for key in _RULE_NUMBERS:
        check_float(value[key], ("rule", key))
    return Rule(value["min_entropy"], value["min_beta"], value["max_beta"], value["outside"])


def _entries(value: Any) -> tuple[Entry, ...]:
    if type(value) is not list:
        refuse(("entries",), value, "give a list")
    return tuple([_entry(entry, ("entries", i)) for i, entry in enumerate(value)])


def _entry(value: Any, where: Where) -> Entry:
    check_keys(value, where, _ENTRY_KEYS)
    layer, head, domain = value["layer"], value["head"], value["domain"]
    if layer is not None:
        check_integer(layer, (*where, "layer"), 0, MAX_INDEX)
    if head is not None:
        check_integer(head, (*where, "head"), 0, MAX_INDEX)
    check_floats(value["coefficients"], (*where, "coefficients"), N_COEFFICIENTS)
    check_floats(domain, (*where, "domain"), 2)
    pairs = value["check"]
    if type(pairs) is not list or len(pairs) != N_COEFFICIENTS:
        refuse((*where, "check"), pairs, f"give a list of {N_COEFFICIENTS} pairs [H, p(H)]")
    for i, pair in enumerate(pairs):
        check_floats(pair, (*where, "check", i), 2)
    try:
        entry = Entry(
            tuple(value["coefficients"]), tuple(domain), layer, head, tuple(map(tuple, pairs))
        )
    except CoefficientsError as refusal:
        raise CoefficientsError(f"{spell(where)}.{refusal}") from None
    verify(entry, where)
    return entry
