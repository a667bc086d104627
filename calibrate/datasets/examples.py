"""Collections of examples: prompts of a whole model, their answers, and plain softmax's scores.

`examples.npz` holds `tokens` (all,) int32, the examples one after the other; `end` (examples,)
int64, where each of them ends in `tokens`; `start` (examples,) int32, the first token of its
answer, which goes on to the example's end; and `cell` (examples,) int32. A cell is a template at a
length. The shards hold the scores. Hidden files are not part of the collection: a lock, and
`.model`, where the model lay when it was last scored.
"""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from calibrate.datasets.manifest import (
    COMPLETE,
    COUNT,
    FILE,
    MANIFEST,
    RESTORE,
    Collection,
    Entry,
    check_arrays,
    entry_of,
    listed_bytes,
    require,
)
from calibrate.errors import CalibrateError, DamagedError
from calibrate.storage.json_shapes import TEXT, List, Map, Object, Scalar, Shape, Word
from calibrate.storage.npz import MAX_BYTES, pack_arrays, parse_arrays, read_bytes
from calibrate.storage.strict_json import refuse
from calibrate.store.coefficient_schema import DIGEST

EXAMPLES = "examples.npz"
MODEL = ".model"  # hidden: a path of this machine
PASSES = ".passes"  # hidden: a folder of results of passes through the model
ALLOW_UNEXPECTED = "allow_unexpected"  # of sources; absent: tensors that do not run are refused
N_HIGHEST = 32  # tokens of a window of text whose KL is kept, for its quantiles
_COMPARED = ("kl", "changed", "highest_kl")  # of Scores, with the baseline's predictions
UNIT_TOKENS = 4096  # of the examples in one shard: seconds of work
MAX_CELLS = 10_000
_OPTIONAL = ("group", "question")  # arrays, absent where each example is alone
# Bytes of a shard, at most.
_OVERHEAD = 1_024
_PER_EXAMPLE = 12


def _yes_or_no(value: Any) -> bool:
    if type(value) is not bool:
        refuse(value, "write true or false")
    return value


_CELL = Object({"template": TEXT, "length": COUNT, "text": _yes_or_no}, required=True)
_CONFIGURATION = Object(
    {
        "model": TEXT,
        "fingerprint": DIGEST,
        "dtype": Word(("float32", "bfloat16")),
        "sources": Map(Scalar()),
        "cells": List(_CELL, most=MAX_CELLS),
        "examples": Object({"count": COUNT, **FILE}, required=True),
    },
    required=True,
)
_PARTIAL: dict[str, Shape] = {
    **dict.fromkeys(("format", "schema_version", "status"), TEXT),
    "configuration": _CONFIGURATION,
}
_COMPLETE: dict[str, Shape] = {**_PARTIAL, "scores": List(Object(FILE, required=True))}


class Cell(NamedTuple):
    """A template at a length."""

    template: str
    length: int  # tokens, nominal
    text: bool  # retention text, whose predictions must stay: scores are per token


class Example(NamedTuple):
    """A prompt and its answer.

    Several right answers to one prompt are an example each, of one question: what counts is how
    probable any of them is.
    """

    tokens: np.ndarray  # (length,) int32
    start: int  # the first token of the answer; 1 or more
    cell: int
    group: int = -1  # examples of one may be alike, as those of a prompt are; -1: it is alone
    question: int = -1  # examples of one have its right answers; -1: it has no other one


@dataclass(frozen=True)
class ExampleSet:
    """Examples in their order, and the cells they belong to."""

    cells: tuple[Cell, ...]
    examples: tuple[Example, ...]

    @staticmethod
    def joined(sets: Sequence["ExampleSet"]) -> "ExampleSet":
        """The examples of all sets, cell by cell, in the order in which cells first occur.

        Groups and questions keep their numbers: only one of the sets may have some.
        """
        pairs = [(x, examples.cells[x.cell]) for examples in sets for x in examples.examples]
        numbers = {cell: i for i, cell in enumerate(dict.fromkeys(cell for _, cell in pairs))}
        joined = [example._replace(cell=numbers[cell]) for example, cell in pairs]
        joined.sort(key=lambda example: example.cell)
        return ExampleSet(tuple(numbers), tuple(joined))

    def pack(self) -> bytes:
        """The bytes of `examples.npz`; the same examples give the same bytes."""
        lengths = [len(example.tokens) for example in self.examples]
        arrays = {
            "tokens": np.concatenate([example.tokens for example in self.examples]).astype("<i4"),
            "end": np.cumsum(lengths, dtype="<i8"),
            "start": np.array([example.start for example in self.examples], "<i4"),
            "cell": np.array([example.cell for example in self.examples], "<i4"),
        }
        for name in _OPTIONAL:
            column = np.array([getattr(example, name) for example in self.examples], "<i4")
            arrays |= {name: column} if (column >= 0).any() else {}
        return pack_arrays(arrays)

    def is_text(self, example: Example) -> bool:
        """True of text, or a protected batch, whose predictions must stay; see `Cell.text`."""
        return self.cells[example.cell].text

    def n_answer(self, indices: Iterable[int]) -> np.ndarray:
        """Tokens of the answers of some examples."""
        chosen = [self.examples[i] for i in indices]
        return np.array([len(example.tokens) - example.start for example in chosen])

    def only(self, indices: Iterable[int]) -> "ExampleSet":
        """Some of the examples."""
        return ExampleSet(self.cells, tuple(self.examples[i] for i in indices))

    def units(
        self, indices: Iterable[int] | None = None, unit_tokens: int = UNIT_TOKENS
    ) -> list[list[int]]:
        """Some examples, or all, in units of work of about so many tokens: what one shard holds."""
        units, room = list[list[int]](), 0
        for i in range(len(self.examples)) if indices is None else indices:
            if room <= 0:
                units.append([])
                room = unit_tokens
            units[-1].append(i)
            room -= len(self.examples[i].tokens)
        return units


class Scores(NamedTuple):
    """Scores of some examples under a rule, such as the baseline.

    What compares predictions with the baseline's is 0 of answers, and of the baseline itself.
    """

    log_p: np.ndarray  # (examples,) float64, nats: of the whole answer
    right: np.ndarray  # (examples,) int32: tokens of the answer that have the highest logit
    kl: np.ndarray  # (examples,) float64, nats: KL(plain || rule) of text, summed over tokens
    changed: np.ndarray  # (examples,) int32: tokens of text whose most probable token changes
    highest_kl: np.ndarray  # (examples, N_HIGHEST) float64, nats: of single tokens of text, falling

    @staticmethod
    def empty(n: int) -> "Scores":
        """Room for the scores of so many examples; comparisons with the baseline are 0."""
        return Scores.of_plain(np.empty(n), np.empty(n, np.int32))

    @staticmethod
    def of_plain(log_p: np.ndarray, right: np.ndarray) -> "Scores":
        """The scores of plain softmax itself."""
        n = len(log_p)
        compared = np.zeros(n), np.zeros(n, np.int32), np.zeros((n, N_HIGHEST))
        return Scores(log_p, right, *compared)

    def at(self, indices: Sequence[int] | np.ndarray) -> "Scores":
        """The scores of some of the examples."""
        return Scores(*(column[np.asarray(indices, int)] for column in self))

    def put(self, indices: Sequence[int], scores: "Scores") -> None:
        """Writes the scores of some of the examples into these."""
        for column, values in zip(self, scores, strict=True):
            column[indices] = values

    def pack(self) -> bytes:
        """The bytes of a shard; without comparisons where KL is 0, as that of the baseline is."""
        left_out = () if self.kl.any() else _COMPARED
        return pack_arrays({k: x for k, x in self._asdict().items() if k not in left_out})

    @staticmethod
    def joined(parts: Sequence["Scores"]) -> "Scores":
        """The scores of all parts, in their order."""
        return Scores(*map(np.concatenate, zip(*parts, strict=True)))


class ExampleCollection(Collection):
    """A collection of examples."""

    kind, format = "examples", "calibrate.examples"
    names = r"examples\.npz|\.model|scores-[0-9]{5,}\.npz|\.passes(/[0-9a-f]{32}\.npz)?"

    @property
    def set(self) -> ExampleSet:
        """The examples."""
        return self._contents[0]

    @property
    def scores(self) -> Scores:
        """The scores of plain softmax, an entry for each example."""
        return self._contents[1]

    @cached_property
    def _contents(self) -> tuple[ExampleSet, Scores]:
        """Examples and scores, every file checked against its digest."""
        contents: tuple[ExampleSet, Scores] = self.in_memory or self._read()
        return contents

    def _read(self) -> tuple[ExampleSet, Scores]:
        path, cells = self.folder / EXAMPLES, cells_of(self.configuration)
        data = listed_bytes(path, self.configuration["examples"], MAX_BYTES)
        examples = parse_examples(data, path, cells)
        units, listed = examples.units(), self.manifest_entries(self.manifest)
        if len(units) != len(listed):
            raise DamagedError(f"{self.folder / MANIFEST} lists {len(listed)} shards; {RESTORE}")
        parts = []
        for unit, (name, entry) in zip(units, listed.items(), strict=True):
            path = self.folder / name
            data = listed_bytes(path, entry, MAX_BYTES)
            parts.append(parse_scores(examples.n_answer(unit), data, path))
        return examples, Scores.joined(parts)

    def recorded_model(self) -> Path:
        """The path of the model when the examples were last scored.

        Raises:
          CalibrateError: that is not recorded, as in a copy without hidden files.
        """
        with contextlib.suppress(CalibrateError, UnicodeDecodeError):
            text = read_bytes(self.folder / MODEL, 1 << 16).decode().removesuffix("\n")
            if text and Path(text).is_dir():
                return Path(text)
        raise CalibrateError(
            f"{self.folder} does not know where its model is; name its folder with model=",
            parameter="model",
        )

    @staticmethod
    def checked(manifest: dict[str, Any]) -> dict[str, Any]:
        """Refuses unknown fields, too."""
        shapes = _COMPLETE if manifest["status"] == COMPLETE else _PARTIAL
        valid: dict[str, Any] = Object(shapes, required=True)(manifest)
        return valid

    @staticmethod
    def listing(configuration: dict[str, Any], entries: Sequence[Entry]) -> dict[str, Any]:
        """The shards."""
        return {"scores": list(entries)}

    @staticmethod
    def manifest_entries(manifest: dict[str, Any]) -> dict[str, Entry]:
        """The shards by name."""
        return {scores_name(unit): entry for unit, entry in enumerate(manifest["scores"])}


def configuration_of(
    model: str, fingerprint: str, dtype: str, sources: dict[str, Any], examples: ExampleSet
) -> dict[str, Any]:
    """The configuration, which determines a collection of examples."""
    cells = [cell._asdict() for cell in examples.cells]
    file = {"count": len(examples.examples), **entry_of(examples.pack())}
    given = {"model": model, "fingerprint": fingerprint, "dtype": dtype, "sources": sources}
    return {**given, "cells": cells, "examples": file}


def allows_unexpected(configuration: dict[str, Any]) -> bool:
    """True if a collection was made although the model's files have tensors that do not run."""
    return configuration["sources"].get(ALLOW_UNEXPECTED) is True


def cells_of(configuration: dict[str, Any]) -> tuple[Cell, ...]:
    """The cells that a configuration lists."""
    return tuple(Cell(**cell) for cell in configuration["cells"])


def scores_name(unit: int) -> str:
    """The name of the shard of a unit of examples."""
    return f"scores-{unit:05d}.npz"


def most_bytes(n_examples: int) -> int:
    """The largest shard of so many examples."""
    return _OVERHEAD + _PER_EXAMPLE * n_examples


def parse_examples(data: bytes, path: Path, cells: tuple[Cell, ...]) -> ExampleSet:
    """The examples in the bytes of a file.

    Raises:
      DamagedError: it is not such a file, or a value is out of range.
    """
    arrays_of_file = parse_arrays(data, path)
    count = len(np.atleast_1d(arrays_of_file.get("end", ())))
    tokens = np.atleast_1d(arrays_of_file.get("tokens", ()))
    arrays = dict.fromkeys(_OPTIONAL, np.full(count, -1, "<i4")) | arrays_of_file
    per_example = dict.fromkeys(("start", "cell", *_OPTIONAL), ("<i4", (count,)))
    of_all = {"tokens": ("<i4", (len(tokens),)), "end": ("<i8", (count,))}
    check_arrays(arrays, path, {**of_all, **per_example})
    end, start, cell, group, question = (arrays[x] for x in ("end", *per_example))
    length = np.diff(end, prepend=0)
    require(count > 0 and end[-1] == len(tokens), path, "its examples do not make up its tokens")
    require((end > 0).all() and (length > 0).all(), path, "end does not rise")
    require((tokens >= 0).all(), path, "a token is negative")
    require(((start >= 1) & (start < length)).all(), path, "an answer is not within its example")
    require(((cell >= 0) & (cell < len(cells))).all(), path, "a cell is not one of the manifest's")
    require(((group >= -1) & (question >= -1)).all(), path, "a group or question is below -1")
    for name, column in (("cell", cell), ("group", group)):
        pairs = np.unique(np.stack([question, column])[:, question >= 0], axis=1)
        is_single = len(np.unique(pairs[0])) == pairs.shape[1]
        require(is_single, path, f"the answers to a question have more than one {name}")
    columns = (x.tolist() for x in (start, cell, group, question))
    return ExampleSet(cells, tuple(map(Example, np.split(tokens, end[:-1]), *columns)))


def parse_scores(n_answer: np.ndarray, data: bytes, path: Path) -> Scores:
    """The scores in the bytes of a shard, of examples with so many tokens of answers.

    Raises:
      DamagedError: it is not such a file, or a value is out of range.
    """
    n = len(n_answer)
    baseline = Scores.empty(n)._asdict()
    arrays = {name: baseline[name] for name in _COMPARED} | parse_arrays(data, path)
    shapes = {name: (x.dtype.newbyteorder("<").str, x.shape) for name, x in baseline.items()}
    check_arrays(arrays, path, shapes)
    scores = Scores(**{name: arrays[name] for name in baseline})
    for name in ("kl", "highest_kl"):
        values = arrays[name]
        require((np.isfinite(values) & (values >= 0)).all(), path, f"{name} is not >= 0")
    require((np.isfinite(scores.log_p) & (scores.log_p <= 0)).all(), path, "log_p is not <= 0")
    for name in ("right", "changed"):
        within = (arrays[name] >= 0) & (arrays[name] <= n_answer)
        require(within.all(), path, f"{name} exceeds the answer's tokens")
    return scores
