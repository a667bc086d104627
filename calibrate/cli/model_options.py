"""Options of commands that look at a whole model: the model, and its examples."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calibrate.cli.options import check_input, parse_sizes
from calibrate.files.model_fingerprint import require_folder

if TYPE_CHECKING:
    from calibrate.examples.sources import Wanted


class Dtype(StrEnum):
    """Of a model's weights in memory."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


ModelOption = Annotated[
    Path | None,
    typer.Option(
        callback=require_folder,  # at once: what reads models takes seconds to load
        help="Folder of a causal language model: config.json and safetensors, or a .gguf file.",
    ),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        callback=check_input,
        help='Prompts with their answers, a line each: {"prompt": ..., "answer": ...}, or '
        '{"prompt_ids": [...], "answer_ids": [...]}; "template" names what counts alike.',
    ),
]
TaskOption = Annotated[
    str | None,
    typer.Option(
        help="Built-in examples: retrieval, in four templates, or retrieval:numbers,json for some "
        "of numbers, towns, json, list."
    ),
]
TextOption = Annotated[
    Path | None,
    typer.Option(callback=check_input, help="Plain text, every token of which is an answer."),
]
LengthsOption = Annotated[
    str,
    typer.Option(help="Lengths of the built-in examples and of text, in tokens: 256..1024, 250."),
]
ExamplesOption = Annotated[
    int, typer.Option(min=1, help="Built-in examples of each template and length.")
]
DtypeOption = Annotated[
    Dtype, typer.Option(help="Of the model's weights; auto: bfloat16 if stored so, else float32.")
]
DeviceOption = Annotated[str, typer.Option(help="PyTorch's device for the model: cpu, cuda.")]

ConstantsOption = Annotated[
    str, typer.Option(help="Of a model: betas to compare on every head, such as 1.15,1.3.")
]
LEAST_BETA, MOST_BETA = 0.01, 64.0

# What a collection of examples has of its own.
OF_EXAMPLES = ("prompts", "task", "text", "lengths", "examples", "seed", "dtype")
OF_MODEL = ("prompts", "task", "text", "lengths", "examples", "dtype", "device")


def wanted_examples(
    prompts: Path | None, task: str | None, text: Path | None, lengths: str, count: int, seed: int
) -> "Wanted":
    """The examples that the options ask for."""
    from calibrate.examples.sources import Wanted, parse_task

    try:
        templates = () if task is None else parse_task(task)
    except ValueError as failure:
        raise typer.BadParameter(str(failure)) from None
    if not (prompts or templates or text):
        raise typer.BadParameter(
            "--model needs examples: --prompts FILE.jsonl, --task retrieval or --text FILE"
        )
    return Wanted(prompts, templates, text, tuple(parse_sizes(lengths)), count, seed)


def parse_betas(text: str) -> list[float]:
    """Some constants, each once."""
    betas = []
    for word in filter(None, map(str.strip, text.split(","))):
        try:
            beta = float(word)
        except ValueError:
            beta = 0.0
        if not LEAST_BETA <= beta <= MOST_BETA:
            raise typer.BadParameter(
                f"--constants has {word!r}; write betas from {LEAST_BETA:g} to {MOST_BETA:g}, such "
                "as 1.15,1.3"
            )
        betas.append(beta)
    return list(dict.fromkeys(betas))
