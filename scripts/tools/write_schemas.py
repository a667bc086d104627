"""Writes the JSON Schema of the coefficient file from the shapes that the loader checks.

    python scripts/tools/write_schemas.py

A test compares the file, calibrate/store/schemas/coefficient-file-1.0.json.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from calibrate.core.rule import KINDS
from calibrate.storage import json_shapes
from calibrate.store import coefficient_schema
from calibrate.store.coefficient_schema import SCHEMA_VERSION, document_shape

NAME = f"coefficient-file-{SCHEMA_VERSION}.json"
PATH = Path(coefficient_schema.__file__).parent / "schemas" / NAME
TEXT = {"type": "string", "minLength": 1, "maxLength": json_shapes.TEXT.longest}

BY_KIND = ("rule", "entries")
RANGE = {"minimum": -json_shapes.FLOAT32_MAX, "maximum": json_shapes.FLOAT32_MAX}

Schema = dict[str, Any]


def schema_of(shape: json_shapes.Shape) -> Schema:
    """The JSON Schema of a shape. Each keyword can be understood without the others."""
    match shape:
        case json_shapes.Integer(lowest, highest, null):
            kind = ["integer", "null"] if null else "integer"
            return {"type": kind, "minimum": lowest, "maximum": highest}
        case json_shapes.Number(keywords, words, null):
            number = {"type": ["number", "null"] if null else "number", **RANGE, **keywords}
            return {"anyOf": [number, {"enum": list(words)}]} if words else number
        case json_shapes.PrintableLine(longest):
            return TEXT | {"maxLength": longest}
        case json_shapes.Pattern(pattern):
            return {"type": "string", "pattern": f"^{pattern.pattern}$"}
        case json_shapes.Word(words):
            return {"enum": list(words)}
        case json_shapes.Scalar():
            return {"anyOf": [TEXT, {"type": ["number", "boolean", "null"], **RANGE}]}
        case json_shapes.List(item, most, exact, _, keywords):
            lengths = {"minItems": exact, "maxItems": most if exact is None else exact}
            lengths = {keyword: length for keyword, length in lengths.items() if length is not None}
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


def json_schema() -> Schema:
    """The schema of the whole file; `rule` and `entries` depend on the kind of rule."""
    of_kind = {kind: schema_of(document_shape(kind)) for kind in KINDS}
    schema = of_kind[KINDS[0]]
    kinds = {"type": "object", "required": ["kind"], "properties": {"kind": {"enum": [*KINDS]}}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"calibrate coefficient file, schema {SCHEMA_VERSION}",
        "description": "A fitted rule for the inverse temperature of softmax. Beside this schema, "
        "fits/file-format.md has conditions on id, check, domain and printable text.",
        **schema,
        "properties": schema["properties"] | {"rule": kinds, "entries": {}},
        "allOf": [
            {
                "if": {"properties": {"rule": {"properties": {"kind": {"const": kind}}}}},
                "then": {"properties": {name: own["properties"][name] for name in BY_KIND}},
            }
            for kind, own in of_kind.items()
        ],
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


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    PATH.write_text(text_of(json_schema()) + "\n")
