"""Scoring rules on a head and on logits on disk, with progress on stderr."""

from collections.abc import Mapping
from pathlib import Path

from calibrate.cli.loading import load_fits, load_head, refuse_per_head
from calibrate.cli.progress import Steps
from calibrate.evidence.baselines import fixed_rules, in_order
from calibrate.evidence.evidence import Evidence
from calibrate.files.coefficients import Coefficients
from calibrate.parallel.jobs import ONE_PROCESS, Jobs
from calibrate.report.scores_record import ScoresRecord
from calibrate.report.streams import stderr
from calibrate.rows.heads import Head
from calibrate.rows.logits_files import Arrays
from calibrate.rows.score_head import score_head
from calibrate.rows.score_logits import score_logits
from calibrate.rows.work_units import Unit, plan_units


def compare_rules(
    reference: str,
    fits: str,
    store: Path | None,
    *,
    sizes: list[int],
    sets: int | None,
    seed: int,
    jobs: Jobs,
) -> ScoresRecord:
    """Scores a head under "REF,..." of fits and the fixed rules."""
    loaded = load_fits(fits, store)
    for fit in loaded.values():
        refuse_per_head(fit)
    head, rules = load_head(reference), in_order({**fixed_rules(), **loaded})
    scores = score_with_progress(head, sizes, sets, seed, rules, jobs)
    return ScoresRecord(scores, tuple(loaded))


def score_with_progress(
    head: Head,
    sizes: list[int],
    sets: int | None,
    seed: int,
    rules: Mapping[str, Coefficients],
    jobs: Jobs = ONE_PROCESS,
) -> Evidence:
    """Scores one head, with a line per set size."""
    with Steps("scoring", len(sizes), at_once=jobs.uses_workers) as steps:
        return score_head(
            head, sizes, sets, seed, rules, jobs=jobs,
            report=lambda size, sets: steps.advance(
                f"  n = {size:>6,}  scored on {sets:,} fresh sets"
            ),
        )  # fmt: skip


def score_logits_files(path: Path, fits: str, store: Path | None) -> ScoresRecord:
    """Scores "REF,..." of fits on the rows of a file or folder."""
    loaded = load_fits(fits, store)
    return ScoresRecord(score_rows(path, loaded), tuple(loaded))


def score_rows(path: Path, fits: Mapping[str, Coefficients]) -> Evidence:
    """Scores fits on the rows of a file or folder, with a line per set size."""
    stderr.print(f"reading {path}")
    return score_arrays(Arrays(path), fits)


def score_arrays(arrays: Arrays, fits: Mapping[str, Coefficients]) -> Evidence:
    """Scores fits on logits that were read, with a line per set size."""
    units = sum(len(plan_units(size, arrays.count(size))) for size in arrays.sizes)
    with Steps("scoring", units) as steps:

        def report(unit: Unit) -> None:
            count = arrays.count(unit.size)
            done = unit.first + unit.sets == count
            steps.advance(f"  n = {unit.size:>6,}  {count:,} rows" if done else None)

        return score_logits(arrays, fits, report)
