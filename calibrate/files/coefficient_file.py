"""The coefficient file, schema 1: strict reading, canonical writing.

JSON in UTF-8, at most 1 MiB; every field is explained in fits/README.md, and the JSON Schema of
each released version lies in `schemas`. `check` holds [x, p(x)] of the bare polynomial at as many
points of the domain as it has coefficients, so that reversed, rescaled or rounded numbers are
refused. `id` is the sha256 of the canonical JSON of rule, entries and source: it detects damage, it
does not say who wrote the file.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from calibrate.errors import CoefficientsError
from calibrate.files.atomic_io import read_file
from calibrate.files.check_pairs import verify
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.files.metadata import PROVENANCE, SOURCE, quality_shape
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
from calibrate.maths.rule import ENTROPY_POLYNOMIAL, LOG_SIZE, N_COEFFICIENTS, Rule

FORMAT = "calibrate.fit"
MAX_BYTES = 1 << 20
MAX_VERSION = 999_999_999
MAX_INDEX = 32_767  # of a layer or head: collections hold them as int16
NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")

NAME_REMEDY = (
    "use lower-case letters, digits, '.', '_' and '-', at most 64, the first a letter or digit"
)

NEWEST_MINOR = 1
_MINOR_VERSION = re.compile(r"1\.(0|[1-9][0-9]{0,8})")
# Line breaks are layout: within JSON texts they are escaped.
_NUMBERS = re.compile(r"\[\n([^\[\]{}\"]*)\n *\]")
_RULE_WORDS = {
    kind: {"kind": kind, "quantity": "beta", "order": "descending"} | unit
    for kind, unit in (
        (ENTROPY_POLYNOMIAL, {"entropy_unit": "nats"}),
        (LOG_SIZE, {"size_unit": "log items"}),
    )
}
# The fields of Rule that a file of each kind has, in its order.
_RULE_GUARDS = {
    ENTROPY_POLYNOMIAL: ("min_entropy", "min_beta", "max_beta", "outside"),
    LOG_SIZE: ("min_beta", "max_beta"),
}
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
    rule = coefficients.rule
    return {
        "rule": _RULE_WORDS[rule.kind]
        | {key: getattr(rule, key) for key in _RULE_GUARDS[rule.kind]},
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
    minor, extra = _check_top(document)
    source, quality, provenance = document["source"], document["quality"], document["provenance"]
    rule = _rule(document["rule"], minor)
    newer = minor > NEWEST_MINOR
    check_shape(source, ("source",), SOURCE)
    check_shape(quality, ("quality",), quality_shape(minor, rule.kind), newer)
    check_shape(provenance, ("provenance",), PROVENANCE, newer)
    coefficients = Coefficients(
        rule=rule,
        entries=_entries(document["entries"], rule.kind),
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


def _check_top(document: Any) -> tuple[int, dict[str, Any]]:
    """The top level but for its objects; (minor version, the fields that are not interpreted)."""
    check_required(document, (), ("format", "schema_version"))
    if document["format"] != FORMAT:
        refuse(("format",), document["format"], f'give a coefficient file, which has "{FORMAT}"')
    version = document["schema_version"]
    check_pattern(
        version, ("schema_version",), _MINOR_VERSION,
        "this calibrate reads 1.x: upgrade it if the file is newer, fit again if it is 0.x",
    )  # fmt: skip
    minor = int(version.removeprefix("1."))
    extra = {}
    if document.keys() != _TOP_KEY_SET:
        extra = {
            key: value for key, value in document.items()
            if key not in _TOP_KEY_SET and (key.startswith("x-") or minor > NEWEST_MINOR)
        }  # fmt: skip
        check_keys(document, (), _TOP_KEYS, extra)
        for key, value in extra.items():
            check_free(value, (key,))
    check_pattern(document["name"], ("name",), NAME_PATTERN, NAME_REMEDY)
    check_integer(document["version"], ("version",), 1, MAX_VERSION)
    return minor, extra


def _rule(value: Any, minor: int) -> Rule:
    check_required(value, ("rule",), ("kind",))
    kind = value["kind"]
    if type(kind) is not str or kind not in _RULE_WORDS:
        known = " and ".join(f'"{word}"' for word in _RULE_WORDS)
        refuse(("rule", "kind"), kind, f"this calibrate reads {known}: upgrade it, or fit again")
    if kind == LOG_SIZE and minor == 0:
        refuse(("rule", "kind"), kind, 'schema 1.0 has no such rule: write schema_version "1.1"')
    check_keys(value, ("rule",), (*_RULE_WORDS[kind], *_RULE_GUARDS[kind]))
    for key, word in _RULE_WORDS[kind].items():
        if value[key] != word:
            refuse(("rule", key), value[key], f'this calibrate reads "{word}", and exchanging the '
                   "word converts no numbers: fit again")  # fmt: skip
    guards = {key: value[key] for key in _RULE_GUARDS[kind]}
    for key, guard in guards.items():
        if key == "outside":
            check_word(guard, ("rule", key), ("clamp", "identity"))
        else:
            check_float(guard, ("rule", key))
    return Rule.log_size(**guards) if kind == LOG_SIZE else Rule(**guards)


def _entries(value: Any, kind: str) -> tuple[Entry, ...]:
    if type(value) is not list:
        refuse(("entries",), value, "give a list")
    count = N_COEFFICIENTS[kind]
    return tuple([_entry(entry, ("entries", i), count) for i, entry in enumerate(value)])


def _entry(value: Any, where: Where, count: int) -> Entry:
    check_keys(value, where, _ENTRY_KEYS)
    layer, head, domain = value["layer"], value["head"], value["domain"]
    if layer is not None:
        check_integer(layer, (*where, "layer"), 0, MAX_INDEX)
    if head is not None:
        check_integer(head, (*where, "head"), 0, MAX_INDEX)
    check_floats(value["coefficients"], (*where, "coefficients"), count)
    check_floats(domain, (*where, "domain"), 2)
    pairs = value["check"]
    if type(pairs) is not list or len(pairs) != count:
        refuse((*where, "check"), pairs, f"give a list of {count} pairs [x, p(x)]")
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
