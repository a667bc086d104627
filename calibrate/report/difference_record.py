"""The difference of two fits as a result to show: the largest change of beta, and the fields."""

import json
import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from calibrate.files.coefficient_file import dumps
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.files.store import load
from calibrate.files.unchanged_fit import Change, Range, domain_of, largest_change
from calibrate.report.blocks import Heading, Result, Text
from calibrate.report.rule_words import items, value_text
from calibrate.rows.solved_rows import head_label

# Derived from the other fields, or different in any two files.
_NOT_COMPARED = re.compile(r"id|name|version|entries\[[0-9]+\]\.check")
_SHOWN_FIELDS = ("rule", "entries", "source", "x-")  # fields of beta and of its source


def compare_fits(a: str, b: str, store: Path | None) -> Result:
    """How fit b differs from fit a: the largest change of beta where either was fitted, and fields.

    Shown are the fields of rule and source; JSON has all, each with its values in a and b.

    Raises:
      CoefficientsError: there is no such fit.
    """
    fits = load(a, store), load(b, store)
    changes = [_change(*fits, *pair) for pair in product(*(fit.entries for fit in fits))]
    change, head = max(filter(None, changes), default=(None, ""))
    one, other = (dict(_leaves(json.loads(dumps(fit)), "")) for fit in fits)
    fields = {
        path: (one.get(path), other.get(path))
        for path in dict.fromkeys([*one, *other])  # 1, 1.0 and true are three values in JSON
        if repr(one.get(path, _leaves)) != repr(other.get(path, _leaves))
    }
    before, after = (f"{fit.reference}  {fit.path}" for fit in fits)
    texts = [Text(text) for text in (_change_text(change, head), *_field_texts(fields))]
    found = {"a": before, "b": after, "head": head, "change": change, "fields": fields}
    return Result([Heading(f"- {before}\n+ {after}"), *texts], found)


def _field_texts(fields: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    shown = {path: values for path, values in fields.items() if path.startswith(_SHOWN_FIELDS)}
    for path, (x, y) in shown.items():
        yield f"{value_text(path)}\n  - {value_text(x)}\n  + {value_text(y)}"
    if hidden := len(fields) - len(shown):
        yield f"{hidden} fields of quality and provenance differ (--json lists them)"
    if not fields:
        yield "no field differs"


def _change_text(change: Change | None, head: str) -> str:
    if change is None:
        return "the fits have no head in common"
    largest, before, after, H, log_n = change
    if largest == 0:
        return "beta is the same"
    at = [head] if head else []
    at += [] if H is None else [f"H = {H:.4g}"]
    at += [] if log_n is None else [f"n = {items(log_n)}"]
    where = ", ".join(at)
    return f"beta changes by at most {largest:.4g}: from {before:.4g} to {after:.4g} at {where}"


def _change(
    a: Coefficients, b: Coefficients, one: Entry, other: Entry
) -> tuple[Change, str] | None:
    """The change of entries for the same head, and the head."""
    pairs = [(one.layer, other.layer), (one.head, other.head)]
    if any(None not in pair and pair[0] != pair[1] for pair in pairs):
        return None
    heads = (a.rule, one), (b.rule, other)
    boxes = (filter(None, ranges) for ranges in zip(*(domain_of(*x) for x in heads), strict=True))
    entropies, log_n = (_hull(list(ranges)) for ranges in boxes)
    layer, head = (y if x is None else x for x, y in pairs)
    where = "" if (layer, head) == (None, None) else head_label(layer, head)
    return largest_change(*heads, (entropies, log_n)), where


def _hull(ranges: list[Range]) -> Range | None:
    """The range that holds all of them."""
    return (min(x[0] for x in ranges), max(x[1] for x in ranges)) if ranges else None


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every value of a document that is not an object, with its path; entries one by one."""
    if _NOT_COMPARED.fullmatch(path):
        return
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else key)
    elif path == "entries":
        for i, item in enumerate(value):
            yield from _leaves(item, f"{path}[{i}]")
    else:
        yield path, value
