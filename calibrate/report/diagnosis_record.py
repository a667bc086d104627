"""A diagnosis as a result to show: the ranked heads, and the folder of its record and figures."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calibrate.evidence.prior import LEAST_GAIN
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
from calibrate.report.rule_words import items
from calibrate.rows import head_verdict as thresholds
from calibrate.rows.diagnosis import Diagnosis, HeadDiagnosis
from calibrate.rows.groups import MIN_ROWS

RECORD = "diagnosis.json"


def diagnosis_result(diagnosis: Diagnosis, path: Path, figures: Sequence[Path]) -> Result:
    """The verdict on each head, the largest gain first, and the files.

    Args:
      diagnosis: of a collection of rows.
      path: of the record as JSON, which has every head and set size, and the thresholds.
      figures: beside it.
    """
    heads, folder = diagnosis.heads, diagnosis.collection.folder
    worth = sum(head.verdict.word == thresholds.WORTH for head in heads)
    texts = [f"  {head.name}: {head.verdict.reason}" for head in heads[:SHOWN_HEADS]]
    gains = "Gains in nats of log p on held-out rows, with 95 % intervals, each head by itself."
    texts.append(gains + and_more(len(heads)))
    if count := len(diagnosis.without_rows):
        texts.append(f"  heads without any kept row: {count} (those of weight 0 do not count)")
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
        "eps": diagnosis.eps,
        "thresholds": {
            "min_rows": MIN_ROWS,
            "least_gain": LEAST_GAIN,
            "robust_slope": thresholds.ROBUST_SLOPE,
            "seldom_on_top": thresholds.SELDOM_ON_TOP,
            "least_sink": thresholds.LEAST_SINK,
        },
        "heads": diagnosis.heads,
        "without_rows": [list(head) for head in diagnosis.without_rows],
    }


def _measurements(diagnosis: Diagnosis) -> Table:
    columns = (
        "head", "rows", "largest n", "entropy there", "commitment slope",
        f"n at {diagnosis.eps:g}", "on top", "ceiling",
    )  # fmt: skip
    note = (
        "Commitment is log n - entropy, in nats. n at a share: where the target has that share "
        "of the attention. On top: rows whose target has the highest logit. Ceiling: the gain "
        "if each row had its own best beta."
    )
    rows = [*map(_cells, diagnosis.heads[:SHOWN_HEADS])]
    return Table(columns, rows, "Measurements", note, left=["head"], detail=True)


def _cells(head: HeadDiagnosis) -> list[str]:
    last = next(at for at in head.sizes if at.size == head.largest)
    slope = "-" if head.slope is None else f"{head.slope:.2f}"
    lost = "never" if head.dispersal is None else items(math.log(head.dispersal))
    return [
        head.name, f"{head.rows:,}", f"{head.largest:,}", f"{last.entropy:.2f}", slope, lost,
        f"{head.on_top:.1%}", f"{head.headroom.ceiling:.4f}",
    ]  # fmt: skip


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
