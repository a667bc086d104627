"""`calibrate diagnose`: rank the heads of a collection by what calibration could add."""

from pathlib import Path
from typing import Annotated

import typer

from calibrate.cli.model_options import OF_EXAMPLES, OF_MODEL, ModelRequest, takes_model
from calibrate.cli.options import JsonOption, SeedOption, refuse_with
from calibrate.cli.progress import Steps
from calibrate.errors import CalibrateError
from calibrate.files.manifest import MANIFEST
from calibrate.report.streams import stderr
from calibrate.report.terminal import show

OutOption = Annotated[
    Path | None,
    typer.Option(help="Folder of the record and figures [default: RUN-diagnosis]"),
]
EpsOption = Annotated[
    float, typer.Option(help="A target is lost where its coefficient is below this.")
]


RunArgument = Annotated[
    Path | None, typer.Argument(help="Folder of a complete collection, of rows or of examples.")
]


@takes_model
def diagnose(
    run: RunArgument = None,
    out: OutOption = None,
    eps: EpsOption = 0.5,
    request: ModelRequest = ModelRequest(),  # noqa: B008 (immutable)
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Rank heads by what calibration could add.

    The heads of logits are ranked by what the best rule adds to the log-probability of the targets,
    on rows that it was not fitted to. Attention sinks are named. This is a look, at each head by
    itself; `calibrate fit` decides. The collection must hold all kinds of rows (collect with --keep
    all, the default).

    Of a model, by a collection of its examples or by --model with the options of `collect`: the
    derivative of log p of its answers by log beta of every head, in one backward pass for each
    example. Which heads want to be sharper, which more diffuse, and what a step gains to first
    order.

    Example: calibrate diagnose runs/try

    Example: calibrate diagnose --model MODEL --task retrieval --examples 8
    """
    from calibrate.files.collection import kind_of

    if run is None and request.model is None:
        raise typer.BadParameter("nothing to look at; give RUN, or --model FOLDER and examples")
    if run is None or kind_of(run) == "examples":
        from calibrate.cli.model_steps import look_at_model

        refuse_with(context, "examples of a model", ("eps",))
        if run is not None:
            refuse_with(context, "a collection, which has its own", OF_EXAMPLES)
        show(look_at_model(request.source(seed, run), out), as_json)
        return
    refuse_with(context, "a collection of rows", ("model", "seed", *OF_MODEL))
    diagnose_rows(run, out, eps, as_json)


def diagnose_rows(run: Path, out: Path | None, eps: float, as_json: bool) -> None:
    """The heads of a collection of rows."""
    from calibrate.files.atomic_io import check_writable
    from calibrate.files.collection import open_collection
    from calibrate.files.rows import RowCollection
    from calibrate.report.diagnosis_record import RECORD, save_diagnosis
    from calibrate.rows import diagnosis
    from calibrate.rows.solved_rows import group_heads

    if not 0 < eps < 1:
        raise typer.BadParameter(f"--eps is {eps}; give a coefficient between 0 and 1")
    collection = open_collection(run, RowCollection)
    diagnosis.require_all_rows(collection)
    folder = diagnosis_folder(run, out, run)
    check_writable(folder / RECORD)
    n_steps = len(group_heads(collection)) * len(collection.manifest["shards"])
    with Steps(f"measuring the rows of {run}", n_steps) as steps:
        result = diagnosis.diagnose(collection, eps, steps.advance)
    stderr.print(f"drawing into {folder}")
    show(save_diagnosis(folder, result), as_json)


def diagnosis_folder(beside: Path, out: Path | None, run: Path | None) -> Path:
    """Where a diagnosis goes, not within the folder of a collection: `out`, or beside another."""
    named = beside if beside.name not in ("", "..") else beside.resolve()
    folder = out or named.with_name(f"{named.name}-diagnosis")
    within = run is not None and folder.resolve().is_relative_to(run.resolve())
    if within or (folder / MANIFEST).exists():
        raise CalibrateError(f"{folder} is a collection's folder; choose another one with --out")
    return folder
