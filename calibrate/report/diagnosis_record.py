"""A diagnosis as a result to show: the ranked heads, and the folder of its record and figures."""

import json
from collections.abc import Sequence
from pathlib import Path

from calibrate.errors import command
from calibrate.fitting.diagnosis import WORTH, Diagnosis
from calibrate.report.blocks import SHOWN_HEADS, Facts, Heading, Result, Text, and_more, as_json
from calibrate.report.plot_style import draw, save_figure
from calibrate.report.plots import plot_entropy
from calibrate.storage.atomic_io import write_atomically

RECORD = "diagnosis.json"


def diagnosis_result(diagnosis: Diagnosis, path: Path, figures: Sequence[Path]) -> Result:
    """The verdict on each head, the largest gain first, and the files.

    Args:
      diagnosis: of a collection of rows.
      path: of the record as JSON, which has every head and set size.
      figures: beside it.
    """
    heads, folder = diagnosis.heads, diagnosis.collection.folder
    fitting = command(f"fit {folder}", name="NAME")
    worth = sum(head.word == WORTH for head in heads)
    texts = [f"  {head.name}: {head.reason}" for head in heads[:SHOWN_HEADS]]
    gains = "Gains in nats of log-likelihood, held out, with 95 % intervals, each head by itself."
    texts.append(gains + and_more(len(heads)))
    files = [("record", str(path)), *(("figure", str(figure)) for figure in figures)]
    record = {
        "collection": folder,
        "digest": diagnosis.collection.digest,
        "heads": heads,
        "path": path,
        "figures": figures,
    }
    return Result(
        [
            Heading(f"Diagnosis of {folder}"),
            Facts([("heads", f"{worth} of {len(heads)} worth calibrating")]),
            *map(Text, texts),
            Text(f"This is an estimate; to fit: {fitting}"),
            Facts(files),
        ],
        record,
    )


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
