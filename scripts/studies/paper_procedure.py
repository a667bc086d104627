#!/usr/bin/env python
"""The paper's procedure on 22 heads and arrays; writes scripts/results/paper-procedure.json.

Also draws scripts/results/optimal-temperature.png.

scripts/studies/paper_procedure.py             # 12 minutes of one core; can be resumed
scripts/studies/paper_procedure.py --markdown  # prints the tables of its page from the record

Rules are fitted to the calibration rows of each data set and scored on held-out rows: the paper's
procedure as `calibrate fit --paper` has it (least squares of log beta), and with least squares of
beta; a polynomial and a constant by maximum likelihood on all rows; the paper's published
polynomial. The data sets are those of paper_procedure_data.py.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

os.environ |= {"NPROC": "1", "OMP_NUM_THREADS": "1"}  # training gives the same bytes

from command_line import parse, study_parser
from matplotlib.figure import Figure
from paper_procedure_data import DATA, SCORED_SETS, DataSet

import calibrate
from calibrate.core.rule import horner
from calibrate.core.rule_kinds import KINDS, POLYNOMIAL
from calibrate.errors import CalibrateError, QualityError
from calibrate.evidence.baselines import PAPER, paper
from calibrate.evidence.estimate import Estimate
from calibrate.evidence.evidence import PLAIN
from calibrate.evidence.metrics import LOG_P, RIGHT, P
from calibrate.fitting.fit_rule import fit_kind, fit_rule
from calibrate.fitting.groups import deal_into_blocks
from calibrate.fitting.options import Options, resolve_options
from calibrate.report.plot_polynomial import plot_optimal_beta
from calibrate.report.plot_style import draw, save_figure
from calibrate.rows.score_head import score_head
from calibrate.rows.score_logits import score_logits
from calibrate.solver.solved_inputs import SolvedInputs
from calibrate.storage.atomic_io import write_atomically
from calibrate.store.coefficients import Coefficients
from calibrate.store.fits_store import published_store

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "scripts" / "results" / "paper-procedure.json"
FOLDER = ROOT / "runs" / "polynomials"
ROBUST, SQUARES, LIKELIHOOD, CONSTANT = "robust", "least-squares", "likelihood", "constant"
NAMES = {  # of the rules, in the tables; ML: maximum likelihood
    PLAIN: "baseline",
    PAPER: "published",
    ROBUST: "procedure, robust",
    SQUARES: "procedure, least squares",
    LIKELIHOOD: "polynomial, ML",
    CONSTANT: "constant, ML",
}
PAIRS = ((ROBUST, SQUARES), (ROBUST, CONSTANT), (ROBUST, PAPER), (LIKELIHOOD, CONSTANT))
MIN_GAIN = 0.01  # nats, over a constant, from which on a data set is listed
FIGURE_SIZES, FIGURE_SETS = [16 << i for i in range(9)], 200
POINTS = 10_000  # of a domain, where the minimum of a polynomial is looked for


def main() -> None:
    parse(study_parser(__doc__), markdown, RESULT)
    text = json.dumps({name: result_of(name) for name in DATA})
    record = json.loads(text, parse_float=lambda digits: float(f"{float(digits):.6g}"))
    write_atomically(RESULT, (json.dumps(record) + "\n").encode())
    save_figure(RESULT.with_name("optimal-temperature.png"), optimal_temperature_figure())
    print("\n".join(markdown(record)))


def optimal_temperature_figure() -> Figure:
    """Optimal betas of max-retrieval-0, with the fitted, the selected and the published rule."""
    solved = calibrate.solve(calibrate.collect("max-retrieval", FIGURE_SIZES, FIGURE_SETS))
    others = {"published": paper(), "selected": calibrate.load("max-retrieval", published_store())}
    fitted = calibrate.fit_polynomial(solved)
    return draw(plot_optimal_beta, solved.rows, fitted, others, size=(6.4, 4.6))


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
    result |= {"refused": refusal(solved), "sizes": data.held_out.sizes}
    evidence = score_logits(data.held_out, fits)
    result |= {"held_out_rows": evidence.n, "kept": sorted(fits)}
    result["nll"] = {r: -float(evidence.mean(r, LOG_P).mean) for r in evidence.rules}
    result["p"] = {r: numbers(evidence.mean(r, P)) for r in evidence.rules}
    pairs = [*((r, PLAIN) for r in evidence.rules if r != PLAIN), *PAIRS]
    result["gain"] = {
        f"{a} over {b}": numbers(evidence.gain(a, LOG_P, b))
        for a, b in pairs if {a, b} <= set(evidence.rules)
    }  # fmt: skip
    if data.head is not None:
        right = score_head(data.head, data.held_out.sizes, SCORED_SETS, 1, {PAPER: paper(), **fits})
        result["accuracy"] = {r: numbers(right.mean(r, RIGHT)) for r in right.rules}
    return result


def fit_rules(solved: SolvedInputs) -> tuple[dict[str, Coefficients], dict]:
    """The rules that could be fitted, and facts about the optimal betas and the polynomials."""
    rows, fits, facts = solved.rows, {}, {}
    for name, loss in ((ROBUST, None), (SQUARES, "least-squares")):
        options = Options.of_the_paper()
        options = options if loss is None else options._replace(loss=loss)
        try:
            options = resolve_options(solved.collection, options)
            loss_of_fit, dealt = options.loss_of_fit(), deal_into_blocks(rows)
            fitted = fit_rule(dealt, KINDS[POLYNOMIAL], loss_of_fit, options)
        except QualityError:
            continue
        fits[name], powers = fitted.coefficients, fitted.powers
        values = horner(np.linspace(*powers.domain, POINTS), powers.coefficients)
        facts[name] = powers._asdict() | {"minimum": float(values.min())}
    options = resolve_options(solved.collection, Options("all", q=0.0))
    for name, kind in ((LIKELIHOOD, POLYNOMIAL), (CONSTANT, "constant")):
        try:
            fits[name] = fit_kind(rows, kind, options)
        except QualityError as failure:
            facts[f"{name} refused"] = str(failure)
    used = rows.interior()
    facts |= {"rows": len(rows.size), "misranked": int(rows.misranked.sum())}
    facts |= {"largest_beta": float(used.beta.max()), "median_beta": float(np.median(used.beta))}
    return fits, facts


def refusal(solved: SolvedInputs) -> str | None:
    """Why `calibrate fit --paper` publishes nothing; None if it does and the file can be loaded."""
    try:
        fit = calibrate.fit_polynomial(solved)
        with tempfile.TemporaryDirectory() as folder:
            fit.save(Path(folder) / "fit.json")
            calibrate.load(str(Path(folder) / "fit.json"))
    except CalibrateError as failure:
        return str(failure)
    return None


def numbers(estimate: Estimate) -> list[float]:
    """A mean and its standard error."""
    return [float(estimate.mean), float(estimate.error)]


def markdown(record: dict[str, dict]) -> list[str]:
    """The tables: the fits, held-out NLL, and mean probability with accuracy."""
    lines = table(
        ["data", "rows fitted", "at a bound", "largest beta", "R^2", "least p(H)", "file written"]
    )
    for name, of in record.items():
        fit = of[ROBUST]
        beta, minima = f"{of['largest_beta']:,.0f}", [of[r]["minimum"] for r in (ROBUST, SQUARES)]
        cells = [f"{fit['n_rows']:,}", f"{fit['n_at_bound']:,}", beta, f"{fit['r_squared']:.2f}"]
        low = " / ".join(f"{minimum:.2f}" for minimum in minima)
        lines.append(line(name, [*cells, low, "no" if of["refused"] else "yes"]))
    rules = [rule for rule in NAMES if rule != PLAIN]
    lines += ["", *table(["data", NAMES[PLAIN], *(NAMES[rule] for rule in rules)])]
    for name, of in record.items():
        gains = [signed(of["gain"].get(f"{rule} over {PLAIN}")) for rule in rules]
        lines.append(line(name, [f"{of['nll'][PLAIN]:.3f}", *gains]))
    lines += ["", *table(["data", *NAMES.values()])]
    for name, of in record.items():
        lines.append(line(name, [percent(of, rule) for rule in NAMES]))
    lines += ["", *table(["rule, over another", "better", "worse", "mean gain"])]
    for a, b in [*((rule, PLAIN) for rule in rules), *PAIRS]:
        pairs = np.array([of["gain"].get(f"{a} over {b}", [0, np.inf]) for of in record.values()])
        signs = np.sign(pairs[:, 0]) * (np.abs(pairs[:, 0]) > 1.96 * pairs[:, 1])
        cells = [str(int((signs == s).sum())) for s in (1, -1)]
        lines.append(line(f"{NAMES[a]}, over {NAMES[b]}", [*cells, f"{pairs[:, 0].mean():+.4f}"]))
    return [*lines, "", *clear_gains(record)]


def clear_gains(record: dict[str, dict]) -> list[str]:
    """The table of the data sets on which a polynomial gains more than MIN_GAIN over a constant."""
    name = f"over the {NAMES[CONSTANT]}: gain in nats"
    lines = table([name, NAMES[ROBUST], NAMES[LIKELIHOOD], "R^2"])
    for data, of in record.items():
        gains = [of["gain"].get(f"{rule} over {CONSTANT}") for rule in (ROBUST, LIKELIHOOD)]
        if gains[1] and gains[1][0] > MIN_GAIN:
            cells = [f"{mean:+.3f} ± {error:.3f}" for mean, error in filter(None, gains)]
            lines.append(line(data, [*cells, f"{of[ROBUST]['r_squared']:.2f}"]))
    return lines


def table(names: list[str]) -> list[str]:
    """The head of a table whose columns but the first hold numbers."""
    return [line(names[0], names[1:]), "| --- |" + " ---: |" * (len(names) - 1)]


def line(name: str, cells: list[str]) -> str:
    return f"| {name} | " + " | ".join(cells) + " |"


def signed(gain: list[float] | None) -> str:
    """The change of NLL, which falls where log p gains; "refused" where there is no rule."""
    return "refused" if gain is None else f"{-gain[0]:+.3f} ± {gain[1]:.3f}"


def percent(of: dict, rule: str) -> str:
    """Mean target probability, and accuracy where a head tells it."""
    found = [of[key][rule][0] for key in ("p", "accuracy") if rule in of.get(key, {})]
    return " / ".join(f"{100 * share:.1f}" for share in found)


if __name__ == "__main__":
    main()
