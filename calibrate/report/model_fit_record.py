"""A fit through a model as a result to show: what it is worth beside its rivals, and its heads."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.export.plan import ALIKE, LAYER
from calibrate.files.coefficients import Coefficients
from calibrate.model.comparison import LOG_P, PLAIN, RIGHT, Estimate, ExampleComparison
from calibrate.model.judging import OWN, Judged
from calibrate.report.blocks import SHOWN_HEADS, Block, Facts, Heading, Table
from calibrate.report.model_plots import Head, plot_head_betas, typical_betas
from calibrate.report.plot_style import new_figure, save_figure
from calibrate.report.usage import usage
from calibrate.report.wording import percent, with_error

if TYPE_CHECKING:
    from calibrate.model.candidates import Candidate
    from calibrate.model.model_fit import ModelFit


@dataclass(frozen=True)
class ModelFitRecord:
    """The result of `calibrate model fit`; the figure is None if it was not drawn."""

    fit: "ModelFit"
    figure: Path | None

    @property
    def coefficients(self) -> Coefficients:
        return self.fit.coefficients

    def as_json(self) -> dict[str, Any]:
        """Every rule on examples that no fit has seen, every candidate, every head, the paths."""
        fit, judged = self.fit, self.fit.judged
        candidates = [
            {
                "kind": c.form.kind, "each_head": c.form.of != ALIKE,
                "heads": len(c.heads_changed(fit.heads)),
                "gain": c.point.value.gain, "losses": _as_dicts(c.point.value.losses),
            }
            for c in fit.candidates
        ]  # fmt: skip
        rules: dict[str, Any] = {PLAIN: {"right": judged.right(PLAIN)}}
        for label, losses in judged.losses.items():
            gain = judged.gain(label)._asdict()
            rules[label] = {"right": judged.right(label), "gain": gain, "losses": _as_dicts(losses)}
        return {
            "reference": fit.coefficients.reference,
            "path": str(fit.coefficients.path),
            "figure": self.figure,
            "rules": rules,
            "by_length": right_by_length(judged.comparison),
            "candidates": candidates,
            "heads": [
                {"layer": layer, "head": head, "beta": 1.0 if beta is None else beta}
                for (layer, head), beta in self._betas().items()
            ],
            "export_cost": judged.export_cost and judged.export_cost._asdict(),
            "quality": dict(fit.coefficients.quality),
        }

    def blocks(self) -> Iterable[Block]:
        """The rules beside each other, the heads that changed most, and how to use the fit."""
        fit = self.fit
        yield Heading(f"Fit {fit.coefficients.reference}")
        yield Facts([
            ("file", str(fit.coefficients.path)), ("figure", str(self.figure or "not drawn")),
        ])  # fmt: skip
        yield rules_table(fit.judged)
        yield lengths_table(fit.judged.comparison)
        yield self._candidates()
        yield from self._heads()
        yield Facts([("verdict", fit.coefficients.quality["verdict"])])
        yield usage(fit.coefficients)

    def _candidates(self) -> Table:
        rows = [
            (
                c.form.kind, self._changed(c), f"{c.point.value.gain:+.3f}", self._choice(c),
            )
            for c in self.fit.candidates
        ]  # fmt: skip
        title = "Kinds of rule, by log p of the answers that choose (nats beyond plain softmax)"
        return Table(("kind", "for", "gain", ""), rows, title=title, left=["kind", "for", ""])

    def _changed(self, candidate: "Candidate") -> str:
        of, heads = candidate.form.of, candidate.heads_changed(self.fit.heads)
        if of == ALIKE:
            return of
        return f"{len(heads)} heads" + ", by layer" * (of == LAYER)

    def _choice(self, candidate: "Candidate") -> str:
        chosen = self.fit.chosen
        if candidate is chosen.published:
            return "chosen"
        if not chosen.exporting or candidate.form in chosen.exporting:
            return ""
        return "best, not for export" if candidate is chosen.free else "not for export"

    def _heads(self) -> Iterable[Block]:
        if self.fit.chosen.published.form.of == ALIKE:
            return
        betas = sorted(
            ((name, beta) for name, beta in self._betas().items() if beta is not None),
            key=lambda item: -abs(np.log(item[1])),
        )
        rest = len(betas) - SHOWN_HEADS
        yield Table(
            ("head", "beta"),
            [(f"L{layer}H{head}", f"{beta:.2f}") for (layer, head), beta in betas[:SHOWN_HEADS]],
            title=f"Heads that changed most, beta at {self._typical_length():,} tokens",
            note=f"and {rest} more (--json lists them all)" if rest > 0 else "",
            left=["head"],
        )

    def _typical_length(self) -> int:
        return round(float(np.exp(self.fit.chosen.published.form.center)))

    def _betas(self) -> dict[Head, float | None]:
        return typical_betas(self.fit.coefficients, self._typical_length(), self.fit.heads)

    def save_beta_map(self, path: Path) -> None:
        """The heads of the model, coloured by beta."""
        n_layers = len({layer for layer, _ in self.fit.heads})
        figure = new_figure(6.0, min(max(3.6, 0.28 * n_layers), 12))
        ax = figure.subplots()
        plot_head_betas(ax, self.fit.coefficients, self._typical_length(), self.fit.heads)
        ax.set_title("red is sharper, blue more diffuse than plain softmax", fontsize=10)
        save_figure(path, figure)


def _as_dicts(estimates: Iterable[Estimate]) -> list[dict[str, float]]:
    return [estimate._asdict() for estimate in estimates]


def right_by_length(comparison: ExampleComparison) -> list[dict[str, Any]]:
    """Of each length: answers, the shares of them that are wholly right, and gains."""
    groups = [(n, comparison.members(length=n)) for n in comparison.lengths()]
    return [
        {"length": n, "answers": comparison.count(cells)}
        | {rule: comparison.mean(rule, RIGHT, cells).mean for rule in (PLAIN, OWN)}
        | {
            "gain": comparison.gain(OWN, RIGHT, cells),
            "log_p_gain": comparison.gain(OWN, LOG_P, cells),
        }
        for n, cells in groups
    ]


def lengths_table(comparison: ExampleComparison) -> Table:
    """Answers wholly right at each length, plain and with the fit, on the same examples."""
    rows = [
        (
            f"{row['length']:,}", f"{row['answers']:,}", percent(row[PLAIN]), percent(row[OWN]),
            with_error(100 * row["gain"].mean, 100 * row["gain"].error, "+.1f"),
            with_error(row["log_p_gain"].mean, row["log_p_gain"].error, "+.3f"),
        )
        for row in right_by_length(comparison)
    ]  # fmt: skip
    return Table(
        ("tokens", "answers", "plain softmax", "own fit", "difference", "log p gained"),
        rows,
        title="Answers right by length, %",
        note="on the same examples; ± standard error: up to two are within chance",
    )


def rules_table(judged: Judged) -> Table:
    """Rules on the examples that no fit has seen; without held tokens, none are lost."""
    lost = [judged.lost(label) for label in judged.losses]
    note = "nats an answer ± standard error"
    columns = {
        "rule": [PLAIN, *judged.losses],
        "answers right": [percent(judged.right(label)) for label in (PLAIN, *judged.losses)],
        "log p gained": ["", *(with_error(*judged.gain(x), "+.3f") for x in judged.losses)],
    }
    if any(lost):
        columns["lost by held tokens"] = ["", *(with_error(*x, "+.4f") if x else "" for x in lost)]
        note += "; nats a token, at most of what is held"
    title = "On examples that no fit has seen, templates and lengths alike"
    rows = list(zip(*columns.values(), strict=True))
    return Table(list(columns), rows, title, note, left=["rule"])
