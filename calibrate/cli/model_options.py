"""Options of commands that look at a whole model: the model, and its examples."""

import functools
import inspect
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from calibrate.cli.options import check_input, parse_sizes
from calibrate.files.model_fingerprint import require_folder

if TYPE_CHECKING:
    from calibrate.model.prompts import Wanted


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
DeviceOption = Annotated[str, typer.Option(help="PyTorch's device for the model: cpu, cuda.")]
ConstantsOption = Annotated[
    str, typer.Option(help="Of a model: betas to compare on every head, such as 1.15,1.3.")
]
LEAST_BETA, MOST_BETA = 0.01, 64.0

# What a collection of examples has of its own.
OF_EXAMPLES = ("prompts", "task", "text", "lengths", "examples", "seed", "dtype")
OF_MODEL = ("prompts", "task", "text", "lengths", "examples", "dtype", "device")


class Source(NamedTuple):
    """A collection of examples with its model, or a model and the examples to make for it."""

    run: Path | None
    model: Path | None  # None: where the collection was made
    wanted: "Wanted | None"
    dtype: str = "auto"
    device: str = "cpu"


class ModelRequest(NamedTuple):
    """The options of a model and its examples, as a command line has them."""

    model: ModelOption = None
    prompts: Annotated[
        Path | None,
        typer.Option(
            callback=check_input,
            help='Prompts with their answers, a line each: {"prompt": ..., "answer": ...}, or '
            '{"prompt_ids": [...], "answer_ids": [...]}; "template" names what counts alike.',
        ),
    ] = None
    task: Annotated[
        str | None,
        typer.Option(
            help="Built-in examples: retrieval, in four templates, or retrieval:numbers,json for "
            "some of numbers, towns, json, list."
        ),
    ] = None
    text: Annotated[
        Path | None,
        typer.Option(callback=check_input, help="Plain text, every token of which is an answer."),
    ] = None
    lengths: Annotated[
        str,
        typer.Option(
            help="Lengths of the built-in examples and of text, in tokens: 256..1024, 250."
        ),
    ] = "256..1024"
    examples: Annotated[
        int, typer.Option(min=1, help="Built-in examples of each template and length.")
    ] = 32
    dtype: Annotated[
        Dtype,
        typer.Option(help="Of the model's weights; auto: bfloat16 if stored so, else float32."),
    ] = Dtype.AUTO
    device: DeviceOption = "cpu"

    def wanted(self, seed: int) -> "Wanted":
        """The examples that the options ask for."""
        from calibrate.model.prompts import Wanted, parse_task

        try:
            templates = () if self.task is None else parse_task(self.task)
        except ValueError as failure:
            raise typer.BadParameter(str(failure)) from None
        if not (self.prompts or templates or self.text):
            raise typer.BadParameter(
                "--model needs examples: --prompts FILE.jsonl, --task retrieval or --text FILE"
            )
        lengths = tuple(parse_sizes(self.lengths))
        return Wanted(self.prompts, templates, self.text, lengths, self.examples, seed)

    def source(self, seed: int, run: Path | None = None) -> Source:
        """The model with a collection, or with the examples that the options ask for."""
        wanted = self.wanted(seed) if run is None else None
        return Source(run, self.model, wanted, self.dtype.value, self.device)


def takes_model(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of a ModelRequest, in the place of its argument `request`."""
    of_model = inspect.signature(ModelRequest).parameters
    parameters = list[inspect.Parameter]()
    for parameter in inspect.signature(command).parameters.values():
        parameters += of_model.values() if parameter.name == "request" else [parameter]

    @functools.wraps(command)
    def run(**options: Any) -> None:
        command(request=ModelRequest(*map(options.pop, of_model)), **options)

    vars(run)["__signature__"] = inspect.Signature(parameters)
    return run


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
