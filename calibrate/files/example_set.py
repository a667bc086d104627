"""Examples: prompts of a whole model with their right answers, as token ids.

`examples.npz` holds `tokens` (all,) int32, the examples one after the other; `end` (examples,)
int64, where each of them ends in `tokens`; `start` (examples,) int32, the first token of its
answer, which goes on to the example's end; and `cell` (examples,) int32. A cell is a template at a
length: its examples count alike.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from calibrate.files.npz import pack_arrays, parse_arrays
from calibrate.files.shard import check_arrays, require

MOST_CELLS = 10_000


class Cell(NamedTuple):
    """Examples that are alike."""

    template: str
    length: int  # tokens, nominal
    text: bool  # plain text: every token is an answer, and scores are per token


class Example(NamedTuple):
    """A prompt and its answer."""

    tokens: np.ndarray  # (length,) int32
    start: int  # the first token of the answer; 1 or more
    cell: int


@dataclass(frozen=True)
class ExampleSet:
    """Examples in their order, and the cells they belong to."""

    cells: tuple[Cell, ...]
    examples: tuple[Example, ...]

    def pack(self) -> bytes:
        """The bytes of `examples.npz`; the same examples give the same bytes."""
        lengths = [len(example.tokens) for example in self.examples]
        arrays = {
            "tokens": np.concatenate([example.tokens for example in self.examples]).astype("<i4"),
            "end": np.cumsum(lengths, dtype="<i8"),
            "start": np.array([example.start for example in self.examples], "<i4"),
            "cell": np.array([example.cell for example in self.examples], "<i4"),
        }
        return pack_arrays(arrays)

    def n_answer(self, which: Iterable[int]) -> np.ndarray:
        """Tokens of the answers of some examples."""
        chosen = [self.examples[i] for i in which]
        return np.array([len(example.tokens) - example.start for example in chosen])

    def units(self, tokens: int) -> list[range]:
        """Consecutive examples of about so many tokens: what one file of scores holds."""
        units, first, total = [], 0, 0
        for i, example in enumerate(self.examples):
            total += len(example.tokens)
            if total >= tokens or i == len(self.examples) - 1:
                units.append(range(first, i + 1))
                first, total = i + 1, 0
        return units


def parse_examples(data: bytes, path: Path, cells: tuple[Cell, ...]) -> ExampleSet:
    """The examples in the bytes of a file.

    Raises:
      DamagedError: it is not such a file, or a value is out of range.
    """
    arrays = parse_arrays(data, path)
    count = len(np.atleast_1d(arrays.get("end", ())))
    tokens = np.atleast_1d(arrays.get("tokens", ()))
    check_arrays(arrays, path, {
        "tokens": ("<i4", (len(tokens),)), "end": ("<i8", (count,)), "start": ("<i4", (count,)),
        "cell": ("<i4", (count,)),
    })  # fmt: skip
    end, start, cell = arrays["end"], arrays["start"], arrays["cell"]
    length = np.diff(end, prepend=0)
    require(count > 0 and end[-1] == len(tokens), path, "its examples do not make up its tokens")
    require((end > 0).all() and (length > 0).all(), path, "end does not rise")
    require((tokens >= 0).all(), path, "a token is negative")
    require(((start >= 1) & (start < length)).all(), path, "an answer is not within its example")
    require(((cell >= 0) & (cell < len(cells))).all(), path, "a cell is not one of the manifest's")
    pieces = np.split(tokens, end[:-1])
    return ExampleSet(cells, tuple(map(Example, pieces, start.tolist(), cell.tolist())))


class Scores(NamedTuple):
    """What plain softmax gives some examples."""

    log_p: np.ndarray  # (examples,) float64, nats: of the whole answer
    right: np.ndarray  # (examples,) int32: tokens of the answer that have the highest logit

    def pack(self) -> bytes:
        """The bytes of a file of scores."""
        return pack_arrays({"log_p": self.log_p, "right": self.right})


def parse_scores(data: bytes, path: Path, n_answer: np.ndarray) -> Scores:
    """The scores in the bytes of a file, of examples with so many tokens of answers.

    Raises:
      DamagedError: it is not such a file, or a value is out of range.
    """
    arrays = parse_arrays(data, path)
    shape = (len(n_answer),)
    check_arrays(arrays, path, {"log_p": ("<f8", shape), "right": ("<i4", shape)})
    scores = Scores(arrays["log_p"], arrays["right"])
    require((np.isfinite(scores.log_p) & (scores.log_p <= 0)).all(), path, "log_p is not <= 0")
    within = (scores.right >= 0) & (scores.right <= n_answer)
    require(within.all(), path, "right exceeds the answer's tokens")
    require(scores.pack() == data, path, "it has more bytes than its arrays")
    return scores
