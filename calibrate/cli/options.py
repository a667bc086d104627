"""Options that several commands share, and parsers of their values: sizes, bytes, files."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import BadParameter, Option

from calibrate.files.model_fingerprint import require_folder
from calibrate.parallel.jobs import Jobs

if TYPE_CHECKING:
    from calibrate.model.prompts import Wanted

MAX_SIZE = 1 << 20
_SIZE = re.compile(r"\s*[0-9]{1,18}\s*")
_BYTES = re.compile(r"([0-9]{1,15}(?:\.[0-9]+)?(?:e[0-9]{1,2})?)\s*(|k|M|G)B?", re.IGNORECASE)


def parse_sizes(text: str) -> list[int]:
    """A range "16..256" doubles, "16,64,100" is a list; both may be mixed."""
    sizes: list[int] = []
    for word in text.split(","):
        first, dots, last = word.partition("..")
        if not _SIZE.fullmatch(first) or (dots and not _SIZE.fullmatch(last)):
            raise BadParameter(f"{word!r} is not a set size; write 16..16384 or 16,64,256")
        size, end = int(first), int(last) if dots else int(first)
        if not 2 <= size <= end <= MAX_SIZE:
            raise BadParameter(f"{word!r}: set sizes are 2 to {MAX_SIZE:,} items, the lowest first")
        while size <= end:
            sizes.append(size)
            size *= 2
    return sorted(set(sizes))


def parse_bytes(text: str) -> int:
    """Decimal units: "1GB", "500 MB", "2e8"."""
    match = _BYTES.fullmatch(text.strip())
    if not match:
        raise BadParameter(f"{text!r} is an invalid size; write 1GB, 500MB or 2e8")
    return int(float(match[1]) * {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}[match[2].lower()])


def check_fit_name(name: str | None) -> str | None:
    """The name of a fit, at once: what is to be fitted may take long to load."""
    from calibrate.errors import CoefficientsError
    from calibrate.files.publishing import check_name

    try:
        if name is not None:
            check_name(name)
    except CoefficientsError as failure:
        raise BadParameter(str(failure)) from None
    return name


def check_page(path: Path) -> Path:
    """The path of a page, an .html file in a folder that exists."""
    if path.suffix != ".html" or not path.parent.is_dir():
        raise BadParameter(f"{str(path)!r} is not an .html file in an existing folder")
    return path


Sizes = Annotated[str, Option(help="Set sizes: 16..16384 doubles; 16,64,256 is a list.")]
Sets = Annotated[int, Option(min=1, help="Sets to draw of each size.")]
MaxBytes = Annotated[str, Option(help="Size limit of the collection: 1GB, 500MB.")]
Fresh = Annotated[bool, Option("--fresh", help="Delete the collection, and collect anew.")]
Store = Annotated[
    Path | None, Option(help="Store to write to [default: $CALIBRATE_FITS or ./fits]")
]
ReadStore = Annotated[
    Path | None, Option(help="Store before $CALIBRATE_FITS, ./fits and the package's fits.")
]
FitName = Annotated[
    str, Option(callback=check_fit_name, help="Name of the fit, whose next version is written.")
]
_MODEL = Option(
    callback=require_folder,  # at once: what reads models takes seconds to load
    help="Folder of a causal language model: config.json and safetensors, or a .gguf file.",
)
Model = Annotated[Path | None, _MODEL]
RequiredModel = Annotated[Path, _MODEL]
Device = Annotated[str, Option(help="PyTorch's device: cpu, cuda.")]


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Who shares the work."""

    jobs: Annotated[int, Option(min=1, help="Processes that share the work.")] = 1
    dask: Annotated[
        str | None, Option(help="Address of a Dask cluster; local: one with --jobs workers.")
    ] = None
    stall: Annotated[
        float, Option(min=0.1, help="Fail after so many seconds without progress.")
    ] = 600.0

    @property
    def workers(self) -> Jobs:
        """Where tasks run."""
        return Jobs(self.jobs, self.dask, self.stall)


@dataclass(frozen=True, kw_only=True)
class HeadOrLogits:
    """Where rows come from: a head that draws sets, or logits on disk."""

    head: Annotated[
        str | None,
        Option(
            help="max-retrieval-0 .. -9, a weights file (.npz), or module:attribute [default: "
            "max-retrieval, or the head that a fit names]"
        ),
    ] = None
    logits: Annotated[
        Path | None,
        Option(
            help="Rows in place of a head: an .npz file, or a folder of them, with logits "
            "(rows, n), target (rows,) and, optionally, mask, layer, head, group."
        ),
    ] = None
    sizes: Sizes = "16..16384"
    sets: Annotated[
        int | None,
        Option(
            min=2,
            help="Held-out sets of each size [default: 32,768 up to n = 256, 4,096 up to 4,096, "
            "1,024 above]",
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
        Option(help="Type of the weights; auto: bfloat16 if stored so, else float32."),
    ] = "auto"
    device: Device = "cpu"

    def wanted(self) -> "Wanted":
        """What is asked for."""
        from calibrate.model.prompts import Wanted, parse_task

        if not (self.prompts or self.task or self.text):
            raise BadParameter("give --prompts FILE.jsonl, --task retrieval or --text FILE")
        try:
            templates = () if self.task is None else parse_task(self.task)
        except ValueError as failure:
            raise BadParameter(str(failure)) from None
        lengths = tuple(parse_sizes(self.lengths))
        return Wanted(self.prompts, templates, self.text, lengths, self.examples, self.seed)
