#!/usr/bin/env python
"""The default fit and the paper's procedure on 22 heads and arrays.

Writes scripts/results/paper-procedure.json, and draws scripts/results/optimal-temperature.png.

scripts/studies/paper_procedure.py             # 18 minutes of one core; can be resumed
scripts/studies/paper_procedure.py --markdown  # prints the tables of its page from the record

Rules are fitted to the calibration inputs of each data set and scored on new ones: the default, a
smoothed polynomial; the paper's procedure, `--paper`; a constant by maximum likelihood; the
published polynomial. The data sets are those of paper_procedure_data.py.
"""

import os

import numpy as np

os.environ |= {"NPROC": "1", "OMP_NUM_THREADS": "1"}  # training gives the same bytes

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from paper_procedure_data import BUILT_IN_HEADS, DATA, SCORED_SETS, DataSet, width_of
from study import (
    RESULTS,
    RUNS,
    fit_rules,
    kept,
    mean_and_error,
    parse,
    table,
    with_errors,
    write_record,
)

import calibrate
from calibrate.core.rule import CONSTANT, POLYNOMIAL
from calibrate.evidence.baselines import PAPER, paper
from calibrate.evidence.estimate import MIN_GAIN, Estimate
from calibrate.evidence.evidence import BASELINE
from calibrate.evidence.metrics import LOG_P, RIGHT, P
from calibrate.fitting.options import LEAST_SQUARES
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
from calibrate.store.fit import Fit

RESULT = RESULTS / "paper-procedure.json"
FOLDER = RUNS / "polynomials"
NAMES = {
    BASELINE: "baseline",
    PAPER: "published polynomial",
    POLYNOMIAL: "default polynomial",
    LEAST_SQUARES: "the paper's procedure (`--paper`)",
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
    parse(__doc__, markdown, RESULT)
    record = write_record(RESULT, {name: result_of(name) for name in DATA}, digits=6)
    save_figure(RESULT.with_name("optimal-temperature.png"), optimal_beta_figure())
    print("\n".join(markdown(record)))


def optimal_beta_figure() -> Figure:
    """Entropy and optimal beta of misranked inputs of max-retrieval, with four rules."""
    solved = calibrate.solve(calibrate.collect("max-retrieval", FIGURE_SIZES, FIGURE_SETS))
    return draw(plot_rules, solved, {PAPER: paper(), **fit_rules(solved)[0]}, size=(7.4, 4.8))


def plot_rules(ax: Axes, solved: SolvedInputs, fits: dict[str, Fit]) -> Axes:
    """Draws a dot for each misranked input, coloured by n, and each rule up to its domain's end."""
    shown = solved.take(solved.has_finite_optimum())
    image = size_colours(shown.n.min(), shown.n.max())
    ax.scatter(shown.entropy, shown.beta, c=shown.n, norm=image.norm, cmap=image.cmap, s=7,
               alpha=0.5, lw=0, label="optimal β of a misranked input")  # fmt: skip
    labels = {name: NAMES[name].replace("`", "") for name in CURVES}
    labels[CONSTANT] = f"constant, β = {fits[CONSTANT].coefficients[0]:.2g}"
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
    with width_of(name):
        return kept(path, lambda: compare(DATA[name](FOLDER / "heads")))


def compare(data: DataSet) -> dict:
    """Fits every rule to a data set, and scores it on held-out rows; NLL and differences in nats.

    A difference is [mean, standard error] of what the first rule gains over the second.
    """
    solved = calibrate.solve(data.collection)
    fits, facts = fit_rules(solved)
    result = facts | describe(solved, fits[LEAST_SQUARES])
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


def describe(solved: SolvedInputs, procedure: Fit) -> dict[str, float]:
    """Facts about calibration inputs, and how far the fit of `--paper` is from polyfit."""
    used = solved.take(solved.fitted_by_least_squares())
    theirs = np.polyval(np.polyfit(used.entropy, used.beta, 4), used.entropy)
    ours = np.polyval(procedure.coefficients, used.entropy)
    return {
        "rows": len(solved.size),
        "misranked": int(solved.misranked.sum()),
        "largest_beta": float(used.beta.max()),
        "polyfit_difference": float(np.abs(ours - theirs).max() / np.abs(theirs).max()),
    }


def numbers(estimate: Estimate) -> list[float]:
    """A mean and its standard error."""
    return [float(estimate.mean), float(estimate.error)]


def markdown(record: dict[str, dict]) -> list[str]:
    """The tables: NLL and accuracy, and pairs of rules; the built-in heads are one row of means."""
    rules = [rule for rule in NAMES if rule != BASELINE]
    groups = {"ten built-in heads, mean": [record[name] for name in BUILT_IN_HEADS]}
    groups |= {name: [of] for name, of in record.items() if name not in BUILT_IN_HEADS}
    losses = ([name, nll_of(parts), *(change_of(parts, rule) for rule in rules)]
              for name, parts in groups.items())  # fmt: skip
    accuracies = (
        [name, *(f"{100 * np.mean([x['accuracy'][rule][0] for x in parts]):.1f}" for rule in NAMES)]
        for name, parts in groups.items() if "accuracy" in parts[0]
    )  # fmt: skip
    return [
        *table(["data", *NAMES.values()], losses), "",
        *table(["accuracy, %", *NAMES.values()], accuracies), "", *comparisons(record),
    ]  # fmt: skip


def nll_of(parts: list[dict]) -> str:
    """The mean NLL of the baseline on data sets."""
    return f"{np.mean([of['nll'][BASELINE] for of in parts]):.3f}"


def change_of(parts: list[dict], rule: str) -> str:
    """The change of NLL ± its standard error, over the inputs of one data set or over several.

    NLL falls where log p gains.
    """
    gains = np.array([of["gain"][f"{rule} over {BASELINE}"] for of in parts])
    mean, error = mean_and_error(gains[:, 0]) if len(parts) > 1 else gains[0]
    return with_errors([-mean], [error], "+z.3f")[0]


def comparisons(record: dict[str, dict]) -> list[str]:
    """Numbers of data sets on which a rule is better or worse than another."""
    titles = ["better", f"better by {MIN_GAIN:g} nats or more", "worse", "lowest gain"]
    rules = [rule for rule in NAMES if rule != BASELINE]
    rows = []
    for a, b in [*((rule, BASELINE) for rule in rules), *PAIRS]:
        pairs = np.array([of["gain"][f"{a} over {b}"] for of in record.values()])
        signs = np.sign(pairs[:, 0]) * (np.abs(pairs[:, 0]) > 2 * pairs[:, 1])
        better = signs == 1, (signs == 1) & (pairs[:, 0] >= MIN_GAIN), signs == -1
        lowest = with_errors(*pairs[[pairs[:, 0].argmin()]].T, "+.4f")
        cells = [*(str(int(which.sum())) for which in better), *lowest]
        rows.append([f"{NAMES[a]}, over {NAMES[b]}", *cells])
    return table(["rule, over another", *titles], rows)


if __name__ == "__main__":
    main()
