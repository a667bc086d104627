"""A fit in words: the line that loads it, its rows, quality, source and provenance."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from calibrate.errors import CoefficientsError
from calibrate.files.coefficients import Coefficients
from calibrate.files.manifest import BAD
from calibrate.files.store import find


def load_line(coefficients: Coefficients) -> str:
    """The Python expression that loads exactly this version from the current folder."""
    path = coefficients.path
    assert path is not None
    pinned = json.dumps(coefficients.reference)
    try:
        held, version = find(coefficients.reference)
        if os.path.realpath(held.path(version)) == os.path.realpath(path):
            return f"calibrate.load({pinned})"
    except CoefficientsError:
        pass
    if (path.parent.name, path.name) == (coefficients.name, f"{coefficients.version}.json"):
        return f"calibrate.load({pinned}, store={_quote(path.parent.parent)})"
    return f"calibrate.load({_quote(path)})"


def _quote(path: Path) -> str:
    """A path as a Python string literal."""
    return json.dumps(str(path), ensure_ascii=False)


def left_out(rows: Mapping[str, int]) -> list[tuple[int, str]]:
    """(count, reason) of the rows that were not fitted, as far as the file says."""
    if not {"rows", "misranked", "kept", "interior"} <= rows.keys():
        return []
    bad = sum(rows.get(reason, 0) for reason in BAD), "bad (NaN, +inf or a masked target)"
    if "used" in rows:
        gated = min(rows.get("gated", 0), rows["kept"] - rows["used"])
        reasons = [
            (rows["rows"] - rows["kept"] - bad[0], "not kept"),
            (gated, "at or below the gate"),
            (rows["kept"] - rows["used"] - gated, "not selected, or not usable by this fit"),
            bad,
        ]
    else:
        reasons = [
            (rows["rows"] - rows["misranked"], "not misranked"),
            (rows["misranked"] - rows["kept"], "over the byte budget"),
            (rows.get("flat", 0), "flat (no positive optimum)"),
            (rows.get("unsolved", 0), "unsolved"),
            bad,
        ]
    return [(count, reason) for count, reason in reasons if count]


def facts(coefficients: Coefficients) -> Iterable[tuple[str, str]]:
    """(label, text) of quality, source and provenance, as far as the file has them."""
    quality, source = coefficients.quality, coefficients.source
    rows, residuals = quality.get("rows", {}), quality.get("residuals", {})
    used = rows.get("used", rows.get("interior"))
    if used is not None and "rows" in rows:
        yield "rows", f"{used:,} used of {rows['rows']:,} seen"
    if residuals:
        yield "residuals", _pairs(residuals)
    for candidate in quality.get("candidates", []):
        yield "candidate", _pairs(candidate)
    if quality.get("learning_curve"):
        yield "learning", "; ".join(map(_pairs, quality["learning_curve"]))
    if "condition" in quality:
        yield "condition", f"{quality['condition']:.4g}"
    for size in quality.get("held_out", []):
        yield "held out", _pairs(size)
    if "verdict" in quality:
        yield "verdict", quality["verdict"]
    for key in ("head", "fingerprint", "collection", "seed", "citation"):
        if key in source:
            yield key, str(source[key])
    if "options" in source:
        yield "options", _pairs(source["options"])
    made = coefficients.provenance
    versions = ", ".join(f"{tool} {version}" for tool, version in made.get("versions", {}).items())
    if made:
        yield "made", ", ".join(filter(None, (made.get("created"), versions)))


def _pairs(mapping: dict[str, Any]) -> str:
    return ", ".join(f"{value_text(key)} {value_text(value)}" for key, value in mapping.items())


def head_text(layer: int | None, head: int | None) -> str:
    """The heads that an entry applies to."""
    of_layer = "every layer" if layer is None else f"layer {layer}"
    return f"{of_layer}, {'every head' if head is None else f'head {head}'}"


def value_text(value: Any) -> str:
    """A JSON value as printable text, numbers with six digits."""
    if value is None:
        return "absent or null"
    if isinstance(value, list):
        return ", ".join(map(value_text, value))
    if isinstance(value, float):
        return f"{value:.6g}"
    printable = isinstance(value, str) and value.isprintable()
    return value if printable else json.dumps(value)
