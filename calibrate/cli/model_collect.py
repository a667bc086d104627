"""`calibrate model collect`: make examples for a model, and keep them with its scores."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, BadParameter, Option

from calibrate.cli.loading import open_run, require_transformers
from calibrate.cli.options import Fresh, parse_sizes
from calibrate.cli.progress import Steps
from calibrate.cli.request import Request
from calibrate.files.collection import discard_collection
from calibrate.files.examples import UNIT_TOKENS
from calibrate.files.model_fingerprint import require_folder
from calibrate.report.blocks import Result
from calibrate.report.streams import stderr

if TYPE_CHECKING:
    from calibrate.files.examples import ExampleCollection, ExampleSet
    from calibrate.model.collect_examples import Job
    from calibrate.model.prompts import Wanted

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
            exists=True,
            dir_okay=False,
            help='Prompts with their answers, a line each: {"prompt": ..., "answer": ...}, or '
            '{"prompt_ids": [...], "answer_ids": [...]}; each "template" has equal weight.',
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
        Path | None,
        Option(exists=True, dir_okay=False, help="Plain text: each token is an answer."),
    ] = None
    lengths: Annotated[str, Option(help="Tokens of --task and --text: 256..1024, 250.")] = (
        "256..1024"
    )
    examples: Annotated[int, Option(min=1, help="Examples of each template and length.")] = 32
    seed: Annotated[int, Option(min=0, help="Seed of the data.")] = 0
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Option(help="Of the weights; auto: bfloat16 if stored so, else float32."),
    ] = "auto"
    device: Device = "cpu"

    @property
    def named(self) -> bool:
        """Whether any examples are asked for."""
        return bool(self.prompts or self.task or self.text)

    def wanted(self) -> "Wanted":
        """What is asked for."""
        from calibrate.model.prompts import Wanted, parse_task

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
    from calibrate.model.passes import batches

    n_batches = sum(len(batches(examples.examples, unit)) for unit in units)
    n_tokens = sum(len(examples.examples[i].tokens) for unit in units for i in unit)
    return Steps(title, n_batches, n_tokens)


@dataclass(frozen=True)
class ModelCollectRequest(Request, Examples):
    """What `calibrate model collect` is asked for."""

    model: RequiredModel
    out: Annotated[
        Path | None, Option(help="Folder of the collection [default: runs/NAME of the model]")
    ] = None
    fresh: Fresh = False


def collect(request: ModelCollectRequest) -> Result:
    """Collect examples of a model: prompts with their right answers.

    They are kept with the model's scores under plain softmax. Give --prompts, --task and --text, or
    some of them. Run the same command again to continue an interrupted collection or to repair
    damaged and missing files; a complete collection is left as it is.

    Example: calibrate model collect --model MODEL --task retrieval --text book.txt --out runs/model
    """
    job = make_examples(request.model, request)
    from calibrate.model.collect_examples import collect_examples
    from calibrate.report.collection_record import examples_result

    folder = request.out or Path("runs") / job.folder.name
    if request.fresh:
        discard_collection(folder)
    with model_steps("scoring", job.examples, job.examples.units(UNIT_TOKENS)) as steps:
        collection = collect_examples(
            job, folder, lambda tokens, resumed: steps.advance(work=tokens, resumed=resumed)
        )
    if not steps.done:
        stderr.print(f"{folder} is already complete")
    return examples_result(collection)
