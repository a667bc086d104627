"""A fit through a model as a result to show: what it is worth beside its rivals, and its heads."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.examples.comparison import PLAIN
from calibrate.model_fitting.judging import Judged
from calibrate.report.blocks import SHOWN_HEADS, Block, Facts, Heading, Table
from calibrate.report.plot_style import new_figure, plot_head_map, save_figure
from calibrate.report.usage import usage
from calibrate.report.wording import percent, with_error

if TYPE_CHECKING:
    from calibrate.model_fitting.model_fit import ModelFit


@dataclass(frozen=True)
class ModelFitRecord:
    """The result of `calibrate fit` on a model; the figure is None if it was not drawn."""

    fit: "ModelFit"
    figure: Path | None

    def as_json(self) -> dict[str, Any]:
        """Every rule on examples that no fit has seen, every candidate, every head, the paths."""
        fit, judged = self.fit, self.fit.judged
        candidates = [
            {
                "kind": c.form.kind, "each_head": not c.form.shared, "heads": c.n_changed,
                "gain": c.point.value.gain, "losses": c.point.value.losses,
            }
            for c in fit.candidates
        ]  # fmt: skip
        rules: dict[str, Any] = {PLAIN: {"right": judged.right(PLAIN)}}
        for label, losses in judged.losses.items():
            gain = judged.gain(label)._asdict()
            rules[label] = {"right": judged.right(label), "gain": gain, "losses": losses}
        return {
            "reference": fit.coefficients.reference,
            "path": str(fit.coefficients.path),
            "figure": self.figure,
            "rules": rules,
            "candidates": candidates,
            "heads": [
                {"layer": layer, "head": head, "beta": beta}
                for (layer, head), beta in typical_betas(fit).items()
            ],
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
        yield self._candidates()
        yield from self._heads()
        yield Facts([("verdict", fit.coefficients.quality["verdict"])])
        yield usage(fit.coefficients)

    def _candidates(self) -> Table:
        rows = [
            (
                c.form.kind, "all heads alike" if c.form.shared else f"{c.n_changed} heads",
                f"{c.point.value.gain:+.3f}", "chosen" if c is self.fit.chosen else "",
            )
            for c in self.fit.candidates
        ]  # fmt: skip
        title = "Kinds of rule, by log p of the answers that choose (nats beyond plain softmax)"
        return Table(("kind", "for", "gain", ""), rows, title=title, left=["kind", "for", ""])

    def _heads(self) -> Iterable[Block]:
        if self.fit.chosen.form.shared:
            return
        betas = sorted(
            ((name, beta) for name, beta in typical_betas(self.fit).items() if beta != 1),
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
        return round(float(np.exp(self.fit.chosen.form.center)))


def rules_table(judged: Judged) -> Table:
    """Rules on the examples that no fit has seen."""
    rows = [(PLAIN, percent(judged.right(PLAIN)), "", "")]
    for label in judged.losses:
        lost = judged.lost(label)
        rows.append((
            label, percent(judged.right(label)), with_error(*judged.gain(label), "+.3f"),
            "" if lost is None else f"{lost:+.4f}",
        ))  # fmt: skip
    return Table(
        ("rule", "answers right", "log p gained", "lost by held tokens"),
        rows,
        title="On examples that no fit has seen, templates and lengths alike",
        note="nats an answer ± standard error; nats a token, at most of what is held",
        left=["rule"],
    )


def typical_betas(fit: "ModelFit") -> dict[tuple[int, int], float]:
    """beta of each head for a query of the typical length, with half of the entropy it can have."""
    form, numbers = fit.chosen.form, fit.chosen.point.numbers
    beta = np.clip(1 + numbers[0], form.rule.min_beta, form.rule.max_beta)
    beta = np.broadcast_to(beta, len(fit.heads))
    return dict(zip(fit.heads, beta.tolist(), strict=True))


def save_beta_map(path: Path, fit: "ModelFit") -> None:
    """The heads of the model, coloured by beta."""
    betas = typical_betas(fit)
    n_layers = len({layer for layer, _ in betas})
    figure = new_figure(6.0, min(max(3.6, 0.28 * n_layers), 12))
    ax = figure.subplots()
    logs: dict[tuple[int | None, int | None], float | None] = {
        name: float(np.log2(beta)) for name, beta in betas.items()
    }
    most = max(0.1, *(abs(x) for x in logs.values() if x is not None))
    label = r"$\log_2 \beta$"
    plot_head_map(ax, logs, "all", label, cmap="RdBu_r", vmin=-most, vmax=most)
    ax.set_title("red is sharper, blue more diffuse than plain softmax", fontsize=10)
    save_figure(path, figure)
