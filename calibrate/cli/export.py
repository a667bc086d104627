"""`calibrate export`: write a fit into a checkpoint, for engines that know nothing of calibrate."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, BadParameter, Context, Option

from calibrate.cli.check_engine import EnginePrompts, ServedModelName
from calibrate.cli.options import AllowUnexpected, AsJson, ReadStore, given
from calibrate.cli.progress_bar import Steps
from calibrate.errors import CalibrateError, install
from calibrate.report.blocks import Record
from calibrate.report.streams import stderr
from calibrate.report.terminal import show
from calibrate.storage.atomic_io import check_free, not_a, require_outside
from calibrate.storage.model_fingerprint import require_folder

if TYPE_CHECKING:
    from calibrate.export.plan import ExportContents
    from calibrate.store.fit import Fit


def export(
    ctx: Context,
    fit: Annotated[str | None, Argument(help="NAME, NAME@3, a file, or an address.")] = None,
    *,
    model: Annotated[Path | None, Option(help="Folder of the model, or its .gguf file.")] = None,
    out: Annotated[
        Path | None, Option(help="New folder (Transformers, vLLM) or .gguf file (llama.cpp).")
    ] = None,
    form: Annotated[
        Literal["lora"] | None, Option("--as", help="Write a LoRA, not a whole model.")
    ] = None,
    max_rank: Annotated[
        int | None, Option(min=1, help="Largest rank of a LoRA [default: 256].")
    ] = None,
    any_model: Annotated[
        bool, Option("--any-model", help="Accept a fit of another model.")
    ] = False,
    check: Annotated[Path | None, Option(help="Exported folder or file to verify.")] = None,
    engine: Annotated[
        str | None, Option(help="Address of a server to test: does it apply the export of --check?")
    ] = None,
    served_model_name: ServedModelName = None,
    prompts: EnginePrompts = None,
    allow_unexpected: AllowUnexpected = False,
    store: ReadStore = None,
    as_json: AsJson = False,
) -> None:
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
    _check_options(given(ctx), out)
    if check is not None:
        show(_read_back(check, model, engine, served_model_name, prompts), as_json)
        return
    from calibrate.store.fits_store import load

    assert fit is not None
    assert model is not None
    assert out is not None
    to_file = out.suffix == ".gguf"
    (_require_gguf if to_file else require_folder)(model)
    check_free(out)
    loaded = load(fit, store)
    if to_file:
        exported = _export_file(loaded, model, out, any_model)
    else:
        exported = _export_folder(
            loaded, model, out, form == "lora", max_rank, any_model, allow_unexpected
        )
    show(exported, as_json)


def _check_options(given: set[str], out: Path | None) -> None:
    """Raises BadParameter unless the options that are given ask for one thing."""
    made = {"fit", "out"}
    if given & {*made, "form"} if "check" in given else not {*made, "model"} <= given:
        raise BadParameter("give FIT, --model MODEL and --out NEW, or --check EXPORTED")
    to_gguf = out is not None and out.suffix == ".gguf"
    if "form" in given and to_gguf:
        raise BadParameter("--as lora makes a folder; give --out another name")
    if "max_rank" in given and "form" not in given:
        raise BadParameter("--max-rank is for --as lora; give that, too")
    if "allow_unexpected" in given and ("check" in given or to_gguf):
        raise BadParameter("--allow-unexpected is for the export of a folder; leave it out")
    of_engine = given & {"engine", "served_model_name", "prompts"}
    if of_engine and not {"engine", "check"} <= given:
        raise BadParameter(
            "--engine needs --check; --served-model-name and --prompts need --engine"
        )


def _export_folder(
    fit: "Fit",
    model: Path,
    out: Path,
    as_lora: bool,
    max_rank: int | None,
    any_model: bool,
    allow_unexpected: bool,
) -> Record:
    """Exports a fit in the format of Hugging Face, or as a LoRA for PEFT."""
    from calibrate.cli.loading import require_transformers

    require_transformers()
    from calibrate.export.checkpoint import write
    from calibrate.export.lora import MAX_RANK, by_lora, require_lora, write_lora
    from calibrate.export.numerical_check import by_weights
    from calibrate.export.preparation import prepare
    from calibrate.report.export_record import export_result
    from calibrate.report.model_card import folder_card, lora_card
    from calibrate.transformers.folders import ModelFolder

    folder = ModelFolder(model)
    if as_lora:
        require_lora(folder)
    require_outside(out, model)
    stderr.print(f"proving the export of {fit.reference} on a small copy of {model}")
    method = by_lora if as_lora else by_weights
    export = prepare(fit, folder, any_model, method, allow_unexpected)
    stderr.print(f"writing {out}")
    if as_lora:
        card = lora_card(export, out.name)
        return export_result(write_lora(export, out, card, max_rank or MAX_RANK))
    return export_result(write(export, out, folder_card(export, out.name)))


def _export_file(fit: "Fit", model: Path, out: Path, any_model: bool) -> Record:
    """Exports a fit as a .gguf file."""
    from calibrate.export.gguf_file import export_gguf
    from calibrate.export.gguf_model import GgufModel
    from calibrate.report.export_record import export_result

    stderr.print(f"reading {model}")
    source = GgufModel(model)
    with Steps() as steps:
        return export_result(export_gguf(fit, source, out, any_model, steps))


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


def _read_back(
    path: Path,
    model: Path | None,
    engine: str | None,
    served_model_name: str | None,
    prompts: Path | None,
) -> Record:
    """Reports what an export contains, or what an engine applies of it."""
    from calibrate.report.export_record import engine_result, export_result

    stderr.print(f"reading {path}")
    exported = _read_exported(path, model, bool(engine))
    if engine is None or exported.problems:
        return export_result(exported)
    from calibrate.export.engine_check import Question, check_engine

    stderr.print("asking the engine, and the model")
    question = Question(engine, served_model_name, prompts)
    return engine_result(exported, check_engine(exported, model, question))


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
