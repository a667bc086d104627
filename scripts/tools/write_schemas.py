"""Writes the JSON Schema of the coefficient file from the types that the loader checks.

    python scripts/tools/write_schemas.py

Descriptions of fields stand in the file alone, calibrate/store/schemas/coefficient-file-1.0.json,
and are kept; that of a new field is empty, and is to be written there.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec

from calibrate.core.rule import KINDS, N_COEFFICIENTS, N_DOMAIN
from calibrate.store import coefficient_fields
from calibrate.store.coefficient_fields import COEFFICIENT_SCHEMA_VERSION, CoefficientDocument

NAME = f"coefficient-file-{COEFFICIENT_SCHEMA_VERSION}.json"
PATH = Path(coefficient_fields.__file__).parent / "schemas" / NAME

Schema = dict[str, Any]


def json_schema() -> Schema:
    """The schema of the whole file; lengths of lists in `entries` depend on the kind of rule."""
    old = json.loads(PATH.read_text())
    (reference,), definitions = msgspec.json.schema_components([CoefficientDocument])
    document = definitions.pop(reference["$ref"].rpartition("/")[2])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"calibrate coefficient file, schema {COEFFICIENT_SCHEMA_VERSION}",
        "description": old["description"],
        "type": document["type"],
        "properties": described(document, old)["properties"],
        "required": document["required"],
        "additionalProperties": False,
        "patternProperties": {"^x-": {"description": "your own notes; any JSON, 32 deep at most"}},
        "allOf": [lengths_of_kind(kind) for kind in KINDS],
        "$defs": {
            name: described(definition, old["$defs"].get(name, {}))
            for name, definition in definitions.items()
        },
    }


def described(definition: Schema, old: Schema) -> Schema:
    """The schema of an object with the descriptions that its fields have in an older one."""
    fields = old.get("properties", {})
    properties = {
        name: {**kind, "description": fields.get(name, {}).get("description", "")}
        for name, kind in definition["properties"].items()
    }
    return {**definition, "properties": properties}


def lengths_of_kind(kind: str) -> Schema:
    """The lengths of an entry's lists if the rule is of a kind."""
    n_coefficients, n_domain = N_COEFFICIENTS[kind], N_DOMAIN[kind]
    pair = exactly(n_domain // 2 + 1)
    lengths = {
        "coefficients": exactly(n_coefficients),
        "domain": exactly(n_domain),
        "check": {**exactly(n_coefficients), "items": pair},
    }
    return {
        "if": {"properties": {"rule": {"properties": {"kind": {"const": kind}}}}},
        "then": {"properties": {"entries": {"items": {"properties": lengths}}}},
    }


def exactly(length: int) -> Schema:
    """The schema of a list of a length."""
    return {"minItems": length, "maxItems": length}


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
