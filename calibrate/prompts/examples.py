"""Examples of a language model, and the collection of them with the baseline's scores.

An example is a prompt with its answer, as token ids. A cell is a prompt template at a length. The
folder of a collection has:

* `examples.npz`: `tokens` (all,) int32, the tokens of all examples one after another; `end`
  (examples,) int64, where each example ends in `tokens`; `start` (examples,) int32, the first token
  of its answer, which goes on to the end of the example; `cell` (examples,) int32; and, if some
  example has a group, `group` (examples,) int32.
* `scores-00000.npz` and so on, the shards: the baseline's scores of some examples each.
* Hidden files, which are no part of the collection: a lock; `.model`, the path of the model when
  the examples were last scored; and `.passes`, cached results of passes through the model.
"""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from calibrate.errors import CalibrateError, DamagedError
from calibrate.rows.manifest import Collection, ShardEntry, entry_of, listed_bytes
from calibrate.storage.npz import pack_arrays, parse_arrays

EXAMPLES_FILE = "examples.npz"
MODEL_FILE = ".model"  # hidden: a path of this machine
PASSES_FOLDER = ".passes"  # hidden: results of passes through the model
UNIT_TOKENS = 4096  # of the examples of a shard: seconds of work


class Cell(NamedTuple):
    """A prompt template at a length."""

    template: str
    length: int  # tokens, nominal
    text: bool  # retention text, whose predictions must stay: its scores are per token


class Example(NamedTuple):
    """A prompt and its answer."""

    tokens: np.ndarray  # (length,) int32
    start: int  # the first token of the answer; 1 or more
    cell: int
    group: int = -1  # examples of a group are dependent, as those of a prompt are; -1: independent


@dataclass(frozen=True)
class ExampleSet:
    """Examples in their order, and their cells."""

    cells: tuple[Cell, ...]
    examples: tuple[Example, ...]

    @staticmethod
    def joined(sets: Sequence["ExampleSet"]) -> "ExampleSet":
        """Joins sets cell by cell, in the order in which the cells first occur.

        Groups keep their numbers, so only one of the sets may have any.
        """
        examples = [(x, members.cells[x.cell]) for members in sets for x in members.examples]
        numbers = {cell: i for i, cell in enumerate(dict.fromkeys(cell for _, cell in examples))}
        joined = [example._replace(cell=numbers[cell]) for example, cell in examples]
        joined.sort(key=lambda example: example.cell)
        return ExampleSet(tuple(numbers), tuple(joined))

    def pack(self) -> bytes:
        """Returns the bytes of `examples.npz`, which are the same for the same examples."""
        lengths = [len(example.tokens) for example in self.examples]
        arrays = {
            "tokens": np.concatenate([example.tokens for example in self.examples]).astype("<i4"),
            "end": np.cumsum(lengths, dtype="<i8"),
            "start": np.array([example.start for example in self.examples], "<i4"),
            "cell": np.array([example.cell for example in self.examples], "<i4"),
        }
        group = np.array([example.group for example in self.examples], "<i4")
        return pack_arrays(arrays | ({"group": group} if (group >= 0).any() else {}))

    def is_text(self, example: Example) -> bool:
        """True for retention text; see `Cell.text`."""
        return self.cells[example.cell].text

    def n_answer(self, indices: Iterable[int]) -> np.ndarray:
        """(len(indices),) the number of tokens of the answers of some examples."""
        chosen = [self.examples[i] for i in indices]
        return np.array([len(example.tokens) - example.start for example in chosen])

    def n_tokens(self, indices: Iterable[int]) -> int:
        """The number of tokens of some examples."""
        return sum(len(self.examples[i].tokens) for i in indices)

    def only(self, indices: Iterable[int]) -> "ExampleSet":
        """Some of the examples, with all cells."""
        return ExampleSet(self.cells, tuple(self.examples[i] for i in indices))

    def units(
        self, indices: Iterable[int] | None = None, unit_tokens: int = UNIT_TOKENS
    ) -> list[list[int]]:
        """Divides examples, all by default, into units of work of about `unit_tokens` tokens.

        A shard holds the scores of a unit.
        """
        units, room = list[list[int]](), 0
        for i in range(len(self.examples)) if indices is None else indices:
            if room <= 0:
                units.append([])
                room = unit_tokens
            units[-1].append(i)
            room -= len(self.examples[i].tokens)
        return units


class Scores(NamedTuple):
    """Scores of some examples under a rule.

    The comparison with the baseline, `kl`, is 0 for answers, and for the baseline itself.
    """

    log_p: np.ndarray  # (examples,) float64, nats: of the whole answer
    right: np.ndarray  # (examples,) int32: tokens of the answer that have the highest logit
    kl: np.ndarray  # (examples,) float64, nats: KL(baseline || rule) of text, summed over tokens

    @staticmethod
    def empty(n: int) -> "Scores":
        """Uninitialised scores of n examples, with a KL of 0."""
        return Scores.baseline(np.empty(n), np.empty(n, np.int32))

    @staticmethod
    def baseline(log_p: np.ndarray, right: np.ndarray) -> "Scores":
        """Scores under the baseline, with a KL of 0."""
        return Scores(log_p, right, np.zeros(len(log_p)))

    def at(self, indices: Sequence[int] | np.ndarray) -> "Scores":
        """The scores of some of the examples."""
        return Scores(*(column[np.asarray(indices, int)] for column in self))

    def put(self, indices: Sequence[int], scores: "Scores") -> None:
        """Replaces the scores of some of the examples, in place."""
        for column, values in zip(self, scores, strict=True):
            column[indices] = values

    def pack(self) -> bytes:
        """Returns the bytes of a shard; the KL is left out if it is 0 throughout."""
        left_out = () if self.kl.any() else ("kl",)
        return pack_arrays({k: x for k, x in self._asdict().items() if k not in left_out})

    @staticmethod
    def joined(parts: Sequence["Scores"]) -> "Scores":
        """Concatenates scores."""
        return Scores(*map(np.concatenate, zip(*parts, strict=True)))


class ExampleCollection(Collection):
    """A collection of examples."""

    format = "calibrate.examples"
    names = r"examples\.npz|\.model|scores-[0-9]{5,}\.npz|\.passes"

    @property
    def set(self) -> ExampleSet:
        """The examples."""
        return self._contents[0]

    @property
    def scores(self) -> Scores:
        """The baseline's scores of all examples."""
        return self._contents[1]

    @cached_property
    def _contents(self) -> tuple[ExampleSet, Scores]:
        """Examples and scores; every file is checked against its digest."""
        contents: tuple[ExampleSet, Scores] = self.in_memory or self._read()
        return contents

    def _read(self) -> tuple[ExampleSet, Scores]:
        cells = tuple(Cell(**cell) for cell in self.configuration["cells"])
        path = self.folder / EXAMPLES_FILE
        data = listed_bytes(path, self.configuration["examples"])
        parts = list[Scores]()
        for number, entry in enumerate(self.manifest["scores"]):
            shard = self.folder / scores_name(number)
            parts.append(parse_scores(listed_bytes(shard, entry), shard))
        return parse_examples(data, path, cells), Scores.joined(parts)

    def recorded_model(self) -> Path:
        """The folder of the model when the examples were last scored.

        Raises:
          CalibrateError: the folder is gone, or not recorded, as in a copy without hidden files.
        """
        with contextlib.suppress(OSError):
            text = (self.folder / MODEL_FILE).read_text(encoding="utf-8").removesuffix("\n")
            if text and Path(text).is_dir():
                return Path(text)
        raise CalibrateError(
            f"{self.folder} does not know where its model is; name its folder with model=",
            parameter="model",
        )

    @staticmethod
    def listing(configuration: dict[str, Any], entries: Sequence[ShardEntry]) -> dict[str, Any]:
        """The field of the manifest that lists the shards."""
        return {"scores": list(entries)}


def make_configuration(
    model: str, fingerprint: str, dtype: str, sources: dict[str, Any], examples: ExampleSet
) -> dict[str, Any]:
    """Returns the configuration, which determines a collection of examples.

    Args:
      model: the name of its folder.
      fingerprint: of the model's weights and configuration.
      dtype: of the weights.
      sources: of the examples: options, and digests of files.
    """
    cells = [cell._asdict() for cell in examples.cells]
    file = {"count": len(examples.examples), **entry_of(examples.pack())}
    given = {"model": model, "fingerprint": fingerprint, "dtype": dtype, "sources": sources}
    return {**given, "cells": cells, "examples": file}


def scores_name(unit: int) -> str:
    """The name of the shard of a unit of examples."""
    return f"scores-{unit:05d}.npz"


def parse_examples(data: bytes, path: Path, cells: tuple[Cell, ...]) -> ExampleSet:
    """Parses the bytes of `examples.npz`; DamagedError if they are not an npz file."""
    arrays = parse_arrays(data, path)
    end = arrays["end"]
    group = arrays.get("group", np.full(len(end), -1))
    columns = (x.tolist() for x in (arrays["start"], arrays["cell"], group))
    tokens = np.split(arrays["tokens"], end[:-1])
    return ExampleSet(cells, tuple(map(Example, tokens, *columns)))


def parse_scores(data: bytes, path: Path) -> Scores:
    """Parses the bytes of a shard; DamagedError if they are not such a file."""
    arrays = parse_arrays(data, path)
    try:
        return Scores.baseline(arrays["log_p"], arrays["right"])._replace(**arrays)
    except (KeyError, ValueError) as failure:  # an array is absent, or another one
        raise DamagedError(f"{path} does not hold the arrays of scores; delete it") from failure
