"""Examples of a model: prompts of the user, the built-in task, plain text.

A file of prompts has a JSON object on each line:

    {"prompt": "The capital of France is", "answer": " Paris"}
    {"prompt_ids": [1, 450, 7483], "answer_ids": [3681], "template": "capitals"}

Each template (default: prompts) at each octave of lengths has equal weight.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from calibrate.errors import CalibrateError
from calibrate.files.examples import MOST_CELLS, Cell, Example, ExampleSet
from calibrate.files.json_shapes import Integer, List, Object, Text
from calibrate.files.npz import digest_of, read_bytes
from calibrate.files.strict_json import Refusal, parse, refuse, spell
from calibrate.model.encoding import Encoded, Encoder
from calibrate.model.retrieval import TEMPLATES, retrieval
from calibrate.model.text_windows import BUILT_IN, built_in_windows, read_texts

if TYPE_CHECKING:
    from calibrate.transformers.folders import ModelFolder

TASK = "retrieval"
_MOST_BYTES, _MOST_OF_LINE = 1 << 26, 1 << 20  # a tokenizer takes 150 times as much memory
TEMPLATE = "prompts"  # of lines that name none


def _words(value: Any) -> str:
    if type(value) is not str or not value:
        refuse(value, "give a text")
    if any("\ud800" <= c <= "\udfff" for c in value):
        refuse(value, "give Unicode text without lone surrogates")
    return value


_IDS = List(Integer(0, (1 << 31) - 1))
_PAIRS = (("prompt", "answer"), ("prompt_ids", "answer_ids"))
_REMEDY = "write prompt and answer, or prompt_ids and answer_ids, and if you like template"
_LINE = Object(
    dict.fromkeys(_PAIRS[0], _words) | dict.fromkeys(_PAIRS[1], _IDS) | {"template": Text(100)},
    remedy=_REMEDY,
)


class Line(NamedTuple):
    """A prompt and its answer: two texts, or two lists of token ids."""

    where: str
    template: str
    prompt: Any
    answer: Any


def encoded_lines(lines: list[Line], encoder: Encoder) -> list[tuple[Cell, Encoded]]:
    """Each with its cell: its template, and its length rounded up to a power of two.

    One that occurs twice is refused: it would judge the fit that was made of it.
    """
    made, seen = [], set[tuple[bytes, int]]()
    for where, template, prompt, answer in lines:
        ids = encoder.pair(prompt, answer) if isinstance(prompt, str) else (prompt, answer)
        encoded = encoder.join(where, *ids)
        key = encoded.tokens.tobytes(), encoded.start
        if key in seen:
            raise CalibrateError(f"{where} repeats a prompt and its answer; give each once")
        seen.add(key)
        octave = 1 << (len(encoded.tokens) - 1).bit_length()
        made.append((Cell(template, octave, False), encoded))
    return made


def read_prompts(path: Path) -> tuple[list[Line], str]:
    """The lines of a file of prompts, and its digest; raises CalibrateError unless all fit."""
    data = read_bytes(path, _MOST_BYTES, "split it")
    lines = [
        _line(text, f"{path}, line {number}")
        for number, text in enumerate(data.split(b"\n"), 1) if text.strip()
    ]  # fmt: skip
    if not lines:
        raise CalibrateError(f"{path} has no line; {_REMEDY}")
    return lines, digest_of(data)


def _line(text: bytes, where: str) -> Line:
    if len(text) > _MOST_OF_LINE:
        raise CalibrateError(
            f"{where} has {len(text):,} bytes, more than the limit of {_MOST_OF_LINE:,}; shorten it"
        )
    try:
        fields = _LINE(parse(text, "write one JSON object a line"))
        template = fields.pop("template", TEMPLATE)
        pair = next((pair for pair in _PAIRS if fields.keys() == {*pair}), None)
        if pair is None:
            raise Refusal((), "not a prompt with its answer", _REMEDY)
    except Refusal as failure:
        what = spell(failure.where) if failure.where else "the line"
        raise CalibrateError(f"{where}: {what} is {failure.state}; {failure.remedy}") from failure
    return Line(where, template, *(fields[name] for name in pair))


@dataclass(frozen=True)
class Wanted:
    """The examples that a user asks for."""

    prompts: Path | None = None  # a file
    templates: tuple[str, ...] = ()  # of the built-in task; see `retrieval`
    text: Path | None = None  # a file of plain text, or a folder of some
    lengths: tuple[int, ...] = (256, 512, 1024)  # tokens: of the built-in task and of windows
    count: int = 8  # examples of each template and length; windows, at most
    seed: int = 0  # of the built-in task
    built_in_text: bool = False  # in place of `text`, where the model has a tokenizer


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


def make_examples(wanted: Wanted, folder: "ModelFolder") -> tuple[ExampleSet, dict[str, Any]]:
    """The examples for a model, by its tokenizer, and their sources as the manifest keeps them.

    Raises:
      CalibrateError: nothing was asked for, a file cannot be read, an example does not fit into the
        model's context, or the tokenizer is missing.
      QualityError: the tokenizer does not know more than a tenth of the tokens.
    """
    lines, digest = read_prompts(wanted.prompts) if wanted.prompts else ([], "")
    texts = read_texts(wanted.text) if wanted.text else []
    has_lengths = bool(texts or wanted.templates)
    if not (lines or has_lengths):
        raise CalibrateError(
            "no examples are named; give --prompts FILE.jsonl, --task retrieval or --text FILE"
        )
    spelled = has_lengths or any(isinstance(line.prompt, str) for line in lines)
    tokenizer = folder.tokenizer() if spelled else None
    encoder = Encoder(tokenizer, folder.context, folder.vocabulary)
    made, sources = list[tuple[str, list[tuple[Cell, Encoded]]]](), dict[str, Any]()
    if lines:
        made.append((str(wanted.prompts), encoded_lines(lines, encoder)))
        sources["prompts"] = digest
    if wanted.templates:
        task = retrieval(encoder, wanted.templates, wanted.lengths, wanted.count, wanted.seed)
        made.append((f"the task {TASK}", task))
        sources |= {"templates": ",".join(wanted.templates), "seed": wanted.seed}
    for text in texts:
        made.append((str(text.path), text.windows(encoder, wanted.lengths, wanted.count)))
    for source, examples in made:
        encoder.check_known(source, examples)
    if wanted.built_in_text and tokenizer is not None:
        try:
            windows = built_in_windows(encoder, wanted.lengths, wanted.count)
            encoder.check_known("the built-in text", windows)
        except CalibrateError as failure:  # not all models know English
            warnings.warn(f"no text is protected: {failure}", stacklevel=2)
        else:
            made.append(("the built-in text", windows))
            texts = read_texts(BUILT_IN)
    if texts:
        sources["text"] = digest_of("\n".join(text.digest for text in texts).encode())
    if has_lengths:
        sources |= {"lengths": ",".join(map(str, wanted.lengths)), "examples": wanted.count}
    return _in_cells([example for _, examples in made for example in examples]), sources


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
