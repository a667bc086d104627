"""Texts as token ids, within a model's context: prompts with answers."""

from typing import Any, NamedTuple

import numpy as np

from calibrate.errors import CalibrateError


class Encoded(NamedTuple):
    """A prompt with its answer."""

    tokens: np.ndarray  # (length,) int32
    start: int  # the first token of the answer


class Encoder(NamedTuple):
    """A tokenizer, and how many tokens fit."""

    tokenizer: Any  # of Transformers; None if all examples come as token ids
    context: int | None  # the most tokens that the model reads; None is any number
    vocabulary: int  # the number of tokens that it knows

    def pair(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        """Ids of a prompt, as the model would be given it, and of its answer.

        The answer is tokenized behind the prompt, so that it begins as it would in a text; where
        the two would share a token, by itself.
        """
        first, both = self._ids(prompt), self._ids(prompt + answer)
        if both[: len(first)] == first:
            return first, both[len(first) :]
        return first, list(self.tokenizer(answer, add_special_tokens=False)["input_ids"])

    def _ids(self, text: str) -> list[int]:
        ids = list(self.tokenizer(text, verbose=False)["input_ids"])
        end = self.tokenizer.eos_token_id
        return ids[:-1] if len(ids) > 1 and ids[-1] == end else ids  # some end every text

    def text(self, text: str) -> tuple[list[int], list[int]]:
        """What begins every text (nothing, for many tokenizers), and the ids of a text."""
        begin = self._ids("")
        begin = [] if begin == [self.tokenizer.eos_token_id] else begin
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return begin, list(ids)

    def join(self, where: str, prompt: list[int], answer: list[int]) -> Encoded:
        """A prompt and its answer, which errors name by `where`, as one example."""
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
        return Encoded(np.array([*prompt, *answer], np.int32), len(prompt))
