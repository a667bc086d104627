"""Examples of a model: prompts of the user, the built-in task, plain text.

Those of the user come from a file; see `prompt_lines.py`. Each template at each octave of lengths
has equal weight.
"""

import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrate.datasets.examples import MAX_CELLS, Cell, Example, ExampleSet
from calibrate.errors import CalibrateError
from calibrate.model.encoding import Encoded, Encoder
from calibrate.model.prompts_file import Line, encoded_lines, read_prompts
from calibrate.model.retention_text import BUILT_IN, built_in_windows, read_texts
from calibrate.model.retrieval_task import TEMPLATES, retrieval
from calibrate.model.splits import MIN_TEMPLATES, mixes_templates
from calibrate.storage.npz import digest_of

if TYPE_CHECKING:
    from calibrate.transformers.folders import ModelFolder

TASK = "retrieval"


@dataclass(frozen=True)
class ExampleSpec:
    """The examples that a user asks for."""

    prompts: Path | None = None  # a file
    templates: tuple[str, ...] = ()  # of the built-in task; see `retrieval`
    text: Path | None = None  # a file of plain text, or a folder of some
    lengths: tuple[int, ...] = (256, 512, 1024)  # tokens: of the built-in task and of windows
    count: int = 8  # examples of each template and length; windows, at most
    seed: int = 0  # of the built-in task
    built_in_text: bool = False  # in place of `text`, where the model has a tokenizer

    @cached_property
    def lines(self) -> tuple[list[Line], str]:
        """The lines of the file of prompts, and its digest; see `read_prompts`."""
        return read_prompts(self.prompts) if self.prompts else ([], "")


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


def make_examples(spec: ExampleSpec, folder: "ModelFolder") -> tuple[ExampleSet, dict[str, Any]]:
    """The examples for a model, by its tokenizer, and their sources as the manifest keeps them.

    Raises:
      CalibrateError: nothing was asked for, a file cannot be read, an example does not fit into the
        model's context, or the tokenizer is missing.
      QualityError: the tokenizer does not know more than a tenth of the tokens.
    """
    lines, digest = spec.lines
    texts = read_texts(spec.text) if spec.text else []
    has_lengths = bool(texts or spec.templates)
    if not (lines or has_lengths):
        raise CalibrateError(
            "no examples are named; give prompts, templates of the built-in task, or a text"
        )
    spelled = has_lengths or any(line.is_spelled for line in lines)
    tokenizer = folder.tokenizer() if spelled else None
    encoder = Encoder(tokenizer, folder.context, folder.vocabulary)
    made, sources = list[tuple[str, list[tuple[Cell, Encoded]]]](), dict[str, Any]()
    if lines:
        made.append((str(spec.prompts), encoded_lines(lines, encoder, str(spec.prompts))))
        sources["prompts"] = digest
    if spec.templates:
        task = retrieval(encoder, spec.templates, spec.lengths, spec.count, spec.seed)
        made.append((f"the task {TASK}", task))
        sources |= {"templates": ",".join(spec.templates), "seed": spec.seed}
    for text in texts:
        made.append((str(text.path), text.windows(encoder, spec.lengths, spec.count)))
    for source, examples in made:
        encoder.check_known(source, examples)
    if spec.built_in_text and tokenizer is not None:
        try:
            windows = built_in_windows(encoder, spec.lengths, spec.count)
            encoder.check_known("the built-in text", windows)
        except CalibrateError as failure:  # not all models know English
            warnings.warn(f"no retention text: {failure}", stacklevel=2)
        else:
            made.append(("the built-in text", windows))
            texts = read_texts(BUILT_IN)
    if texts:
        sources["text"] = digest_of("\n".join(text.digest for text in texts).encode())
    if has_lengths:
        sources |= {"lengths": ",".join(map(str, spec.lengths)), "examples": spec.count}
    return _in_cells([example for _, examples in made for example in examples]), sources


def _in_cells(made: list[tuple[Cell, Encoded]]) -> ExampleSet:
    """The examples cell by cell, in the order in which cells first occur."""
    cells = list(dict.fromkeys(cell for cell, _ in made))
    if len(cells) > MAX_CELLS:
        raise CalibrateError(
            f"the examples have {len(cells):,} templates and lengths; give at most {MAX_CELLS:,}"
        )
    number = {cell: i for i, cell in enumerate(cells)}
    examples = [Example(x.tokens, x.start, number[cell], x.group, x.question) for cell, x in made]
    example_set = ExampleSet(
        tuple(cells), tuple(sorted(examples, key=lambda example: example.cell))
    )
    if len({c.template for c in cells if not c.text}) >= MIN_TEMPLATES and mixes_templates(
        example_set
    ):
        warnings.warn(
            "some prompts or groups have lines of several templates: no template is held out as a "
            "whole",
            stacklevel=3,
        )
    return example_set
