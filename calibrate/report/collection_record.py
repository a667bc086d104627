"""Collections and their solved inputs, as results to show and as a table on disk."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from calibrate.evidence.estimate import per_cent
from calibrate.evidence.evidence import BASELINE, Evidence
from calibrate.evidence.metrics import LOG_P, RIGHT
from calibrate.prompts.examples import ExampleCollection
from calibrate.report.blocks import Block, Facts, Heading, Result, Table, Text
from calibrate.rows.collection import RowCollection
from calibrate.rows.rows import count_bad, share_misranked
from calibrate.rows.solve import QUARTILES, SolvedInputs, theta_quartiles
from calibrate.storage.atomic_io import write_atomically
from calibrate.storage.npz import write_arrays

MIN_RIGHT = 0.02  # share of right answers at some length; with fewer the model cannot do the task
STATUSES = {  # of the solver, in words
    "interior": "at a finite beta",
    "sharp": "at infinity (theta = 0)",
    "flat": "at zero",
    "unsolved": "not found",
}


def rows_result(collection: RowCollection) -> Result:
    """Inputs and misranked inputs by size, and the size on disk; JSON is the manifest."""
    manifest = collection.manifest
    rows = [
        (
            f"{size['size']:,}",
            f"{size['rows']:,}",
            f"{size['misranked']:,}",
            per_cent(share_misranked(size)),
            f"{size['ties']:,}",
            f"{count_bad(size):,}",
            f"{size['kept']:,}",
        )
        for size in manifest["sizes"]
    ]
    total = sum(shard["bytes"] for shard in manifest["shards"])
    is_of_logits = manifest["configuration"].get("of") == "logits"
    n = "n, up to" if is_of_logits else "n"
    columns = (n, "inputs", "misranked", "share", "ties", "bad", "kept")
    note = (
        f"{len(manifest['shards'])} shards, {total / 1e6:,.1f} MB. Misranked: another item has a "
        "higher logit than the target. Ties: another item has the same."
    )
    return Result([Table(columns, rows, f"Collection {collection.folder}", note)], manifest)


def examples_result(collection: ExampleCollection) -> Result:
    """Examples, NLL and exact match by template and length; JSON has the manifest, too."""
    configuration, scores = collection.manifest["configuration"], _baseline_evidence(collection)
    rows, cells = [], []
    for stratum, part in scores.by("stratum").items():
        log_p, right = (part.mean(BASELINE, metric) for metric in (LOG_P, RIGHT))
        shown = (f"{part.n:,}", log_p.shown(".3f", -1), per_cent(right.mean))
        rows.append((stratum.template, f"{stratum.size:,}", *shown))
        cell = dict(zip(("length", "template", "text"), stratum[:3], strict=True))
        numbers = {"log_p": log_p.mean, "error": log_p.error, "right": right.mean}
        cells.append(cell | {"examples": part.n} | numbers)
    columns = ("template", "length", "examples", "NLL", "exact match")
    title = f"Examples {collection.folder}: {configuration['model']}, baseline"
    note = (
        "NLL of the whole answer in nats, of text per token; exact match: each token of the answer "
        "has the highest probability."
    )
    if "prompts" in configuration["sources"]:
        note += " Lengths of prompts are rounded up to powers of two."
    shown_blocks: list[Block] = [Table(columns, rows, title, note, left=["template"])]
    if warning := nearly_none_right(collection):
        shown_blocks.append(Text(f"\nNote: {warning}."))
    more = {"folder": collection.folder, "digest": collection.digest, "baseline": cells}
    return Result(shown_blocks, collection.manifest | more)


def nearly_none_right(collection: ExampleCollection) -> str | None:
    """A warning about a model that answers nearly nothing at any length; None for others."""
    by_length = _baseline_evidence(collection).answers.by("size").values()
    right = max((float(part.mean(BASELINE, RIGHT).mean) for part in by_length), default=1.0)
    if right >= MIN_RIGHT:
        return None
    return (
        f"the model answers nearly nothing right ({per_cent(right)} at best); temperatures do not "
        "teach a model a task: give prompts that it answers when they are short"
    )


def _baseline_evidence(collection: ExampleCollection) -> Evidence:
    from calibrate.model.objective import baseline_evidence

    return baseline_evidence(collection.set, collection.scores)


def theta_facts(rows: SolvedInputs) -> Iterable[tuple[str, str]]:
    """The quartiles of the optimal theta of misranked inputs; nothing if there are none."""
    first, median, third = theta_quartiles(rows)
    if not np.isnan(median):
        text = f"{first:.3g}, {median:.3g}, {third:.3g}"
        yield "optimal theta", f"{text} (quartiles of the misranked inputs; theta = 1/beta)"


def solved_result(solved: SolvedInputs, out: Path | None) -> Result:
    """Numbers of inputs by class of their optimum, and theta of the misranked ones."""
    counts, n_misranked = solved.count_by_status(), np.count_nonzero(solved.misranked)
    parts = [(n, solved.take(solved.size == n)) for n in np.unique(solved.size).tolist()]
    medians = {n: float(theta_quartiles(part)[1]) for n, part in parts}
    known = {n: theta for n, theta in medians.items() if not np.isnan(theta)}
    by_size = ", ".join(f"{theta:.3g} (n = {n:,})" for n, theta in known.items())
    facts = [
        ("inputs", f"{len(solved.theta):,}, {n_misranked:,} misranked"),
        ("optimum", ", ".join(f"{n:,} {STATUSES[name]}" for name, n in counts.items() if n)),
        *theta_facts(solved),
    ]
    facts += [("median", by_size)] if len(known) > 1 else []
    facts += [] if out is None else [("table", str(out))]
    title = f"Optimal temperature theta = 1/beta of {solved.collection.folder}"
    theta = dict(zip(map(str, QUARTILES), theta_quartiles(solved).tolist(), strict=True))
    data = {"inputs": len(solved.theta), "misranked": n_misranked, **counts, "theta": theta}
    return Result([Heading(title), Facts(facts)], data | {"medians": known, "table": out})


def write_table(solved: SolvedInputs, path: Path) -> None:
    """Writes a row for each input, as CSV or npz, whole or not at all."""
    names = ("size", "n", "entropy", "beta", "theta", "status", "misranked")
    columns = {name: getattr(solved, name) for name in names}
    heads = {"layer": solved.layer, "head": solved.head}
    columns |= {name: x for name, x in heads.items() if (x >= 0).any()}
    if path.suffix == ".npz":
        write_arrays(path, columns)
        return
    columns["misranked"] = columns["misranked"].astype(int)
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    lines = [",".join(columns), *(",".join(map(str, row)) for row in rows)]
    write_atomically(path, ("\n".join(lines) + "\n").encode())
