"""Writing a fit into a checkpoint and reading one back, with progress on stderr."""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from calibrate.cli.loading import find_model_fit
from calibrate.cli.model_steps import require_transformers
from calibrate.cli.progress import Steps
from calibrate.errors import CalibrateError, install
from calibrate.files.atomic_io import check_free
from calibrate.files.model_fingerprint import require_folder
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
    require_folder(model)
    check_free(out)
    fit, run = find_model_fit(reference, store)
    require_transformers()
    from calibrate.export.checkpoint import prepare, write
    from calibrate.transformers.folders import ModelFolder

    stderr.print(f"proving the export of {fit.reference} on a small copy of {model}")
    with _naming(run):
        export = prepare(fit, ModelFolder(model), any_model)
    done = 0
    with Steps("writing", -(-export.n_bytes // _STEP), export.n_bytes) as steps:

        def report(n_bytes: int) -> None:
            nonlocal done
            before, done = done // _STEP, done + n_bytes
            for _ in range(done // _STEP - before):
                steps.advance(work=_STEP)

        return ExportRecord(write(export, out, report))


@contextlib.contextmanager
def _naming(run: Path | None) -> Iterator[None]:
    """Names the fit's collection in the remedy of an error: to make another fit of it."""
    try:
        yield
    except CalibrateError as failure:
        raise type(failure)(str(failure).replace("fit RUN", f"fit {run or 'RUN'}")) from failure


def export_file(
    reference: str, store: Path | None, model: Path, out: Path, any_model: bool
) -> ExportRecord:
    """Exports a fit as a .gguf file.

    Raises:
      CalibrateError: engines cannot run the fit exactly in this model, or the file is taken.
    """
    path = _gguf_in(model)
    _require_gguf(path)
    check_free(out)
    fit, run = find_model_fit(reference, store)
    from calibrate.export.gguf_file import export_gguf
    from calibrate.export.gguf_model import GgufModel

    stderr.print(f"reading {path}")
    source = GgufModel(path)
    sizes = [tensor.data.nbytes for tensor in source.tensors.values()]
    with _naming(run), Steps("writing", len(sizes), sum(sizes)) as steps:
        carried = export_gguf(
            fit, source, out, any_model, lambda n_bytes: steps.advance(work=n_bytes)
        )
    return ExportRecord(carried)


def _gguf_in(model: Path) -> Path:
    found = sorted(model.glob("*.gguf")) if model.is_dir() else [model]
    if len(found) == 1 and found[0].suffix == ".gguf":
        return found[0]
    state = f"has {len(found)} .gguf files" if model.is_dir() else "is no .gguf file"
    raise CalibrateError(
        f"{model} {state}; give one of the original model, which llama.cpp makes of its folder: "
        "convert_hf_to_gguf.py FOLDER --outfile MODEL.gguf"
    )


def _require_gguf(path: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise CalibrateError(f"{path} cannot be read without the package gguf: {install('gguf')}")


def check_file(path: Path) -> ExportRecord:
    """What an exported .gguf file carries.

    Raises:
      CalibrateError: it cannot be read, or is no export.
    """
    _require_gguf(path)
    from calibrate.export.gguf_file import read_gguf_export

    stderr.print(f"reading {path}")
    return ExportRecord(read_gguf_export(path))


def check_folder(folder: Path) -> ExportRecord:
    """What an exported folder carries.

    Raises:
      CalibrateError: it cannot be read, or is no export.
    """
    require_transformers()
    from calibrate.export.checkpoint import read_export

    stderr.print(f"reading {folder}")
    return ExportRecord(read_export(folder))
