"""Writes the JSON Schema of the coefficient file from the types that the loader checks.

    python scripts/tools/write_schemas.py

A test compares the file, calibrate/store/schemas/coefficient-file-1.0.json.
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

# By the name of a field, or OBJECT.FIELD where the name has several meanings.
MEANINGS = {
    "format": "the format of the file",
    "schema_version": "the version of this schema",
    "CoefficientDocument.name": "of the fit",
    "version": "of the fit; a saved version never changes",
    "id": "sha256 of the canonical JSON of rule, entries and source",
    "rule": "the kind of rule, with its guards",
    "kind": "the kind of rule",
    "quantity": "the coefficients give beta = 1/theta",
    "order": "coefficients are of these terms, or of falling powers; L = log n",
    "entropy_unit": "of H, the Shannon entropy of softmax(z)",
    "size_unit": "natural logarithm of n, the number of unmasked items",
    "min_entropy": "at or below this entropy beta is 1; 0: no threshold",
    "min_beta": "lower bound of beta",
    "max_beta": "upper bound of beta",
    "outside": "outside the domain: clamp H to it, or set beta to 1 (identity)",
    "entries": "one for each calibrated head, in any order; beta of other heads is 1",
    "layer": "number of the layer; null: all",
    "head": "number of the head; null: all",
    "coefficients": "b; kappa, b; c4, c3, c2, c1, c0; or of the terms in order",
    "domain": "lo, hi of the fitted inputs in each variable of the rule: H, log n, or both",
    "check": "points of the rule without its guards, which determine the coefficients: "
    "[b], [x, p(x)] or [H, log n, p(H, log n)]",
    "evidence": "what the fit was fitted to, and its scores on held-out inputs",
    "EvidenceFields.inputs": "counts of inputs",
    "seen": "inputs that were read",
    "misranked": "inputs in which another item has a higher logit than the target",
    "optimum_infinite": "inputs whose target has the highest logit",
    "optimum_zero": "inputs for which no beta > 0 is best",
    "optimum_finite": "inputs with a finite optimal beta",
    "bad": "inputs with NaN, +inf or a masked target, left out",
    "fitted": "inputs that the coefficients were fitted to",
    "heads": "a record for each head that was fitted, or tried",
    "inputs": "number of inputs, or of examples",
    "penalty": "the penalty lambda towards the best constant; null: none",
    "r_squared_log_beta": "R^2 of log beta in inputs with a finite optimum; null: not defined",
    "at_bound": "the bound of beta that the fit reached",
    "degrees_of_freedom": "effective degrees of freedom",
    "gain": "in log-likelihood, nats, over the baseline; of kinds of a language model, over one "
    "constant for all heads",
    "se": "standard error of the paired difference, nats",
    "held_out": "scores on held-out inputs, a record for each n",
    "n": "number of items; of a language model, of tokens",
    "nll_before": "mean negative log-likelihood of the target under the baseline, nats",
    "nll_after": "the same under the rule",
    "kinds": "scores of kinds of rule on the same folds",
    "KindRecord.kind": "a kind of rule, baseline, or least-squares (the paper's procedure)",
    "nll": "held-out negative log-likelihood, nats",
    "gain_over_fit": "gain over the kind of this fit on the same folds, nats",
    "se_over_fit": "standard error of the paired difference gain_over_fit",
    "verdict": "whether the rule has a significant gain on held-out inputs",
    "source": "the origin of the fit",
    "SourceFields.head": "name of the head, or of the model",
    "fingerprint": "digest of all that determines the head's logits",
    "citation": "of coefficients that were published elsewhere",
    "collection": "digest of the collection's manifest",
    "seed": "of the data of the collection",
    "options": "options of the fit by name",
    "provenance": "when, and with which software, the file was written",
    "created": "time of writing, UTC",
    "versions": "of the software, by name",
}


def json_schema() -> Schema:
    """The schema of the whole file; lengths of lists in `entries` depend on the kind of rule."""
    (reference,), definitions = msgspec.json.schema_components([CoefficientDocument])
    document = definitions.pop(reference["$ref"].rpartition("/")[2])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"calibrate coefficient file, schema {COEFFICIENT_SCHEMA_VERSION}",
        "description": "A fitted rule for the inverse temperature of softmax. Beside this schema, "
        "fits/README.md has the equation, and conditions on id, check and domain.",
        "type": document["type"],
        "properties": with_meanings(document["properties"], CoefficientDocument.__name__),
        "required": document["required"],
        "additionalProperties": False,
        "patternProperties": {"^x-": {"description": "your own notes; any JSON, 32 deep at most"}},
        "allOf": [lengths_of_kind(kind) for kind in KINDS],
        "$defs": {name: described(definition, name) for name, definition in definitions.items()},
    }


def described(definition: Schema, name: str) -> Schema:
    """The schema of an object with the meaning of each field."""
    return {**definition, "properties": with_meanings(definition["properties"], name)}


def with_meanings(properties: Schema, name: str) -> Schema:
    """The fields of an object, each with its description."""
    return {
        field: {**kind, "description": MEANINGS.get(f"{name}.{field}") or MEANINGS[field]}
        for field, kind in properties.items()
    }


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
