"""Parts that the studies share: the command line, results in files, fits, and Markdown tables."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.errors import QualityError
from calibrate.fitting.fit import fit_solved
from calibrate.fitting.options import FitOptions
from calibrate.rows.solve import SolvedInputs
from calibrate.storage.atomic_io import write_atomically
from calibrate.store.fit import Fit

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts" / "results"  # records, figures and pages
WEIGHTS = ROOT / "scripts" / "weights"
RUNS = ROOT / "runs"  # intermediate results


def study_parser(about: str | None, steps: Iterable[str] = ()) -> argparse.ArgumentParser:
    """A parser for --markdown and, of a study that has steps, for their names.

    Args:
      about: the docstring of the study, shown by --help.
      steps: names of its steps in their order; without any name given, all of them are done.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if names := list(steps):
        parser.add_argument("steps", nargs="*", help=f"of {', '.join(names)}; all without any")
        parser.set_defaults(names=names)
    parser.add_argument("--markdown", action="store_true", help="print the tables of the record")
    return parser


def parse(
    parser: argparse.ArgumentParser, markdown: Callable[[dict], list[str]], record: Path
) -> argparse.Namespace:
    """The options, with `steps` as asked for; ends after the tables with --markdown."""
    options = parser.parse_args()
    if options.markdown:
        print("\n".join(markdown(json.loads(record.read_text()))))
        parser.exit()
    names = getattr(options, "names", [])
    if names:
        options.steps = options.steps or names
        if wrong := [name for name in options.steps if name not in names]:
            parser.error(f"{', '.join(wrong)} is not a step; give any of {', '.join(names)}")
    return options


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
