"""Batches of examples for a pass: equal lengths together, so that nothing is padded."""

from collections.abc import Callable, Iterable, Iterator

from calibrate.datasets.examples import Example, ExampleSet
from calibrate.model.answers import n_tokens

TOKENS_AT_ONCE = 1024  # of a batch; an example alone may be longer
Report = Callable[[int, bool], None]  # tokens of a batch, and whether it was passed before


def length_batches(
    examples: ExampleSet, indices: Iterable[int]
) -> Iterator[tuple[list[int], list[Example]]]:
    """Some examples in batches of equal length, without padding, with their places in `indices`.

    A window of text is a batch of its own. Order is kept within a length.
    """
    alike: dict[tuple[int, bool], list[tuple[int, Example]]] = {}
    for place, example in enumerate(examples.examples[i] for i in indices):
        key = len(example.tokens), examples.cells[example.cell].text
        alike.setdefault(key, []).append((place, example))
    for (length, is_text), members in alike.items():
        size = 1 if is_text else max(1, TOKENS_AT_ONCE // length)
        for first in range(0, len(members), size):
            batch = members[first : first + size]
            yield [place for place, _ in batch], [example for _, example in batch]


def batch_tokens(examples: ExampleSet, indices: Iterable[int]) -> list[int]:
    """The tokens of each of the batches of some examples."""
    return [n_tokens(batch) for _, batch in length_batches(examples, indices)]


def report_passed(
    examples: ExampleSet, indices: Iterable[int], report: Report, resumed: bool = True
) -> None:
    """Reports the batches of some examples, which may have been passed before."""
    for tokens in batch_tokens(examples, indices):
        report(tokens, resumed)
