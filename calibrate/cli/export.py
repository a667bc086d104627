"""`calibrate export`: write a fit into a checkpoint, for engines that know nothing of calibrate."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, BadParameter, Option

from calibrate.cli.check_engine import EnginePrompts, ServedModelName
from calibrate.cli.options import AllowUnexpected, ReadStore
from calibrate.cli.progress_bar import Steps
from calibrate.cli.request import Request
from calibrate.errors import CalibrateError, install
from calibrate.report.blocks import Record
from calibrate.report.streams import stderr
from calibrate.storage.atomic_io import check_free, not_a, require_outside
from calibrate.storage.model_fingerprint import require_folder

if TYPE_CHECKING:
    from calibrate.export.plan import ExportContents
    from calibrate.store.coefficients import Coefficients


@dataclass(frozen=True)
class ExportRequest(Request):
    fit: Annotated[str | None, Argument(help="NAME, NAME@3, a file, or an address.")] = None
    model: Annotated[Path | None, Option(help="Folder of the model, or its .gguf file.")] = None
    out: Annotated[
        Path | None,
        Option(help="New folder (Transformers, vLLM) or .gguf file (llama.cpp)."),
    ] = None
    form: Annotated[
        Literal["lora"] | None, Option("--as", help="Write a LoRA, not a whole model.")
    ] = None
    max_rank: Annotated[
        int | None, Option(min=1, help="Largest rank of a LoRA [default: 256].")
    ] = None
    any_model: Annotated[bool, Option("--any-model", help="Accept a fit of another model.")] = False
    allow_unexpected: AllowUnexpected = False
    check: Annotated[Path | None, Option(help="Exported folder or file to verify.")] = None
    engine: Annotated[
        str | None, Option(help="Address of a server to test: does it apply the export of --check?")
    ] = None
    served_model_name: ServedModelName = None
    prompts: EnginePrompts = None
    store: ReadStore = None

    def __post_init__(self) -> None:
        """Checks that there is one thing to do."""
        for_engine = self.served_model_name or self.prompts
        given = [x is not None for x in (self.fit, self.out, self.form)]
        if any(given) if self.check else not (all(given[:2]) and self.model):
            raise BadParameter("give FIT, --model MODEL and --out NEW, or --check EXPORTED")
        to_gguf = self.out is not None and self.out.suffix == ".gguf"
        if self.form == "lora" and to_gguf:
            raise BadParameter("--as lora makes a folder; give --out another name")
        if self.max_rank and self.form != "lora":
            raise BadParameter("--max-rank is for --as lora; give that, too")
        if self.allow_unexpected and (self.check or to_gguf):
            raise BadParameter("--allow-unexpected is for the export of a folder; leave it out")
        if not (self.engine and self.check) and (self.engine or for_engine):
            raise BadParameter(
                "--engine needs --check; --served-model-name and --prompts need --engine"
            )


def export(request: ExportRequest) -> Record:
    """Write a fit into a copy of its model, for other engines.

    Constants of each head become part of the weights of queries; what grows with log n becomes the
    query scaling of a Ministral 3. What cannot be exact is refused: rules of entropy, and bounds
    that a model's context reaches.

    With --as lora, the model stays as it is: the LoRA holds constants of heads.

    With --check, an export is read back: which fit it carries, what engines will apply, and whether
    it is what was written (of a LoRA, in its --model). Exit code 1: it is not.

    With --engine too, a server is asked for log-likelihoods, which are compared with the model's
    own under the fit and under the baseline. The exit code is 0 if it applies the fit, 3 if not,
    1 if that cannot be told. A .gguf file with a rule of log n needs its original, --model.

    Example: calibrate export mine --model model --out model-mine

    Example: calibrate export mine --model model --as lora --out mine-lora

    Example: calibrate export --check model-mine --engine http://localhost:8000
    """
    if request.check is not None:
        return _read_back(request, request.check)
    from calibrate.store.fits_store import load

    model, out = request.model, request.out
    assert request.fit is not None
    assert model is not None
    assert out is not None
    to_file = out.suffix == ".gguf"
    (_require_gguf if to_file else require_folder)(model)
    check_free(out)
    fit = load(request.fit, request.store)
    if to_file:
        return _export_file(request, fit, model, out)
    return _export_folder(request, fit, model, out)


def _export_folder(request: ExportRequest, fit: "Coefficients", model: Path, out: Path) -> Record:
    """Exports a fit in the format of Hugging Face, or as a LoRA for PEFT."""
    from calibrate.cli.loading import require_transformers

    require_transformers()
    from calibrate.export.checkpoint import write
    from calibrate.export.lora import MAX_RANK, by_lora, require_peft, write_lora
    from calibrate.export.numerical_check import by_weights
    from calibrate.export.preparation import prepare
    from calibrate.report.export_record import export_result
    from calibrate.report.model_card import folder_card, lora_card
    from calibrate.transformers.folders import ModelFolder

    as_lora = request.form == "lora"
    if as_lora:
        require_peft()
    require_outside(out, model)
    stderr.print(f"proving the export of {fit.reference} on a small copy of {model}")
    export = prepare(
        fit,
        ModelFolder(model),
        request.any_model,
        by_lora if as_lora else by_weights,
        allow_unexpected=request.allow_unexpected,
    )
    stderr.print(f"writing {out}")
    if as_lora:
        card = lora_card(export, out.name)
        return export_result(write_lora(export, out, card, request.max_rank or MAX_RANK))
    return export_result(write(export, out, folder_card(export, out.name)))


def _export_file(request: ExportRequest, fit: "Coefficients", model: Path, out: Path) -> Record:
    """Exports a fit as a .gguf file."""
    from calibrate.export.gguf_file import export_gguf
    from calibrate.export.gguf_model import GgufModel
    from calibrate.report.export_record import export_result

    stderr.print(f"reading {model}")
    source = GgufModel(model)
    with Steps() as steps:
        return export_result(export_gguf(fit, source, out, request.any_model, steps))


def _require_gguf(path: Path) -> None:
    """Raises CalibrateError if a path is not a .gguf file, or none can be read."""
    if path.suffix != ".gguf" or not path.is_file():
        raise CalibrateError(
            f"{not_a('.gguf file', path)}; give one of the original model, which llama.cpp makes "
            "of its folder: convert_hf_to_gguf.py FOLDER --outfile MODEL.gguf"
        )
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise CalibrateError(f"{path} needs the package gguf: {install('gguf')}") from None


def _read_back(request: ExportRequest, path: Path) -> Record:
    """Reports what an export contains, or what an engine applies of it."""
    from calibrate.report.export_record import engine_result, export_result

    stderr.print(f"reading {path}")
    exported = _read_exported(path, request.model, bool(request.engine))
    if request.engine is None or exported.problems:
        return export_result(exported)
    from calibrate.export.engine_check import Question, check_engine

    stderr.print("asking the engine, and the model")
    question = Question(request.engine, request.served_model_name, request.prompts)
    return engine_result(exported, check_engine(exported, request.model, question))


def _read_exported(path: Path, model: Path | None, asks_engine: bool) -> "ExportContents":
    """Reads an exported file or folder, or a LoRA for a model."""
    is_file = path.suffix == ".gguf"
    if is_file:
        _require_gguf(path)
    else:
        from calibrate.cli.loading import require_transformers

        require_transformers()
        require_folder(path)
        from calibrate.export.lora import is_lora, read_lora
        from calibrate.transformers.folders import ModelFolder

        if is_lora(path):
            if model is None:
                raise CalibrateError(f"{path} is a LoRA; give --model, which it is for")
            return read_lora(path, ModelFolder(model))
    if model and not asks_engine:
        raise CalibrateError(f"{path} has weights of its own, and takes no --model; leave it out")
    if is_file:
        from calibrate.export.gguf_file import read_gguf_export

        return read_gguf_export(path)
    from calibrate.export.checkpoint import read_export

    return read_export(path)
