"""A diagnosis as a result to show: the ranked heads, and the folder of its record and figures."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrate.evidence.prior import LEAST_GAIN
from calibrate.files.atomic_io import write_atomically
from calibrate.report.blocks import (
    SHOWN_HEADS,
    Block,
    Facts,
    Heading,
    Table,
    Text,
    and_more,
    as_json,
)
from calibrate.report.diagnosis_plots import save_figures
from calibrate.report.wording import items
from calibrate.rows import head_verdict as thresholds
from calibrate.rows.diagnosis import Diagnosis, HeadDiagnosis
from calibrate.rows.groups import MIN_ROWS

RECORD = "diagnosis.json"


@dataclass(frozen=True)
class DiagnosisRecord:
    """The result of `calibrate diagnose` on rows."""

    diagnosis: Diagnosis
    path: Path  # of the record as JSON
    figures: Sequence[Path]

    def as_json(self) -> dict[str, Any]:
        """Every head and set size, and the thresholds of the verdicts."""
        diagnosis = self.diagnosis
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
            "path": self.path,
            "figures": self.figures,
        }

    def blocks(self) -> Iterable[Block]:
        """The verdict on each head, the largest gain first, and the files."""
        diagnosis, heads = self.diagnosis, self.diagnosis.heads
        folder = diagnosis.collection.folder
        worth = sum(head.verdict.word == thresholds.WORTH for head in heads)
        yield Heading(f"Diagnosis of {folder}")
        yield Facts([("heads", f"{worth} of {len(heads)} worth calibrating")])
        for head in heads[:SHOWN_HEADS]:
            yield Text(f"  {head.name}: {head.verdict.reason}")
        yield Text(
            "Gains in nats of log p on held-out rows, with 95 % intervals, each head by itself."
            + and_more(len(heads))
        )
        if diagnosis.without_rows:
            count = len(diagnosis.without_rows)
            yield Text(f"  heads without any kept row: {count} (those of weight 0 do not count)")
        yield self._measurements()
        yield Text(f"This is a look; the fit decides: calibrate fit {folder} --name NAME")
        yield Facts([("record", str(self.path)), *(("figure", str(path)) for path in self.figures)])

    def _measurements(self) -> Table:
        columns = (
            "head", "rows", "largest n", "entropy there", "commitment slope",
            f"n at {self.diagnosis.eps:g}", "on top", "ceiling",
        )  # fmt: skip
        note = (
            "Commitment is log n - entropy, in nats. n at a share: where the target has that share "
            "of the attention. On top: rows whose target has the highest logit. Ceiling: the gain "
            "if each row had its own best beta."
        )
        rows = [*map(_cells, self.diagnosis.heads[:SHOWN_HEADS])]
        return Table(columns, rows, "Measurements", note, left=["head"], detail=True)


def _cells(head: HeadDiagnosis) -> list[str]:
    last = next(at for at in head.sizes if at.size == head.largest)
    slope = "-" if head.slope is None else f"{head.slope:.2f}"
    lost = "never" if head.dispersal is None else items(math.log(head.dispersal))
    return [
        head.name, f"{head.rows:,}", f"{head.largest:,}", f"{last.entropy:.2f}", slope, lost,
        f"{head.on_top:.1%}", f"{head.headroom.ceiling:.4f}",
    ]  # fmt: skip


def save_diagnosis(folder: Path, diagnosis: Diagnosis) -> DiagnosisRecord:
    """Writes the figures and then the record, which is returned, each whole or not at all."""
    record = DiagnosisRecord(diagnosis, folder / RECORD, save_figures(folder, diagnosis))
    save_json(record.path, record)
    return record


def save_json(path: Path, record: Any) -> None:
    """Writes what --json prints of a record, whole or not at all."""
    write_atomically(path, (json.dumps(as_json(record), indent=1, allow_nan=False) + "\n").encode())
