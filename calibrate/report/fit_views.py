"""Published fits in words: what there is, one fit, and two compared."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.errors import CoefficientsError
from calibrate.files.coefficient_file import digest, dumps
from calibrate.files.coefficients import Coefficients, Entry
from calibrate.files.collection import BAD
from calibrate.files.fit_difference import Difference, HeadDifference
from calibrate.files.store import StoredName, find, names, open_name
from calibrate.maths.rule import LOG_SIZE, Rule, beta_of
from calibrate.report.console import stdout
from calibrate.report.rule_text import guards, items, outside, polynomial, span, variable
from calibrate.report.text_plot import draw_curve

PLOT_POINTS = 128  # two per character
SHOWN_ENTRIES = 8


def load_line(coefficients: Coefficients) -> str:
    """The Python that loads exactly this version, from the folder that one is in."""
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
    """A path as a Python text."""
    return json.dumps(str(path), ensure_ascii=False)


def distinct(folders: Iterable[Path]) -> list[Path]:
    """Folders without those that are the same folder by another path."""
    return list({os.path.realpath(f): f for f in reversed(list(folders))}.values())[::-1]


def list_names(origins: list[tuple[str, Path]]) -> list[dict[str, Any]]:
    """A record of every name in every store, in the order of resolution."""
    kept = distinct(folder for _, folder in origins)
    records: list[dict[str, Any]] = []
    for origin, folder in origins:
        if folder in kept:
            kept.remove(folder)
            for name in names(folder):
                shadowed = any(record["name"] == name for record in records)
                records.append({**_name_or_error(folder, name), "origin": origin,
                                "shadowed": shadowed})  # fmt: skip
    return records


def _name_or_error(store: Path, name: str) -> dict[str, Any]:
    try:
        return name_record(open_name(store, name))
    except CoefficientsError as failure:
        return {
            "name": name, "store": str(store), "default": None, "versions": [], "yanked": [],
            "aliases": {}, "error": str(failure),
        }  # fmt: skip


def name_record(held: StoredName) -> dict[str, Any]:
    """What a store has of one name."""
    return {
        "name": held.name,
        "store": str(held.folder.parent),
        "default": held.default,
        "versions": held.versions,
        "yanked": sorted(held.history.yanked & set(held.versions)),
        "aliases": dict(sorted(held.history.aliases.items())),
        "error": None,
    }


def yank_in_words(held: StoredName, reference: str, undo: bool) -> list[str]:
    """What a name stands for after one of its versions was yanked, or a yank undone."""
    loads = f"{held.name} now loads {held.name}@{held.default}" if held.default else (
        f"{held.name} has no version left to load"
    )  # fmt: skip
    state = "usable again" if undo else "yanked"
    lines = [f"{reference} is {state}, in {held.folder.parent}; {loads}"]
    if not undo:
        lines += [
            f"{held.name}@{alias} leads to {reference} and no longer loads; move it"
            for alias, version in sorted(held.history.aliases.items())
            if reference == f"{held.name}@{version}"
        ]
    return lines


def print_names(records: list[dict[str, Any]]) -> None:
    """The names of each store; the first store that holds a name decides."""
    for place in dict.fromkeys((record["origin"], record["store"]) for record in records):
        origin, store = place
        stdout.print(f"{origin}  {Path(store).absolute()}", style="bold")
        rows = [("NAME", "LOADS", "VERSIONS", "ALIASES")]
        rows += [_cells(r) for r in records if (r["origin"], r["store"]) == place]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
            stdout.print("  " + "  ".join(cells).rstrip())
    for record in records:
        if record["error"]:
            stdout.print(f"{record['name']} is damaged: {record['error']}")


def _cells(record: dict[str, Any]) -> tuple[str, str, str, str]:
    if record["error"]:
        return record["name"], "damaged", "see below", "-"
    versions = [
        f"{version} (yanked)" if version in record["yanked"] else str(version)
        for version in record["versions"]
    ]
    aliases = [f"{alias} = {version}" for alias, version in record["aliases"].items()]
    loads = f"@{record['default']}" if record["default"] else "nothing"
    if record["shadowed"]:
        loads += " (hidden)"
    return record["name"], loads, ", ".join(versions) or "-", ", ".join(aliases) or "-"


def fit_record(coefficients: Coefficients, figure: Path | None) -> dict[str, Any]:
    """The file as it is, its path and the line that loads it."""
    return {
        "fit": json.loads(dumps(coefficients)),
        "path": str(coefficients.path),
        "load": load_line(coefficients),
        "figure": figure and str(figure),
    }


def print_fit(coefficients: Coefficients, figure: Path | None) -> None:
    """One fit: the rule with its curve, how good it is, what it was made from, how to load it."""
    stdout.print(f"Fit {coefficients.reference}", style="bold")
    for entry in coefficients.entries[:SHOWN_ENTRIES]:
        if len(coefficients.entries) > 1:
            stdout.print(f"  {_whose(entry.layer, entry.head)}")
        _print_entry(entry, coefficients.rule)
    if len(coefficients.entries) > SHOWN_ENTRIES:
        rest = len(coefficients.entries) - SHOWN_ENTRIES
        stdout.print(f"  and {rest} entries more (--json has them all)")
    _line("guards", guards(coefficients.rule))
    for label, text in facts(coefficients):
        _line(label, text)
    _line("file", str(coefficients.path))
    _line("id", digest(coefficients))
    if figure:
        _line("figure", str(figure))
    stdout.print("\nLoad it:")
    stdout.print(f"  fit = {load_line(coefficients)}")


def _print_entry(entry: Entry, rule: Rule) -> None:
    by_size = rule.kind == LOG_SIZE
    _line("p(n)" if by_size else "p(H)", polynomial(entry.coefficients))
    _line("domain", f"{span(entry.domain, rule.kind)}; {outside(rule)}")
    if not stdout.encoding.startswith("utf"):
        return
    x = np.linspace(*entry.domain, PLOT_POINTS)
    beta = beta_of(x, x, entry.coefficients, entry.domain, rule, np)
    shown = np.exp(x).tolist() if by_size else x.tolist()
    label = "set size n, log scale" if by_size else "entropy H, nats"
    stdout.print()
    for line in draw_curve(shown, beta.tolist(), label, "beta"):
        stdout.print(f"    {line}")
    stdout.print()


def left_out(rows: Mapping[str, int]) -> list[tuple[int, str]]:
    """(how many, why) of the rows that did not make a fit, as far as the file says."""
    if not {"rows", "misranked", "kept", "interior"} <= rows.keys():
        return []
    bad = sum(rows.get(reason, 0) for reason in BAD), "bad (NaN, +inf or a masked target)"
    if "used" in rows:
        gated = min(rows.get("gated", 0), rows["kept"] - rows["used"])
        reasons = [
            (rows["rows"] - rows["kept"] - bad[0], "not kept"),
            (gated, "at or below the gate"),
            (rows["kept"] - rows["used"] - gated, "not asked for, or of no use to this fit"),
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
    """Quality, source and provenance, as far as the file has them."""
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
    return ", ".join(f"{_in_words(key)} {_in_words(value)}" for key, value in mapping.items())


def _line(label: str, text: str) -> None:
    stdout.print(f"  {label:<11}  {text}")


def _whose(layer: int | None, head: int | None) -> str:
    of_layer = "every layer" if layer is None else f"layer {layer}"
    return f"{of_layer}, {'every head' if head is None else f'head {head}'}"


def difference_record(a: Coefficients, b: Coefficients, difference: Difference) -> dict[str, Any]:
    """What `print_difference` says, for a machine, and every field that differs."""
    return {
        "a": {"reference": a.reference, "path": str(a.path)},
        "b": {"reference": b.reference, "path": str(b.path)},
        "heads": [
            {
                "layer": head.layer,
                "head": head.head,
                "common": head.common and head.common._asdict(),
                "anywhere": head.anywhere._asdict(),
            }
            for head in difference.heads
        ],
        "fields": [{"path": path, "a": x, "b": y} for path, x, y in difference.fields],
    }


def print_difference(a: Coefficients, b: Coefficients, difference: Difference) -> None:
    """The largest changes of beta, and the fields that differ and determine beta or its source."""
    stdout.print(f"- {a.reference}  {a.path}\n+ {b.reference}  {b.path}", style="bold")
    by_size = sorted(difference.heads, key=lambda head: -head.anywhere.largest)
    for head in by_size[:SHOWN_ENTRIES]:
        for line in _changes_in_words(head, a.rule.kind):
            stdout.print(line)
    if a.rule.kind != b.rule.kind:
        stdout.print(f"beta is not compared: {_by(a)}, and {_by(b)}")
    elif not difference.heads:
        stdout.print("they share no head")
    if len(by_size) > SHOWN_ENTRIES:
        stdout.print(f"and {len(by_size) - SHOWN_ENTRIES} heads with smaller changes")
    told = [field for field in difference.fields if field[0].startswith(_TOLD)]
    for path, x, y in told:
        stdout.print(f"{_in_words(path)}\n  - {_in_words(x)}\n  + {_in_words(y)}")
    untold = len(difference.fields) - len(told)
    if untold:
        stdout.print(f"{untold} fields of quality and provenance differ (--json has them)")
    if not difference.fields:
        stdout.print("no field differs")


_TOLD = ("rule", "entries", "source", "x-")


def _by(coefficients: Coefficients) -> str:
    return f"{coefficients.reference} sets it by {variable(coefficients.rule)}"


def _changes_in_words(head: HeadDifference, kind: str) -> list[str]:
    many = (head.layer, head.head) != (None, None)
    lines = [_whose(head.layer, head.head) + ":"] if many else []
    by_size = kind == LOG_SIZE
    anywhere = f"in sets of {span(head.anywhere.range, kind)}" if by_size else "anywhere"
    for change, where in ((head.common, "in the domain of both"), (head.anywhere, anywhere)):
        if change is None:
            lines.append("the domains have nothing in common")
        elif change.largest == 0:
            lines.append(f"beta is the same {where}")
        else:
            before, after = change.betas
            of = f", {span(change.range, kind)}" if change is head.common else ""
            at = f"n = {items(change.at)}" if by_size else f"H = {change.at:.4g}"
            lines.append(
                f"beta changes by at most {change.largest:.4g} {where}{of}: "
                f"from {before:.4g} to {after:.4g} at {at}"
            )
    return lines


def _in_words(value: Any) -> str:
    if value is None:
        return "absent or null"
    if isinstance(value, list):
        return ", ".join(map(_in_words, value))
    if isinstance(value, float):
        return f"{value:.6g}"
    printable = isinstance(value, str) and value.isprintable()
    return value if printable else json.dumps(value)
