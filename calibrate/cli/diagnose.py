"""`calibrate diagnose`: rank the heads of a collection by what calibration could add."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from calibrate.cli.options import AsJson
from calibrate.cli.progress_bar import Steps
from calibrate.report.streams import stderr
from calibrate.report.terminal import show


def diagnose(
    run: Annotated[Path, Argument(help="Folder of a collection of rows.")],
    *,
    out: Annotated[
        Path | None, Option(help="Folder of the record and figures [default: RUN-diagnosis]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rank heads by what calibration could add.

    They are ranked by the held-out log-likelihood that the best rule adds for the targets.
    Attention sinks are named. This is a look, at each head by itself;
    `calibrate fit` decides. The collection must hold all kinds of rows (collect with --keep all,
    the default).

    Example: calibrate diagnose runs/try
    """
    from calibrate.datasets.collection import open_collection
    from calibrate.datasets.row_collection import RowCollection
    from calibrate.fitting import diagnosis
    from calibrate.report.diagnosis_record import RECORD, save_diagnosis

    collection = open_collection(run, RowCollection)
    diagnosis.require_all_rows(collection)
    folder = diagnosis_folder(run, out, RECORD)
    with Steps() as steps:
        result = diagnosis.diagnose(collection, steps)
    stderr.print(f"drawing into {folder}")
    show(save_diagnosis(folder, result), as_json)


def diagnosis_folder(run: Path, out: Path | None, record: str) -> Path:
    """The folder of the record on a collection: `out`, or beside the collection."""
    from calibrate.storage.atomic_io import check_writable

    run = run.resolve()
    folder = out or run.with_name(f"{run.name}-diagnosis")
    check_writable(folder / record)
    return folder
