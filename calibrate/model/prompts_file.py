"""Prompts of the user: a file with a JSON object on each line.

    {"prompt": "The capital of France is", "answer": " Paris"}
    {"prompt_ids": [1, 450, 7483], "answer_ids": [3681], "template": "capitals"}

Examples of one template (default: prompts) and of one octave of lengths count alike.
"""

from pathlib import Path
from typing import Any, NamedTuple

from calibrate.errors import CalibrateError, CoefficientsError
from calibrate.files.examples import Cell
from calibrate.files.json_shapes import Integer, List, Object, Text
from calibrate.files.npz import digest_of, read_bytes
from calibrate.files.strict_json import Refusal, parse, refuse
from calibrate.model.encoding import Encoded, Encoder

MOST_BYTES = 1 << 28
TEMPLATE = "prompts"  # of lines that name none


def _words(value: Any) -> str:
    if type(value) is not str or not value:
        refuse(value, "give a text")
    if any("\ud800" <= c <= "\udfff" for c in value):
        refuse(value, "give Unicode text without lone surrogates")
    return value


_IDS = List(Integer(0, (1 << 31) - 1))
_LINE = Object(
    {"prompt": _words, "answer": _words, "prompt_ids": _IDS, "answer_ids": _IDS,
     "template": Text(100)},
    remedy="a line has prompt and answer, or prompt_ids and answer_ids, and if you like template",
)  # fmt: skip
_PAIRS = (("prompt", "answer"), ("prompt_ids", "answer_ids"))


class Line(NamedTuple):
    """A prompt and its answer: two texts, or two lists of token ids."""

    where: str
    template: str
    prompt: Any
    answer: Any


class PromptsFile(NamedTuple):
    """The prompts of a file."""

    lines: list[Line]
    digest: str

    @property
    def needs_tokenizer(self) -> bool:
        """Whether any of them is text."""
        return any(isinstance(line.prompt, str) for line in self.lines)

    def examples(self, encoder: Encoder) -> list[tuple[Cell, Encoded]]:
        """Each with its cell: its template, and its length rounded up to a power of two.

        Raises:
          CalibrateError: one occurs twice: it would judge the fit that was made of it.
        """
        made, seen = [], dict[tuple[bytes, int], str]()
        for where, template, prompt, answer in self.lines:
            ids = encoder.pair(prompt, answer) if isinstance(prompt, str) else (prompt, answer)
            encoded = encoder.join(where, *ids)
            first = seen.setdefault((encoded.tokens.tobytes(), encoded.start), where)
            if first != where:
                raise CalibrateError(
                    f"{where}: the same prompt and answer as in line {first.split()[-1]}; give "
                    "each once, or a fit is judged by what it was made of"
                )
            octave = 1 << (len(encoded.tokens) - 1).bit_length()
            made.append((Cell(template, octave, False), encoded))
        return made


def read_prompts(path: Path) -> PromptsFile:
    """Reads a file of prompts.

    Raises:
      CalibrateError: it cannot be read or has no line, or a line is not a prompt with its answer.
    """
    data = read_bytes(path, MOST_BYTES, "split it")
    lines = [
        _line(text, f"{path}, line {number}")
        for number, text in enumerate(data.split(b"\n"), 1) if text.strip()
    ]  # fmt: skip
    if not lines:
        example = '{"prompt": "2 + 2 =", "answer": " 4"}'
        raise CalibrateError(f"{path} has no line; write one for each prompt, such as {example}")
    return PromptsFile(lines, digest_of(data))


def _line(text: bytes, where: str) -> Line:
    try:
        fields = _LINE(parse(text, "write one JSON object a line"))
        given = [pair for pair in _PAIRS if not fields.keys().isdisjoint(pair)]
        if len(given) != 1:
            raise Refusal((), "without a prompt" if not given else "given twice", (
                "write prompt and answer, or prompt_ids and answer_ids"
            ))  # fmt: skip
        for name in given[0]:
            if name not in fields:
                raise Refusal((name,), "absent", "every prompt needs its right answer")
    except CoefficientsError as failure:
        message = str(failure).replace("the file is", "the line is", 1)
        raise CalibrateError(f"{where}: {message}") from failure
    prompt, answer = (fields[name] for name in given[0])
    return Line(where, fields.get("template", TEMPLATE), prompt, answer)
