"""The coefficient file, schema 1.0, field by field: the loader and the JSON Schema check the same.

scripts/tools/write_schemas.py writes `schemas/coefficient-file-1.0.json`, for other readers, from
the shapes here.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from calibrate.core import rule as rules
from calibrate.storage.json_shapes import (
    NUMBER,
    TEXT,
    Integer,
    List,
    Map,
    Number,
    Object,
    Pattern,
    PrintableLine,
    Scalar,
    Shape,
    Word,
    numbers,
)
from calibrate.store.entry import MAX_INDEX

FORMAT = "calibrate.fit"
SCHEMA_VERSION = "1.0"
MAX_VERDICT = 2000  # characters: that of a language model has over a thousand
MAX_HEADS = 100_000

NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
NAME_REMEDY = (
    "use lower-case letters, digits, '.', '_' and '-', at most 64, the first a letter or digit"
)

COUNT = Integer(0, 2**63 - 1)
DIGEST = Pattern(re.compile("sha256:[0-9a-f]{64}"), 'give "sha256:" and 64 hexadecimal digits')
TIME = Pattern(
    re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\+00:00"),
    "write UTC as 2026-01-31T12:00:00+00:00",
)
FORMAT_WORD = Word((FORMAT,), f'give a coefficient file, which has "{FORMAT}"')
VERSION_WORD = Word(
    (SCHEMA_VERSION,),
    f'this calibrate reads "{SCHEMA_VERSION}": upgrade calibrate if the file is newer, fit again '
    "if it is older",
)
KIND_WORD = Word(rules.KINDS)


class RuleFields(NamedTuple):
    """The fields of `rule` of one kind, beside `kind`."""

    words: Mapping[str, str]  # fields with one value
    guards: Mapping[str, Shape]  # fields of `core.rule.Rule`; Fit checks their range


_WORDS = {"quantity": "beta", "order": "descending"}
_TERMS = {"quantity": "beta", "order": ", ".join(rules.TERMS[rules.ENTROPY_AND_SIZE])}
_NATS, _ITEMS = {"entropy_unit": "nats"}, {"size_unit": "log items"}
_BOUNDS: dict[str, Shape] = {
    "min_beta": Number({"exclusiveMinimum": 0}),
    "max_beta": Number({"exclusiveMinimum": 0, "description": "not below min_beta"}),
}
_THRESHOLD: dict[str, Shape] = {
    "min_entropy": Number(
        {"minimum": 0, "description": "nats; at or below it beta is 1; 0 is no threshold"}
    )
}
_OUTSIDE: dict[str, Shape] = {"outside": Word(("clamp", "identity"))}
RULE_FIELDS = {
    rules.CONSTANT: RuleFields(_WORDS, _BOUNDS),
    rules.LOG_SIZE: RuleFields(_WORDS | _ITEMS, _BOUNDS),
    rules.POLYNOMIAL: RuleFields(_WORDS | _NATS, _THRESHOLD | _BOUNDS | _OUTSIDE),
    rules.ENTROPY_AND_SIZE: RuleFields(_TERMS | _NATS | _ITEMS, _THRESHOLD | _BOUNDS),
}
CHECK_ITEMS = ("values [p]", "pairs [x, p(x)]", "triples [H, log n, p(H, log n)]")


def document_shape(kind: str) -> Object:
    """The whole file with a rule of a kind."""
    fields: dict[str, Shape] = {
        "format": FORMAT_WORD,
        "schema_version": VERSION_WORD,
        "name": Pattern(NAME_PATTERN, NAME_REMEDY),
        "version": Integer(1, 999_999_999),
        "id": DIGEST,
        "rule": _rule_shape(kind),
        "entries": List(_entry_shape(kind), schema={"minItems": 1}),
        "evidence": _EVIDENCE,
        "source": _SOURCE,
        "provenance": Object({"created": TIME, "versions": Map(TEXT)}),
    }
    remedy = "remove it; names of your own fields begin with x-"
    return Object(fields, required=True, others="x-", remedy=remedy)


def _rule_shape(kind: str) -> Object:
    words: dict[str, Shape] = {
        name: Word(
            (word,),
            f'this calibrate reads "{word}", and exchanging the word converts no numbers: fit '
            "again",
        )
        for name, word in {"kind": kind, **RULE_FIELDS[kind].words}.items()
    }
    return Object({**words, **RULE_FIELDS[kind].guards}, required=True)


def _entry_shape(kind: str) -> Object:
    """The coefficients of one head, of a rule of a kind."""
    count, n_variables = rules.N_COEFFICIENTS[kind], len(rules.VARIABLES[kind])
    fields: dict[str, Shape] = {
        **_HEAD,
        "coefficients": numbers(count),
        "domain": numbers(2 * n_variables, {"minimum": 0, "maximum": 64}),
        "check": List(numbers(n_variables + 1), exact=count, items=CHECK_ITEMS[n_variables]),
    }
    return Object(fields, required=True)


def _record(counts: str, numbers: str, **fields: Shape) -> Object:
    """An object of optional counts and numbers, by their names, and fields of other shapes."""
    shapes: dict[str, Shape] = {**fields, **dict.fromkeys(counts.split(), COUNT)}
    return Object(shapes | dict.fromkeys(numbers.split(), NUMBER))


_HEAD: dict[str, Shape] = dict.fromkeys(("layer", "head"), Integer(0, MAX_INDEX, null=True))
_INPUTS = _record("seen misranked optimum_infinite optimum_zero optimum_finite bad fitted", "")
_HEAD_RECORD = _record(
    "inputs",
    "degrees_of_freedom gain se",
    **_HEAD,
    penalty=Number(words=("infinite",), null=True),
    r_squared_log_beta=Number(null=True),
    at_bound=Word(("", "min", "max")),
)
_INTERPOLATION = _record(
    "inputs", "weight gain gain_se calibration_gain calibration_gain_se kl kl_se kl_999 same_top"
)
_EVIDENCE = Object(
    {
        "inputs": _INPUTS,
        "heads": List(_HEAD_RECORD, most=MAX_HEADS),
        "held_out": List(_record("n inputs", "nll_before nll_after se")),
        "kinds": List(_record("", "nll gain se", kind=TEXT), most=16),
        "interpolation": List(_INTERPOLATION, most=64),
        "verdict": PrintableLine(MAX_VERDICT),
    }
)
_SOURCE = Object(
    {
        "head": TEXT,
        "fingerprint": TEXT,
        "collection": DIGEST,
        "seed": Integer(0, 2**64 - 1),
        "options": Map(Scalar()),
        "citation": TEXT,
    }
)
