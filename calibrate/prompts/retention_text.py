"""Retention text: windows of plain text, whose predictions a fit must hardly change.

The tokens of the second half of a window are its answer, as in llama.cpp's perplexity: those of the
first half have shorter contexts than the prompts that a fit is for, and a rule that grows with
log n would spend the whole KL budget on the last tokens. Each text belongs to a text domain. The
package has nine domains of some 2,900 tokens each, in `text/`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from calibrate.errors import CalibrateError
from calibrate.prompts.encoding import Encoder
from calibrate.prompts.examples import Cell, ExampleSet
from calibrate.storage.atomic_io import read_bytes
from calibrate.storage.fingerprints import sha256_of

MAX_TEXT_BYTES = 1 << 22  # a tokenizer takes 150 times as much memory
DEFAULT_DOMAIN = "text"  # of a single file
BUILT_IN_FOLDER = Path(__file__).parent / "text"  # a file for each domain, written for this use
MAX_BUILT_IN = 1024  # tokens of a window of the built-in text
SPLIT_CYCLE = 4  # groups or segments in turn, after which the order of splits repeats


class TextFile(NamedTuple):
    """A text of one domain."""

    path: Path
    text: str
    digest: str
    domain: str = DEFAULT_DOMAIN

    def cut_windows(self, encoder: Encoder, lengths: Sequence[int], most: int) -> ExampleSet:
        """Cuts windows of each length from segments that are spread evenly over the text.

        A segment is as long as the longest window, and all of its windows are in one split (see
        `assign_splits`). A window begins with the tokens that the tokenizer puts before every text.

        Args:
          lengths: of windows, tokens.
          most: the largest number of windows of each length.
        Raises:
          CalibrateError: the text is shorter than a window.
        """
        prefix = encoder.prefix
        sizes = [length - len(prefix) for length in lengths]
        longest = max(1, *sizes)
        ids = encoder.ids_without_prefix(self.text)
        for length, size in zip(lengths, sizes, strict=True):
            if not 0 < size <= len(ids) or length < 2:
                raise CalibrateError(
                    f"{self.path} has {len(ids):,} tokens, too few for a window of {length:,}; "
                    "give a longer text, or shorter lengths"
                )
        n_segments = len(ids) // longest
        spread = np.unique(np.linspace(0, n_segments - 1, min(n_segments, most)).astype(int))
        windows = []
        for cell, size in enumerate(sizes):
            start = max(len(prefix), (len(prefix) + size) // 2)
            for first in _first_tokens(spread * longest, longest // size, size, most):
                tokens = [*prefix, *ids[first : first + size]]
                windows.append(encoder.join(str(self.path), tokens[:start], tokens[start:], cell))
        return ExampleSet(tuple(Cell(self.domain, n, True) for n in lengths), tuple(windows))


def _first_tokens(segments: np.ndarray, per_segment: int, size: int, most: int) -> list[int]:
    """The first tokens of windows, which take the segments in the order of their splits.

    Args:
      segments: (segments,) the first token of each.
      per_segment: the number of windows that a segment has room for.
      size: of a window, tokens.
      most: the largest number of windows.
    """
    needed = -(-most // max(len(segments) - len(segments) % SPLIT_CYCLE, 1))
    offsets = np.linspace(0, per_segment - 1, min(per_segment, needed)).astype(int) * size
    starts = list[int]()
    for number in range(most):
        segment, place = segment_of_window(number, len(segments))
        if segment >= len(segments) or place == len(offsets):
            break
        starts.append(int(segments[segment] + offsets[place]))
    return starts


def segment_of_window(number: int, n_segments: int) -> tuple[int, int]:
    """The segment of a window by its number in its cell, and the place of the window in it.

    The number and the segment are the same modulo SPLIT_CYCLE, so that a segment's windows of all
    lengths are in one split.
    """
    remainder, turn = number % SPLIT_CYCLE, number // SPLIT_CYCLE
    n_candidates = len(range(remainder, n_segments, SPLIT_CYCLE))
    place, cycle = divmod(turn, max(1, n_candidates))
    return remainder + SPLIT_CYCLE * cycle, place


def read_texts(path: Path) -> list[TextFile]:
    """Reads a text in UTF-8, or the .txt files of a folder, each of which is a domain.

    Raises:
      CalibrateError: a file cannot be read, or there is none.
    """
    if not path.is_dir():
        return [_read_text(path)]
    paths = sorted(path.glob("*.txt"))
    if not paths:
        raise CalibrateError(f"{path} has no .txt file; give a text, or a folder of some")
    return [_read_text(file)._replace(domain=file.stem) for file in paths]


def cut_built_in_text(encoder: Encoder, lengths: Sequence[int], most: int) -> ExampleSet:
    """Cuts windows of the built-in text, of at most MAX_BUILT_IN tokens."""
    longest = min(MAX_BUILT_IN, encoder.context or MAX_BUILT_IN)
    fitting = sorted({min(length, longest) for length in lengths})
    texts = read_texts(BUILT_IN_FOLDER)
    return ExampleSet.joined([text.cut_windows(encoder, fitting, most) for text in texts])


def _read_text(path: Path) -> TextFile:
    data = read_bytes(path, MAX_TEXT_BYTES)
    try:
        return TextFile(path, data.decode("utf-8-sig"), sha256_of(data))
    except UnicodeDecodeError as failure:
        raise CalibrateError(
            f"{path} is not UTF-8 at byte {failure.start}; save it as UTF-8"
        ) from failure
