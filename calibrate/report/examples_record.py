"""A collection of examples as a result to show: plain softmax's scores by template and length."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from calibrate.files.examples import Cell, ExampleCollection
from calibrate.report.blocks import Block, Table, Text
from calibrate.report.wording import with_error

LEAST_RIGHT = 0.02  # of the answers of some length: with fewer, the model does not do the task


class CellScore(NamedTuple):
    """The scores of one template at one length."""

    cell: Cell
    examples: int
    log_p: float  # nats: mean over whole answers; of text, per token
    error: float  # standard error
    right: float  # share of answers that are right as a whole; of text, of tokens


@dataclass(frozen=True)
class ExamplesRecord:
    """The result of `calibrate collect --model`."""

    collection: ExampleCollection

    def as_json(self) -> dict[str, Any]:
        """The manifest, and the scores of each cell."""
        scores = [
            score.cell._asdict() | {key: x for key, x in score._asdict().items() if key != "cell"}
            for score in cell_scores(self.collection)
        ]
        return self.collection.manifest | {
            "folder": self.collection.folder,
            "digest": self.collection.digest,
            "plain": scores,
        }

    def blocks(self) -> Iterable[Block]:
        """A row per template and length."""
        configuration = self.collection.manifest["configuration"]
        scores = cell_scores(self.collection)
        rows = [
            (
                score.cell.template, f"{score.cell.length:,}", f"{score.examples:,}",
                with_error(score.log_p, score.error, ".3f"), f"{score.right:.1%}",
            )
            for score in scores
        ]  # fmt: skip
        yield Table(
            columns=("template", "length", "examples", "log p", "right"),
            rows=rows,
            title=f"Examples {self.collection.folder}: {configuration['model']}, plain softmax",
            left=["template"],
        )
        yield Text(
            "log p in nats of the whole answer; right: greedy decoding gives the whole answer."
            + " Text: per token." * any(score.cell.text for score in scores)
            + " Lengths of --prompts are rounded up to powers of two."
            * ("prompts" in configuration["sources"])
        )
        if warning := nearly_none_right(self.collection):
            yield Text(f"\nNote: {warning}.")


def nearly_none_right(collection: ExampleCollection) -> str | None:
    """What it means that the model answers nearly nothing at any length; None if it does."""
    of_length: dict[int, list[CellScore]] = {}
    for score in cell_scores(collection):
        if not score.cell.text:
            of_length.setdefault(score.cell.length, []).append(score)
    right = {n: np.mean([score.right for score in some]) for n, some in of_length.items()}
    if not right or max(right.values()) >= LEAST_RIGHT:
        return None
    shown = ", ".join(
        f"{right[n]:.1%} at {n:,} tokens (log p {np.mean([s.log_p for s in of_length[n]]):.1f})"
        for n in sorted(right)
    )
    return (
        f"the model answers nearly nothing right: {shown}; a temperature can make it surer of what "
        "it finds, and hardly teaches it a task: give prompts that it answers when they are short"
    )


def cell_scores(collection: ExampleCollection) -> list[CellScore]:
    """The scores of each cell, in their order."""
    examples, scores = collection.set, collection.scores
    cell = np.array([example.cell for example in examples.examples])
    n_answer = examples.n_answer(range(len(cell)))
    made = []
    for number, of_cell in enumerate(examples.cells):
        rows = cell == number
        if not rows.any():
            continue
        log_p, right, n = scores.log_p[rows], scores.right[rows], n_answer[rows]
        value = log_p / n if of_cell.text else log_p
        share = right / n if of_cell.text else right == n
        error = float(value.std(ddof=1) / np.sqrt(len(value))) if len(value) > 1 else np.nan
        made.append(CellScore(of_cell, len(value), float(value.mean()), error, float(share.mean())))
    return made
