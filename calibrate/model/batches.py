"""Batches of examples for a pass: equal lengths together, so that nothing is padded."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from calibrate.datasets.examples import Example, ExampleSet
from calibrate.parallel import Progress

TOKENS_AT_ONCE = 1024  # of a batch; an example alone may be longer


class TokenBatch(NamedTuple):
    """Examples of equal length, which go through the model together."""

    places: list[int]  # of each one among the indices that were given
    examples: list[Example]


def length_batches(
    examples: ExampleSet, indices: Iterable[int], max_tokens: int = TOKENS_AT_ONCE
) -> Iterator[TokenBatch]:
    """Some examples in batches of equal length, without padding.

    A window of text is a batch of its own. Order is kept within a length.
    """
    alike: dict[tuple[int, bool], list[tuple[int, Example]]] = {}
    for place, example in enumerate(examples.examples[i] for i in indices):
        key = len(example.tokens), examples.is_text(example)
        alike.setdefault(key, []).append((place, example))
    for (length, is_text), members in alike.items():
        size = 1 if is_text else max(1, max_tokens // length)
        for first in range(0, len(members), size):
            places, batch = zip(*members[first : first + size], strict=True)
            yield TokenBatch([*places], [*batch])


def n_tokens(examples: Sequence[Example]) -> int:
    """The tokens of some examples."""
    return sum(len(example.tokens) for example in examples)


def batch_tokens(examples: ExampleSet, indices: Iterable[int]) -> list[int]:
    """The tokens of each of the batches of some examples."""
    return [n_tokens(batch.examples) for batch in length_batches(examples, indices)]


def begin_passes(
    progress: Progress, stage: str, examples: ExampleSet, passes: Iterable[Sequence[int]]
) -> None:
    """Begins a stage with a step for each batch of some passes, the indices of their examples."""
    steps = [n for indices in passes for n in batch_tokens(examples, indices)]
    progress.begin(stage, len(steps), sum(steps))


def resume_pass(progress: Progress, examples: ExampleSet, indices: Iterable[int]) -> None:
    """Counts the batches of a pass whose result is cached."""
    for n in batch_tokens(examples, indices):
        progress.advance(n, resumed=True)
