"""The whole way in five steps, from a trained head to a softmax that uses its polynomial.

    import calibrate

    rows = calibrate.collect("max-retrieval", sizes=[64, 256, 1024], sets=500)
    solved = calibrate.solve(rows)
    rule = calibrate.fit_polynomial(solved)
    print(rule.coefficients, rule.r_squared)
    rule.save("mine.json")
    probs = calibrate.adaptive_softmax(logits, calibrate.load("./mine.json"))

`collect` runs a trained head on inputs whose right item is known. `solve` gives each input the
temperature theta that maximises the probability of that item. `fit_polynomial` fits beta = 1/theta,
a polynomial of degree 4 in the entropy. The commands `calibrate collect`, `solve` and `fit` run
these functions; `calibrate.fit` does the same for arrays.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.core.rule import POLYNOMIAL
from calibrate.core.tensors import default_errors
from calibrate.datasets.resume import discard_collection
from calibrate.datasets.row_collection import RowCollection
from calibrate.datasets.row_quality import check_bad_rows
from calibrate.defaults import MAX_SETS, MAX_SIZE
from calibrate.errors import CalibrateError
from calibrate.fitting.fit import fit_solved, open_for_fit
from calibrate.fitting.options import LIKELIHOOD, FitOptions
from calibrate.parallel import ONE_PROCESS, SILENT, Jobs, Progress
from calibrate.rows.collect import MAX_BYTES, collect_head_in_memory
from calibrate.rows.collect import collect as collect_on_disk
from calibrate.rows.heads import Head, check_head, load_head
from calibrate.solver.solved_inputs import SolvedInputs
from calibrate.solver.solved_rows import solve_collection
from calibrate.store.fit import Fit


@default_errors
def collect(
    head: Head | str,
    sizes: Sequence[int],
    sets: int = 1_000,
    *,
    seed: int = 0,
    folder: Path | str | None = None,
    overwrite: bool = False,
    keep: str = "all",
    max_bytes: int = MAX_BYTES,
    jobs: Jobs = ONE_PROCESS,
    progress: Progress = SILENT,
) -> RowCollection:
    """Runs a head on inputs of every size, and keeps the logits of a sample.

    Args:
      head: see `calibrate.Head`; or the name of a built-in one, or "module:attribute".
      sizes: numbers of items n.
      sets: inputs of each size.
      seed: of the inputs.
      folder: where to write them, resumably; None keeps them in memory.
      overwrite: delete a collection that is there, and collect anew.
      keep: "all", at most 2,048 inputs of each size; or "misranked", only those.
      max_bytes: of the folder.
      jobs: processes that share the work into a folder; the result does not depend on them.
      progress: of that work, advances after each part.
    Raises:
      CalibrateError: a head that lacks a member, a number out of range, or a folder with another
        collection.
      QualityError: more than 1 % of the inputs have NaN, +inf or a masked target.
    """
    given = load_head(head) if isinstance(head, str) else head
    check_head(given, f"of type {type(given).__name__}")
    sizes = _whole_sizes(sizes)
    sets, seed = _whole("sets", sets, 1, MAX_SETS), _whole("seed", seed, 0, (1 << 64) - 1)
    if folder is None:
        return collect_head_in_memory(given, sizes, sets, seed, keep)
    if overwrite:
        discard_collection(Path(folder))
    to = Path(folder)
    return collect_on_disk(given, sizes, sets, seed, to, max_bytes, progress, keep, jobs)


def _whole(name: str, value: Any, low: int, high: int) -> int:
    """An integer of Python or NumPy as one of Python; CalibrateError if it is none in the range."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise CalibrateError(f"{name} is {value!r}; give an integer")
    if not low <= value <= high:
        raise CalibrateError(f"{name} is {value}; give {low:,} to {high:,}")
    return int(value)


def _whole_sizes(sizes: Any) -> list[int]:
    """Numbers of items as integers of Python; CalibrateError if there is none or one is wrong."""
    try:
        given = list(sizes)
    except TypeError:
        given = []
    if not given or isinstance(sizes, str):
        raise CalibrateError(
            f"sizes is {sizes!r}; give a list of numbers of items, such as [64, 256]"
        )
    return [_whole("sizes", size, 2, MAX_SIZE) for size in given]


@default_errors
def solve(rows: RowCollection | Path | str, jobs: Jobs = ONE_PROCESS) -> SolvedInputs:
    """Solves every input for the temperature that maximises the probability of its target.

    The result has `.n`, `.entropy`, `.beta`, `.theta`, `.status` and `.misranked` of every input
    that the collection keeps; inputs with NaN, +inf or a masked target are not kept.

    Args:
      rows: of `collect`, or the folder of a collection.
      jobs: processes that share the work; the result does not depend on them.
    Raises:
      CalibrateError: the folder holds no finished collection.
      QualityError: more than 1 % of the inputs have NaN, +inf or a masked target.
    Reference: Velickovic et al. 2024, section 3 and appendix A.
    """
    if not isinstance(rows, RowCollection | Path | str):
        raise CalibrateError(
            f"rows is a {type(rows).__name__}; give what calibrate.collect returns, or its folder"
        )
    collection = rows if isinstance(rows, RowCollection) else open_for_fit(Path(rows))
    check_bad_rows(collection.manifest)
    return SolvedInputs(solve_collection(collection, jobs), collection)


@default_errors
def fit_polynomial(
    solved: SolvedInputs,
    *,
    loss: str = LIKELIHOOD,
    min_entropy: float | None = None,
    min_beta: float | None = None,
    max_beta: float | None = None,
    seed: int = 0,
    name: str = "polynomial",
) -> Fit:
    """Fits beta(H) = c4 H^4 + c3 H^3 + c2 H^2 + c1 H + c0 to solved inputs.

    Args:
      solved: of `solve`.
      loss: "likelihood", of all inputs, with a penalty towards the best constant; or
        "least-squares", the paper's procedure: numpy.polyfit of the optimal beta of misranked
        inputs.
      min_entropy: nats, at and below which beta is 1; None: 0, of least squares 0.5.
      min_beta, max_beta: bounds of beta; None: 1/1024 and 1024, of least squares 1 and 64.
      seed: of the folds.
      name: of the fit.
    Returns:
      Fit: `.coefficients` are the five numbers, of H^4 to 1; `.r_squared` is how much of log beta
      the entropy explains in misranked inputs, `.effective_degrees` how much of the polynomial the
      inputs support (1 to 5), `.verdict` the gain on held-out folds. Of inputs that name heads,
      each head has a polynomial, in `.entries`.
    Raises:
      CalibrateError: an option is out of range.
      QualityError: fewer than 100 inputs, of least squares misranked ones.
    Warns:
      UserWarning: the rule does not gain significantly over softmax.
    Reference: Velickovic et al. 2024, section 3 and appendix B.
    """
    if not isinstance(solved, SolvedInputs):
        raise CalibrateError(f"solved is a {type(solved).__name__}; give calibrate.solve(rows)")
    kind = None if loss == LIKELIHOOD else POLYNOMIAL
    options = FitOptions(kind, loss, min_entropy, min_beta, max_beta, seed=seed)
    return fit_solved(solved.collection, solved.rows, name, options, refuse=False).fit
