"""Tokenization of prompts with answers, for a model's context and vocabulary.

A prompt and its answer are tokenized as one text, as the model would read it, and split where the
answer begins. A token that also covers the end of the prompt belongs to the answer.
"""

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np

from calibrate.errors import CalibrateError, QualityError
from calibrate.evidence.estimate import per_cent
from calibrate.prompts.examples import Example, ExampleSet

MAX_UNKNOWN = 0.1  # share of the tokens of prompts, answers or a text
_PROBES = ("a", "1", ".")  # texts that show which tokens a tokenizer adds to every text


@dataclass(frozen=True, eq=False)
class Encoder:
    """A tokenizer with the limits of its model.

    Raises:
      CalibrateError: the tokenizer has no offsets, the characters that each token covers.
    """

    tokenizer: Any  # of Transformers; None if all examples are given as token ids
    context: int | None  # largest number of tokens that the model reads; None: no limit
    vocabulary: int  # number of token ids

    def __post_init__(self) -> None:
        if self.tokenizer is not None and not getattr(self.tokenizer, "is_fast", False):
            raise CalibrateError(
                f"{type(self.tokenizer).__name__} does not tell which characters its tokens stand "
                "for; put the model's tokenizer.json into its folder, or give prompts of token ids "
                "alone"
            )

    # A prompt with its answer

    def pair(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        """The ids of a prompt and of the answer that follows it.

        Tokens that the tokenizer puts before every text are added, unless the prompt begins with
        them; tokens that it puts after every text are not.

        Raises:
          CalibrateError: the tokenizer does not know a word, and has no token for such words.
        """
        _keep_spaces_in_offsets(self.tokenizer.backend_tokenizer.post_processor)
        options = {"add_special_tokens": False, "return_offsets_mapping": True}
        encoded = self._encode(prompt + answer, **options)
        ids, boundary = list(encoded["input_ids"]), len(prompt)
        ends = (end for _, end in encoded["offset_mapping"])
        start = next((i for i, end in enumerate(ends) if end > boundary), len(ids))
        return self._with_prefix(ids[:start]), ids[start:]

    def prompt_ids(self, prompt: str) -> list[int]:
        """The ids of a prompt without an answer; spaces at its end are ignored."""
        return self._with_prefix(self.ids(prompt.rstrip()))

    def join(self, where: str, prompt: list[int], answer: list[int], cell: int = 0) -> Example:
        """Joins a prompt and its answer into an example.

        Args:
          where: names the example in errors.
        Raises:
          CalibrateError: either is empty, an id is not in the vocabulary, or both together are
            longer than the context.
        """
        if not prompt or not answer:
            raise CalibrateError(f"{where}: a prompt and an answer need a token each")
        if wrong := [i for i in (*prompt, *answer) if not 0 <= i < self.vocabulary]:
            raise CalibrateError(
                f"{where} has token {wrong[0]}; this model knows 0 to {self.vocabulary - 1}"
            )
        if self.context is not None and len(prompt) + len(answer) > self.context:
            raise CalibrateError(
                f"{where}: prompt and answer have {len(prompt):,} + {len(answer):,} tokens, and "
                f"the model's context is {self.context:,}; shorten them"
            )
        return Example(np.array([*prompt, *answer], np.int32), len(prompt), cell)

    # Text

    def ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text."""
        return list(self._encode(text, add_special_tokens=add_special_tokens)["input_ids"])

    def ids_without_prefix(self, text: str) -> list[int]:
        """The ids of a text without the tokens that begin every text."""
        ids, prefix = self.ids(text), self.prefix
        return ids[len(prefix) :] if ids[: len(prefix)] == prefix else ids

    def _with_prefix(self, ids: list[int]) -> list[int]:
        """Ids with the tokens that begin every text, which are not repeated."""
        prefix = self.prefix
        return ids if ids[: len(prefix)] == prefix else [*prefix, *ids]

    def _encode(self, text: str, **options: bool) -> Any:
        try:
            return self.tokenizer(text, verbose=False, **options)
        except Exception as failure:  # a vocabulary without an unknown token lacks a word
            raise CalibrateError(
                f"the model's tokenizer does not know all of the text ({failure}); give other text"
            ) from failure

    @cached_property
    def prefix(self) -> list[int]:
        """The ids that begin every text, such as that of a beginning-of-sequence token."""
        around = self.ids("", add_special_tokens=True)  # before a text and after it
        for text in _PROBES if around else ():
            try:
                alone, whole = self.ids(text), self.ids(text, add_special_tokens=True)
            except CalibrateError:  # the vocabulary lacks it
                continue
            for n in range(len(around), -1, -1) if alone else ():
                if whole == [*around[:n], *alone, *around[n:]]:
                    return around[:n]
        ends = {getattr(self.tokenizer, f"{x}_token_id", None) for x in ("eos", "sep")}
        return [i for i in around if i not in ends]

    # Unknown tokens

    @property
    def unknown(self) -> str | None:
        """The token for unknown text; None if the tokenizer has none.

        Tokenizers of bytes, which know every text, may name their first or last token as unknown.
        """
        named, *ends = (getattr(self.tokenizer, f"{x}_token", None) for x in ("unk", "bos", "eos"))
        model = self.tokenizer.backend_tokenizer.model
        return getattr(model, "unk_token", None if named in ends else named)

    def require_known(self, source: str, examples: ExampleSet) -> None:
        """Raises QualityError if more than MAX_UNKNOWN of the tokens of examples are unknown.

        Answers are counted for themselves: they have few tokens.

        Args:
          source: names the examples in the message.
        """
        if self.tokenizer is None or (unknown := self.unknown) is None:
            return
        unknown_id = self.tokenizer.convert_tokens_to_ids(unknown)
        prompts = [x.tokens[: x.start] == unknown_id for x in examples.examples]
        answers = [x.tokens[x.start :] == unknown_id for x in examples.examples]
        share = max(float(np.mean(np.concatenate(x))) for x in (prompts, answers))
        if share > MAX_UNKNOWN:
            raise QualityError(
                f"{per_cent(share)} of the tokens of {source} are unknown ({unknown}), more than "
                f"{per_cent(MAX_UNKNOWN, 0)}; give text of a kind that the tokenizer of the model "
                "knows, or put the model's own into its folder"
            )


def _keep_spaces_in_offsets(post_processor: Any) -> None:
    """Makes the offsets of byte-level tokens include their spaces, as other tokenizers do.

    No id changes.
    """
    if getattr(post_processor, "trim_offsets", False):
        post_processor.trim_offsets = False
    if hasattr(post_processor, "__getitem__"):  # a sequence of processors, which has no length
        with suppress(IndexError):
            for i in count():
                _keep_spaces_in_offsets(post_processor[i])
