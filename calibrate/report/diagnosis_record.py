"""A diagnosis as a result to show: the ranked heads, and the folder of its record and figures."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calibrate.files.atomic_io import write_atomically
from calibrate.report.blocks import (
    SHOWN_HEADS,
    Block,
    Facts,
    Heading,
    Result,
    Table,
    Text,
    and_more,
    as_json,
)
from calibrate.report.plot_style import draw, save_figure
from calibrate.report.plots import plot_entropy
from calibrate.rows.diagnosis import THRESHOLDS, WORTH, Diagnosis, HeadDiagnosis

RECORD = "diagnosis.json"


def diagnosis_result(diagnosis: Diagnosis, path: Path, figures: Sequence[Path]) -> Result:
    """The verdict on each head, the largest gain first, and the files.

    Args:
      diagnosis: of a collection of rows.
      path: of the record as JSON, which has every head and set size, and the thresholds.
      figures: beside it.
    """
    heads, folder = diagnosis.heads, diagnosis.collection.folder
    worth = sum(head.word == WORTH for head in heads)
    texts = [f"  {head.name}: {head.reason}" for head in heads[:SHOWN_HEADS]]
    gains = "Gains in nats of log p on held-out rows, with 95 % intervals, each head by itself."
    texts.append(gains + and_more(len(heads)))
    shown: list[Block] = [
        Heading(f"Diagnosis of {folder}"),
        Facts([("heads", f"{worth} of {len(heads)} worth calibrating")]),
        *map(Text, texts),
        _measurements(diagnosis),
        Text(f"This is a look; the fit decides: calibrate fit {folder} --name NAME"),
        Facts([("record", str(path)), *(("figure", str(figure)) for figure in figures)]),
    ]
    return Result(shown, _found(diagnosis) | {"path": path, "figures": figures})


def _found(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "collection": diagnosis.collection.folder,
        "digest": diagnosis.collection.digest,
        "thresholds": THRESHOLDS,
        "heads": diagnosis.heads,
    }


def _measurements(diagnosis: Diagnosis) -> Table:
    columns = ("head", "rows", "largest n", "entropy there", "on top")
    note = "Mean entropy in nats. On top: rows whose target has the highest logit."
    rows = [*map(_cells, diagnosis.heads[:SHOWN_HEADS])]
    return Table(columns, rows, "Measurements", note, left=["head"], detail=True)


def _cells(head: HeadDiagnosis) -> list[str]:
    last = head.sizes[-1]
    entropy, on_top = f"{last.entropy:.2f}", f"{head.on_top:.1%}"
    return [head.name, f"{head.rows:,}", f"{last.size:,}", entropy, on_top]


def save_diagnosis(folder: Path, diagnosis: Diagnosis) -> Result:
    """Writes the figure and then the record, which is returned, each whole or not at all."""
    figure = folder / "entropy.png"
    save_figure(figure, draw(plot_entropy, diagnosis.heads))
    result = diagnosis_result(diagnosis, folder / RECORD, [figure])
    save_json(folder / RECORD, result)
    return result


def save_json(path: Path, record: Result) -> None:
    """Writes what --json prints of a record, whole or not at all."""
    write_atomically(path, (json.dumps(as_json(record), indent=1, allow_nan=False) + "\n").encode())
