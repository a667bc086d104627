"""Texts as token ids, within a model's context: prompts with answers.

A prompt and its answer are tokenized as one text, as the model would be given it, and split where
the answer begins. A token that holds the end of the prompt as well belongs to the answer.
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

from calibrate.datasets.examples import Example, ExampleSet
from calibrate.errors import CalibrateError, QualityError

MAX_UNKNOWN = 0.1  # of the tokens of prompts, answers or a text
_PROBES = ("a", "1", ".")  # texts that show what a tokenizer puts around every text
_SHOWN = 20  # characters of a text in a message


@dataclass(frozen=True, eq=False)
class Encoder:
    """A tokenizer, and how many tokens fit.

    Raises:
      CalibrateError: the tokenizer does not tell which characters its tokens stand for.
    """

    tokenizer: Any  # of Transformers; None if all examples come as token ids
    context: int | None  # the most tokens that the model reads; None is any number
    vocabulary: int  # the number of tokens that it knows

    def __post_init__(self) -> None:
        if self.tokenizer is not None and not getattr(self.tokenizer, "is_fast", False):
            raise CalibrateError(
                f"{type(self.tokenizer).__name__} does not tell which characters its tokens stand "
                "for; put the model's tokenizer.json into its folder, or give prompts of token ids "
                "alone"
            )

    def pair(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        """Ids of a prompt, as the model would be given it, and of its answer behind it.

        The tokens that the tokenizer begins every text with come first, unless the prompt has them;
        those that it ends every text with are left out, unless they are written.

        Raises:
          CalibrateError: the ids stand for another text, or do not show where the answer begins.
        """
        text, first = prompt + answer, len(prompt)
        ids, spans = self._ids_and_spans(text)
        decoded = self._decoded(ids)
        if without_spaces(decoded) != without_spaces(text):
            self._require_same(text, decoded, ids)
            while 0 < first < len(text) and unicodedata.combining(text[first]):
                first -= 1  # the tokenizer may have joined a mark to its letter
        start = next((i for i, (_, end) in enumerate(spans) if end > first), len(ids))
        if start < len(ids) and spans[start][0] < first and ids[start] == self._unknown_id:
            raise CalibrateError(
                "the tokenizer does not know the word that the prompt ends in and the answer goes "
                "on with; put the space that belongs between them into the answer, or give other "
                "text"
            )
        self._require_prompt(prompt, ids[:start])
        return self._begun(ids[:start]), ids[start:]

    def pairs(self, prompt: str, answers: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """The same of several answers to one prompt, any of which is right.

        All continue the same tokens: the prompt ends where it does for the answer that shares a
        token with most of it. An answer whose tokens begin with another answer is left out, as it
        is right only where the shorter one is.
        """
        pairs = [self.pair(prompt, answer) for answer in answers]
        texts = list(dict.fromkeys((*before, *behind) for before, behind in pairs))
        start = min(len(before) for before, _ in pairs)
        start = min([start, *(n_shared(texts[0], text) for text in texts[1:])])
        kept = [x for x in texts if not any(x != y and x[: len(y)] == y for y in texts)]
        return [(list(x[:start]), list(x[start:])) for x in kept]

    def prompt_ids(self, prompt: str) -> list[int]:
        """The ids of a prompt without an answer; spaces at its end do not count."""
        return self._begun(self.ids(prompt.rstrip()))

    def _begun(self, ids: list[int]) -> list[int]:
        """Ids behind what begins every text, which is not repeated."""
        begin = self.begin()
        return ids if ids[: len(begin)] == begin else [*begin, *ids]

    def _ids_and_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of a text, and the characters that each stands for: the first, and their end."""
        _keep_spaces_in_offsets(self.tokenizer.backend_tokenizer.post_processor)
        encoded = self._encoded(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), list(encoded["offset_mapping"])

    def _require_same(self, text: str, decoded: str, ids: list[int]) -> None:
        """Raises CalibrateError unless a text comes back from its ids, but for what is lossy.

        Spaces, case, marks on letters and compatible characters may be lost, and words that the
        tokenizer does not know.
        """
        expected, given = _letters(text), _letters(decoded)
        if self._unknown_id in ids:
            rest = iter(expected)
            known = _letters(self._decoded([i for i in ids if i != self._unknown_id]))
            if all(letter in rest for letter in known):
                return
        if expected != given:
            first = n_shared(expected, given)
            part = slice(first, first + _SHOWN)
            raise CalibrateError(
                f"the tokenizer makes {given[part]!r} of {expected[part]!r}: "
                "another text would be scored; give text that it keeps"
            )

    def _require_prompt(self, prompt: str, ids: list[int]) -> None:
        """Raises CalibrateError if ids have more than a part of a prompt."""
        decoded = self._decoded(ids).rstrip("\ufffd")  # of a character that is not whole
        if prompt.startswith(decoded) or self._unknown_id in ids:
            return
        if not _letters(prompt).startswith(_letters(decoded)):
            raise CalibrateError(
                "the tokenizer does not tell where the answer begins; give prompt_ids and "
                "answer_ids"
            )

    def _decoded(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text, or of a piece of one."""
        return list(self._encoded(text, add_special_tokens=add_special_tokens)["input_ids"])

    def ids_within(self, piece: str) -> list[int]:
        """The ids of a piece of a text that is cut before a space, as they are within the text."""
        return self.ids_behind(piece.removeprefix(" ") if self._doubles_space else piece)

    def ids_behind(self, text: str) -> list[int]:
        """The ids of a text behind what begins every text, which it may begin with itself."""
        ids, begin = self.ids(text), self.begin()
        return ids[len(begin) :] if ids[: len(begin)] == begin else ids

    @cached_property
    def _doubles_space(self) -> bool:
        """True if a text that begins with a space gets another one before it."""
        for word in _PROBES:
            with suppress(CalibrateError):  # it is not in the vocabulary
                alone, both = self.ids(word), self.ids(f"{word} {word}")
                return both == 2 * alone != [*alone, *self.ids(f" {word}")]
        return False

    def _encoded(self, text: str, **options: bool) -> Any:
        try:
            return self.tokenizer(text, verbose=False, **options)
        except Exception as failure:  # of a word that a vocabulary without an unknown token lacks
            raise CalibrateError(
                f"the model's tokenizer does not know all of the text ({failure}); give other text"
            ) from failure

    @property
    def unknown(self) -> str | None:
        """The token in place of what the tokenizer does not know; None if it has none.

        Tokenizers of bytes, which know every text, may name the token that begins or ends one.
        """
        named, *ends = (getattr(self.tokenizer, f"{x}_token", None) for x in ("unk", "bos", "eos"))
        model = self.tokenizer.backend_tokenizer.model
        return getattr(model, "unk_token", None if named in ends else named)

    @cached_property
    def _unknown_id(self) -> int | None:
        unknown = self.unknown
        return None if unknown is None else int(self.tokenizer.convert_tokens_to_ids(unknown))

    def check_known(self, source: str, examples: ExampleSet) -> None:
        """Warns of tokens that the tokenizer does not know; QualityError for more than 10 %."""
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
            message = f"{share:.1%} of the tokens of {part}{source} are unknown ({unknown})"
            if share > MAX_UNKNOWN:
                raise QualityError(
                    f"{message}, more than {MAX_UNKNOWN:.0%}; give text of a kind that the model's "
                    "tokenizer knows, or put the tokenizer of this model into its folder"
                )
            if share:
                warnings.warn(message, stacklevel=2)

    def begin(self) -> list[int]:
        """The ids that begin every text; none, for many tokenizers."""
        return list(self._begin)

    @cached_property
    def _begin(self) -> list[int]:
        """The ids before those of a text, by what stands around one: it may be ended, too."""
        around = self.ids("", add_special_tokens=True)
        for text in _PROBES if around else ():
            try:
                alone, whole = self.ids(text), self.ids(text, add_special_tokens=True)
            except CalibrateError:  # it is not in the vocabulary
                continue
            for n in range(len(around), -1, -1) if alone else ():
                if whole == [*around[:n], *alone, *around[n:]]:
                    return around[:n]
        ends = {getattr(self.tokenizer, f"{x}_token_id", None) for x in ("eos", "sep")}
        return [i for i in around if i not in ends]

    def join(self, where: str, prompt: list[int], answer: list[int], cell: int = 0) -> Example:
        """A prompt and its answer, which errors name by `where`, as one example of a cell."""
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


def n_shared(first: Sequence[Any], second: Sequence[Any]) -> int:
    """The length of the common prefix of two sequences."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _keep_spaces_in_offsets(post_processor: Any) -> None:
    """Makes the offsets of tokens of bytes cover their spaces, as others do; no id changes."""
    if getattr(post_processor, "trim_offsets", False):
        post_processor.trim_offsets = False
    if hasattr(post_processor, "__getitem__"):  # several, one after another
        with suppress(IndexError):
            for i in count():
                _keep_spaces_in_offsets(post_processor[i])


def without_spaces(text: str) -> str:
    """A text without its spaces and line ends."""
    return "".join(text.split())


def _letters(text: str) -> str:
    """The characters of a text that every tokenizer keeps, in one spelling."""
    plain = unicodedata.normalize("NFKD", text).casefold().replace("\u2581", "")
    return "".join(c for c in plain if unicodedata.category(c)[0] not in "MCZ")
