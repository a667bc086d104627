"""A diagnosis in words: the ranked table, the record, and the folder with record and figures."""

import json
import math
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from calibrate.evaluation import diagnosis as diagnosing
from calibrate.evaluation.diagnosis import AtSize, Diagnosis, HeadDiagnosis
from calibrate.files.atomic_io import write_atomically
from calibrate.fitting.rule_fitting import MIN_ROWS
from calibrate.report.console import print_whole, stdout
from calibrate.report.diagnosis_plots import save_figures
from calibrate.report.rule_text import items

SHOWN = 20  # heads in the table
RECORD = "diagnosis.json"


def print_diagnosis(diagnosis: Diagnosis, record: dict[str, Any]) -> None:
    """The heads, the largest headroom first, each with its verdict, and where the figures are."""
    heads = diagnosis.heads
    worth = sum(head.verdict.word == diagnosing.WORTH for head in heads)
    stdout.print(f"\nDiagnosis of {diagnosis.collection.folder}", style="bold")
    stdout.print(f"  heads      {worth} of {len(heads)} worth calibrating")
    for head in heads[:SHOWN]:
        stdout.print(f"  {head.name}: {head.verdict.reason}")
    if len(heads) > SHOWN:
        stdout.print(f"  and {len(heads) - SHOWN} more (--json lists them all)")
    if diagnosis.without_rows:
        stdout.print(f"  heads of which no row was kept: {len(diagnosis.without_rows)}")
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("head", no_wrap=True)
    for heading in (
        "rows", "largest n", "entropy there", "commitment slope", f"n at {diagnosis.eps:g}",
        "on top", "at largest n", "best beta, 10/50/90 %", "headroom", "ceiling",
    ):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for head in heads[:SHOWN]:
        table.add_row(*_cells(head))
    print_whole(table)
    folder = diagnosis.collection.folder
    stdout.print(
        "Headroom in nats of log p: an upper estimate, from the rows that it is chosen by."
    )
    stdout.print(f"What decides is held-out rows: calibrate fit {folder} --name NAME")
    stdout.print(f"  record     {record['path']}")
    for figure in record["figures"]:
        stdout.print(f"  figure     {figure}")


def _cells(head: HeadDiagnosis) -> list[str]:
    last, room = at_largest(head), head.headroom
    slope = f"{head.slope.value:.2f} ± {head.slope.error:.2f}" if head.slope else "-"
    lost = "never" if head.dispersal is None else items(math.log(head.dispersal))
    beta = " / ".join(f"{b:.2f}" for b in head.beta) if head.beta else "-"
    return [
        head.name, f"{head.rows:,}", f"{head.largest:,}",
        f"{last.entropy:.2f} ± {last.entropy_spread:.2f}", slope, lost, f"{head.on_top:.1%}",
        f"{head.on_top_at_largest:.1%}", beta, f"{room.constant:.4f} ± {room.error:.4f}",
        f"{room.ceiling:.4f}",
    ]  # fmt: skip


def at_largest(head: HeadDiagnosis) -> AtSize:
    """The rows of the largest set size that has enough of them."""
    return next(at for at in head.sizes if at.size == head.largest)


def save_diagnosis(folder: Path, diagnosis: Diagnosis) -> dict[str, Any]:
    """Writes the figures and then the record, which is returned, each whole or not at all."""
    record = diagnosis_record(diagnosis)
    record["path"] = str(folder / RECORD)
    record["figures"] = [str(path) for path in save_figures(folder, diagnosis)]
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    write_atomically(folder / RECORD, text.encode())
    return record


def diagnosis_record(diagnosis: Diagnosis) -> dict[str, Any]:
    """What `print_diagnosis` says, of every head and set size, for a machine."""
    return {
        "collection": str(diagnosis.collection.folder),
        "digest": diagnosis.collection.digest,
        "eps": diagnosis.eps,
        "thresholds": {
            "min_rows": MIN_ROWS,
            "least_headroom": diagnosing.LEAST_HEADROOM,
            "least_errors": diagnosing.LEAST_ERRORS,
            "robust_slope": diagnosing.ROBUST_SLOPE,
            "seldom_on_top": diagnosing.SELDOM_ON_TOP,
        },
        "heads": [_head_record(head) for head in diagnosis.heads],
        "without_rows": [list(head) for head in diagnosis.without_rows],
    }


def _head_record(head: HeadDiagnosis) -> dict[str, Any]:
    plain = head._asdict()
    del plain["contexts"]  # of every row
    return plain | {
        "sizes": [at._asdict() for at in head.sizes],
        "slope": head.slope and head.slope._asdict(),
        "beta": head.beta and dict(zip(("10%", "50%", "90%"), head.beta, strict=True)),
        "headroom": head.headroom._asdict(),
        "verdict": head.verdict._asdict(),
    }
