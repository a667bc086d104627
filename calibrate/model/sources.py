"""Where examples come from: prompts of the user, the built-in task, plain text."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from calibrate.errors import CalibrateError
from calibrate.files.examples import MOST_CELLS, Cell, Example, ExampleSet
from calibrate.model.encoding import Encoded, Encoder
from calibrate.model.prompts_file import read_prompts
from calibrate.model.retrieval import TEMPLATES, retrieval
from calibrate.model.text_windows import read_text

if TYPE_CHECKING:
    from calibrate.transformers.folders import ModelFolder

TASK = "retrieval"


@dataclass(frozen=True)
class Wanted:
    """The examples that a user asks for.

    Attributes:
      prompts: a file of prompts; see `prompts_file`.
      templates: of the built-in task; see `retrieval`.
      text: a file of plain text.
      lengths: in tokens, of the built-in task and of the windows of text.
      count: examples of each template and length; windows, at most.
      seed: of the built-in task.
    """

    prompts: Path | None = None
    templates: tuple[str, ...] = ()
    text: Path | None = None
    lengths: tuple[int, ...] = (256, 512, 1024)
    count: int = 32
    seed: int = 0


class Made(NamedTuple):
    """Examples, and what they were made from as the manifest keeps it."""

    set: ExampleSet
    sources: dict[str, Any]


def parse_task(text: str) -> tuple[str, ...]:
    """The templates of "retrieval", or of "retrieval:numbers,json".

    Raises:
      ValueError: there is no such task or template.
    """
    task, colon, names = text.partition(":")
    chosen = tuple(dict.fromkeys(names.split(","))) if colon else tuple(TEMPLATES)
    if task != TASK or not set(chosen) <= set(TEMPLATES):
        raise ValueError(
            f"{text!r} is not a task; write {TASK}, or {TASK}: and some of {','.join(TEMPLATES)}"
        )
    return chosen


def make_examples(wanted: Wanted, folder: "ModelFolder") -> Made:
    """The examples for a model, by its tokenizer.

    Raises:
      CalibrateError: nothing was asked for; a file cannot be read; an example does not fit into the
        model's context; or the tokenizer is missing.
    """
    prompts = read_prompts(wanted.prompts) if wanted.prompts else None
    text = read_text(wanted.text) if wanted.text else None
    if not (prompts or text or wanted.templates):
        raise CalibrateError(
            "no examples are named; give --prompts FILE.jsonl, --task retrieval or --text FILE"
        )
    longest, context = max(wanted.lengths), folder.context
    if (text or wanted.templates) and context is not None and longest > context:
        raise CalibrateError(
            f"--lengths go to {longest:,} tokens, and the model's context is {context:,}; give "
            "lengths within it"
        )
    needed = bool(text or wanted.templates or (prompts and prompts.needs_tokenizer))
    encoder = Encoder(folder.tokenizer() if needed else None, context, folder.vocabulary)
    made, sources = [], dict[str, Any]()
    if prompts:
        made += prompts.examples(encoder)
        sources["prompts"] = prompts.digest
    if wanted.templates:
        templates, lengths = list(wanted.templates), list(wanted.lengths)
        made += retrieval(encoder, templates, lengths, wanted.count, wanted.seed)
        sources |= {"templates": ",".join(templates), "seed": wanted.seed}
    if text:
        made += text.windows(encoder, list(wanted.lengths), wanted.count)
        sources["text"] = text.digest
    if text or wanted.templates:
        sources |= {"lengths": ",".join(map(str, wanted.lengths)), "examples": wanted.count}
    return Made(_in_cells(made), sources)


def _in_cells(made: list[tuple[Cell, Encoded]]) -> ExampleSet:
    """The examples cell by cell, in the order in which cells first occur."""
    cells = list(dict.fromkeys(cell for cell, _ in made))
    if len(cells) > MOST_CELLS:
        raise CalibrateError(
            f"the examples have {len(cells):,} templates and lengths; give at most {MOST_CELLS:,}"
        )
    number = {cell: i for i, cell in enumerate(cells)}
    examples = [Example(encoded.tokens, encoded.start, number[cell]) for cell, encoded in made]
    return ExampleSet(tuple(cells), tuple(sorted(examples, key=lambda example: example.cell)))
