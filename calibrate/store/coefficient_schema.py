"""The coefficient file, field by field: what the loader checks and what the JSON Schemas say.

`schemas` holds the JSON Schema of each minor version for other readers, written from the shapes
here by scripts/tools/write_schemas.py. A new field or kind of rule is one edit in this module.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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

SCHEMA_VERSION = "1.3"  # of files that are written
NEWEST_MINOR = int(SCHEMA_VERSION.removeprefix("1."))

MAX_VERDICT = 2000  # characters: of a model fit, with text, they may be over a thousand

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
VERSION = Integer(1, 999_999_999)

FORMAT = Word(("calibrate.fit",), 'give a coefficient file, which has "calibrate.fit"')
VERSION_OF_SCHEMA = Pattern(
    re.compile(r"1\.(0|[1-9][0-9]{0,8})"),
    "this calibrate reads 1.x: upgrade it if the file is newer, fit again if it is 0.x",
)


@dataclass(frozen=True)
class RuleFields:
    """The fields of `rule` in files of one kind of rule, beside its `kind`."""

    minor: int  # of the first schema that has it
    words: Mapping[str, str]  # fields with one value
    guards: Mapping[str, Shape]  # fields of Rule; Coefficients checks their range


_MIN_ENTROPY = Number(
    {"minimum": 0, "description": "nats; at or below it beta is 1; 0 is no threshold"}
)
_BOUNDS = {
    "min_beta": Number({"exclusiveMinimum": 0}),
    "max_beta": Number({"exclusiveMinimum": 0, "description": "not below min_beta"}),
}
RULE_FIELDS = {
    rules.ENTROPY_POLYNOMIAL: RuleFields(
        minor=0,
        words={"quantity": "beta", "order": "descending", "entropy_unit": "nats"},
        guards={"min_entropy": _MIN_ENTROPY, **_BOUNDS, "outside": Word(("clamp", "identity"))},
    ),
    rules.LOG_SIZE: RuleFields(
        minor=1,
        words={"quantity": "beta", "order": "descending", "size_unit": "log items"},
        guards=_BOUNDS,
    ),
    rules.ENTROPY_AND_SIZE: RuleFields(
        minor=2,
        words={
            "quantity": "beta",
            "order": ", ".join(rules.TERMS[rules.ENTROPY_AND_SIZE]),
            "entropy_unit": "nats",
            "size_unit": "log items",
        },
        guards={"min_entropy": _MIN_ENTROPY, **_BOUNDS},
    ),
}

KIND = Word(
    tuple(RULE_FIELDS),
    f"this calibrate reads {', '.join(map(json.dumps, RULE_FIELDS))}: upgrade it, or fit again",
)


def document_shape(minor: int, kind: str, newer: bool = False) -> Object:
    """The whole file of a kind of rule, by schema 1.`minor`.

    Args:
      newer: the file has a later minor version, whose unknown fields are let through: never in
        rule, entries or source, which determine beta and the digest.
    """
    others = "" if newer else None
    fields: dict[str, Shape] = {
        "format": FORMAT,
        "schema_version": VERSION_OF_SCHEMA,
        "name": Pattern(NAME_PATTERN, NAME_REMEDY),
        "version": VERSION,
        "id": DIGEST,
        "rule": _rule_shape(kind),
        "entries": List(_entry_shape(kind), schema={"minItems": 1}),
        "quality": _quality_shape(minor, kind, others),
        "source": _SOURCE,
        "provenance": Object({"created": TIME, "versions": Map(TEXT)}, others=others),
    }
    return Object(fields, required=True, others="" if newer else "x-")


def _rule_shape(kind: str) -> Object:
    words: dict[str, Shape] = {
        name: Word(
            (word,),
            f'this calibrate reads "{word}", and exchanging the word converts '
            "no numbers: fit again",
        )
        for name, word in {"kind": kind, **RULE_FIELDS[kind].words}.items()
    }
    return Object({**words, **RULE_FIELDS[kind].guards}, required=True)


def _entry_shape(kind: str) -> Object:
    """One head's coefficients, in a rule of that kind."""
    count, n_domain = rules.N_COEFFICIENTS[kind], rules.N_DOMAIN[kind]
    items = "pairs [x, p(x)]" if n_domain == 2 else "triples [H, log n, value]"
    index = Integer(0, MAX_INDEX, null=True)
    fields: dict[str, Shape] = {
        "layer": index,
        "head": index,
        "coefficients": numbers(count),
        "domain": numbers(n_domain, {"minimum": 0, "maximum": 64}),
        "check": List(numbers(n_domain // 2 + 1), exact=count, items=items),
    }
    return Object(fields, required=True)


# What the fit was made from. Part of the id, and so the same in every minor version.
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

_ROW_COUNTS = (
    "rows",
    "misranked",
    "ties",
    "nan",
    "inf",
    "masked_target",
    "kept",
    "sharp",
    "flat",
    "interior",
    "unsolved",
)


def _quality_shape(minor: int, kind: str, others: str | None) -> Object:
    """The quality of the fit."""
    fields: dict[str, Shape] = {
        "rows": _part_of_quality(
            others,
            counts=_ROW_COUNTS
            + (("gated", "used") if minor else ())
            + (("at_bound",) if minor > 2 else ()),
        ),
        "residuals": _part_of_quality(
            others,
            ("beta_rms", "beta_r_squared", "theta_rms")
            + (("log_beta_r_squared",) if minor > 2 else ()),
        ),
        "standard_errors": List(numbers(rules.N_COEFFICIENTS[kind])),
        "held_out": List(_part_of_quality(others, ("before", "after", "error"), ("size", "rows"))),
        "verdict": PrintableLine(MAX_VERDICT) if minor > 2 else TEXT,
    }
    if minor > 1:
        fields |= {"q": NUMBER, "trade": List(_trade_shape(minor, others), most=64)}
    if minor > 2:
        fields["over_constant"] = _part_of_quality(others, ("gain", "gain_error"))
    if minor:
        fields |= {
            "candidates": List(_candidate_shape(minor, others), most=16),
            # No fit writes it any more; max-retrieval@2, which is published, has one.
            "learning_curve": List(_part_of_quality(others, ("log_p",), ("rows",)), most=64),
            "band": List(numbers(rules.N_DOMAIN[kind] // 2 + 2), most=512),
            "condition": NUMBER,
        }
    return Object(fields, others=others)


def _part_of_quality(
    others: str | None, names: Iterable[str] = (), counts: Iterable[str] = (), **fields: Shape
) -> Object:
    """A record with counts, fields of other shapes, and numbers of these names."""
    shapes: dict[str, Shape] = dict.fromkeys(counts, COUNT)
    return Object({**shapes, **fields, **dict.fromkeys(names, NUMBER)}, others=others)


def _candidate_shape(minor: int, others: str | None) -> Object:
    """A kind of rule that was compared."""
    names = ("log_p", "gain", "low", "high") + (("q", "p") if minor > 1 else ())
    if minor < 3:
        return _part_of_quality(others, names, kind=TEXT)
    some_numbers = List(NUMBER, most=max(rules.N_COEFFICIENTS.values()))
    return _part_of_quality(
        others,
        (*names, "log_beta_r_squared"),
        kind=TEXT,
        loss=TEXT,
        coefficients=some_numbers,
        domain=some_numbers,
    )


def _trade_shape(minor: int, others: str | None) -> Object:
    """The gain of a model's fit, and its KL of retention text, at one interpolation weight."""
    pairs = ("gain", "seen", "kl")
    names = ("strength", *pairs, *(f"{name}_error" for name in pairs))
    return _part_of_quality(others, names + (("kl_999", "same_top") if minor > 2 else ()))
