"""Figure of the study of SmolLM2."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from smollm2_results import (
    ALL,
    FORMATS,
    HEAD_SCALE,
    LABELS,
    LAYERS,
    LOOSER,
    OWN_POLYNOMIAL,
    POLYNOMIAL_LOOSER,
    TEXT,
    VERSION_2,
    Row,
)

from calibrate.evidence.evidence import BASELINE
from calibrate.evidence.metrics import KL, LOG_P, RIGHT
from calibrate.report.plot_style import STYLES, new_figure, own_style, save_figure

# Others have their own.
STYLE_OF = {
    LAYERS: "hard",
    HEAD_SCALE: "least-squares",
    VERSION_2: "constant",
    OWN_POLYNOMIAL: "log-n",
    LOOSER: "entropy-and-size",
    POLYNOMIAL_LOOSER: "paper",
}
# Rows of the figure: kind of examples, measure, number in the record, label of the axis.
DRAWN = (
    ("held-out", RIGHT.name, "mean", "exact match (%)"),
    ("held-out", LOG_P.name, "gain", "gain in log-likelihood (nats)"),
    (TEXT, KL.name, "mean", "KL (nats per token)"),
)


def draw_results(path: Path, record: Row) -> None:
    """Saves the figure of a record."""
    save_figure(path, figure_of(record))


@own_style()
def figure_of(record: Row) -> Any:
    """A row of panels for each measure, a panel for each length, and in it rules by template."""
    rows = [row for row in record["found"] if ALL not in (row["template"], row["length"])]
    panels = [_panels(rows, *measure) for measure in DRAWN]
    n_columns = max(map(len, panels))
    figure = new_figure(4.2 * n_columns, 3.6 * len(panels) + 0.5)
    places = figure.subplots(len(panels), n_columns, squeeze=False)
    handles = dict[str, Any]()
    for of_measure, of_panels in zip(places, panels, strict=True):
        for ax in of_measure[len(of_panels) :]:
            ax.set_axis_off()
        for ax, panel in zip(of_measure, of_panels, strict=False):
            _draw_panel(ax, panel)
            drawn, labels = ax.get_legend_handles_labels()
            handles |= dict(zip(labels, drawn, strict=True))
    shown = [label for label in LABELS.values() if label in handles]
    figure.legend(
        [handles[label] for label in shown], shown, loc="outside lower center", ncols=3,
        frameon=False,
    )  # fmt: skip
    return figure


class Panel(NamedTuple):
    """The rows of a length under the rules that have a number of a measure."""

    kind: str
    length: int
    rows: list[Row]
    measure: str
    number: str
    axis_label: str


def _panels(rows: list[Row], kind: str, measure: str, number: str, axis_label: str) -> list[Panel]:
    """The panels of a measure of a kind of examples, the shortest length first."""
    of_kind = [row for row in rows if row["kind"] == kind]
    return [
        Panel(kind, n, [row for row in of_kind if row["length"] == n], measure, number, axis_label)
        for n in sorted({row["length"] for row in of_kind})
    ]


def _draw_panel(ax: Any, panel: Panel) -> None:
    """The rules side by side at each template; the baseline only where it can differ from 0."""
    rules = [rule for rule in LABELS if rule in panel.rows[0]["rules"]]
    if (panel.measure, panel.number) != (RIGHT.name, "mean"):
        rules.remove(BASELINE)
    for i, rule in enumerate(rules):
        _draw_rule(ax, rule, panel, 0.12 * (i - (len(rules) - 1) / 2))
    names = [row["template"] for row in panel.rows]
    ax.set_xticks(range(len(names)), names, rotation=45, ha="right")
    what = "text" if panel.kind == TEXT else "held-out templates"
    ax.set_title(f"{what}, {panel.length:,} tokens", fontsize=10)
    ax.set_ylabel(panel.axis_label)
    if panel.number == "mean":
        ax.set_ylim(bottom=0)
    else:
        ax.axhline(0, color="black", lw=0.8)
    ax.grid(axis="y", alpha=0.25, lw=0.5)


def _draw_rule(ax: Any, rule: str, panel: Panel, shift: float) -> None:
    """Means with two standard errors."""
    factor = FORMATS[panel.measure][0]
    found = [[factor * x for x in row["rules"][rule][panel.measure][panel.number]]
             for row in panel.rows]  # fmt: skip
    colour, marker, _ = STYLES[STYLE_OF.get(rule, rule)]
    ax.errorbar(
        np.arange(len(found)) + shift, [mean for mean, _ in found],
        [2 * error for _, error in found], fmt=marker, color=colour, ms=5,
        lw=1.4, capsize=2, label=LABELS[rule],
    )  # fmt: skip
