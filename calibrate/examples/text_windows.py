"""Plain text, cut into windows: every token of it is an answer, which must not get worse."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from calibrate.errors import CalibrateError
from calibrate.examples.encoding import Encoded, Encoder
from calibrate.files.example_set import Cell
from calibrate.files.npz import digest_of, read_bytes

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
        """Windows of each length that do not overlap, evenly spread over the text.

        Each begins with what the tokenizer begins texts with; where that is nothing, its first
        token is not an answer.

        Raises:
          CalibrateError: the text is shorter than a window.
        """
        begin, ids = encoder.text(self.text)
        made = []
        for length in lengths:
            size = length - len(begin)
            n_windows = len(ids) // size if size > 0 else 0
            if not n_windows or length < 2:
                raise CalibrateError(
                    f"{self.path} has {len(ids):,} tokens, too few for a window of {length:,}; "
                    "give a longer text, or shorter --lengths"
                )
            chosen = np.unique(np.linspace(0, n_windows - 1, min(n_windows, most)).astype(int))
            for window in chosen:
                tokens = [*begin, *ids[window * size : (window + 1) * size]]
                start = max(1, len(begin))
                encoded = encoder.join(str(self.path), tokens[:start], tokens[start:])
                made.append((Cell(TEMPLATE, length, True), encoded))
        return made


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
