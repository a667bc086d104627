"""`calibrate export`: write a fit into a checkpoint, for engines that know nothing of calibrate."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from calibrate.cli.options import JsonOption, ReadStoreOption, refuse_with
from calibrate.errors import CalibrateError
from calibrate.report.terminal import show


class Format(StrEnum):
    """Of what is written."""

    HF = "hf"
    GGUF = "gguf"


def export(
    fit: Annotated[
        str | None, typer.Argument(help="A fit: NAME, NAME@VERSION, a file, or a collection.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Folder of the model: config.json and safetensors; or its .gguf file."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="New folder, or .gguf file, to write.")] = None,
    format_: Annotated[
        Format | None,
        typer.Option(
            "--format",
            help="hf: safetensors, as Transformers and vLLM load; gguf: as llama.cpp and Ollama "
            "load [default: by the name of --out]",
        ),
    ] = None,
    any_model: Annotated[
        bool, typer.Option("--any-model", help="Export a fit that was made for another model.")
    ] = False,
    check: Annotated[
        Path | None, typer.Option(help="Exported folder or file to read back, in place of FIT.")
    ] = None,
    store: ReadStoreOption = None,
    as_json: JsonOption = False,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
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
    from calibrate.cli.export_steps import check_file, check_folder, export_file, export_folder

    if check is not None:
        refuse_with(context, "--check", ("fit", "model", "out", "format_", "any_model", "store"))
        record = (check_file if check.suffix == ".gguf" else check_folder)(check)
        show(record, as_json)
        if failure := record.failure():
            raise CalibrateError(failure)
        return
    if fit is None or model is None or out is None:
        raise typer.BadParameter("give FIT, --model MODEL and --out NEW, or --check EXPORTED")
    named = Format.GGUF if out.suffix == ".gguf" else Format.HF
    if format_ not in (None, named):
        raise typer.BadParameter("--out ends in .gguf with --format gguf, and otherwise not")
    write = export_file if named == Format.GGUF else export_folder
    show(write(fit, store, model, out, any_model), as_json)
