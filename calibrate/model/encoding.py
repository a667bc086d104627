"""Texts as token ids, within a model's context: prompts with answers."""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from calibrate.errors import CalibrateError, QualityError
from calibrate.files.examples import Cell

MOST_UNKNOWN = 0.1  # of the tokens of prompts, answers or a text


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
        return first, self.ids(answer)

    def _ids(self, text: str) -> list[int]:
        ids = self.ids(text, add_special_tokens=True)
        end = self.tokenizer.eos_token_id
        return ids[:-1] if len(ids) > 1 and ids[-1] == end else ids  # some end every text

    def ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text, or of a piece of one."""
        try:
            found = self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        except Exception as failure:  # of a word that a vocabulary without an unknown token lacks
            raise CalibrateError(
                f"the model's tokenizer does not know all of the text ({failure}); give other text"
            ) from failure
        return list(found["input_ids"])

    @property
    def unknown(self) -> str | None:
        """The token in place of what the tokenizer does not know; None if it has none.

        Tokenizers of bytes, which know every text, may name the token that begins or ends one.
        """
        model = getattr(getattr(self.tokenizer, "backend_tokenizer", None), "model", None)
        named, *ends = (getattr(self.tokenizer, f"{x}_token", None) for x in ("unk", "bos", "eos"))
        return getattr(model, "unk_token", None if named in ends else named)

    def check_known(self, source: str, made: Sequence[tuple[Cell, Encoded]]) -> None:
        """Warns of tokens that the tokenizer does not know; QualityError for more than 10 %."""
        if (unknown := self.unknown) is None:
            return
        token = self.tokenizer.convert_tokens_to_ids(unknown)
        parts = {"prompts of ": [x.tokens[: x.start] for cell, x in made if not cell.text],
                 "answers of ": [x.tokens[x.start :] for cell, x in made if not cell.text],
                 "": [x.tokens for cell, x in made if cell.text]}  # fmt: skip
        for part, tokens in parts.items():
            share = float(np.mean(np.concatenate(tokens) == token)) if tokens else 0.0
            said = f"{share:.1%} of the tokens of {part}{source} are unknown ({unknown})"
            if share > MOST_UNKNOWN:
                raise QualityError(
                    f"{said}, more than {MOST_UNKNOWN:.0%}; give text of a kind that the model's "
                    "tokenizer knows, or put the tokenizer of this model into its folder"
                )
            if share:
                warnings.warn(said, stacklevel=2)

    def begin(self) -> list[int]:
        """What begins every text; nothing, for many tokenizers."""
        begin = self._ids("")
        return [] if begin == [self.tokenizer.eos_token_id] else begin

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
