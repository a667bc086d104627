"""Tokenization of prompts with answers, for a model's context and vocabulary.

A prompt and its answer are tokenized as one text, as the model would read it, and split where the
answer begins. A token that also covers the end of the prompt belongs to the answer.
"""

import unicodedata
import warnings
from collections.abc import Sequence
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
_SHOWN = 20  # characters of a text in a message


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
          CalibrateError: the ids decode to another text, or do not show where the answer begins.
        """
        text, boundary = prompt + answer, len(prompt)
        ids, spans = self._ids_and_spans(text)
        decoded = self._decode(ids)
        if without_spaces(decoded) != without_spaces(text):
            self._require_same(text, decoded, ids)
            # The tokenizer may have joined a combining mark to the letter before it.
            while 0 < boundary < len(text) and unicodedata.combining(text[boundary]):
                boundary -= 1
        start = next((i for i, (_, end) in enumerate(spans) if end > boundary), len(ids))
        if start < len(ids) and spans[start][0] < boundary and ids[start] == self._unknown_id:
            raise CalibrateError(
                "the tokenizer does not know the word that the prompt ends in and the answer goes "
                "on with; put the space that belongs between them into the answer, or give other "
                "text"
            )
        self._require_prompt(prompt, ids[:start])
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

    def _ids_and_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of a text, and the first character and the end of each token."""
        _keep_spaces_in_offsets(self.tokenizer.backend_tokenizer.post_processor)
        encoded = self._encode(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), list(encoded["offset_mapping"])

    def _require_same(self, text: str, decoded: str, ids: list[int]) -> None:
        """Raises CalibrateError if ids decode to another text.

        Allowed losses are spaces, case, marks on letters, the spelling of compatible characters,
        and words that the tokenizer does not know.
        """
        expected, actual = _normalize(text), _normalize(decoded)
        if self._unknown_id in ids:
            rest = iter(expected)
            known = _normalize(self._decode([i for i in ids if i != self._unknown_id]))
            if all(letter in rest for letter in known):
                return
        if expected != actual:
            first = n_shared(expected, actual)
            part = slice(first, first + _SHOWN)
            raise CalibrateError(
                f"the tokenizer makes {actual[part]!r} of {expected[part]!r}: "
                "another text would be scored; give text that it keeps"
            )

    def _require_prompt(self, prompt: str, ids: list[int]) -> None:
        """Raises CalibrateError unless the prompt begins with the text of these ids."""
        decoded = self._decode(ids).rstrip("\ufffd")  # the first bytes of a character
        if prompt.startswith(decoded) or self._unknown_id in ids:
            return
        if not _normalize(prompt).startswith(_normalize(decoded)):
            raise CalibrateError(
                "the tokenizer does not tell where the answer begins; give prompt_ids and "
                "answer_ids"
            )

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

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

    @cached_property
    def _unknown_id(self) -> int | None:
        unknown = self.unknown
        return None if unknown is None else int(self.tokenizer.convert_tokens_to_ids(unknown))

    def check_known(self, source: str, examples: ExampleSet) -> None:
        """Warns of unknown tokens in examples.

        Args:
          source: names the examples in messages.
        Raises:
          QualityError: more than MAX_UNKNOWN of the tokens are unknown.
        """
        if self.tokenizer is None or (unknown := self.unknown) is None:
            return
        windows = [x.tokens for x in examples.examples if examples.is_text(x)]
        answers = [x for x in examples.examples if not examples.is_text(x)]
        parts = {
            "prompts of ": [x.tokens[: x.start] for x in answers],
            "answers of ": [x.tokens[x.start :] for x in answers],
            "": windows,
        }
        for part, tokens in parts.items():
            share = float(np.mean(np.concatenate(tokens) == self._unknown_id)) if tokens else 0.0
            message = f"{per_cent(share)} of the tokens of {part}{source} are unknown ({unknown})"
            if share > MAX_UNKNOWN:
                raise QualityError(
                    f"{message}, more than {per_cent(MAX_UNKNOWN, 0)}; give text of a kind that "
                    "the tokenizer of the model knows, or put the model's own into its folder"
                )
            if share:
                warnings.warn(message, stacklevel=2)


def n_shared(first: Sequence[Any], second: Sequence[Any]) -> int:
    """The length of the common prefix of two sequences."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def without_spaces(text: str) -> str:
    """A text without its spaces and line ends."""
    return "".join(text.split())


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


def _normalize(text: str) -> str:
    """The characters that every tokenizer keeps, in one spelling."""
    plain = unicodedata.normalize("NFKD", text).casefold().replace("\u2581", "")
    return "".join(c for c in plain if unicodedata.category(c)[0] not in "MCZ")
