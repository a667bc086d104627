"""Texts as token ids, within a model's context: prompts with answers, and windows of plain text.

Every token of a window is an answer, which must not get worse.
"""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from calibrate.errors import CalibrateError, QualityError
from calibrate.files.examples import Cell
from calibrate.files.npz import digest_of, read_bytes
from calibrate.model.splits import N_TURNS, turn

MOST_BYTES = 1 << 26
# A text is tokenized as a whole up to so many characters: tokenizers take 150 times as much memory.
WHOLE = 1 << 20
PER_TOKEN = 8  # characters, more than most tokens have
TEMPLATE = "text"
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


class TextFile(NamedTuple):
    """A text of the user's."""

    path: Path
    text: str
    digest: str

    def windows(
        self, encoder: Encoder, lengths: Sequence[int], most: int
    ) -> list[tuple[Cell, Encoded]]:
        """Windows of each length, cut from stretches that are spread evenly over the text.

        A stretch is as long as the longest window, and its windows all belong to one split (see
        `splits_of`). A window begins with what the tokenizer begins texts with; where that is
        nothing, its first token is not an answer.
        """
        begin = encoder.begin()
        sizes = [length - len(begin) for length in lengths]
        ids = self._ids(encoder, max(1, *sizes), most)
        for length, size in zip(lengths, sizes, strict=True):
            if not 0 < size <= len(ids) or length < 2:
                raise CalibrateError(
                    f"{self.path} has {len(ids):,} tokens, too few for a window of {length:,}; "
                    "give a longer text, or shorter --lengths"
                )
        n_stretches = len(ids) // max(sizes)
        spread = np.unique(np.linspace(0, n_stretches - 1, min(n_stretches, most)).astype(int))
        start, made = max(1, len(begin)), []
        for length, size in zip(lengths, sizes, strict=True):
            for first in _first_tokens(spread * max(sizes), max(sizes) // size, size, most):
                tokens = [*begin, *ids[first : first + size]]
                encoded = encoder.join(str(self.path), tokens[:start], tokens[start:])
                made.append((Cell(TEMPLATE, length, True), encoded))
        return made

    def _ids(self, encoder: Encoder, size: int, most: int) -> Any:
        """The tokens of a text; of a long one, as many stretches as are needed, spread over it."""
        if len(self.text) <= WHOLE:
            return encoder.ids(self.text)
        pieces, n = list(_pieces(self.text, PER_TOKEN * size)), most
        while n < len(pieces):
            chosen = np.linspace(0, len(pieces) - 2, n).astype(int)  # the last one may be short
            ids = (encoder.ids(pieces[i])[:size] for i in chosen)
            if len(found := [x for x in ids if len(x) == size]) >= most:
                return np.concatenate(found)
            n *= 2
        return np.concatenate([np.array(encoder.ids(piece), np.int32) for piece in pieces])


def _pieces(text: str, size: int) -> Iterator[str]:
    """A text in pieces of at most so many characters, cut before words."""
    first = 0
    while first < len(text):
        space = text.rfind(" ", first + 1, first + size) if first + size < len(text) else -1
        last = space if space > 0 else first + size
        yield text[first:last]
        first = last


def _first_tokens(stretches: np.ndarray, in_each: int, size: int, most: int) -> list[int]:
    """Where at most so many windows begin, which have their turns of the splits as stretches do."""
    needed = -(-most // max(len(stretches) - len(stretches) % N_TURNS, 1))
    places = np.linspace(0, in_each - 1, min(in_each, needed)).astype(int) * size
    found = list[int]()
    for number in range(most):
        stretch, place = turn(number, len(stretches))
        if stretch >= len(stretches) or place == len(places):
            break
        found.append(int(stretches[stretch] + places[place]))
    return found


def read_text(path: Path) -> TextFile:
    """Reads a text in UTF-8; raises CalibrateError if it cannot be read."""
    data = read_bytes(path, MOST_BYTES, "give a part of it")
    try:
        return TextFile(path, data.decode("utf-8-sig"), digest_of(data))
    except UnicodeDecodeError as failure:
        raise CalibrateError(
            f"{path} is not UTF-8 at byte {failure.start}; save it as UTF-8"
        ) from failure
