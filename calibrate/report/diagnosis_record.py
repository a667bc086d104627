"""A diagnosis as a result to show: the ranked heads, and the folder of its record and figures."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrate.evidence.prior import LEAST_GAIN
from calibrate.files.atomic_io import write_atomically
from calibrate.report.blocks import SHOWN_HEADS, Block, Facts, Heading, Table, Text, as_json
from calibrate.report.diagnosis_plots import save_figures
from calibrate.report.wording import items
from calibrate.rows import head_verdict as thresholds
from calibrate.rows.diagnosis import Diagnosis, HeadDiagnosis
from calibrate.rows.head_verdict import RuleGain
from calibrate.rows.rule_fitting import MIN_ROWS

RECORD = "diagnosis.json"


@dataclass(frozen=True)
class DiagnosisRecord:
    """The result of `calibrate diagnose`."""

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
            "heads": [_head_json(head) for head in diagnosis.heads],
            "without_rows": [list(head) for head in diagnosis.without_rows],
            "path": self.path,
            "figures": self.figures,
        }

    def blocks(self) -> Iterable[Block]:
        """The heads, the largest gain first, each with its verdict, and the files."""
        diagnosis, heads = self.diagnosis, self.diagnosis.heads
        folder = diagnosis.collection.folder
        worth = sum(head.verdict.word == thresholds.WORTH for head in heads)
        yield Heading(f"Diagnosis of {folder}")
        yield Facts([("heads", f"{worth} of {len(heads)} worth calibrating")])
        for head in heads[:SHOWN_HEADS]:
            yield Text(f"  {head.name}: {head.verdict.reason}")
        if len(heads) > SHOWN_HEADS:
            yield Text(f"  and {len(heads) - SHOWN_HEADS} more (--json lists them all)")
        if diagnosis.without_rows:
            count = len(diagnosis.without_rows)
            yield Text(f"  heads without any kept row: {count} (those of weight 0 do not count)")
        yield self._table()
        yield Text(
            "Gains in nats of log p on held-out rows, with 95 % intervals, each head by itself."
        )
        yield Text(f"This is a look; the fit decides: calibrate fit {folder} --name NAME")
        yield Facts([("record", str(self.path)), *(("figure", str(path)) for path in self.figures)])

    def _table(self) -> Table:
        columns = (
            "head", "rows", "largest n", "entropy there", "commitment slope",
            f"n at {self.diagnosis.eps:g}", "on top", "at largest n", "best beta, 10/50/90 %",
            "best rule", "gain", "ceiling",
        )  # fmt: skip
        return Table(columns, [*map(_cells, self.diagnosis.heads[:SHOWN_HEADS])], left=["head"])


def _cells(head: HeadDiagnosis) -> list[str]:
    last = next(at for at in head.sizes if at.size == head.largest)
    slope = f"{head.slope.value:.2f} ± {head.slope.error:.2f}" if head.slope else "-"
    lost = "never" if head.dispersal is None else items(math.log(head.dispersal))
    beta = " / ".join(f"{b:.2f}" for b in head.beta) if head.beta else "-"
    return [
        head.name, f"{head.rows:,}", f"{head.largest:,}",
        f"{last.entropy:.2f} ± {last.entropy_spread:.2f}", slope, lost, f"{head.on_top:.1%}",
        f"{head.on_top_at_largest:.1%}", beta,
        *_gain_cells(head.headroom.gains), f"{head.headroom.ceiling:.4f}",
    ]  # fmt: skip


def _gain_cells(gains: Sequence[RuleGain]) -> tuple[str, str]:
    """The best rule and its gain."""
    if not gains:
        return "-", "-"
    kind, (mean, low, high, _) = gains[0]
    return kind, f"{mean:.4f} ({low:.4f} to {high:.4f})"


def _head_json(head: HeadDiagnosis) -> dict[str, Any]:
    fields = head._asdict()
    del fields["contexts"]  # of every row
    return fields | {"beta": head.beta and dict(zip(("10%", "50%", "90%"), head.beta, strict=True))}


def save_diagnosis(folder: Path, diagnosis: Diagnosis) -> DiagnosisRecord:
    """Writes the figures and then the record, which is returned, each whole or not at all."""
    record = DiagnosisRecord(diagnosis, folder / RECORD, save_figures(folder, diagnosis))
    text = json.dumps(as_json(record), indent=1, allow_nan=False) + "\n"
    write_atomically(record.path, text.encode())
    return record
