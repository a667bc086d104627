"""A file of prompts: each line is a JSON object with a prompt and its right answer.

    {"prompt": "The capital of France is", "answer": " Paris"}
    {"prompt_ids": [1, 450, 7483], "answer_ids": [3681], "template": "capitals", "group": 7}

Lines with the same `group`, or without one and with the same prompt, are in one split.
"""

import codecs
from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from msgspec import UNSET, Meta, Struct, UnsetType

from calibrate.errors import CalibrateError, CoefficientsError
from calibrate.prompts.encoding import Encoder
from calibrate.prompts.examples import Cell, Example, ExampleSet
from calibrate.storage.atomic_io import read_bytes
from calibrate.storage.fingerprints import sha256_of
from calibrate.storage.strict_json import PRINTABLE, UNICODE, PrintableText, convert, parse

DEFAULT_TEMPLATE = "prompts"  # of lines that name none
_MAX_FILE_BYTES = 1 << 26

_Name = Annotated[str, Meta(min_length=1, max_length=100, pattern=PRINTABLE)]
_Words = Annotated[str, Meta(min_length=1, pattern=UNICODE)]
_TokenIds = Annotated[list[Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]], Meta(min_length=1)]
_Group = PrintableText | Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _LineFields(Struct, forbid_unknown_fields=True):
    """The fields that a line may have."""

    prompt: _Words | UnsetType = UNSET
    answer: _Words | UnsetType = UNSET
    prompt_ids: _TokenIds | UnsetType = UNSET
    answer_ids: _TokenIds | UnsetType = UNSET
    template: _Name = DEFAULT_TEMPLATE
    group: _Group | UnsetType = UNSET


_FIELDS = ({"prompt", "answer"}, {"prompt_ids", "answer_ids"})  # beside template and group
_REMEDY = (
    "write prompt and answer, or prompt_ids and answer_ids, and if you like template and group, "
    "and nothing else"
)


class PromptLine(NamedTuple):
    """A line of a file of prompts: a prompt and its right answer."""

    where: str  # "FILE, line 3"
    template: str
    prompt: Any  # a text or token ids
    answer: Any
    group: str | int | None = None

    @property
    def is_text(self) -> bool:
        """True if the line is text, which needs a tokenizer."""
        return isinstance(self.prompt, str)


def read_prompts(path: Path) -> tuple[list[PromptLine], str]:
    """Reads a file of prompts; returns its lines and its digest.

    Raises:
      CalibrateError: the file cannot be read or has no line, or a line is wrong.
    """
    data = read_bytes(path, _MAX_FILE_BYTES)
    texts = enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1)
    lines = [_parse_line(text, f"{path}, line {number}") for number, text in texts if text.strip()]
    if not lines:
        raise CalibrateError(f"{path} has no line; {_REMEDY}")
    return lines, sha256_of(data)


def _parse_line(text: bytes, where: str) -> PromptLine:
    try:
        fields: dict[str, Any] = parse(text, "write one JSON object a line", "the line")
        convert(fields, _LineFields, _REMEDY, "the line")
    except CoefficientsError as failure:
        raise CalibrateError(f"{where}: {failure}") from failure
    template, group = fields.pop("template", DEFAULT_TEMPLATE), fields.pop("group", None)
    if fields.keys() not in _FIELDS:
        raise CalibrateError(f"{where}: the line is not a prompt with its answer; {_REMEDY}")
    suffix = "" if "prompt" in fields else "_ids"
    return PromptLine(where, template, fields[f"prompt{suffix}"], fields[f"answer{suffix}"], group)


def encode_lines(lines: Sequence[PromptLine], encoder: Encoder) -> ExampleSet:
    """Makes an example of each line.

    The cell of a line is its template at the length of its example, rounded up to a power of two.

    Raises:
      CalibrateError: a line does not suit the tokenizer or the context, or repeats a prompt with
        its answer: these would be one observation in two splits.
    """
    seen, examples, keys = set[tuple[bytes, int]](), list[Example](), list[Hashable]()
    cells = dict[Cell, int]()
    for line in lines:
        example, prompt_ids = _encode_line(line, encoder)
        copy = example.tokens.tobytes(), example.start
        if copy in seen:
            raise CalibrateError(f"{line.where} repeats a prompt and its answer; give each once")
        seen.add(copy)
        cell = Cell(line.template, 1 << (len(example.tokens) - 1).bit_length(), False)
        examples.append(example._replace(cell=cells.setdefault(cell, len(cells))))
        keys.append(("prompt", *prompt_ids) if line.group is None else line.group)
    n_lines = Counter(keys)
    groups = {key: i for i, key in enumerate(key for key, n in n_lines.items() if n > 1)}
    grouped = (x._replace(group=groups.get(key, -1)) for x, key in zip(examples, keys, strict=True))
    return ExampleSet(tuple(cells), tuple(grouped))


def _encode_line(line: PromptLine, encoder: Encoder) -> tuple[Example, list[int]]:
    """The example of a line, and the ids of its prompt."""
    if not line.is_text:
        return encoder.join(line.where, line.prompt, line.answer), line.prompt
    try:
        pair, prompt_ids = encoder.pair(line.prompt, line.answer), encoder.prompt_ids(line.prompt)
    except CalibrateError as failure:
        raise CalibrateError(f"{line.where}: {failure}") from failure
    return encoder.join(line.where, *pair), prompt_ids
