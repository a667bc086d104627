#!/usr/bin/env python
"""The size from which on max-retrieval-0 loses its target; writes scripts/results/dispersal.json.

scripts/studies/dispersal.py             # a minute; also draws the paper's Figures 2 and 6
scripts/studies/dispersal.py --markdown  # prints the table of its page from the record
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.special import entr, softmax
from study import RESULTS, parse, table, write_record

import calibrate
from calibrate.report.plot_style import new_figure, own_style, save_figure
from calibrate.rows.heads import load_head
from calibrate.rows.units import Unit, attended_pieces
from calibrate.store.fit import Fit
from calibrate.store.references import published_store

RESULT = RESULTS / "dispersal.json"
SIZES = [16 << i for i in range(11)]
SETS = 256
SHARES = (0.5, 0.25, 0.1)  # of the attention, that the target falls below
SHOWN = ("256", "1024")  # sizes of the sets of an estimate, in the table
N_SETS, N_PANELS = 32, 8  # of heat maps
STREAM = "closeup"  # name of the random stream: another name draws other sets
N_LARGEST = 16
BASELINE = calibrate.identity()


def main() -> None:
    parse(__doc__, markdown, RESULT)
    examples = draw_examples(load_head("max-retrieval"), SIZES, SETS, 0)
    record = write_record(RESULT, record_of(examples) | {"spread": spreads_of(examples)})
    fit = calibrate.load("max-retrieval@1", published_store())
    save_figure(RESULT.with_suffix(".png"), heatmap_figure(examples, [BASELINE, fit]))
    print("\n".join(markdown(record)))


class ExampleSets(NamedTuple):
    """Some sets of one size."""

    size: int
    logits: np.ndarray  # (sets, n) float64
    target: np.ndarray  # (sets,)
    entropy: np.ndarray  # (sets,) nats
    largest: np.ndarray  # (sets, up to 16) items with the largest keys, the target last
    spread_bound: np.ndarray  # (sets,) bound of the largest logit less the smallest, of the weights

    def coefficients(self, fit: Fit = BASELINE) -> np.ndarray:
        """(sets, n) attention coefficients under a fit."""
        beta = calibrate.inverse_temperature(self.entropy, fit, n=self.size)
        return softmax(np.asarray(beta, float)[:, None] * self.logits, axis=1)

    def target_coefficient(self) -> np.ndarray:
        """(sets,) attention coefficient of the target under the baseline."""
        return np.take_along_axis(self.coefficients(), self.target[:, None], axis=1)[:, 0]

    def spread(self) -> np.ndarray:
        """(sets,) the largest logit less the smallest."""
        return np.ptp(self.logits, axis=1)


def draw_examples(head: Any, sizes: Sequence[int], sets: int, seed: int) -> list[ExampleSets]:
    """Runs the head over a few sets of each size, from a stream that is used for nothing else."""
    return [_draw_size(head, size, sets, seed) for size in sizes]


def _draw_size(head: Any, size: int, sets: int, seed: int) -> ExampleSets:
    pieces = [
        (piece.logits.astype(float), piece.target, piece.batch.priority,
         spread_bound(head.params, piece.batch.query, np.asarray(piece.attended.features)))
        for piece in attended_pieces(head, STREAM, seed, Unit(size, 0, 0, sets))
    ]  # fmt: skip
    logits, target, keys, bound = (np.concatenate(column) for column in zip(*pieces, strict=True))
    largest = np.argsort(keys, axis=1)[:, -N_LARGEST:]
    H = entropy_of(softmax(logits, axis=1))
    return ExampleSets(size, logits, target, H, largest, bound)


def entropy_of(coefficients: np.ndarray) -> np.ndarray:
    """(sets,) Shannon entropy of (sets, n) coefficients, nats."""
    return np.asarray(entr(coefficients).sum(axis=1))


def spread_bound(params: Any, query: np.ndarray, items: np.ndarray) -> np.ndarray:
    """Proposition 3.1 for attention with biases: delta <= 2 |Q y + b| s_max(K) max |x| / sqrt(d).

    A key bias adds the same to every logit of a row.

    Args:
      params: of the head max-retrieval.
      query: (sets,)
      items: (sets, n, d) embedded items x.
    Returns:
      (sets,) an upper bound of the largest logit less the smallest.
    Reference: Velickovic et al. 2024, Proposition 3.1 and appendix A.3.
    """
    y = query[:, None]
    for layer in ("query_1", "query_2", "attention_query"):
        y = y @ params[layer]["kernel"] + params[layer]["bias"]
        y = jax.nn.gelu(y) if layer == "query_1" else y
    query_norm = np.linalg.norm(np.asarray(y), axis=1) / math.sqrt(items.shape[-1])
    key_norm = np.linalg.norm(np.asarray(params["attention_key"]["kernel"]), ord=2)
    item_norm = np.linalg.norm(items, axis=-1).max(axis=1)
    return 2 * query_norm * key_norm * item_norm


def estimated_dispersal(sets: ExampleSets, eps: float = 0.5) -> float:
    """The size above which the target's coefficient is below eps in half of the sets.

    n* = 1 + (1 / eps - 1) / m, with m the mean of exp(z_j - z_t) over the other items: with n items
    of the same kind the coefficient is 1 / (1 + (n - 1) m). The larger the sets, the better.
    """
    at_target = np.take_along_axis(sets.logits, sets.target[:, None], axis=1)
    others = np.exp(sets.logits - at_target).sum(axis=1) - 1
    return float(np.median(1 + (1 / eps - 1) * (sets.size - 1) / others))


def measured_dispersal(examples: Sequence[ExampleSets], eps: float = 0.5) -> float | None:
    """The same, measured: interpolated between two sizes that bracket it, None if none do."""
    medians = [float(np.median(sets.target_coefficient())) for sets in examples]
    for i, (before, after) in enumerate(pairwise(medians)):
        if before >= eps > after:
            share = (before - eps) / (before - after)
            low, high = np.log([examples[i].size, examples[i + 1].size])
            return float(np.exp(low + share * (high - low)))
    return None


def record_of(examples: Sequence[ExampleSets]) -> dict[str, dict]:
    """By eps, the size from which on the target has less: as estimated, and as measured."""
    return {
        f"{eps:g}": {
            "estimate": {
                f"{sets.size}": round(estimated_dispersal(sets, eps))
                for sets in examples if sets.size >= 256
            },
            "measured": round(measured_dispersal(examples, eps) or 0),
        }
        for eps in SHARES
    }  # fmt: skip


def spreads_of(examples: Sequence[ExampleSets]) -> dict[str, dict[str, float]]:
    """By size, medians of the spread of the logits and of its bound by Proposition 3.1, in nats."""
    return {
        f"{sets.size}": {
            "measured": round(float(np.median(sets.spread())), 1),
            "bound": round(float(np.median(sets.spread_bound)), 1),
        }
        for sets in examples
    }


def markdown(record: dict) -> list[str]:
    """The table of the page."""
    columns = [record[f"{eps:g}"] for eps in SHARES]
    rows = [(f"predicted from inputs of {int(size):,}", [of["estimate"][size] for of in columns])
            for size in SHOWN]  # fmt: skip
    rows.append(("measured", [of["measured"] for of in columns]))
    cells = ([name, *(f"{n:,}" for n in sizes)] for name, sizes in rows)
    return table(["eps", *(f"{eps:g}" for eps in SHARES)], cells)


@own_style()
def heatmap_figure(examples: Sequence[ExampleSets], fits: Sequence[Fit]) -> Figure:
    """The paper's Figures 2 and 6: coefficients of the 16 largest keys of 32 sets.

    A column of panels per set size, a row of panels per fit.
    """
    chosen = np.linspace(0, len(examples) - 1, min(N_PANELS, len(examples))).round().astype(int)
    shown = [examples[i] for i in chosen]
    figure = new_figure(9.6, 0.7 + 1.9 * len(fits))
    axes = figure.subplots(len(fits), len(shown), squeeze=False)
    for row, fit in zip(axes, fits, strict=True):
        for ax, sets in zip(row, shown, strict=True):
            plot_coefficients(ax, sets, fit)
        name = "baseline" if fit == BASELINE else f"with {fit.reference}"
        row[0].set_ylabel(f"{name}: {N_SETS} inputs", fontsize=9)
    for ax, sets in zip(axes[0], shown, strict=True):
        ax.set_title(f"n = {sets.size:,}", fontsize=9)
    figure.supxlabel("the 16 items with the largest keys, the target rightmost", fontsize=9)
    image = axes[0, 0].images[0]
    figure.colorbar(image, ax=axes, label="attention coefficient", shrink=0.9, pad=0.01)
    return figure


def plot_coefficients(ax: Axes, sets: ExampleSets, fit: Fit) -> None:
    largest = np.take_along_axis(sets.coefficients(fit), sets.largest, axis=1)[:N_SETS]
    ax.imshow(largest, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest")
    ax.set(xticks=[], yticks=[])


if __name__ == "__main__":
    main()
