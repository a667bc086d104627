"""Batches of examples for a pass: equal lengths together, so that nothing is padded."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from calibrate.datasets.examples import Example, ExampleSet
from calibrate.parallel.progress import Progress

TOKENS_AT_ONCE = 1024  # of a batch; an example alone may be longer
# Times that of an answer's token: what others take, so that the time left can be told.
BACKWARD_WORK = 2.3  # with a gradient
TEXT_WORK = 1.8  # of text under a rule, with its share of the baseline's pass


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


class Passes(NamedTuple):
    """Passes through the model: the indices of the examples of each."""

    forward: Sequence[Sequence[int]] = ()  # under a rule
    backward: Sequence[Sequence[int]] = ()  # these have a gradient

    def __add__(self, other: "Passes") -> "Passes":  # type: ignore[override]
        return Passes((*self.forward, *other.forward), (*self.backward, *other.backward))

    def steps(self, examples: ExampleSet) -> list[float]:
        """The work of each batch: tokens of answers, or what the same time is spent on."""
        backward = [BACKWARD_WORK * n for x in self.backward for n in batch_tokens(examples, x)]
        return backward + [
            rule_work(batch.examples, examples.is_text(batch.examples[0]))
            for indices in self.forward
            for batch in length_batches(examples, indices)
        ]


def rule_work(batch: Sequence[Example], is_text: bool) -> float:
    """The work of a batch under a rule."""
    return n_tokens(batch) * (TEXT_WORK if is_text else 1.0)


NO_PASSES = Passes()


def begin_passes(
    progress: Progress,
    stage: str,
    examples: ExampleSet,
    passes: Passes,
    ahead: Passes | None = None,
) -> None:
    """Begins a stage with a step for each batch of some passes; `ahead` are those after it."""
    steps = passes.steps(examples)
    later = None if ahead is None else sum(ahead.steps(examples))
    progress.begin(stage, len(steps), sum(steps), later)


def resume_passes(progress: Progress, examples: ExampleSet, passes: Passes) -> None:
    """Counts the batches of some passes, whose results are cached."""
    for step in passes.steps(examples):
        progress.advance(step, resumed=True)
