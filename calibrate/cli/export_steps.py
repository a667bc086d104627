"""Writing a fit into a checkpoint and reading one back, with progress on stderr."""

from pathlib import Path

from calibrate.cli.loading import find_model_fit
from calibrate.cli.model_steps import require_transformers
from calibrate.cli.progress import Steps
from calibrate.files.atomic_io import check_free
from calibrate.report.export_record import ExportRecord
from calibrate.report.streams import stderr

_STEP = 1 << 26  # bytes


def export_folder(
    reference: str, store: Path | None, model: Path, out: Path, any_model: bool
) -> ExportRecord:
    """Exports a fit in the format of Hugging Face.

    Raises:
      CalibrateError: engines cannot run the fit exactly in this model, or a folder is taken.
    """
    require_transformers()
    from calibrate.export.check import Carried
    from calibrate.export.checkpoint import prepare, write
    from calibrate.transformers.folders import ModelFolder

    check_free(out)
    fit, _ = find_model_fit(reference, store)
    stderr.print(f"proving the export of {fit.reference} on a small copy of {model}")
    export = prepare(fit, ModelFolder(model), any_model)
    done = 0
    with Steps("writing", -(-export.n_bytes // _STEP), export.n_bytes) as steps:

        def report(n_bytes: int) -> None:
            nonlocal done
            before, done = done // _STEP, done + n_bytes
            for _ in range(done // _STEP - before):
                steps.advance(work=_STEP)

        said = write(export, out, report)
    kind = str(export.configuration["model_type"])
    return ExportRecord(Carried(out, said, kind, export.plan, ()))


def check_folder(folder: Path) -> ExportRecord:
    """What an exported folder carries.

    Raises:
      CalibrateError: it cannot be read, or is no export.
    """
    require_transformers()
    from calibrate.export.check import read_export

    stderr.print(f"reading {folder}")
    return ExportRecord(read_export(folder))
