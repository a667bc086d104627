"""Results of the studies of SmolLM2: record, tables and figure; and the folders of its model."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from study import RUNS, table

from calibrate.evidence.evidence import BASELINE, OWN, Evidence
from calibrate.evidence.metrics import KL, LOG_P, RIGHT, Metric
from calibrate.report.plot_style import STYLES, new_figure, own_style, save_figure

RUN = RUNS / "smollm2"
MODEL_NAME = "SmolLM2-135M-Instruct"
MODEL = RUN / MODEL_NAME  # made by the step `get` of smollm2.py

TEXT, ALL = "text", "all"
MEASURED = (RIGHT, LOG_P, KL)
OWN_POLYNOMIAL = "own-polynomial"
SHOWN = {OWN: "constants", OWN_POLYNOMIAL: "polynomials"}  # in the tables
LABELS = {BASELINE: "baseline", **SHOWN}  # in the figure
FORMATS = {RIGHT.name: (100, ".1f"), LOG_P.name: (1, ".3f"), KL.name: (1, ".4f")}
TOKENS = {256: 250, 1_024: 900, 2_048: 2_000}  # of prompts, by the nominal length in the record
SIGNED = ("gain", "lead")

Row = dict[str, Any]


def measured(evidence: Evidence, kinds: Mapping[str, Sequence[str]]) -> list[Row]:
    """Every template and length, and the mean of the templates of a kind at each length.

    Args:
      evidence: of rules by their names in the record.
      kinds: templates, by the name of their kind.
    """
    return [
        {
            "kind": kind, "template": template, "length": length, "examples": part.n,
            "rules": {
                rule: {m.name: _numbers(part, rule, m) for m in MEASURED if m in part.values}
                for rule in part.rules
            },
        }
        for kind, templates in kinds.items()
        for template, length, part in _parts(evidence, templates)
    ]  # fmt: skip


def _parts(evidence: Evidence, templates: Sequence[str]) -> Iterator[tuple[str, int, Evidence]]:
    """(template or ALL, length, examples)."""
    chosen = np.array([stratum.template in templates for stratum in evidence.strata])
    of_kind = evidence.where(chosen[evidence.stratum])
    for length, part in of_kind.by("size").items():
        by_template = part.by("template")
        for template, one in by_template.items():
            yield template, length, one
        if len(by_template) > 1:
            yield ALL, length, part


def _numbers(evidence: Evidence, rule: str, metric: Metric) -> dict[str, tuple[float, float]]:
    """Means and errors: of the rule, of its gain, and of the polynomials' lead over constants."""
    numbers = {"mean": evidence.mean(rule, metric), "gain": evidence.gain(rule, metric)}
    if rule == OWN_POLYNOMIAL and OWN in evidence.rules:
        numbers["lead"] = evidence.gain(rule, metric, over=OWN)
    return {name: (estimate.mean, estimate.error) for name, estimate in numbers.items()}


def markdown(record: Row) -> list[str]:
    """Tables of answers, of text, and of polynomials less constants.

    Templates and domains have rows at their shortest length; the means of all, at every length.
    """
    shortest = {
        kind: min(row["length"] for row in record["found"] if row["kind"] == kind)
        for kind in ("held-out", TEXT)
    }
    rows = [
        row for row in record["found"]
        if row["template"] == ALL or row["length"] == shortest[row["kind"]]
    ]  # fmt: skip
    answers = [row for row in rows if row["kind"] != TEXT]
    exact, log_p, kl = RIGHT.name, LOG_P.name, KL.name
    of_answers = [Column("exact match of the baseline, %", BASELINE, exact, "mean")]
    of_answers += [Column(f"{SHOWN[rule]}: points", rule, exact, "gain") for rule in SHOWN]
    of_answers += [Column(f"{SHOWN[rule]}: nats", rule, log_p, "gain") for rule in SHOWN]
    of_text = [Column(f"KL of {SHOWN[rule]}", rule, kl, "mean") for rule in SHOWN]
    leads = [Column("exact match, points", OWN_POLYNOMIAL, exact, "lead"),
             Column("log-likelihood, nats", OWN_POLYNOMIAL, log_p, "lead")]  # fmt: skip
    return [
        *_table("template", answers, of_answers), "",
        *_table("text", [row for row in rows if row["kind"] == TEXT], of_text), "",
        *_table("polynomials less constants", [r for r in answers if r["template"] == ALL], leads),
    ]  # fmt: skip


class Column(NamedTuple):
    """A number of a rule in a table."""

    title: str
    rule: str
    measure: str
    number: str


def _table(head: str, rows: Sequence[Row], columns: Sequence[Column]) -> list[str]:
    """A line for each row; the numbers of rules that a row lacks are empty."""
    cells = (
        [row["template"], tokens_of(row["length"]), f"{row['examples']:,}",
         *(_cell(row, column) for column in columns)]
        for row in rows
    )  # fmt: skip
    return table([head, "length", "examples", *(column.title for column in columns)], cells)


def tokens_of(length: int) -> str:
    """The tokens of examples of a nominal length, as text."""
    return f"{TOKENS.get(length, length):,}"


def _cell(row: Row, column: Column) -> str:
    numbers = row["rules"].get(column.rule, {}).get(column.measure, {}).get(column.number)
    if numbers is None:
        return ""
    factor, digits = FORMATS[column.measure]
    sign = "+z" if column.number in SIGNED else ""
    mean, error = (factor * x for x in numbers)
    known = f" ± {error:{digits}}" if np.isfinite(error) else ""
    return f"{mean:{sign}{digits}}{known}"


# Rules of the figure, and their styles.
DRAWN_RULES = {
    BASELINE: STYLES[BASELINE],
    OWN: STYLES["constant"],
    OWN_POLYNOMIAL: STYLES["own"],
}
# Rows of the figure: kind of examples, measure, number in the record, label of the axis.
DRAWN = (
    ("held-out", RIGHT.name, "mean", "exact match (%)"),
    ("held-out", LOG_P.name, "gain", "gain in log-likelihood (nats)"),
    (TEXT, KL.name, "mean", "KL (nats per token)"),
)


def draw_record(path: Path, record: Row) -> None:
    """Saves the figure of a record."""
    save_figure(path, figure_of(record))


@own_style()
def figure_of(record: Row) -> Any:
    """A row of panels for each measure, a panel for each length, and in it rules by template."""
    rows = [row for row in record["found"] if row["template"] != ALL]
    panels = [_panels(rows, *measure) for measure in DRAWN]
    n_columns = max(map(len, panels))
    figure = new_figure(8, 2.1 * len(panels) + 0.4)
    places = figure.subplots(len(panels), n_columns, squeeze=False, sharex="row", sharey="row")
    for of_measure, of_panels in zip(places, panels, strict=True):
        for ax in of_measure[len(of_panels) :]:
            ax.set_axis_off()
        for ax, panel in zip(of_measure, of_panels, strict=False):
            _draw_panel(ax, panel)
        of_measure[0].invert_yaxis()
    figure.legend(
        *places[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3,
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
    """The rules at each template; the baseline only where it can differ from 0."""
    rules = [rule for rule in DRAWN_RULES if rule in panel.rows[0]["rules"]]
    if (panel.measure, panel.number) != (RIGHT.name, "mean"):
        rules.remove(BASELINE)
    for i, rule in enumerate(rules):
        _draw_rule(ax, rule, panel, 0.24 * (i - (len(rules) - 1) / 2))
    names = [row["template"] for row in panel.rows]
    ax.set_yticks(range(len(names)), names)
    ax.set_xlabel(panel.axis_label)
    what = "text" if panel.kind == TEXT else "templates"
    ax.set_title(f"{what}, {tokens_of(panel.length)} tokens", fontsize=10)
    ax.axvline(0, color="black", lw=0.8)
    ax.grid(alpha=0.25, lw=0.5)


def _draw_rule(ax: Any, rule: str, panel: Panel, shift: float) -> None:
    """Means with standard errors."""
    factor = FORMATS[panel.measure][0]
    found = [[factor * x for x in row["rules"][rule][panel.measure][panel.number]]
             for row in panel.rows]  # fmt: skip
    colour, marker, _ = DRAWN_RULES[rule]
    ax.errorbar(
        [mean for mean, _ in found], np.arange(len(found)) + shift,
        xerr=[error for _, error in found], fmt=marker, color=colour, ms=6,
        lw=1.6, capsize=2, label=LABELS[rule],
    )  # fmt: skip
