"""`calibrate diagnose`: rank the heads of a collection by what calibration could add."""

from pathlib import Path
from typing import Annotated

import typer

from calibrate.cli.options import JsonOption
from calibrate.cli.progress import Steps
from calibrate.errors import CalibrateError
from calibrate.report.streams import stderr
from calibrate.report.terminal import show

OutOption = Annotated[
    Path | None,
    typer.Option(help="Folder of the record and figures [default: RUN-diagnosis]"),
]
EpsOption = Annotated[
    float, typer.Option(help="A target is lost where its coefficient is below this.")
]


def diagnose(
    run: Annotated[Path, typer.Argument(help="Folder of a complete collection.")],
    out: OutOption = None,
    eps: EpsOption = 0.5,
    as_json: JsonOption = False,
) -> None:
    """Rank the heads of a collection by what calibration could add.

    Heads are ranked by what the best rule adds to the log-probability of the targets, on rows that
    it was not fitted to. Attention sinks are named. This is a look, at each head by itself;
    `calibrate fit` decides. The collection must hold all kinds of rows (collect with --keep all,
    the default).

    Example: calibrate diagnose runs/try
    """
    from calibrate.evaluation import diagnosis
    from calibrate.files.atomic_io import check_writable
    from calibrate.files.collection import open_collection
    from calibrate.files.manifest import MANIFEST
    from calibrate.fitting.solved_rows import group_heads
    from calibrate.report.diagnosis_record import RECORD, save_diagnosis

    if not 0 < eps < 1:
        raise typer.BadParameter(f"--eps is {eps}; give a coefficient between 0 and 1")
    collection = open_collection(run)
    diagnosis.require_all_rows(collection)
    named = run if run.name not in ("", "..") else run.resolve()
    folder = out or named.with_name(f"{named.name}-diagnosis")
    if folder.resolve().is_relative_to(run.resolve()) or (folder / MANIFEST).exists():
        raise CalibrateError(f"{folder} is a collection's folder; choose another one with --out")
    check_writable(folder / RECORD)
    n_steps = len(group_heads(collection)) * len(collection.manifest["shards"])
    with Steps(f"measuring the rows of {run}", n_steps) as steps:
        result = diagnosis.diagnose(collection, eps, steps.advance)
    stderr.print(f"drawing into {folder}")
    show(save_diagnosis(folder, result), as_json)
