"""Writes the JSON Schemas of the coefficient file from the shapes that the loader checks.

    python scripts/tools/write_schemas.py

The files lie in calibrate/store/schemas, one for each minor version; a test compares them.
"""

import argparse
import json
from functools import reduce
from pathlib import Path
from typing import Any

from calibrate.storage import json_shapes
from calibrate.store import coefficient_schema
from calibrate.store.coefficient_schema import NEWEST_MINOR, RULE_FIELDS, document_shape

FOLDER = Path(coefficient_schema.__file__).parent / "schemas"
TEXT = {"type": "string", "minLength": 1, "maxLength": json_shapes.TEXT.longest}

Schema = dict[str, Any]


def schema_of(shape: json_shapes.Shape) -> Schema:
    """The JSON Schema of a shape. Each keyword can be understood without the others."""
    match shape:
        case json_shapes.Integer(lowest, highest, null):
            kind = ["integer", "null"] if null else "integer"
            return {"type": kind, "minimum": lowest, "maximum": highest}
        case json_shapes.Number(keywords):
            return {"type": "number", **keywords}
        case json_shapes.PrintableLine(longest):
            return TEXT | {"maxLength": longest}
        case json_shapes.Pattern(pattern):
            return {"type": "string", "pattern": f"^{pattern.pattern}$"}
        case json_shapes.Word(words):
            return {"enum": list(words)}
        case json_shapes.Scalar():
            return {"anyOf": [TEXT, {"type": ["number", "boolean", "null"]}]}
        case json_shapes.List(item, most, exact, _, keywords):
            lengths = {"minItems": exact, "maxItems": exact or most}
            lengths = {keyword: length for keyword, length in lengths.items() if length}
            return {"type": "array", "items": schema_of(item), **lengths, **keywords}
        case json_shapes.Map(item):
            return {
                "type": "object", "propertyNames": TEXT, "additionalProperties": schema_of(item)
            }  # fmt: skip
        case json_shapes.Object(fields, required, others):
            return _schema_of_object(fields, required, others)
    raise TypeError(f"no schema for {shape}")


def _schema_of_object(fields: Any, required: bool, others: str | None) -> Schema:
    schema: Schema = {"type": "object"}
    if required:
        schema["required"] = list(fields)
    if others != "":
        known = {"enum": list(fields)}
        named = {"anyOf": [known, {"pattern": f"^{others}"}]} if others else known
        schema["propertyNames"] = named
    return schema | {"properties": {name: schema_of(shape) for name, shape in fields.items()}}


def json_schema(minor: int) -> Schema:
    """The schema of files that say 1.`minor`, or a later 1.N as a reader of that minor sees it."""
    kinds = [word for word, kind in RULE_FIELDS.items() if kind.minor <= minor]
    closed, opened = (
        [schema_of(document_shape(minor, kind, newer)) for kind in kinds] for newer in (False, True)
    )
    common = reduce(_intersection, opened)
    this_minor = _difference(reduce(_intersection, closed), common)
    later = rf"([{minor}-9]|[1-9][0-9]{{1,8}})" if minor else r"(0|[1-9][0-9]{0,8})"
    cases = [("schema_version", {"const": f"1.{minor}"}, this_minor)]
    for kind, schema in zip(kinds, opened, strict=True):
        rule = {"properties": {"kind": {"const": kind}}}
        cases.append(("rule", rule, _difference(schema, common)))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"calibrate coefficient file, schema 1.{minor}",
        "description": "A fit of adaptive-temperature softmax. What a schema cannot say (id, "
        "check, domain order, printable text) is in fits/file-format.md.",
        **common,
        "allOf": [
            {
                "properties": {
                    "schema_version": {"pattern": rf"^1\.{later}$"},
                    "rule": {"properties": {"kind": {"enum": kinds}}},
                }
            },
            *(
                {"if": {"properties": {field: condition}}, "then": then}
                for field, condition, then in cases if then
            ),
        ],
    }  # fmt: skip


def _intersection(a: Schema, b: Schema) -> Schema:
    """The keywords that two schemas have in common."""
    common = {}
    for key in a.keys() & b.keys():
        if isinstance(a[key], dict) and isinstance(b[key], dict):
            common[key] = _intersection(a[key], b[key])
        elif a[key] == b[key]:
            common[key] = a[key]
    return {key: common[key] for key in a if key in common}


def _difference(a: Schema, b: Schema) -> Schema:
    """The keywords of schema `a` that schema `b`, a part of it, lacks."""
    return {
        key: _difference(value, b[key]) if isinstance(value, dict) and key in b else value
        for key, value in a.items() if value != b.get(key)
    }  # fmt: skip


def text_of(value: Any, indent: str = "") -> str:
    """JSON with every object and list on one line that is short enough."""
    line = json.dumps(value)
    if len(indent) + len(line) <= 98 or not isinstance(value, dict | list):
        return line
    inner = indent + " "
    if isinstance(value, list):
        body = [inner + text_of(item, inner) for item in value]
        return "[\n" + ",\n".join(body) + f"\n{indent}]"
    body = [f"{inner}{json.dumps(key)}: {text_of(item, inner)}" for key, item in value.items()]
    return "{\n" + ",\n".join(body) + f"\n{indent}}}"


def schema_files() -> dict[Path, str]:
    """The text of each schema file."""
    return {
        FOLDER / f"coefficient-file-1.{minor}.json": text_of(json_schema(minor)) + "\n"
        for minor in range(NEWEST_MINOR + 1)
    }


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for path, text in schema_files().items():
        path.write_text(text)
