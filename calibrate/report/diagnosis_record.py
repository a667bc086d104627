"""The diagnosis of a collection as a result to show."""

from collections.abc import Sequence
from pathlib import Path

from calibrate.evidence.estimate import NOTHING, per_cent
from calibrate.report.blocks import SHOWN_HEADS, Facts, Result, Table, and_more
from calibrate.rows.diagnosis import AtSize, Diagnosis, HeadDiagnosis

READING = (
    "rho = log n - H, in nats: its slope against log n is 1 for a head that attends to a fixed "
    "number of items at every n, and 0 for one that disperses; the susceptibility is its change "
    "per unit of beta."
)

Cells = tuple[list[str], list[list[str]]]  # columns and rows of a table


def diagnosis_result(diagnosis: Diagnosis, figure: Path) -> Result:
    """A table of the heads by rising slope, or of the set sizes of a single head.

    JSON has every head and set size.
    """
    heads, folder = diagnosis.heads, diagnosis.collection.folder
    columns, rows = _cells_of_heads(heads) if len(heads) > 1 else _cells_of_sizes(heads[0])
    title = f"Commitment rho and susceptibility of {folder}"
    table = Table(columns, rows, title, READING + and_more(len(heads)), left=["head"])
    facts = [("figure", str(figure))]
    if len(heads) == 1:
        facts.insert(0, ("slope", f"{_slope_text(heads[0])} (of rho against log n)"))
    digest = diagnosis.collection.digest
    record = {"collection": folder, "digest": digest, "heads": heads, "figure": figure}
    return Result([table, Facts(facts)], record)


def _cells_of_heads(heads: Sequence[HeadDiagnosis]) -> Cells:
    """A row for each head, with its means at the smallest and at the largest set size."""
    at_sizes = [{at.size: at for at in head.sizes} for head in heads]
    every_size = {size for of_head in at_sizes for size in of_head}
    largest, ends = max(every_size), sorted({min(every_size), max(every_size)})
    spans = {n: _span([of_head[n] for of_head in at_sizes if n in of_head]) for n in ends}
    rows = []
    for head, of_head in zip(heads[:SHOWN_HEADS], at_sizes, strict=False):
        rho = [_rho_text(of_head.get(size)) for size in ends]
        chi = f"{of_head[largest].susceptibility:.3g}" if largest in of_head else NOTHING
        numbers = [f"{head.inputs:,}", _slope_text(head), *rho, chi, per_cent(head.misranked)]
        rows.append([head.name, *numbers])
    of_rho = [f"rho, n = {spans[size]}" for size in ends]
    of_chi = f"susceptibility, n = {spans[largest]}"
    return ["head", "inputs", "slope", *of_rho, of_chi, "misranked"], rows


def _cells_of_sizes(head: HeadDiagnosis) -> Cells:
    """A row for each set size of one head."""
    rows = [
        [
            _span([at]),
            f"{at.inputs:,}",
            _rho_text(at),
            f"{at.susceptibility:.3g}",
            per_cent(at.misranked),
        ]
        for at in head.sizes
    ]
    return ["n", "inputs", "rho", "susceptibility", "misranked"], rows


def _rho_text(at: AtSize | None) -> str:
    return NOTHING if at is None else at.commitment.shown(".2f")


def _slope_text(head: HeadDiagnosis) -> str:
    return NOTHING if head.slope is None else head.slope.shown(".3f")


def _span(at_size: Sequence[AtSize]) -> str:
    """The range of n of inputs: "64", or "33-64"."""
    least, most = min(at.least_n for at in at_size), max(at.most_n for at in at_size)
    return f"{most:,}" if least == most else f"{least:,}-{most:,}"
