#!/usr/bin/env python
"""The default fit and the paper's procedure on 22 heads and arrays.

Writes scripts/results/paper-procedure.json, and draws scripts/results/optimal-temperature.png.

scripts/studies/paper_procedure.py             # 18 minutes of one core; can be resumed
scripts/studies/paper_procedure.py --markdown  # prints the tables of its page from the record

Rules are fitted to the calibration inputs of each data set and scored on new ones: the default, a
smoothed polynomial; the paper's procedure, `--paper`; a constant by maximum likelihood; the
published polynomial. The data sets are those of paper_procedure_data.py.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

os.environ |= {"NPROC": "1", "OMP_NUM_THREADS": "1"}  # training gives the same bytes

from command_line import parse, study_parser
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from paper_procedure_data import DATA, SCORED_SETS, DataSet

import calibrate
from calibrate.core.rule import CONSTANT, POLYNOMIAL
from calibrate.errors import QualityError
from calibrate.evidence.baselines import PAPER, paper
from calibrate.evidence.estimate import MIN_GAIN, Estimate
from calibrate.evidence.evidence import BASELINE
from calibrate.evidence.metrics import LOG_P, RIGHT, P
from calibrate.fitting.fit import fit_solved
from calibrate.fitting.options import LEAST_SQUARES, FitOptions
from calibrate.report.plot_scatter import outline, set_beta_axis
from calibrate.report.plot_style import (
    BETA_LABEL,
    BLACK,
    ENTROPY_LABEL,
    OURS,
    STYLES,
    add_size_bar,
    draw,
    legend_below,
    save_figure,
    size_colours,
)
from calibrate.rows.score import score_head, score_logits
from calibrate.rows.solve import SolvedInputs
from calibrate.storage.atomic_io import write_atomically
from calibrate.store.fit import Fit

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "scripts" / "results" / "paper-procedure.json"
FOLDER = ROOT / "runs" / "polynomials"
OPTIONS = {
    POLYNOMIAL: FitOptions(),
    LEAST_SQUARES: FitOptions(loss=LEAST_SQUARES),
    CONSTANT: FitOptions(CONSTANT),
}
NAMES = {
    BASELINE: "baseline",
    PAPER: "published",
    POLYNOMIAL: "default",
    LEAST_SQUARES: "`--paper`",
    CONSTANT: "constant",
}
PAIRS = ((POLYNOMIAL, CONSTANT), (POLYNOMIAL, PAPER), (POLYNOMIAL, LEAST_SQUARES))
FIGURE_SIZES, FIGURE_SETS = [16 << i for i in range(9)], 1_024  # those of the quickstart
CURVES = {  # in the figure: colour, dash
    LEAST_SQUARES: (BLACK, "-"),
    PAPER: (STYLES[PAPER][0], "-."),
    POLYNOMIAL: (OURS, "-"),
    CONSTANT: (STYLES[CONSTANT][0], "--"),
}
CURVE_POINTS = 600
BETA_BOUNDS = 1 / 8, 64  # of the figure


def main() -> None:
    parse(study_parser(__doc__), markdown, RESULT)
    text = json.dumps({name: result_of(name) for name in DATA})
    record = json.loads(text, parse_float=lambda digits: float(f"{float(digits):.6g}"))
    write_atomically(RESULT, (json.dumps(record) + "\n").encode())
    save_figure(RESULT.with_name("optimal-temperature.png"), optimal_beta_figure())
    print("\n".join(markdown(record)))


def optimal_beta_figure() -> Figure:
    """Entropy and optimal beta of misranked inputs of max-retrieval, with four rules."""
    solved = calibrate.solve(calibrate.collect("max-retrieval", FIGURE_SIZES, FIGURE_SETS))
    fits = {
        name: fit_solved(solved.collection, solved, "a", options).fit
        for name, options in OPTIONS.items()
    }
    return draw(plot_rules, solved, {PAPER: paper(), **fits}, size=(7.4, 4.8))


def plot_rules(ax: Axes, solved: SolvedInputs, fits: dict[str, Fit]) -> Axes:
    """Draws a dot for each misranked input, coloured by n, and each rule up to its domain's end."""
    shown = solved.take(solved.has_finite_optimum())
    image = size_colours(shown.n.min(), shown.n.max())
    ax.scatter(shown.entropy, shown.beta, c=shown.n, norm=image.norm, cmap=image.cmap, s=7,
               alpha=0.5, lw=0, label="optimal β of a misranked input")  # fmt: skip
    labels = {
        LEAST_SQUARES: "the paper's procedure (--paper)",
        PAPER: "published polynomial",
        POLYNOMIAL: "the default polynomial",
        CONSTANT: f"constant, β = {fits[CONSTANT].coefficients[0]:.2g}",
    }
    for name, (colour, dash) in CURVES.items():
        fit = fits[name]
        last = [solved.entropy.max(), *fit.only.domain[1:2]]
        entropy = np.linspace(0, min(last), CURVE_POINTS)
        beta = np.broadcast_to(fit.only.beta_at(entropy, entropy, fit.rule), entropy.shape)
        ax.plot(entropy, beta, color=colour, ls=dash, lw=1.6, zorder=3, label=labels[name],
                path_effects=outline(1.6))  # fmt: skip
    set_beta_axis(ax, BETA_BOUNDS)
    ax.set(xlabel=ENTROPY_LABEL, ylabel=BETA_LABEL)
    add_size_bar(ax.figure, image, shown.n, ax=ax, location="right", fraction=0.04)
    legend_below(ax)
    return ax


def result_of(name: str) -> dict:
    """The result of a data set, from an earlier run if there is one."""
    path = FOLDER / f"{name.replace('/', 'by')}.json"
    if not path.exists():
        start = time.monotonic()
        result = compare(DATA[name](FOLDER / "heads"))
        result["seconds"] = round(time.monotonic() - start, 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(result).encode())
        print(f"{name}: compared in {result['seconds']} s", file=sys.stderr, flush=True)
    return json.loads(path.read_text())


def compare(data: DataSet) -> dict:
    """Fits every rule to a data set, and scores it on held-out rows; NLL and differences in nats.

    A difference is [mean, standard error] of what the first rule gains over the second.
    """
    solved = calibrate.solve(data.collection)
    fits, result = fit_rules(solved)
    result["sizes"] = data.held_out.sizes
    evidence = score_logits(data.held_out, fits)
    result |= {"held_out_rows": evidence.n, "kept": sorted(fits)}
    result["nll"] = {r: -float(evidence.mean(r, LOG_P).mean) for r in evidence.rules}
    result["p"] = {r: numbers(evidence.mean(r, P)) for r in evidence.rules}
    pairs = [*((r, BASELINE) for r in evidence.rules if r != BASELINE), *PAIRS]
    result["gain"] = {
        f"{a} over {b}": numbers(evidence.gain(a, LOG_P, b))
        for a, b in pairs if {a, b} <= set(evidence.rules)
    }  # fmt: skip
    if data.head is not None:
        right = score_head(data.head, data.held_out.sizes, SCORED_SETS, 1, {PAPER: paper(), **fits})
        result["accuracy"] = {r: numbers(right.mean(r, RIGHT)) for r in right.rules}
    return result


def fit_rules(solved: SolvedInputs) -> tuple[dict[str, Fit], dict]:
    """The rules, and facts about them: what was refused, and how far from polyfit `--paper` is."""
    rows, fits, refused = solved, {}, {}
    for name, options in OPTIONS.items():
        try:
            fits[name] = fit_solved(solved.collection, rows, "a", options).fit
        except QualityError as refusal:
            refused[name] = str(refusal)
            fits[name] = fit_solved(solved.collection, rows, "a", options, refuse=False).fit
    used = rows.take(rows.fitted_by_least_squares())
    theirs = np.polyval(np.polyfit(used.entropy, used.beta, 4), used.entropy)
    ours = np.polyval(fits[LEAST_SQUARES].coefficients, used.entropy)
    return fits, {
        "refused": refused,
        "rows": len(rows.size),
        "misranked": int(rows.misranked.sum()),
        "largest_beta": float(used.beta.max()),
        "polyfit_difference": float(np.abs(ours - theirs).max() / np.abs(theirs).max()),
        "degrees_of_freedom": fits[POLYNOMIAL].effective_degrees,
        "r_squared": {name: fits[name].r_squared for name in (POLYNOMIAL, LEAST_SQUARES)},
        "verdict": fits[POLYNOMIAL].verdict,
    }


def numbers(estimate: Estimate) -> list[float]:
    """A mean and its standard error."""
    return [float(estimate.mean), float(estimate.error)]


def markdown(record: dict[str, dict]) -> list[str]:
    """The tables: NLL and accuracy of each data set, and pairs of rules."""
    rules = [rule for rule in NAMES if rule != BASELINE]
    names = ["misranked, %", "degrees of freedom", "R^2, default", "R^2, `--paper`"]
    lines = table(["data", *names, *NAMES.values()])
    for name, of in record.items():
        cells = [f"{100 * of['misranked'] / of['rows']:.0f}", f"{of['degrees_of_freedom']:.1f}"]
        cells += [f"{of['r_squared'][rule]:z.2f}" for rule in (POLYNOMIAL, LEAST_SQUARES)]
        gains = [signed(of["gain"][f"{rule} over {BASELINE}"]) for rule in rules]
        lines.append(line(name, [*cells, f"{of['nll'][BASELINE]:.3f}", *gains]))
    lines += ["", *accuracies(record), "", *comparisons(record)]
    return lines


def accuracies(record: dict[str, dict]) -> list[str]:
    """The accuracy of each rule on the data sets that have one."""
    lines = table(["accuracy, %", *NAMES.values()])
    for name, of in record.items():
        if "accuracy" in of:
            cells = [f"{100 * of['accuracy'][rule][0]:.1f}" for rule in NAMES]
            lines.append(line(name, cells))
    return lines


def comparisons(record: dict[str, dict]) -> list[str]:
    """Numbers of data sets on which a rule is better or worse than another."""
    titles = ["better", f"better by {MIN_GAIN:g} nats or more", "worse", "lowest gain"]
    rules = [rule for rule in NAMES if rule != BASELINE]
    lines = table(["rule, over another", *titles])
    for a, b in [*((rule, BASELINE) for rule in rules), *PAIRS]:
        pairs = np.array([of["gain"][f"{a} over {b}"] for of in record.values()])
        signs = np.sign(pairs[:, 0]) * (np.abs(pairs[:, 0]) > 2 * pairs[:, 1])
        mean, error = pairs[pairs[:, 0].argmin()]
        better = signs == 1, (signs == 1) & (pairs[:, 0] >= MIN_GAIN), signs == -1
        cells = [*(str(int(which.sum())) for which in better), f"{mean:+.4f} ± {error:.4f}"]
        lines.append(line(f"{NAMES[a]}, over {NAMES[b]}", cells))
    return lines


def table(names: list[str]) -> list[str]:
    """The head of a table whose columns but the first hold numbers."""
    return [line(names[0], names[1:]), "| --- |" + " ---: |" * (len(names) - 1)]


def line(name: str, cells: list[str]) -> str:
    return f"| {name} | " + " | ".join(cells) + " |"


def signed(gain: list[float]) -> str:
    """The change of NLL, which falls where log p gains."""
    return f"{-gain[0]:+z.3f} ± {gain[1]:.3f}"


if __name__ == "__main__":
    main()
