"""A file of prompts: each line is a JSON object with a prompt and its right answer.

    {"prompt": "The capital of France is", "answer": " Paris"}
    {"prompt": "The capital of the Netherlands is", "answers": [" Amsterdam", " The Hague"]}
    {"messages": [{"role": "user", "content": "Name a colour."}], "answer": "Red"}
    {"prompt_ids": [1, 450, 7483], "answer_ids": [3681], "template": "capitals", "group": 7}

Any of several `answers` is right. Messages are rendered by the model's chat template; without an
answer, the last message must be the assistant's, and is the answer. Lines with the same `group` or
the same prompt are in one split.
"""

import codecs
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from msgspec import UNSET, Meta, Struct, UnsetType

from calibrate.errors import CalibrateError, CoefficientsError
from calibrate.prompts.encoding import Encoder, without_spaces
from calibrate.prompts.examples import Cell, Example, ExampleSet
from calibrate.storage.fingerprints import sha256_of
from calibrate.storage.npz import read_bytes
from calibrate.storage.strict_json import PRINTABLE, UNICODE, PrintableText, convert, parse

DEFAULT_TEMPLATE = "prompts"  # of lines that name none
_MAX_FILE_BYTES = 1 << 26
_MAX_LINE_BYTES = 1 << 20  # a tokenizer takes 150 times as much memory
_MAX_RENDERED = 1 << 21  # characters of messages as the chat template writes them
_MAX_SHOWN = 10  # bad lines in a message
_MAX_STATE = 150  # characters on each bad line
_MAX_END = 60  # characters of the end of a rendered text in a message
_MAX_ANSWERS = 100
_ASSISTANT = "assistant"
_UNCHANGED = ("system", "user")  # roles whose content the prompt must have; others may be shortened
_DATE = "26 Jul 2024"  # for templates that write the date: examples must not change from day to day
_AS_PROMPT = "give as prompt the text that the model should read, in place of messages"
Messages = Sequence[Mapping[str, str]]  # role and content of each

# The format of a line


_Name = Annotated[str, Meta(min_length=1, max_length=100, pattern=PRINTABLE)]
_Words = Annotated[str, Meta(min_length=1, pattern=UNICODE)]
_TokenIds = list[Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]]
_Group = PrintableText | Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _Message(Struct, forbid_unknown_fields=True):
    """A message; the chat template is given role and content."""

    role: _Name
    content: Annotated[str, Meta(pattern=UNICODE)]


class _LineFields(Struct, forbid_unknown_fields=True):
    """The fields that a line may have."""

    prompt: _Words | UnsetType = UNSET
    answer: _Words | UnsetType = UNSET
    answers: Annotated[list[_Words], Meta(max_length=_MAX_ANSWERS)] | UnsetType = UNSET
    messages: list[_Message] | UnsetType = UNSET
    prompt_ids: _TokenIds | UnsetType = UNSET
    answer_ids: _TokenIds | UnsetType = UNSET
    template: _Name | UnsetType = UNSET
    group: _Group | UnsetType = UNSET


_FIELDS = (  # the combinations that a line may have, beside template and group
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


class PromptLine(NamedTuple):
    """A line of a file of prompts: a prompt and its right answers."""

    where: str  # "line 3"
    template: str
    prompt: Any  # a text, messages or token ids
    answers: list[Any]  # texts or token ids; none if the last message is the answer
    group: str | int | None = None

    @property
    def is_text(self) -> bool:
        """True if the line is text or messages, which need a tokenizer."""
        return isinstance(self.prompt, str) or isinstance(self.prompt[0], dict)


def read_prompts(path: Path) -> tuple[list[PromptLine], str]:
    """Reads a file of prompts; returns its lines and its digest.

    Raises:
      CalibrateError: the file cannot be read or has no line, or lines are wrong.
    """
    data = read_bytes(path, _MAX_FILE_BYTES, "split it")
    lines, errors = list[PromptLine](), list[str]()
    for number, text in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if text.strip():
            try:
                lines.append(_parse_line(text, f"line {number}"))
            except CalibrateError as failure:
                errors.append(str(failure))
    _raise_errors(path, errors)
    if not lines:
        raise CalibrateError(f"{path} has no line; {_REMEDY}")
    return lines, sha256_of(data)


def _parse_line(text: bytes, where: str) -> PromptLine:
    if len(text) > _MAX_LINE_BYTES:
        raise CalibrateError(
            f"{where} has {len(text):,} bytes, more than the limit of {_MAX_LINE_BYTES:,}; "
            "shorten it"
        )
    try:
        fields: dict[str, Any] = parse(text, "write one JSON object a line", "the line")
        convert(fields, _LineFields, _REMEDY, "the line")
        template, group = fields.pop("template", DEFAULT_TEMPLATE), fields.pop("group", None)
        _check_fields(fields)
    except CoefficientsError as failure:
        raise CalibrateError(f"{where}: {failure}") from failure
    prompt = next(fields[name] for name in ("prompt", "messages", "prompt_ids") if name in fields)
    answers = fields.get("answers", [fields[x] for x in ("answer", "answer_ids") if x in fields])
    if not all([prompt, *answers]):
        raise CalibrateError(f"{where}: a prompt and an answer need a token each")
    return PromptLine(where, template, prompt, answers, group)


def _check_fields(fields: dict[str, Any]) -> None:
    """Raises CoefficientsError unless the fields of a line are a prompt with its answer."""
    if fields.keys() not in _FIELDS:
        raise CoefficientsError(f"the line is not a prompt with its answer; {_REMEDY}")
    answers, messages = fields.get("answers"), fields.get("messages")
    if answers is not None and len(set(answers)) < max(1, len(answers)):
        raise CoefficientsError("answers is empty, or has one twice; give each right answer once")
    if messages is None:
        return
    ends_with_answer = bool(messages) and messages[-1]["role"] == _ASSISTANT
    has_answer = len(fields) > 1
    if not has_answer and not (ends_with_answer and len(messages) > 1):
        raise CoefficientsError(
            "the line is messages without an answer; add it, or the assistant's message"
        )
    if has_answer and (ends_with_answer or not messages):
        state = "the assistant's, beside an answer" if ends_with_answer else "absent"
        place = f"messages[{max(0, len(messages) - 1)}]"
        raise CoefficientsError(f"{place} is {state}; end with the user's message")


def _raise_errors(path: Path | str, errors: Sequence[str]) -> None:
    """Raises CalibrateError if lines have errors: how many, and the first ones by remedy."""
    if len(errors) == 1:
        raise CalibrateError(f"{path}, {errors[0]}")
    if not errors:
        return
    states_by_remedy = dict[str, list[str]]()
    for message in errors[:_MAX_SHOWN]:
        state, _, remedy = message.rpartition("; ")
        short = state if len(state) <= _MAX_STATE else f"{state[:_MAX_STATE]}..."
        states_by_remedy.setdefault(remedy, []).append(short)
    some = ", among them" if len(errors) > _MAX_SHOWN else ""
    shown = ". ".join(f"{'; '.join(x)}; {remedy}" for remedy, x in states_by_remedy.items())
    raise CalibrateError(f"{path} has {len(errors):,} bad lines{some}: {shown}")


# Lines as examples


def encode_lines(lines: Sequence[PromptLine], encoder: Encoder, path: Path | str) -> ExampleSet:
    """Makes an example of each right answer of each line.

    The cell of a line is its template at the length of its longest answer, rounded up to a power of
    two.

    Args:
      path: names the file in errors.
    Raises:
      CalibrateError: a line does not suit the tokenizer or the context, or repeats a prompt with
        its answer: these would be one observation in two splits.
    """
    seen, errors = set[tuple[bytes, int]](), list[str]()
    answers_by_line, keys = list[list[Example]](), list[list[Hashable]]()
    for line in lines:
        try:
            answers, prompt_ids = _encode_line(line, encoder)
        except CalibrateError as failure:
            errors.append(str(failure))
            continue
        copies = {(x.tokens.tobytes(), x.start) for x in answers}
        if copies & seen:
            errors.append(f"{line.where} repeats a prompt and its answer; give each once")
        seen |= copies
        answers_by_line.append(answers)
        group_key = [] if line.group is None else [("group", line.group)]
        keys.append([("prompt", *prompt_ids), *group_key])
    _raise_errors(path, errors)
    groups = _number_groups(keys, [len(answers) for answers in answers_by_line])
    cells, examples = dict[Cell, int](), list[Example]()
    for i, (line, answers) in enumerate(zip(lines, answers_by_line, strict=True)):
        longest = max(len(x.tokens) for x in answers)
        cell = Cell(line.template, 1 << (longest - 1).bit_length(), False)
        number = cells.setdefault(cell, len(cells))
        question = i if len(answers) > 1 else -1
        examples += [x._replace(cell=number, group=groups[i], question=question) for x in answers]
    return ExampleSet(tuple(cells), tuple(examples))


def _encode_line(line: PromptLine, encoder: Encoder) -> tuple[list[Example], list[int]]:
    """An example of each answer of a line, and the ids of its prompt."""
    if not line.is_text:
        return [encoder.join(line.where, line.prompt, line.answers[0])], line.prompt
    prompt, answers = line.prompt, line.answers
    try:
        if not isinstance(prompt, str) and answers:
            prompt = render_messages(encoder.tokenizer, prompt, answers)
        elif not isinstance(prompt, str):
            prompt, answer = render_conversation(encoder.tokenizer, prompt)
            answers = [answer]
        pairs, prompt_ids = encoder.pairs(prompt, answers), encoder.prompt_ids(prompt)
    except CalibrateError as failure:
        raise CalibrateError(f"{line.where}: {failure}") from failure
    return [encoder.join(line.where, *pair) for pair in pairs], prompt_ids


def _number_groups(keys: Sequence[Sequence[Hashable]], sizes: Sequence[int]) -> list[int]:
    """The number of each line's group; -1 for a line that is alone and has one answer.

    Lines are in a group if they share a key, or are connected by lines that do.

    Args:
      keys: of each line.
      sizes: the number of answers of each line.
    """
    parent, first_line = list(range(len(keys))), dict[Hashable, int]()

    def find_root(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    for i, keys_of_line in enumerate(keys):
        for key in keys_of_line:
            parent[find_root(i)] = find_root(first_line.setdefault(key, i))
    roots = [find_root(i) for i in range(len(keys))]
    n_answers = Counter[int]()
    for root, n in zip(roots, sizes, strict=True):
        n_answers[root] += n
    several = dict.fromkeys(root for root in roots if n_answers[root] > 1)
    number = {root: i for i, root in enumerate(several)}
    return [number.get(root, -1) for root in roots]


# Messages by the model's chat template
#
# A template may write more than the messages: it opens a <think> block before the answer, closes
# the turn, or reads the content as a list of parts. The rendered text is therefore compared with
# the messages, and with the conversation that has the answer as the assistant's message.


def render_messages(tokenizer: Any, messages: Messages, answers: Sequence[str] = ()) -> str:
    """Renders messages as the text of a prompt, by the model's chat template.

    Args:
      tokenizer: of Transformers.
      answers: right answers, each of which must directly follow the prompt.
    Raises:
      CalibrateError: there is no chat template, it refuses the messages or leaves out the content
        of one, or it writes an answer elsewhere than directly behind the prompt.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise CalibrateError(
            "the model's tokenizer has no chat template for messages; give as prompt what "
            "tokenizer.apply_chat_template(messages, tokenize=False, "
            "add_generation_prompt=True) returns of a tokenizer that has one"
        )
    prompt = _apply_template(tokenizer, messages, add_generation_prompt=True)
    for message in messages:
        content = message["content"]
        if message["role"] in _UNCHANGED and without_spaces(content) not in without_spaces(prompt):
            raise CalibrateError(
                f"the chat template writes {_shorten_start(prompt)}, without the message "
                f"{content[:_MAX_END]!r}; {_AS_PROMPT}"
            )
    for answer in answers:
        whole = _render_with_answer(tokenizer, messages, answer)
        if not without_spaces(whole).startswith(without_spaces(prompt + answer)):
            raise _misplaced_answer(prompt + answer, whole)
    return prompt


def render_conversation(tokenizer: Any, messages: Messages) -> tuple[str, str]:
    """Renders messages whose last is the assistant's, as a prompt and its answer.

    The answer is the last message as the template writes it, up to the end of its content.

    Raises:
      CalibrateError: as `render_messages`.
    """
    prompt = render_messages(tokenizer, messages[:-1])
    content = messages[-1]["content"].strip()
    whole = _render_with_answer(tokenizer, messages[:-1], messages[-1]["content"])
    answer = whole.removeprefix(prompt)
    if not whole.startswith(prompt) or not answer.lstrip().startswith(content) or not content:
        raise _misplaced_answer(prompt + content, whole)
    return prompt, answer[: answer.index(content) + len(content)]


def _render_with_answer(tokenizer: Any, messages: Messages, answer: str) -> str:
    message = {"role": _ASSISTANT, "content": answer}
    return _apply_template(tokenizer, [*messages, message], add_generation_prompt=False)


def _apply_template(tokenizer: Any, messages: Messages, add_generation_prompt: bool) -> str:
    try:
        text: str = tokenizer.apply_chat_template(
            [*messages],
            tokenize=False,
            date_string=_DATE,
            add_generation_prompt=add_generation_prompt,
        )
    except Exception as failure:  # templates may refuse a role, or an order of roles
        raise CalibrateError(
            f"the model's chat template does not take the messages ({failure}); change them"
        ) from failure
    if len(text) > _MAX_RENDERED:
        raise CalibrateError(
            f"the model's chat template writes {len(text):,} characters, more than the limit of "
            f"{_MAX_RENDERED:,}; {_AS_PROMPT}"
        )
    return text


def _misplaced_answer(text: str, whole: str) -> CalibrateError:
    return CalibrateError(
        f"the chat template writes {_shorten_start(text)} as prompt and answer, but "
        f"{_shorten_start(whole)} as a conversation with that answer; {_AS_PROMPT}"
    )


def _shorten_start(text: str) -> str:
    """The end of a text, quoted."""
    return repr(text) if len(text) <= _MAX_END else f"...{text[-_MAX_END:]!r}"
