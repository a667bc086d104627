"""Prompts of messages, as text by the model's own chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from calibrate.errors import CalibrateError

_DATE = "26 Jul 2024"  # for templates that take one: today's would make other examples each day
Messages = Sequence[Mapping[str, str]]  # role and content of each


def rendered(tokenizer: Any, messages: Messages) -> str:
    """The text of a prompt of messages, by the model's own chat template.

    Raises:
      CalibrateError: the tokenizer has no chat template, or that does not take the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise CalibrateError(
            "the model's tokenizer has no chat template for messages; give as prompt what "
            "tokenizer.apply_chat_template(messages, tokenize=False, "
            "add_generation_prompt=True) returns of a tokenizer that has one"
        )
    return _templated(tokenizer, messages, add_generation_prompt=True)


def last_turn(tokenizer: Any, messages: Messages) -> tuple[str, str]:
    """The prompt and the answer in messages whose last is the assistant's.

    The answer is that message as the template writes it, up to the end of its content.
    """
    prompt, content = rendered(tokenizer, messages[:-1]), messages[-1]["content"].strip()
    whole = _templated(tokenizer, messages, add_generation_prompt=False)
    answer = whole.removeprefix(prompt)
    if not whole.startswith(prompt) or not answer.lstrip().startswith(content) or not content:
        raise CalibrateError(
            "the chat template does not write the last message right behind the prompt that "
            "the others make; give it as answer"
        )
    return prompt, answer[: answer.index(content) + len(content)]


def _templated(tokenizer: Any, messages: Messages, **options: bool) -> str:
    try:
        text: str = tokenizer.apply_chat_template(
            [*messages], tokenize=False, date_string=_DATE, **options
        )
    except Exception as failure:  # templates refuse roles, or an order of them
        raise CalibrateError(
            f"the model's chat template does not take the messages ({failure}); change them"
        ) from failure
    return text
