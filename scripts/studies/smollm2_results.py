"""Results of the study of SmolLM2: record, tables and figure."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.evidence.metrics import KL, LOG_P, RIGHT, Metric
from calibrate.evidence.scores import OWN, PLAIN, Evidence
from calibrate.report.plot_style import STYLES, new_figure, save_figure

TEXT, ALL = "text", "all"
MEASURED = (RIGHT, LOG_P, KL)
LINE, LAYERS, HEAD_SCALE = "kappa-log-n", "layers", "head-scale"
LOOSER, WHOLE = "own-looser", "own-whole"
LABELS = {
    PLAIN: "baseline",
    "constant": "constant, every head",
    LINE: "log n, every head",
    LAYERS: "constant, layers 10 to 19",
    HEAD_SCALE: "HeadScale",
    OWN: "fitted rule, KL 0.01",
    LOOSER: "fitted rule, KL 0.03",
    WHOLE: "fitted rule, s = 1",
}
FORMATS = {
    RIGHT.name: (100, ".1f"),
    LOG_P.name: (1, ".3f"),
    TEXT: (1, ".4f"),
    KL.name: (1, ".4f"),
}  # factor and digits
TITLES = {
    RIGHT.name: "exact match, %",
    LOG_P.name: "log-likelihood of the answer, nats",
    TEXT: "text, log-likelihood, nats per token",
    KL.name: "text, KL from the baseline, nats per token",
}
# Others have their own.
STYLE_OF = {LAYERS: "log-n", HEAD_SCALE: "procedure", LOOSER: "entropy-and-size", WHOLE: "hard"}
DIFFERENCES = {"own_beyond": ": fitted rule less", "gain": ": gain over the baseline"}
# Names of the record, for people.
KINDS = {"not seen": "held-out", "seen": "calibration"}
STEPS = {"rivals": "baselines"}

Row = dict[str, Any]


def measured(evidence: Evidence, kinds: Mapping[str, Sequence[str]]) -> list[Row]:
    """Every template and length; the mean of the templates of a kind at each length; of both.

    Args:
      evidence: of rules by their names in LABELS.
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


def _parts(
    evidence: Evidence, templates: Sequence[str]
) -> Iterator[tuple[str, int | str, Evidence]]:
    """(template or ALL, length or ALL, examples)."""
    chosen = np.array([stratum.template in templates for stratum in evidence.strata])
    of_kind = evidence.where(chosen[evidence.stratum])
    by_length = of_kind.by("size")
    for length, part in by_length.items():
        by_template = part.by("template")
        for template, one in by_template.items():
            yield template, length, one
        if len(by_template) > 1:
            yield ALL, length, part
    if len(by_length) > 1:
        yield ALL, ALL, of_kind


def _numbers(evidence: Evidence, rule: str, metric: Metric) -> dict[str, tuple[float, float]]:
    """Means and errors: of the rule, of its gain, and of the gain of the fitted rule over it."""
    numbers = {"mean": evidence.mean(rule, metric), "gain": evidence.gain(rule, metric)}
    if OWN in evidence.rules:
        numbers["own_beyond"] = evidence.gain(OWN, metric, over=rule)
    return {name: (estimate.mean, estimate.error) for name, estimate in numbers.items()}


def markdown(record: Row) -> list[str]:
    """Tables of every measure, of leads of the fitted rule, of gain against KL, and of time."""
    rows = record["found"]
    answers, text = ([r for r in rows if (r["kind"] == TEXT) is its] for its in (False, True))
    rules = [rule for rule in LABELS if any(rule in row["rules"] for row in rows)]
    others = rules[1:]
    lines = [f"{record['verdict']}.", ""]
    for title, chosen, number, shown in (
        (RIGHT.name, answers, "mean", rules), (LOG_P.name, answers, "gain", others),
        (KL.name, text, "mean", others), (TEXT, text, "gain", others),
    ):  # fmt: skip
        lines += [*_table(title, chosen, number, shown), ""]
    means = [row for row in answers if row["template"] == ALL]
    for measure in (RIGHT.name, LOG_P.name):
        lines += [
            *_table(measure, means, "own_beyond", [rule for rule in rules if rule != OWN]),
            "",
        ]
    lines += [*_trade(record["trade"]), "", "| step | minutes |", "| --- | ---: |"]
    times = {STEPS.get(step, step): minutes for step, minutes in record["times"].items()}
    return lines + [f"| {step} | {minutes:.0f} |" for step, minutes in times.items()]


def _trade(records: Sequence[Row]) -> list[str]:
    """The gain and the KL of each interpolation weight, on test examples."""
    columns = {
        "gain": "held-out templates, nats",
        "seen": "calibration templates, nats",
        "kl": "text, KL per token",
    }
    lines = [
        "| interpolation weight s | " + " | ".join(columns.values()) + " |",
        "| ---: |" + " ---: |" * 3,
    ]
    for record in records:
        cells = [
            f"{record[x]:+.{3 + (x == 'kl')}f} ± {record[f'{x}_error']:.{3 + (x == 'kl')}f}"
            if x in record else "" for x in columns
        ]  # fmt: skip
        lines.append(f"| {record['strength']:g} | " + " | ".join(cells) + " |")
    return lines


def _table(title: str, rows: Sequence[Row], number: str, rules: Sequence[str]) -> list[str]:
    """A line for each row; rules that a row lacks are empty."""
    head = TITLES[title] + DIFFERENCES.get(number, "")
    lines = [f"| {head} | length | examples | " + " | ".join(LABELS[rule] for rule in rules) + " |"]
    lines += ["| --- | ---: | ---: |" + " ---: |" * len(rules)]
    for row in rows:
        cells = [_cell(row, rule, title, number) for rule in rules]
        of_kind = "" if row["kind"] == TEXT else f" ({KINDS[row['kind']]})"
        name = row["template"] + of_kind
        length = row["length"] if row["length"] == ALL else f"{row['length']:,}"
        lines.append(f"| {name} | {length} | {row['examples']:,} | " + " | ".join(cells) + " |")
    return lines


def _cell(row: Row, rule: str, title: str, number: str) -> str:
    numbers = row["rules"].get(rule, {}).get(LOG_P.name if title == TEXT else title, {}).get(number)
    if numbers is None:
        return ""
    factor, digits = FORMATS[title]
    sign = "+" if number in DIFFERENCES else ""
    mean, error = (factor * x for x in numbers)
    known = f" ± {error:{digits}}" if np.isfinite(error) else ""
    return f"{mean:{sign}{digits}}{known}"


def draw_results(path: Path, record: Row) -> None:
    """A panel for each kind and length: exact match by template, or KL of text by domain."""
    panels = dict[tuple[str, int], list[Row]]()
    for row in record["found"]:
        if ALL not in (row["template"], row["length"]):
            panels.setdefault((row["kind"], row["length"]), []).append(row)
    n_columns = min(3, len(panels))
    n_rows = -(-len(panels) // n_columns)
    figure = new_figure(4.2 * n_columns, 3.9 * n_rows + 0.5)
    places = figure.subplots(n_rows, n_columns, squeeze=False).ravel()
    for ax in places[len(panels) :]:
        ax.set_axis_off()
    for ax, ((kind, length), rows) in zip(places, panels.items(), strict=False):
        rules = [rule for rule in LABELS if rule in rows[0]["rules"]]
        if kind == TEXT:
            rules.remove(PLAIN)  # its KL is 0
        for i, rule in enumerate(rules):
            _draw_rule(ax, rule, rows, 0.12 * (i - (len(rules) - 1) / 2))
        ax.set_xticks(range(len(rows)), [row["template"] for row in rows], rotation=45, ha="right")
        what = "text" if kind == TEXT else f"{KINDS[kind]} templates"
        ax.set_title(f"{what}, {length:,} tokens", fontsize=10)
        ax.set_ylabel("KL (nats per token)" if kind == TEXT else "exact match (%)")
        ax.set_ylim(bottom=0)
        ax.grid(axis="y", alpha=0.25, lw=0.5)
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, frameon=False)
    save_figure(path, figure)


def _draw_rule(ax: Any, rule: str, rows: Sequence[Row], shift: float) -> None:
    """Means with two standard errors."""
    measure, factor = (KL.name, 1) if rows[0]["kind"] == TEXT else (RIGHT.name, 100)
    found = [[factor * x for x in row["rules"][rule][measure]["mean"]] for row in rows]
    colour, marker, _ = STYLES[STYLE_OF.get(rule, rule)]
    ax.errorbar(
        np.arange(len(rows)) + shift, [mean for mean, _ in found],
        [2 * error for _, error in found], fmt=marker, color=colour, ms=5,
        lw=1.4, capsize=2, label=LABELS[rule],
    )  # fmt: skip
