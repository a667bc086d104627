"""`calibrate export`: write a fit into a checkpoint, for engines that know nothing of calibrate."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, BadParameter, Option

from calibrate.cli.options import ReadStore
from calibrate.cli.progress import Steps
from calibrate.cli.request import Request
from calibrate.errors import CalibrateError, install
from calibrate.files.atomic_io import check_free
from calibrate.files.model_fingerprint import require_folder
from calibrate.report.blocks import Record
from calibrate.report.streams import stderr

if TYPE_CHECKING:
    from calibrate.files.coefficients import Coefficients
    from calibrate.report.export_record import ExportRecord

_STEP = 1 << 26  # bytes


@dataclass(frozen=True)
class ExportRequest(Request):
    fit: Annotated[str | None, Argument(help="NAME, NAME@3, a file, or a collection.")] = None
    model: Annotated[Path | None, Option(help="Folder of the model, or its .gguf file.")] = None
    out: Annotated[Path | None, Option(help="New folder, or .gguf file, to write.")] = None
    format: Annotated[
        Literal["hf", "gguf"] | None,
        Option(
            help="hf: safetensors, as Transformers and vLLM load; gguf: as llama.cpp and Ollama "
            "load [default: by the name of --out]"
        ),
    ] = None
    any_model: Annotated[
        bool, Option("--any-model", help="Export a fit of another model, too.")
    ] = False
    check: Annotated[Path | None, Option(help="Exported folder or file to read back.")] = None
    store: ReadStore = None

    def __post_init__(self) -> None:
        """Checks that there is one thing to do."""
        given = [x is not None for x in (self.fit, self.model, self.out)]
        if any(given) if self.check else not all(given):
            raise BadParameter("give FIT, --model MODEL and --out NEW, or --check EXPORTED")
        if self.out and self.format not in (None, "gguf" if self.out.suffix == ".gguf" else "hf"):
            raise BadParameter("--out ends in .gguf with --format gguf, and otherwise not")


def export(request: ExportRequest) -> Record:
    """Write a fit into a copy of its model, for other engines.

    Constants of each head become part of the weights of queries; what grows with log n becomes the
    query scaling of a Ministral 3. Both are exact, up to the rounding of the weights' own dtype.
    What cannot be exact is refused: rules of entropy, and bounds that a model's context reaches.

    With --check, an export is read back: which fit it carries, what engines will apply, and whether
    it is what was written. The exit code is 1 if it is not.

    Example: calibrate export mine --model model --out model-mine

    Example: calibrate export mine --model model.gguf --out model-mine.gguf

    Example: calibrate export --check model-mine
    """
    if request.check is not None:
        return _read_back(request.check)
    from calibrate.cli.loading import find_fit

    assert request.fit is not None
    assert request.model is not None
    assert request.out is not None
    to_file = request.out.suffix == ".gguf"
    model = _gguf_in(request.model) if to_file else require_folder(request.model)
    assert model is not None
    check_free(request.out)
    fit, run = find_fit(request.fit, request.store)
    if run is not None:
        stderr.print(f"{fit.reference} was made of {run}")
    write = _export_file if to_file else _export_folder
    return write(fit, model, request.out, request.any_model)


def _export_folder(fit: "Coefficients", model: Path, out: Path, any_model: bool) -> "ExportRecord":
    """Exports a fit in the format of Hugging Face.

    Raises:
      CalibrateError: engines cannot run the fit exactly in this model, or a folder is taken.
    """
    from calibrate.cli.loading import require_transformers

    require_transformers()
    from calibrate.export.checkpoint import prepare, write
    from calibrate.report.export_record import ExportRecord
    from calibrate.transformers.folders import ModelFolder

    stderr.print(f"proving the export of {fit.reference} on a small copy of {model}")
    export = prepare(fit, ModelFolder(model), any_model)
    done = 0
    with Steps("writing", -(-export.n_bytes // _STEP), export.n_bytes) as steps:

        def report(n_bytes: int) -> None:
            nonlocal done
            before, done = done // _STEP, done + n_bytes
            for _ in range(done // _STEP - before):
                steps.advance(work=_STEP)

        return ExportRecord(write(export, out, report))


def _export_file(fit: "Coefficients", model: Path, out: Path, any_model: bool) -> "ExportRecord":
    """Exports a fit as a .gguf file; raises as `_export_folder`."""
    from calibrate.export.gguf_file import export_gguf
    from calibrate.export.gguf_model import GgufModel
    from calibrate.report.export_record import ExportRecord

    stderr.print(f"reading {model}")
    source = GgufModel(model)
    sizes = [tensor.data.nbytes for tensor in source.tensors.values()]
    with Steps("writing", len(sizes), sum(sizes)) as steps:
        return ExportRecord(
            export_gguf(fit, source, out, any_model, lambda n_bytes: steps.advance(work=n_bytes))
        )


def _gguf_in(model: Path) -> Path:
    found = sorted(model.glob("*.gguf")) if model.is_dir() else [model]
    if len(found) == 1 and found[0].suffix == ".gguf":
        _require_gguf(found[0])
        return found[0]
    state = f"has {len(found)} .gguf files" if model.is_dir() else "is not a .gguf file"
    raise CalibrateError(
        f"{model} {state}; give one of the original model, which llama.cpp makes of its folder: "
        "convert_hf_to_gguf.py FOLDER --outfile MODEL.gguf"
    )


def _require_gguf(path: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise CalibrateError(f"{path} cannot be read without the package gguf: {install('gguf')}")


def _read_back(path: Path) -> "ExportRecord":
    """What an exported folder or .gguf file carries.

    Raises:
      CalibrateError: it cannot be read, or is not an export.
    """
    from calibrate.cli.loading import require_transformers
    from calibrate.report.export_record import ExportRecord

    if path.suffix == ".gguf":
        _require_gguf(path)
        from calibrate.export.gguf_file import read_gguf_export as read
    else:
        require_transformers()
        from calibrate.export.checkpoint import read_export as read
    stderr.print(f"reading {path}")
    return ExportRecord(read(path))
