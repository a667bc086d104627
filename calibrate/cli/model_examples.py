"""The options of a model and of examples to make for it, and making them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, BadParameter, Option

from calibrate.cli.loading import open_run, require_transformers
from calibrate.cli.options import check_input, parse_sizes
from calibrate.cli.progress import Steps
from calibrate.files.model_fingerprint import require_folder
from calibrate.report.streams import stderr

if TYPE_CHECKING:
    from calibrate.files.examples import ExampleCollection, ExampleSet
    from calibrate.model.collect_examples import Job
    from calibrate.model.sources import Wanted

LEAST_BETA, MOST_BETA = 0.01, 64.0

_MODEL = Option(
    callback=require_folder,  # at once: what reads models takes seconds to load
    help="Folder of a causal language model: config.json and safetensors, or a .gguf file.",
)
Model = Annotated[Path | None, _MODEL]
RequiredModel = Annotated[Path, _MODEL]
Device = Annotated[str, Option(help="PyTorch's device: cpu, cuda.")]
Constants = Annotated[str, Option(help="Betas to compare on all heads, such as 1.15,1.3.")]


def parse_betas(text: str) -> list[float]:
    """Some constants, each once."""
    betas = []
    for word in filter(None, map(str.strip, text.split(","))):
        try:
            beta = float(word)
        except ValueError:
            beta = 0.0
        if not LEAST_BETA <= beta <= MOST_BETA:
            raise BadParameter(
                f"--constants has {word!r}; write betas from {LEAST_BETA:g} to {MOST_BETA:g}, such "
                "as 1.15,1.3"
            )
        betas.append(beta)
    return list(dict.fromkeys(betas))


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Which examples to make for a model."""

    prompts: Annotated[
        Path | None,
        Option(
            callback=check_input,
            help='Prompts with their answers, a line each: {"prompt": ..., "answer": ...}, or '
            '{"prompt_ids": [...], "answer_ids": [...]}; templates ("template") have equal weight.',
        ),
    ] = None
    task: Annotated[
        str | None,
        Option(
            help="Built-in examples: retrieval, in four templates, or retrieval:numbers,json for "
            "some of numbers, towns, json, list."
        ),
    ] = None
    text: Annotated[
        Path | None, Option(callback=check_input, help="Plain text; each token is an answer.")
    ] = None
    lengths: Annotated[str, Option(help="Tokens of --task and --text: 256..1024, 250.")] = (
        "256..1024"
    )
    examples: Annotated[int, Option(min=1, help="Examples of each template and length.")] = 32
    seed: Annotated[int, Option(min=0, help="Seed of the data.")] = 0
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Option(help="Of the weights; auto: as they are stored."),
    ] = "auto"
    device: Device = "cpu"

    @property
    def named(self) -> bool:
        """Whether any examples are asked for."""
        return bool(self.prompts or self.task or self.text)

    def wanted(self) -> "Wanted":
        """What is asked for."""
        from calibrate.model.sources import Wanted, parse_task

        if not self.named:
            raise BadParameter(
                "--model needs examples: --prompts FILE.jsonl, --task retrieval or --text FILE"
            )
        try:
            templates = () if self.task is None else parse_task(self.task)
        except ValueError as failure:
            raise BadParameter(str(failure)) from None
        lengths = tuple(parse_sizes(self.lengths))
        return Wanted(self.prompts, templates, self.text, lengths, self.examples, self.seed)


@dataclass(frozen=True)
class RunOrExamples(Examples):
    """A collection of examples, or a model and the examples to make for it."""

    run: Annotated[Path | None, Argument(help="Folder of a collection of examples.")] = None
    model: Model = None

    def __post_init__(self) -> None:
        """Checks that there is one of the two."""
        if self.run is None and self.model is None:
            raise BadParameter("give RUN, or --model FOLDER and examples for it")
        if self.run is not None and self.named:
            raise BadParameter("--prompts, --task and --text cannot be used with RUN")


def open_or_make(
    model: Path | None, examples: Examples, run: Path | None
) -> "tuple[Job, ExampleCollection | None]":
    """The examples of a collection, or examples made for a model; and the collection, if any."""
    if run is not None:
        return open_run(run, model, examples.device)
    assert model is not None
    return make_examples(model, examples), None


def make_examples(model: Path, examples: Examples) -> "Job":
    """Makes examples for a model, whose weights are not loaded."""
    wanted = examples.wanted()
    require_transformers(examples.device)
    from calibrate.model.collect_examples import plan

    stderr.print(f"making examples for {model}")
    job = plan(model, wanted, examples.dtype, examples.device)
    cells = Counter(job.examples.cells[example.cell] for example in job.examples.examples)
    few = [
        f"{n} windows of {cell.length:,} tokens"
        for cell, n in cells.items()
        if cell.text and n < wanted.count
    ]
    if few:
        stderr.print(
            f"{wanted.text} gives {', '.join(few)}, not {wanted.count}: a longer text gives more"
        )
    return job


def model_steps(title: str, examples: "ExampleSet", units: Sequence[Sequence[int]]) -> Steps:
    """A step for each batch of each unit of work, of as much work as it has tokens."""
    from calibrate.model.answering import batches

    n_batches = sum(len(batches(examples.examples, unit)) for unit in units)
    n_tokens = sum(len(examples.examples[i].tokens) for unit in units for i in unit)
    return Steps(title, n_batches, n_tokens)
