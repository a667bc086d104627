"""Examples of a model from three sources: a file of prompts, the built-in task, plain text."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrate.defaults import LENGTHS, N_EXAMPLES
from calibrate.errors import CalibrateError
from calibrate.prompts.encoding import Encoder
from calibrate.prompts.examples import ExampleSet
from calibrate.prompts.prompts_file import PromptLine, encode_lines, read_prompts
from calibrate.prompts.retention_text import (
    BUILT_IN_FOLDER,
    TextFile,
    cut_built_in_text,
    read_texts,
)
from calibrate.prompts.retrieval_task import PROMPT_TEMPLATES, make_retrieval_examples
from calibrate.storage.fingerprints import sha256_of

if TYPE_CHECKING:
    from calibrate.transformers.folders import ModelFolder

TASK = "retrieval"


@dataclass(frozen=True)
class ExampleSpec:
    """The examples that a user asks for."""

    prompts: Path | None = None  # a file of prompts
    templates: tuple[str, ...] = ()  # of the built-in task
    text: Path | None = None  # a file of plain text, or a folder of such files
    lengths: tuple[int, ...] = LENGTHS  # tokens: of the built-in task and of windows of text
    count: int = N_EXAMPLES  # examples of each template and length; windows, at most
    seed: int = 0  # of the built-in task
    built_in_text: bool = False  # in place of `text`, if the model has a tokenizer

    @cached_property
    def lines(self) -> tuple[list[PromptLine], str]:
        """The lines of the file of prompts, and its digest."""
        return read_prompts(self.prompts) if self.prompts else ([], "")


def parse_task(text: str) -> tuple[str, ...]:
    """Parses "retrieval" or "retrieval:numbers,json" into names of templates.

    Raises:
      ValueError: there is no such task or template.
    """
    task, colon, names = text.partition(":")
    chosen = tuple(dict.fromkeys(names.split(","))) if colon else tuple(PROMPT_TEMPLATES)
    if task != TASK or not set(chosen) <= set(PROMPT_TEMPLATES):
        raise ValueError(
            f"{text!r} is not a task; write {TASK}, or {TASK}: and some of "
            f"{','.join(PROMPT_TEMPLATES)}"
        )
    return chosen


def make_examples(spec: ExampleSpec, folder: "ModelFolder") -> tuple[ExampleSet, dict[str, Any]]:
    """Makes examples for a model; returns them with their sources, as the manifest records these.

    Raises:
      CalibrateError: no source is given, a file cannot be read, an example is longer than the
        model's context, or the tokenizer is missing.
      QualityError: too many tokens are unknown.
    """
    lines, digest = spec.lines
    texts = read_texts(spec.text) if spec.text else []
    has_lengths = bool(texts or spec.templates)
    if not (lines or has_lengths):
        raise CalibrateError(
            "no examples are named; give prompts, templates of the built-in task, or a text"
        )
    needs_tokenizer = has_lengths or any(line.is_text for line in lines)
    tokenizer = folder.tokenizer() if needs_tokenizer else None
    encoder = Encoder(tokenizer, folder.context, folder.vocabulary)
    sets = _make_sets(spec, encoder, texts)
    if spec.built_in_text and tokenizer is not None:
        windows = _try_built_in_text(spec, encoder)
        sets += [windows] if windows else []
        texts = read_texts(BUILT_IN_FOLDER) if windows else texts
    sources = dict[str, Any](prompts=digest) if lines else {}
    if spec.templates:
        sources |= {"templates": ",".join(spec.templates), "seed": spec.seed}
    if texts:
        sources["text"] = sha256_of("\n".join(text.digest for text in texts).encode())
    if has_lengths:
        sources |= {"lengths": ",".join(map(str, spec.lengths)), "examples": spec.count}
    return ExampleSet.joined(sets), sources


def _make_sets(spec: ExampleSpec, encoder: Encoder, texts: Sequence[TextFile]) -> list[ExampleSet]:
    """The examples of each source; warns of tokens that the tokenizer does not know."""
    sets = list[tuple[str, ExampleSet]]()
    if spec.prompts:
        sets.append((str(spec.prompts), encode_lines(spec.lines[0], encoder)))
    if spec.templates:
        task = make_retrieval_examples(encoder, spec.templates, spec.lengths, spec.count, spec.seed)
        sets.append((f"the task {TASK}", task))
    for text in texts:
        sets.append((str(text.path), text.cut_windows(encoder, spec.lengths, spec.count)))
    for source, examples in sets:
        encoder.require_known(source, examples)
    return [examples for _, examples in sets]


def _try_built_in_text(spec: ExampleSpec, encoder: Encoder) -> ExampleSet | None:
    """Windows of the built-in text; None, with a warning, if the tokenizer knows no English."""
    try:
        windows = cut_built_in_text(encoder, spec.lengths, spec.count)
        encoder.require_known("the built-in text", windows)
    except CalibrateError as failure:
        warnings.warn(f"no retention text: {failure}", stacklevel=3)
        return None
    return windows
