#!/usr/bin/env python
"""The size from which on max-retrieval-0 loses its target; writes scripts/results/dispersal.json.

scripts/studies/dispersal.py             # a minute; also draws the paper's Figures 2 and 6
scripts/studies/dispersal.py --markdown  # prints the table of its page from the record
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from command_line import parse, study_parser
from example_sets import ExampleSets, draw_examples, estimated_dispersal, measured_dispersal
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import calibrate
from calibrate.report.plot_style import new_figure, own_style, save_figure
from calibrate.rows.heads import load_head
from calibrate.storage.atomic_io import write_atomically
from calibrate.store.fit import Fit
from calibrate.store.fits_store import published_store

RESULT = Path(__file__).parents[1] / "results" / "dispersal.json"
SIZES = [16 << i for i in range(11)]
SETS = 256
SHARES = (0.5, 0.25, 0.1)  # of the attention, that the target falls below
SHOWN = ("1024", "16384")  # sizes of the sets of an estimate, in the table
N_SETS, N_PANELS = 32, 8  # of heat maps

Examples = Sequence[ExampleSets]


def main() -> None:
    parse(study_parser(__doc__), markdown, RESULT)
    examples = draw_examples(load_head("max-retrieval"), SIZES, SETS, 0)
    record = record_of(examples)
    write_atomically(RESULT, (json.dumps(record, indent=1) + "\n").encode())
    fit = calibrate.load("max-retrieval@1", published_store())
    save_figure(RESULT.with_suffix(".png"), heatmap_figure(examples, [None, fit]))
    print("\n".join(markdown(record)))
    spread = max(sets.spread().max() for sets in examples)
    bound = max(sets.spread_bound.max() for sets in examples)
    print(f"largest spread of the logits: {spread:.0f}, by Proposition 3.1 at most {bound:.0f}")


def record_of(examples: Examples) -> dict[str, dict]:
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


def markdown(record: dict) -> list[str]:
    """The table of the page."""
    rows = {f"estimate from sets of {int(size):,}": [] for size in SHOWN} | {"measured": []}
    for found in record.values():
        for row, size in zip(rows.values(), SHOWN, strict=False):
            row.append(found["estimate"][size])
        rows["measured"].append(found["measured"])
    return [
        f"| eps | {' | '.join(record)} |",
        "| --- |" + " ---: |" * len(record),
        *(f"| {name} | {' | '.join(f'{n:,}' for n in row)} |" for name, row in rows.items()),
    ]


@own_style()
def heatmap_figure(examples: Examples, fits: Sequence[Fit | None]) -> Figure:
    """The paper's Figures 2 and 6: coefficients of the 16 largest keys of 32 sets.

    A column of panels per set size, a row of panels per fit; None is the baseline.
    """
    chosen = np.linspace(0, len(examples) - 1, min(N_PANELS, len(examples))).round().astype(int)
    shown = [examples[i] for i in chosen]
    figure = new_figure(9.6, 0.7 + 1.9 * len(fits))
    axes = figure.subplots(len(fits), len(shown), squeeze=False)
    for row, fit in zip(axes, fits, strict=True):
        for ax, sets in zip(row, shown, strict=True):
            plot_coefficients(ax, sets, fit)
        row[0].set_ylabel(f"with {fit.reference}" if fit else "baseline", fontsize=9)
    for ax, sets in zip(axes[0], shown, strict=True):
        ax.set_title(f"n = {sets.size:,}", fontsize=9)
    figure.supxlabel("the 16 items with the largest keys, the target rightmost", fontsize=9)
    figure.supylabel(f"{N_SETS} sets", fontsize=9)
    image = axes[0, 0].images[0]
    figure.colorbar(image, ax=axes, label="attention coefficient", shrink=0.9, pad=0.01)
    return figure


def plot_coefficients(ax: Axes, sets: ExampleSets, fit: Fit | None) -> None:
    largest = np.take_along_axis(sets.coefficients(fit), sets.largest, axis=1)[:N_SETS]
    ax.imshow(largest, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest")
    ax.set(xticks=[], yticks=[])


if __name__ == "__main__":
    main()
