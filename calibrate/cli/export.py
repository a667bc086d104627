"""`calibrate export`: write a fit into a checkpoint, for engines without calibrate."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, BadParameter, Context, Option

from calibrate.cli.check_engine import EngineAddress, EnginePrompts, ServedModelName
from calibrate.cli.command import given
from calibrate.cli.options import AsJson, ReadStore
from calibrate.errors import CalibrateError, install
from calibrate.report.blocks import Result
from calibrate.report.terminal import Steps, show, stderr
from calibrate.storage.atomic_io import check_free, not_a, require_outside
from calibrate.storage.fingerprints import require_folder

if TYPE_CHECKING:
    from calibrate.export.plan import ExportContents
    from calibrate.store.fit import Fit

_ORIGINAL_FILE = {  # by format, how it is made
    ".gguf": ", which llama.cpp makes of its folder: convert_hf_to_gguf.py FOLDER --outfile "
    "MODEL.gguf",
    ".onnx": "",
}


def export_command(
    ctx: Context,
    fit: Annotated[str | None, Argument(help="NAME, NAME@3, a file, or an address.")] = None,
    *,
    model: Annotated[
        Path | None,
        Option(help="Folder of the fit's model, or its .gguf or .onnx file."),
    ] = None,
    out: Annotated[
        Path | None,
        Option(help="New folder (Transformers, vLLM), .gguf file (llama.cpp) or .onnx file."),
    ] = None,
    form: Annotated[
        Literal["lora"] | None, Option("--as", help="Write a LoRA, not a whole model.")
    ] = None,
    any_model: Annotated[
        bool,
        Option(
            "--any-model",
            help="Skip the check that the rule was fitted to these weights, for the same model in "
            "another dtype or format.",
        ),
    ] = False,
    check: Annotated[Path | None, Option(help="Exported folder or file to verify.")] = None,
    engine: EngineAddress = None,
    served_model_name: ServedModelName = None,
    prompts: EnginePrompts = None,
    store: ReadStore = None,
    as_json: AsJson = False,
) -> None:
    """Write a fit into a copy of its model, for other engines.

    In a folder or a .gguf file, constants of heads become part of the weights of queries; a
    log-size rule becomes the query scaling of a Ministral 3. Rules that these cannot represent
    exactly are refused. An .onnx file takes every kind of rule. With --as lora, the model stays as
    it is: the LoRA holds the constants of heads.

    With --check, an export is read back: the fit in it, what engines will apply, and its integrity.
    With --engine too, the log-likelihoods of a server are compared with the model's own under the
    fit and under the baseline. Exit code 3: the server does not apply the fit.

    Example: calibrate export mine --model Qwen3 --out Qwen3-mine
    """
    _check_options(given(ctx), out)
    if check is not None:
        show(_read_back(check, model, engine, served_model_name, prompts), as_json)
        return
    from calibrate.store.loading import load

    assert fit is not None
    assert model is not None
    assert out is not None
    if out.suffix in _ORIGINAL_FILE:
        _require_file(model, out.suffix)
    else:
        require_folder(model)
    check_free(out)
    loaded = load(fit, store)
    if out.suffix == ".gguf":
        exported = _export_gguf(loaded, model, out, any_model)
    elif out.suffix == ".onnx":
        exported = _export_onnx(loaded, model, out)
    else:
        exported = _export_folder(loaded, model, out, form == "lora", any_model)
    show(exported, as_json)


def _check_options(given: set[str], out: Path | None) -> None:
    """Raises BadParameter unless the options ask for either an export or a check."""
    if "check" in given:
        is_complete = not given & {"fit", "out", "form"}
    else:
        is_complete = given >= {"fit", "out", "model"}
    if not is_complete:
        raise BadParameter("give FIT, --model MODEL and --out NEW, or --check EXPORTED")
    suffix = out.suffix if out is not None else ""
    if "form" in given and suffix in _ORIGINAL_FILE:
        raise BadParameter("--as lora makes a folder; give --out another name")
    engine_options = given & {"engine", "served_model_name", "prompts"}
    if engine_options and not {"engine", "check"} <= given:
        raise BadParameter(
            "--engine needs --check; --served-model-name and --prompts need --engine"
        )


def _export_folder(fit: "Fit", model: Path, out: Path, as_lora: bool, any_model: bool) -> Result:
    """Exports a fit in the format of Hugging Face, or as a LoRA for PEFT."""
    from calibrate.cli.loading import require_transformers

    require_transformers()
    from calibrate.export.folder import prepare_folder, write_folder
    from calibrate.export.lora import prepare_lora, write_lora
    from calibrate.report.export_record import export_result
    from calibrate.report.model_card import folder_card, lora_card
    from calibrate.transformers.folders import ModelFolder

    folder = ModelFolder(model)
    require_outside(out, model)
    stderr.print(f"proving the export of {fit.reference} on a small copy of {model}")
    export = (prepare_lora if as_lora else prepare_folder)(fit, folder, any_model)
    stderr.print(f"writing {out}")
    if as_lora:
        return export_result(write_lora(export, out, lora_card(export, out.name)))
    return export_result(write_folder(export, out, folder_card(export, out.name)))


def _export_gguf(fit: "Fit", model: Path, out: Path, any_model: bool) -> Result:
    """Writes a fit into a .gguf file."""
    from calibrate.export.gguf import prepare_gguf, write_gguf
    from calibrate.export.gguf_model import GgufModel
    from calibrate.report.export_record import export_result

    stderr.print(f"reading {model}")
    export = prepare_gguf(fit, GgufModel(model), any_model)
    with Steps() as steps:
        return export_result(write_gguf(export, out, steps))


def _export_onnx(fit: "Fit", model: Path, out: Path) -> Result:
    """Writes a fit into an .onnx file."""
    from calibrate.export.onnx import export_onnx
    from calibrate.report.export_record import onnx_result

    stderr.print(f"reading {model}")
    return onnx_result(export_onnx(fit, model, out))


def _require_file(path: Path, suffix: str) -> None:
    """Raises CalibrateError unless a path is a file of a format, whose package is installed."""
    if path.suffix != suffix or not path.is_file():
        remedy = f"; give one of the original model{_ORIGINAL_FILE[suffix]}"
        raise CalibrateError(not_a(f"{suffix} file", path) + remedy)
    package = suffix.removeprefix(".")
    if find_spec(package) is None:
        raise CalibrateError(f"{path} needs the package {package}: {install(package)}")


def _read_back(
    path: Path,
    model: Path | None,
    engine: str | None,
    served_model_name: str | None,
    prompts: Path | None,
) -> Result:
    """Reads an export, and compares it with a server if there is one."""
    from calibrate.report.export_record import engine_result, export_result

    stderr.print(f"reading {path}")
    exported = _read_exported(path, model)
    if engine is None or exported.problems:
        return export_result(exported)
    from calibrate.export.engine_check import check_exported_engine
    from calibrate.export.engine_predictions import Question

    stderr.print("asking the engine, and the model")
    question = Question(engine, served_model_name, prompts)
    return engine_result(exported, check_exported_engine(exported, model, question))


def _read_exported(path: Path, model: Path | None) -> "ExportContents":
    """Reads an exported file or folder, or a LoRA with its model."""
    if path.suffix == ".gguf":
        _require_file(path, path.suffix)
        from calibrate.export.gguf import check_gguf

        return check_gguf(path)
    from calibrate.cli.loading import require_transformers

    require_transformers()
    require_folder(path)
    from calibrate.export.folder import check_folder
    from calibrate.export.lora import check_lora, is_lora
    from calibrate.transformers.folders import ModelFolder

    if not is_lora(path):
        return check_folder(path)
    if model is None:
        raise CalibrateError(f"{path} is a LoRA; give --model, which it is for")
    return check_lora(path, ModelFolder(model))
