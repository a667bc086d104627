"""Prompts of messages, as text by the model's own chat template.

A template may write something else than the question with the answer behind it: it opens a
`<think>` block before the answer, closes the turn, or reads the content as a list of parts. So the
rendered text is compared with the messages, and with the same conversation as the template writes
it with the answer as the assistant's message.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from calibrate.errors import CalibrateError
from calibrate.prompts.encoding import without_spaces

_DATE = "26 Jul 2024"  # for templates that take one: today's would make other examples each day
_MAX_TEXT = 1 << 21  # characters: a line of a file has half as many, and a tokenizer takes long
_SHOWN = 60  # characters at the end of a rendered text in a message
_KEPT = ("system", "user")  # roles whose content a prompt has as it is; others may be shortened
_AS_PROMPT = "give as prompt the text that the model should read, in place of messages"
Messages = Sequence[Mapping[str, str]]  # role and content of each


def rendered(tokenizer: Any, messages: Messages, answers: Sequence[str] = ()) -> str:
    """The text of a prompt of messages, by the model's own chat template.

    Args:
      answers: right answers, each of which is written right behind the prompt.
    Raises:
      CalibrateError: the tokenizer has no chat template, that does not take the messages, it leaves
        out a message's content, or it writes an answer elsewhere than right behind the prompt.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise CalibrateError(
            "the model's tokenizer has no chat template for messages; give as prompt what "
            "tokenizer.apply_chat_template(messages, tokenize=False, "
            "add_generation_prompt=True) returns of a tokenizer that has one"
        )
    prompt = _templated(tokenizer, messages, add_generation_prompt=True)
    for message in messages:
        content = message["content"]
        if message["role"] in _KEPT and without_spaces(content) not in without_spaces(prompt):
            raise CalibrateError(
                f"the chat template writes {_end(prompt)}, without the message "
                f"{content[:_SHOWN]!r}; {_AS_PROMPT}"
            )
    for answer in answers:
        whole = _whole(tokenizer, messages, answer)
        if not without_spaces(whole).startswith(without_spaces(prompt + answer)):
            raise _misplaced(prompt + answer, whole)
    return prompt


def last_turn(tokenizer: Any, messages: Messages) -> tuple[str, str]:
    """The prompt and the answer in messages whose last is the assistant's.

    The answer is that message as the template writes it, up to the end of its content.

    Raises:
      CalibrateError: as of `rendered`.
    """
    prompt, content = rendered(tokenizer, messages[:-1]), messages[-1]["content"].strip()
    whole = _whole(tokenizer, messages[:-1], messages[-1]["content"])
    answer = whole.removeprefix(prompt)
    if not whole.startswith(prompt) or not answer.lstrip().startswith(content) or not content:
        raise _misplaced(prompt + content, whole)
    return prompt, answer[: answer.index(content) + len(content)]


def _whole(tokenizer: Any, messages: Messages, answer: str) -> str:
    """The conversation with an answer as the assistant's message."""
    message = {"role": "assistant", "content": answer}
    return _templated(tokenizer, [*messages, message], add_generation_prompt=False)


def _misplaced(text: str, whole: str) -> CalibrateError:
    """The error for an answer that the template does not write right behind the prompt."""
    return CalibrateError(
        f"the chat template writes {_end(text)} as prompt and answer, but {_end(whole)} as a "
        f"conversation with that answer; {_AS_PROMPT}"
    )


def _end(text: str) -> str:
    """The end of a text, as a message shows it."""
    return repr(text) if len(text) <= _SHOWN else f"...{text[-_SHOWN:]!r}"


def _templated(tokenizer: Any, messages: Messages, **options: bool) -> str:
    try:
        text: str = tokenizer.apply_chat_template(
            [*messages], tokenize=False, date_string=_DATE, **options
        )
    except Exception as failure:  # templates refuse roles, or an order of them
        raise CalibrateError(
            f"the model's chat template does not take the messages ({failure}); change them"
        ) from failure
    if len(text) > _MAX_TEXT:
        raise CalibrateError(
            f"the model's chat template writes {len(text):,} characters, more than the limit of "
            f"{_MAX_TEXT:,}; {_AS_PROMPT}"
        )
    return text
