"""Solved inputs as a result to show, and as a table on disk."""

from pathlib import Path
from typing import Any

import numpy as np

from calibrate.report.blocks import Block, Facts, Result, Table
from calibrate.solver.solved_inputs import SolvedInputs
from calibrate.storage.atomic_io import write_atomically
from calibrate.storage.npz import write_arrays

QUANTILES = (0.05, 0.5, 0.95)


def solved_result(solved: SolvedInputs, out: Path | None) -> Result:
    """Numbers of inputs by size and kind of optimum, and the optimal theta of the misranked."""
    records = [_of_size(solved, size) for size in np.unique(solved.rows.size).tolist()]
    rows = [
        (
            f"{record['size']:,}",
            f"{record['inputs']:,}",
            f"{record['misranked']:,}",
            *(f"{record[name]:,}" for name in ("interior", "sharp", "flat")),
            *(f"{theta:.3g}" for theta in record["theta"]),
        )
        for record in records
    ]
    columns = ("n", "inputs", "misranked", "interior", "sharp", "flat", *_theta_columns())
    note = (
        "Optimum interior: a finite theta, of which the last columns are quantiles; sharp: theta "
        "-> 0 (ranked first); flat: no theta is better than infinity."
    )
    title = f"Optimal temperature theta = 1/beta of {solved.collection.folder}"
    shown: list[Block] = [Table(columns, rows, title, note)]
    if out is not None:
        shown.append(Facts([("table", str(out))]))
    return Result(shown, {"sizes": records, "table": out})


def _theta_columns() -> list[str]:
    return [f"theta {100 * q:g} %" for q in QUANTILES]


def _of_size(solved: SolvedInputs, size: int) -> dict[str, Any]:
    """The numbers of one size."""
    of_size = solved.rows.size == size
    status, theta = solved.status[of_size], solved.theta[of_size]
    interior = theta[status == "interior"]
    quantiles = np.quantile(interior, QUANTILES) if len(interior) else np.full(3, np.nan)
    names = ("interior", "sharp", "flat", "unsolved")
    return {
        "size": size,
        "inputs": int(of_size.sum()),
        "misranked": int(solved.misranked[of_size].sum()),
        **{name: int((status == name).sum()) for name in names},
        "theta": quantiles.tolist(),
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
