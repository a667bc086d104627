"""Plain text, cut into windows: every token of it is an answer, which must not get worse."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from calibrate.errors import CalibrateError
from calibrate.files.examples import Cell
from calibrate.files.npz import digest_of, read_bytes
from calibrate.model.encoding import Encoded, Encoder
from calibrate.model.parts import N_TURNS

MOST_BYTES = 1 << 26
TEMPLATE = "text"


class TextFile(NamedTuple):
    """A text of the user's."""

    path: Path
    text: str
    digest: str

    def windows(
        self, encoder: Encoder, lengths: list[int], most: int
    ) -> list[tuple[Cell, Encoded]]:
        """Windows of each length, cut from stretches that are spread evenly over the text.

        A stretch is as long as the longest window, and every window of it belongs to the same part
        (`parts_of`): no token judges a fit that was fitted to it at another length. Each window
        begins with what the tokenizer begins texts with; where that is nothing, its first token is
        not an answer.

        Raises:
          CalibrateError: the text is shorter than a window.
        """
        begin, ids = encoder.text(self.text)
        sizes = [length - len(begin) for length in lengths]
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


def _first_tokens(stretches: np.ndarray, in_each: int, size: int, most: int) -> list[int]:
    """Where at most so many windows begin, which have their turns of the parts as stretches do.

    Args:
      stretches: where they begin.
      in_each: windows that a stretch has room for.
    """
    needed = -(-most // max(len(stretches) - len(stretches) % N_TURNS, 1))
    places = np.linspace(0, in_each - 1, min(in_each, needed)).astype(int) * size
    of_turn = [np.add.outer(places, stretches[i::N_TURNS]).ravel() for i in range(N_TURNS)]
    found = list[int]()
    for i in range(most):
        mine, number = of_turn[i % N_TURNS], i // N_TURNS
        if number == len(mine):
            break
        found.append(int(mine[number]))
    return found


def read_text(path: Path) -> TextFile:
    """Reads a text in UTF-8.

    Raises:
      CalibrateError: it cannot be read.
    """
    data = read_bytes(path, MOST_BYTES, "give a part of it")
    try:
        return TextFile(path, data.decode("utf-8-sig"), digest_of(data))
    except UnicodeDecodeError as failure:
        raise CalibrateError(
            f"{path} is not UTF-8 at byte {failure.start}; save it as UTF-8"
        ) from failure
