"""A file of prompts: a JSON object on each line, which is a prompt with its right answer.

    {"prompt": "The capital of France is", "answer": " Paris"}
    {"prompt": "The capital of the Netherlands is", "answers": [" Amsterdam", " The Hague"]}
    {"messages": [{"role": "user", "content": "Name a colour."}], "answer": "Red"}
    {"prompt_ids": [1, 450, 7483], "answer_ids": [3681], "template": "capitals", "group": 7}

Any of several `answers` is right. Messages are rendered by the model's own chat template; without
an answer, the last of them is it, if it is the assistant's. Lines that have a `group` in common, or
their prompt, belong together: all of them are in one split.
"""

import codecs
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from calibrate.datasets.examples import Cell, Example, ExampleSet
from calibrate.errors import CalibrateError
from calibrate.prompts.chat_template import last_turn, rendered
from calibrate.prompts.encoding import Encoder
from calibrate.storage.json_shapes import Integer, List, Object, PrintableLine
from calibrate.storage.npz import read_bytes, sha256_of
from calibrate.storage.strict_json import Refusal, parse, refuse, spell

TEMPLATE = "prompts"  # of lines that name none
_MAX_BYTES = 1 << 26
_MAX_OF_LINE = 1 << 20  # bytes: a tokenizer takes 150 times as much memory
_MAX_SHOWN = 10  # bad lines in a message
_MAX_STATE = 150  # characters on each
_MAX_ANSWERS = 100
_ASSISTANT = "assistant"


def _unicode(value: Any) -> str:
    if type(value) is not str:
        refuse(value, "give a text")
    if any("\ud800" <= c <= "\udfff" for c in value):
        refuse(value, "give Unicode text without lone surrogates")
    return value


def _words(value: Any) -> str:
    return _unicode(value) or refuse(value, "give a text")


def _group(value: Any) -> str | int:
    if type(value) is str:
        return _NAME(value)
    number = _NUMBER(value)
    assert number is not None
    return number


_NAME = PrintableLine()
_NUMBER = Integer(-(1 << 63), (1 << 63) - 1)
_IDS = List(Integer(0, (1 << 31) - 1))
_MESSAGE = Object(
    {"role": PrintableLine(100), "content": _unicode},
    required=True,
    remedy="remove it: the chat template is given role and content",
)
_KINDS = (  # of a line: the fields that it has
    {"prompt", "answer"},
    {"prompt", "answers"},
    {"messages", "answer"},
    {"messages", "answers"},
    {"messages"},
    {"prompt_ids", "answer_ids"},
)
_REMEDY = (
    "write prompt (or messages, which the model's chat template renders) and answer (or answers), "
    "or prompt_ids and answer_ids, and if you like template and group, and nothing else"
)
_LINE = Object(
    {
        "prompt": _words,
        "answer": _words,
        "answers": List(_words, most=_MAX_ANSWERS),
        "messages": List(_MESSAGE),
        "prompt_ids": _IDS,
        "answer_ids": _IDS,
        "template": PrintableLine(100),
        "group": _group,
    },
    remedy=_REMEDY,
)


class PromptLine(NamedTuple):
    """A line of a file of prompts: a prompt and its right answers."""

    where: str  # "line 3"
    template: str
    prompt: Any  # a text, messages or token ids
    answers: list[Any]  # as texts or token ids; none where the last message is the answer
    group: str | int | None = None

    @property
    def is_spelled(self) -> bool:
        """True if it is text, which takes a tokenizer."""
        return isinstance(self.prompt, str) or isinstance(self.prompt[0], dict)


class _BadLines:
    """Errors in the lines of a file, which are raised together."""

    def __init__(self, path: Path | str) -> None:
        self._path, self._count, self._shown = path, 0, list[str]()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Notes the error of a line, which begins with its number."""
        try:
            yield
        except CalibrateError as failure:
            self._count += 1
            if len(self._shown) < _MAX_SHOWN:
                self._shown.append(str(failure))

    def refuse(self) -> None:
        """Raises CalibrateError if there are any: the first ones, and how many."""
        if self._count == 1:
            raise CalibrateError(f"{self._path}, {self._shown[0]}")
        if not self._count:
            return
        states = dict[str, list[str]]()  # by remedy
        for message in self._shown:
            state, _, remedy = message.rpartition("; ")
            short = state if len(state) <= _MAX_STATE else f"{state[:_MAX_STATE]}..."
            states.setdefault(remedy, []).append(short)
        some = ", among them" if self._count > len(self._shown) else ""
        what = ". ".join(f"{'; '.join(lines)}; {remedy}" for remedy, lines in states.items())
        raise CalibrateError(f"{self._path} has {self._count:,} bad lines{some}: {what}")


def read_prompts(path: Path) -> tuple[list[PromptLine], str]:
    """The lines of a file of prompts, and its digest; raises CalibrateError unless all fit."""
    data = read_bytes(path, _MAX_BYTES, "split it")
    lines, bad = list[PromptLine](), _BadLines(path)
    for number, text in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if text.strip():
            with bad.noted():
                lines.append(_line(text, f"line {number}"))
    bad.refuse()
    if not lines:
        raise CalibrateError(f"{path} has no line; {_REMEDY}")
    return lines, sha256_of(data)


def _line(text: bytes, where: str) -> PromptLine:
    if len(text) > _MAX_OF_LINE:
        raise CalibrateError(
            f"{where} has {len(text):,} bytes, more than the limit of {_MAX_OF_LINE:,}; shorten it"
        )
    try:
        fields = _LINE(parse(text, "write one JSON object a line"))
        template, group = fields.pop("template", TEMPLATE), fields.pop("group", None)
        _check_fields(fields)
    except Refusal as failure:
        what = spell(failure.where) if failure.where else "the line"
        raise CalibrateError(f"{where}: {what} is {failure.state}; {failure.remedy}") from failure
    prompt = next(fields[name] for name in ("prompt", "messages", "prompt_ids") if name in fields)
    answers = fields.get("answers", [fields[x] for x in ("answer", "answer_ids") if x in fields])
    if not all([prompt, *answers]):
        raise CalibrateError(f"{where}: a prompt and an answer need a token each")
    return PromptLine(where, template, prompt, answers, group)


def _check_fields(fields: dict[str, Any]) -> None:
    """Raises Refusal unless these fields are a prompt with its answers."""
    if fields.keys() not in _KINDS:
        raise Refusal((), "not a prompt with its answer", _REMEDY)
    answers, messages = fields.get("answers"), fields.get("messages")
    if answers is not None and len(set(answers)) < max(1, len(answers)):
        raise Refusal(("answers",), "empty, or has one twice", "give each right answer once")
    if messages is None:
        return
    ends = bool(messages) and messages[-1]["role"] == _ASSISTANT
    if len(fields) == 1 and not (ends and len(messages) > 1):
        raise Refusal((), "messages without an answer", "add it, or the assistant's message")
    if len(fields) > 1 and (ends or not messages):
        state = "the assistant's, beside an answer" if ends else "absent"
        raise Refusal(("messages", max(0, len(messages) - 1)), state, "end with the user's message")


def encode_lines(lines: Sequence[PromptLine], encoder: Encoder, path: Path | str) -> ExampleSet:
    """The examples of lines: one for each right answer.

    The cell of a line is its template, and the length of its longest answer rounded up to a power
    of two. A prompt and its answer that occur twice are refused: they are one observation.
    """
    bad, seen = _BadLines(path), set[tuple[bytes, int]]()
    answers_of_lines, keys = list[list[Example]](), list[list[Hashable]]()
    for line in lines:
        with bad.noted():
            answers, prompt_ids = _encode(line, encoder)
            copies = {(x.tokens.tobytes(), x.start) for x in answers}
            if copies & seen:
                raise CalibrateError(
                    f"{line.where} repeats a prompt and its answer; give each once"
                )
            seen |= copies
            answers_of_lines.append(answers)
            group_key = [] if line.group is None else [("group", line.group)]
            keys.append([("prompt", *prompt_ids), *group_key])
    bad.refuse()
    groups = _groups(keys, [len(answers) for answers in answers_of_lines])
    cells, examples = dict[Cell, int](), list[Example]()
    for i, (line, answers) in enumerate(zip(lines, answers_of_lines, strict=True)):
        longest = max(len(x.tokens) for x in answers)
        cell = Cell(line.template, 1 << (longest - 1).bit_length(), False)
        number = cells.setdefault(cell, len(cells))
        question = i if len(answers) > 1 else -1
        examples += [x._replace(cell=number, group=groups[i], question=question) for x in answers]
    return ExampleSet(tuple(cells), tuple(examples))


def _encode(line: PromptLine, encoder: Encoder) -> tuple[list[Example], list[int]]:
    """The answers of a line, and the ids of its prompt."""
    prompt, answers = line.prompt, line.answers
    try:
        if line.is_spelled and not answers:
            prompt, answer = last_turn(encoder.tokenizer, prompt)
            answers = [answer]
        elif not isinstance(prompt, str) and line.is_spelled:
            prompt = rendered(encoder.tokenizer, prompt, answers)
        pairs = encoder.pairs(prompt, answers) if line.is_spelled else [(prompt, answers[0])]
        prompt_ids = encoder.prompt_ids(prompt) if line.is_spelled else prompt
    except CalibrateError as failure:
        raise CalibrateError(f"{line.where}: {failure}") from failure
    return [encoder.join(line.where, *pair) for pair in pairs], prompt_ids


def _groups(keys: Sequence[Sequence[Hashable]], sizes: Sequence[int]) -> list[int]:
    """The number of each line's group; -1 of a line that is alone and has one answer.

    Lines that share a key are of one group, and so are those that others connect.
    """
    above, first = list(range(len(keys))), dict[Hashable, int]()

    def top(i: int) -> int:
        while above[i] != i:
            above[i] = i = above[above[i]]
        return i

    for i, keys_of_line in enumerate(keys):
        for key in keys_of_line:
            above[top(i)] = top(first.setdefault(key, i))
    tops = [top(i) for i in range(len(keys))]
    size = Counter[int]()
    for i, n in zip(tops, sizes, strict=True):
        size[i] += n
    number = {i: n for n, i in enumerate(dict.fromkeys(i for i in tops if size[i] > 1))}
    return [number.get(i, -1) for i in tops]
