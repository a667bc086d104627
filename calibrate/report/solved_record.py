"""Solved inputs as a result to show, and as a table on disk."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.datasets.row_collection import RowCollection
from calibrate.datasets.row_quality import count_bad, share_misranked
from calibrate.report.blocks import Block, Facts, Heading, Result
from calibrate.solver.solved_inputs import QUARTILES, SolvedInputs, theta_quartiles
from calibrate.solver.solved_rows import Rows
from calibrate.storage.atomic_io import write_atomically
from calibrate.storage.npz import write_arrays

STATUSES = {  # of the solver, in words
    "interior": "at a finite beta",
    "sharp": "at infinity (theta = 0)",
    "flat": "at zero",
    "unsolved": "not found",
}


def misranked_by_size(collection: RowCollection) -> dict[int, str]:
    """The number of misranked inputs, by size: "123 of 256 (48.0%)"."""
    return {
        of["size"]: f"{of['misranked']:,} of {of['rows'] - count_bad(of):,} "
        f"({share_misranked(of):.1%})"
        for of in collection.manifest["sizes"]
    }


def spans_by_size(rows: Rows) -> dict[int, str]:
    """The numbers of items n of the inputs of each size: "64", or "33-64"."""
    spans = {}
    for size in np.unique(rows.size).tolist():
        fewest = int(rows.items[rows.size == size].min())
        spans[size] = f"{size:,}" if fewest == size else f"{fewest:,}-{size:,}"
    return spans


def theta_facts(rows: Rows) -> Iterable[tuple[str, str]]:
    """The quartiles of the optimal theta of misranked inputs; nothing without any."""
    first, median, third = theta_quartiles(rows)
    if not np.isnan(median):
        text = f"{first:.3g}, {median:.3g}, {third:.3g}"
        yield "optimal theta", f"{text} (quartiles of the misranked inputs; theta = 1/beta)"


def theta_json(rows: Rows) -> dict[str, float]:
    """The same by their shares."""
    quartiles = theta_quartiles(rows).tolist()
    return {f"{share:g}": theta for share, theta in zip(QUARTILES, quartiles, strict=True)}


def solved_result(solved: SolvedInputs, out: Path | None) -> Result:
    """Numbers of inputs by class of their optimum, and theta of the misranked ones, also by size.

    JSON has all of it by size.
    """
    records = [_of_size(solved, size) for size in np.unique(solved.rows.size).tolist()]
    counts = solved.rows.count_by_status()
    optima = ", ".join(f"{n:,} {STATUSES[name]}" for name, n in counts.items() if n)
    facts = [
        ("inputs", f"{len(solved.theta):,}, {np.count_nonzero(solved.misranked):,} misranked"),
        ("optimum", optima),
        *theta_facts(solved.rows),
    ]
    medians = [f"{x['theta']['0.5']:.3g} (n = {x['size']:,})" for x in records if x["misranked"]]
    if len(medians) > 1:
        facts.append(("median", ", ".join(medians)))
    if out is not None:
        facts.append(("table", str(out)))
    title = f"Optimal temperature theta = 1/beta of {solved.collection.folder}"
    shown: list[Block] = [Heading(title), Facts(facts)]
    return Result(shown, {"theta": theta_json(solved.rows), "sizes": records, "table": out})


def _of_size(solved: SolvedInputs, size: int) -> dict[str, Any]:
    """The numbers of one size."""
    rows = solved.rows.take(solved.rows.size == size)
    return {
        "size": size,
        "inputs": len(rows.beta),
        "misranked": int(rows.misranked.sum()),
        **rows.count_by_status(),
        "theta": theta_json(rows),
    }


def write_table(solved: SolvedInputs, path: Path) -> None:
    """Writes a row for each input, as CSV or npz, whole or not at all."""
    columns = {
        "size": solved.rows.size,
        "n": solved.n,
        "entropy": solved.entropy,
        "beta": solved.beta,
        "theta": solved.theta,
        "status": solved.status,
        "misranked": solved.misranked,
    }
    heads = {"layer": solved.rows.layer, "head": solved.rows.head}
    columns |= {name: x for name, x in heads.items() if (x >= 0).any()}
    if path.suffix == ".npz":
        write_arrays(path, columns)
        return
    cells = [[_cell(x) for x in column.tolist()] for column in columns.values()]
    lines = [",".join(columns), *(",".join(row) for row in zip(*cells, strict=True))]
    write_atomically(path, ("\n".join(lines) + "\n").encode())


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return repr(value) if isinstance(value, float) else str(value)
