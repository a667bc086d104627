"""Options that several commands share, and the checks of their values."""

import functools
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import BadParameter, Option

from calibrate.defaults import (
    LENGTHS,
    MIN_BETA_LIMIT,
    MIN_ENTROPY,
    N_EXAMPLES,
    SIZES,
    TIMEOUT,
)
from calibrate.parallel import Jobs
from calibrate.storage.model_fingerprint import require_folder

if TYPE_CHECKING:
    from calibrate.prompts.make_examples import ExampleSpec

MAX_SIZE = 1 << 20
_SIZE = re.compile(r"\s*[0-9]{1,18}\s*")


@functools.cache  # what it tells is told once
def parse_sizes(text: str) -> list[int]:
    """A range "16..256" doubles, "16,64,100" is a list; both may be mixed.

    Warns of a range whose end is not reached.
    """
    sizes: list[int] = []
    for word in text.split(","):
        first, dots, last = word.partition("..")
        ends = [first, last] if dots else [first, first]
        size, end = (int(x) if _SIZE.fullmatch(x) else 0 for x in ends)
        if not 2 <= size <= end <= MAX_SIZE:
            raise BadParameter(
                f"{word[:40]!r}: write set sizes, 2 to {MAX_SIZE:,}: 16..256 or 16,100"
            )
        while size <= end:
            sizes.append(size)
            size *= 2
        if sizes[-1] < end:
            message = f"{word} doubles and ends at {sizes[-1]}; for {end} write {word},{end}"
            warnings.warn(message, stacklevel=2)
    return sorted(set(sizes))


def check_fit_name(name: str | None) -> str | None:
    """The name of a fit, at once: what is to be fitted may take long to load."""
    from calibrate.store.publishing import check_name

    if name is not None:
        check_name(name)
    return name


def check_page(path: Path) -> Path:
    """The path of a page, an .html file in a folder that exists."""
    if path.suffix != ".html" or not path.parent.is_dir():
        raise BadParameter(f"{str(path)!r} is not an .html file in an existing folder")
    return path


def _file(text: str) -> Any:
    return Option(exists=True, dir_okay=False, help=text)


Sizes = Annotated[
    str,
    Option(help="Set sizes: 16..256 doubles, 16,100 is a list; run and report end at 4096."),
]
# Units of work are planned ahead.
MAX_SETS = 10_000_000
MAX_EXAMPLES = 100_000
Sets = Annotated[
    int, Option(min=1, max=MAX_SETS, help="Sets of each size; run draws fewer than collect.")
]
Overwrite = Annotated[
    bool, Option("--overwrite", help="Delete the collection that is there, and collect again.")
]
Store = Annotated[Path | None, Option(help="Store to write to [default: $CALIBRATE_FITS, ./fits]")]
ReadStore = Annotated[Path | None, Option(help="Store to search before all others.")]
FitName = Annotated[str, Option(callback=check_fit_name, help="Name of the fit.")]
# At once: what reads models takes seconds to load.
_MODEL = Option(
    callback=require_folder, help="Folder of a causal language model: safetensors, or a .gguf file."
)
Model = Annotated[Path | None, _MODEL]
RequiredModel = Annotated[Path, _MODEL]
Device = Annotated[str, Option(help="PyTorch device: cpu, cuda.")]
AllowUnexpected = Annotated[
    bool,
    Option(
        "--allow-unexpected",
        help="Accept a model whose files have tensors or scales that Transformers drops.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The processes that share the work."""

    jobs: Annotated[int, Option(min=1, max=1024, help="Number of worker processes.")] = 1
    dask: Annotated[
        str | None, Option(help="Address of a Dask scheduler, in place of --jobs: tcp://HOST:PORT.")
    ] = None
    timeout: Annotated[
        float, Option(min=0.1, help="Seconds without a finished task before the command fails.")
    ] = TIMEOUT

    @property
    def workers(self) -> Jobs:
        """The processes or the cluster that run tasks."""
        return Jobs(self.jobs, self.dask, self.timeout)


@dataclass(frozen=True, kw_only=True)
class RuleOptions:
    """The kind of rule, and how it is fitted."""

    # The names of KINDS, which would load NumPy for --help; a test compares them.
    kind: Annotated[
        Literal["auto", "constant", "log-size", "polynomial", "entropy-and-size"],
        Option(help="Kind of rule; a named one is published even if not significant."),
    ] = "auto"
    loss: Annotated[
        Literal["likelihood", "log-least-squares", "least-squares"],
        Option(help="Loss; least squares compare --kind polynomial with each row's optimal beta."),
    ] = "likelihood"
    q: Annotated[
        float | None,
        Option(
            min=0,
            max=1,
            help="Exponent of generalised cross-entropy, 0: maximum likelihood [default: 0, or "
            "tuned for accuracy with a head]",
        ),
    ] = None
    paper: Annotated[
        bool,
        Option(
            "--paper",
            help="The paper's procedure, robust: --kind polynomial --loss log-least-squares "
            f"--rows misranked --min-entropy {MIN_ENTROPY:g} --min-beta 1.",
        ),
    ] = False
    rows: Annotated[
        Literal["all", "misranked"] | None, Option(help="Rows to fit [default: all that were kept]")
    ] = None
    min_entropy: Annotated[
        float, Option(min=0, max=20, help="Entropy in nats up to which beta is 1.")
    ] = 0.0
    min_beta: Annotated[
        float | None,
        Option(
            min=MIN_BETA_LIMIT,
            max=1,
            help=f"Lower bound of beta [default: 1, of arrays 1/{1 / MIN_BETA_LIMIT:g}]",
        ),
    ] = None

    def check_rule(self, **others: Any) -> None:
        """Raises BadParameter for options that exclude each other, of these or `others`."""
        if self.paper:
            own = (self.kind != "auto", self.loss != "likelihood", self.q is not None)
            given = (self.rows, self.min_entropy, self.min_beta)
            if any(own) or any(given) or any(x is not None for x in others.values()):
                raise BadParameter("other options of the fit cannot be used with --paper")
        if self.loss != "likelihood":
            if self.kind != "polynomial":
                raise BadParameter(f"--loss {self.loss} goes with --kind polynomial")
            for name, value in {"q": self.q or None, **others}.items():
                if value is not None:
                    option = f"--{name.replace('_', '-')}"
                    raise BadParameter(
                        f"--loss {self.loss} cannot be used with {option}; leave out {option}"
                    )

    @property
    def is_chosen(self) -> bool:
        """True if the kind is selected by the scores of the rows."""
        return self.kind == "auto" and not self.paper


@dataclass(frozen=True, kw_only=True)
class HeadOrLogits:
    """The source of rows: a head that draws sets, or logits on disk."""

    head: Annotated[
        str | None,
        Option(help="Head: max-retrieval-0 .. -9, a weights file, or module:attribute."),
    ] = None
    logits: Annotated[
        Path | None,
        Option(
            help="Logits in place of a head: an .npz file or a folder of them, with logits (rows, "
            "n), target (rows,) and, optionally, mask, layer, head, group."
        ),
    ] = None
    sizes: Sizes = SIZES
    sets: Annotated[
        int | None,
        Option(
            min=2,
            max=MAX_SETS,
            help="Held-out sets of each size [default: 32768 up to 256 items, then fewer]",
        ),
    ] = None
    seed: Annotated[int, Option(min=0, help="Seed of the data.")] = 0

    def __post_init__(self) -> None:
        """Checks that logits, which have sizes of their own, are not to be drawn too."""
        drawn, default = (self.sizes, self.sets), (type(self).sizes, type(self).sets)
        if self.logits is not None and (self.head is not None or drawn != default):
            raise BadParameter("--head, --sizes and --sets cannot be used with --logits")
        self.set_sizes  # noqa: B018 (parsed before anything is loaded)

    @property
    def set_sizes(self) -> list[int]:
        """The sizes of the sets to draw."""
        return parse_sizes(self.sizes)


@dataclass(frozen=True, kw_only=True)
class Examples:
    """The examples to make for a model."""

    prompts: Annotated[
        Path | None,
        _file('JSON lines {"prompt": ..., "answer": ...}; see fits/language-models.md.'),
    ] = None
    task: Annotated[
        str | None,
        Option(help="Built-in task: retrieval, or retrieval:numbers,json for some templates."),
    ] = None
    retention_text: Annotated[
        Path | None,
        Option(
            exists=True,
            help="Text whose predictions must stay, or a folder of .txt files [default: nine "
            "built-in text domains]",
        ),
    ] = None
    no_retention_text: Annotated[
        bool, Option("--no-retention-text", help="Use no retention text.")
    ] = False
    lengths: Annotated[
        str, Option(help="Lengths of --task and --retention-text in tokens: 256,1024.")
    ] = f"{LENGTHS[0]}..{LENGTHS[-1]}"
    examples: Annotated[
        int, Option(min=1, max=MAX_EXAMPLES, help="Examples of each prompt template and length.")
    ] = N_EXAMPLES
    seed: Annotated[int, Option(min=0, help="Seed of the data.")] = 0
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Option(help="Type of the weights; auto is bfloat16 if stored so, else float32."),
    ] = "auto"
    device: Device = "cpu"
    allow_unexpected: AllowUnexpected = False

    def example_spec(self) -> "ExampleSpec":
        """The examples that are asked for."""
        from calibrate.prompts.make_examples import ExampleSpec, parse_task

        if not (self.prompts or self.task or self.retention_text):
            raise BadParameter(
                "give --prompts FILE.jsonl, --task retrieval or --retention-text FILE"
            )
        if self.retention_text and self.no_retention_text:
            raise BadParameter("--no-retention-text cannot be used with --retention-text")
        try:
            templates = () if self.task is None else parse_task(self.task)
        except ValueError as failure:
            raise BadParameter(str(failure)) from None
        lengths = tuple(parse_sizes(self.lengths))
        return ExampleSpec(
            self.prompts,
            templates,
            self.retention_text,
            lengths,
            self.examples,
            self.seed,
            built_in_text=not (self.no_retention_text or self.retention_text),
        )
