"""Retention text: windows of plain text, whose predictions a fit must hardly change.

The tokens of the second half of a window are its answer, as in llama.cpp's perplexity: those of the
first half have contexts shorter than the prompts that a fit is for, and a rule that grows with
log n would spend the whole KL budget on the last tokens. A text is of one text domain, which is its
template: the package brings nine of some 2,900 tokens each, in `text/`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from calibrate.datasets.examples import Cell, ExampleSet
from calibrate.errors import CalibrateError
from calibrate.prompts.encoding import Encoder
from calibrate.storage.npz import read_bytes, sha256_of

MAX_BYTES = 1 << 26
# A text is tokenized as a whole up to so many characters: tokenizers take 150 times as much memory.
MAX_WHOLE = 1 << 20
PER_TOKEN = 8  # characters, more than most tokens have
TEMPLATE = "text"  # of a file alone
BUILT_IN = Path(__file__).parent / "text"  # a file for each text domain, written for this use
MAX_BUILT_IN = 1024  # tokens of a window of it
N_FOLDS = 4  # that segments are dealt to in turn, for the splits of a fit


class TextFile(NamedTuple):
    """A text of one text domain."""

    path: Path
    text: str
    digest: str
    domain: str = TEMPLATE

    def windows(
        self, encoder: Encoder, lengths: Sequence[int], most: int, max_whole: int = MAX_WHOLE
    ) -> ExampleSet:
        """Windows of each length, at most so many, from segments spread evenly over the text.

        A segment is as long as the longest window, and its windows all belong to one split (see
        `splits_of`). A window begins with what the tokenizer begins texts with, and has nothing
        that it ends them with.
        """
        begin = encoder.begin()
        sizes = [length - len(begin) for length in lengths]
        size = max(1, *sizes)
        is_long = len(self.text) > max_whole
        ids = self._spread_ids(encoder, size, most) if is_long else encoder.ids_behind(self.text)
        for length, size in zip(lengths, sizes, strict=True):
            if not 0 < size <= len(ids) or length < 2:
                raise CalibrateError(
                    f"{self.path} has {len(ids):,} tokens, too few for a window of {length:,}; "
                    "give a longer text, or shorter lengths"
                )
        n_segments = len(ids) // max(sizes)
        spread = np.unique(np.linspace(0, n_segments - 1, min(n_segments, most)).astype(int))
        windows = []
        for cell, size in enumerate(sizes):
            start = max(len(begin), (len(begin) + size) // 2)
            for first in _first_tokens(spread * max(sizes), max(sizes) // size, size, most):
                tokens = [*begin, *ids[first : first + size]]
                windows.append(encoder.join(str(self.path), tokens[:start], tokens[start:], cell))
        return ExampleSet(tuple(Cell(self.domain, n, True) for n in lengths), tuple(windows))

    def _spread_ids(self, encoder: Encoder, size: int, most: int) -> Any:
        """The tokens of as many segments of a long text as are needed, spread over it."""
        pieces, n = list(_pieces(self.text, PER_TOKEN * size)), most
        while n < len(pieces):
            chosen = np.linspace(0, len(pieces) - 2, n).astype(int)  # the last one may be short
            segments = [encoder.ids_within(pieces[i])[:size] for i in chosen]
            full = [segment for segment in segments if len(segment) == size]
            if len(full) >= most:
                return np.concatenate(full)
            n *= 2
        return np.concatenate([np.array(encoder.ids_within(x), np.int32) for x in pieces])


def _pieces(text: str, size: int) -> Iterator[str]:
    """A text in pieces of at most so many characters, cut before words."""
    first = 0
    while first < len(text):
        space = text.rfind(" ", first + 1, first + size) if first + size < len(text) else -1
        last = space if space > 0 else first + size
        yield text[first:last]
        first = last


def _first_tokens(segments: np.ndarray, in_each: int, size: int, most: int) -> list[int]:
    """The starts of at most so many windows, which take turns in the splits as segments do."""
    needed = -(-most // max(len(segments) - len(segments) % N_FOLDS, 1))
    places = np.linspace(0, in_each - 1, min(in_each, needed)).astype(int) * size
    starts = list[int]()
    for number in range(most):
        segment, place = segment_of_window(number, len(segments))
        if segment >= len(segments) or place == len(places):
            break
        starts.append(int(segments[segment] + places[place]))
    return starts


def segment_of_window(number: int, n_segments: int) -> tuple[int, int]:
    """The segment of a window, by its number in its cell, and the window's place in it."""
    first, later = number % N_FOLDS, number // N_FOLDS
    of_fold = len(range(first, n_segments, N_FOLDS))
    place, behind = divmod(later, max(1, of_fold))
    return first + N_FOLDS * behind, place


def read_texts(path: Path) -> list[TextFile]:
    """A text in UTF-8, or those of the .txt files of a folder, a text domain each.

    Raises:
      CalibrateError: one cannot be read, or there is none.
    """
    if not path.is_dir():
        return [_read(path)]
    paths = sorted(path.glob("*.txt"))
    if not paths:
        raise CalibrateError(f"{path} has no .txt file; give a text, or a folder of some")
    return [_read(file)._replace(domain=file.stem) for file in paths]


def built_in_windows(encoder: Encoder, lengths: Sequence[int], most: int) -> ExampleSet:
    """Windows of the package's own texts, no longer than these have."""
    longest = min(MAX_BUILT_IN, encoder.context or MAX_BUILT_IN)
    fitting = sorted({min(length, longest) for length in lengths})
    texts = read_texts(BUILT_IN)
    return ExampleSet.joined([text.windows(encoder, fitting, most) for text in texts])


def _read(path: Path) -> TextFile:
    data = read_bytes(path, MAX_BYTES, "give a part of it")
    try:
        return TextFile(path, data.decode("utf-8-sig"), sha256_of(data))
    except UnicodeDecodeError as failure:
        raise CalibrateError(
            f"{path} is not UTF-8 at byte {failure.start}; save it as UTF-8"
        ) from failure


def built_in_domains() -> frozenset[str]:
    """The names of the text domains that come with the package."""
    return frozenset(path.stem for path in BUILT_IN.glob("*.txt"))
