"""Results of the studies of SmolLM2: record, tables and figure; and the folders of its model."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from study import RUNS, table

from calibrate.evidence.evidence import BASELINE, OWN, Evidence
from calibrate.evidence.metrics import KL, LOG_P, RIGHT, Metric
from calibrate.report.plot_style import STYLES, new_figure, own_style, save_figure

RUN = RUNS / "smollm2"
MODEL_NAME = "SmolLM2-135M-Instruct"
MODEL = RUN / MODEL_NAME  # made by the step `get` of smollm2.py

HELD_OUT, TEXT, ALL = "held-out", "text", "all"
MEASURED = (RIGHT, LOG_P, KL)
OWN_POLYNOMIAL = "own-polynomial"
SHOWN = {OWN: "constants", OWN_POLYNOMIAL: "polynomials"}  # in the tables
LABELS = {BASELINE: "baseline", **SHOWN}  # in the figure
FORMATS = {RIGHT.name: (100, ".1f"), LOG_P.name: (1, ".3f"), KL.name: (1, ".4f")}
TOKENS = {256: 250, 1_024: 900, 2_048: 2_000}  # of prompts, by the nominal length in the record

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
    answers, text = (
        [row for row in record["found"] if row["kind"] == kind] for kind in (HELD_OUT, TEXT)
    )
    exact, log_p, kl = RIGHT.name, LOG_P.name, KL.name
    of_answers = {"exact match of the baseline, %": (BASELINE, exact, "mean")}
    of_answers |= {f"{name}: points": (rule, exact, "gain") for rule, name in SHOWN.items()}
    of_answers |= {f"{name}: nats": (rule, log_p, "gain") for rule, name in SHOWN.items()}
    of_text = {f"KL of {name}": (rule, kl, "mean") for rule, name in SHOWN.items()}
    leads = {"exact match, points": (OWN_POLYNOMIAL, exact, "lead"),
             "log-likelihood, nats": (OWN_POLYNOMIAL, log_p, "lead")}  # fmt: skip
    means = [row for row in answers if row["template"] == ALL]
    return [
        *_table("template", _shown(answers), of_answers), "",
        *_table("text", _shown(text), of_text), "",
        *_table("polynomials less constants", means, leads),
    ]  # fmt: skip


def _shown(rows: Sequence[Row]) -> list[Row]:
    shortest = min(row["length"] for row in rows)
    return [row for row in rows if row["template"] == ALL or row["length"] == shortest]


def _table(head: str, rows: Sequence[Row], columns: Mapping[str, tuple[str, str, str]]) -> Any:
    """A line for each row; columns are a rule, a metric and a number of it."""
    cells = (
        [row["template"], tokens_of(row["length"]), f"{row['examples']:,}",
         *(_cell(row, *column) for column in columns.values())]
        for row in rows
    )  # fmt: skip
    return table([head, "length", "examples", *columns], cells)


def tokens_of(length: int) -> str:
    """The tokens of examples of a nominal length, as text."""
    return f"{TOKENS.get(length, length):,}"


def _cell(row: Row, rule: str, metric: str, number: str) -> str:
    """A number with its error; empty if the row lacks the rule."""
    numbers = row["rules"].get(rule, {metric: {}})[metric].get(number)
    if numbers is None:
        return ""
    factor, digits = FORMATS[metric]
    sign = "" if number == "mean" else "+z"
    mean, error = (factor * x for x in numbers)
    known = f" ± {error:{digits}}" if np.isfinite(error) else ""
    return f"{mean:{sign}{digits}}{known}"


# Rules of the figure, and their styles.
DRAWN_RULES = {
    BASELINE: STYLES[BASELINE],
    OWN: STYLES["constant"],
    OWN_POLYNOMIAL: STYLES["own"],
}
# Rows of the figure: kind of examples, metric, number in the record, label of the axis.
DRAWN = (
    (HELD_OUT, RIGHT.name, "mean", "exact match (%)"),
    (HELD_OUT, LOG_P.name, "gain", "gain in log-likelihood (nats)"),
    (TEXT, KL.name, "mean", "KL (nats per token)"),
)


def draw_record(path: Path, record: Row) -> None:
    """Saves the figure of a record."""
    save_figure(path, figure_of(record))


@own_style()
def figure_of(record: Row) -> Any:
    """A row of panels for each metric, a panel for each length, and in it rules by template."""
    rows = [row for row in record["found"] if row["template"] != ALL]
    lengths = {
        kind: sorted({row["length"] for row in rows if row["kind"] == kind})
        for kind in (HELD_OUT, TEXT)
    }
    n_columns = max(map(len, lengths.values()))
    figure = new_figure(8, 2.1 * len(DRAWN) + 0.4)
    panels = figure.subplots(len(DRAWN), n_columns, squeeze=False, sharex="row", sharey="row")
    for of_metric, (kind, metric, number, axis_label) in zip(panels, DRAWN, strict=True):
        for ax, length in zip_longest(of_metric, lengths[kind]):
            if length is None:
                ax.set_axis_off()
                continue
            of_panel = [row for row in rows if (row["kind"], row["length"]) == (kind, length)]
            _draw_rules(ax, of_panel, metric, number)
            what = "text" if kind == TEXT else "templates"
            ax.set_title(f"{what}, {tokens_of(length)} tokens", fontsize=10)
            ax.set_xlabel(axis_label)
        of_metric[0].invert_yaxis()
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3,
                  frameon=False)  # fmt: skip
    return figure


def _draw_rules(ax: Any, rows: list[Row], metric: str, number: str) -> None:
    """Means with standard errors at each template; the baseline only where it can differ from 0."""
    rules = [rule for rule in DRAWN_RULES if rule in rows[0]["rules"]]
    if (metric, number) != (RIGHT.name, "mean"):
        rules.remove(BASELINE)
    for i, rule in enumerate(rules):
        colour, marker, _ = DRAWN_RULES[rule]
        found = [row["rules"][rule][metric][number] for row in rows]
        mean, error = FORMATS[metric][0] * np.transpose(found)
        places = np.arange(len(rows)) + 0.24 * (i - (len(rules) - 1) / 2)
        ax.errorbar(mean, places, xerr=error, fmt=marker, color=colour, ms=6, lw=1.6, capsize=2,
                    label=LABELS[rule])  # fmt: skip
    ax.set_yticks(range(len(rows)), [row["template"] for row in rows])
    ax.axvline(0, color="black", lw=0.8)
    ax.grid(alpha=0.25, lw=0.5)
