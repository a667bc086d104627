"""The steps of a calibration, from a trained head to probabilities.

>>> import calibrate
>>> rows = calibrate.collect("max-retrieval", sizes=[64, 256], sets=200)
>>> solved = calibrate.solve(rows)
>>> fit = calibrate.fit_polynomial(solved)
>>> fit.save("mine.json")  # doctest: +SKIP
>>> probs = calibrate.adaptive_softmax([2.0, 1.0, 0.5], fit)

`collect` runs a trained head on inputs whose target is known. `solve` finds the temperature theta
of each input that maximises the probability of its target. `fit_polynomial` fits beta = 1/theta, a
polynomial of degree 4 in the entropy. `adaptive_softmax` applies the fit. `calibrate collect` of a
head and `calibrate solve` call these functions; `calibrate fit` shares `fit_solved` with
`fit_polynomial`. `calibrate.fit` takes arrays.
"""

from collections.abc import Sequence
from operator import index
from pathlib import Path
from typing import Any

from calibrate.core.masking import default_errstate
from calibrate.defaults import MAX_SETS, MAX_SIZE
from calibrate.errors import CalibrateError
from calibrate.fitting.fit_collection import fit_solved
from calibrate.fitting.options import LIKELIHOOD, FitOptions
from calibrate.parallel import ONE_PROCESS, SILENT, Jobs, Progress
from calibrate.rows.collect import MAX_COLLECTION_BYTES, collect_from_head
from calibrate.rows.collection import RowCollection, open_collection
from calibrate.rows.heads import Head, check_head, load_head
from calibrate.rows.resume import discard_collection
from calibrate.rows.solve import SolvedInputs, solve_collection
from calibrate.store.fit import Fit


@default_errstate
def collect(
    head: Head | str,
    sizes: Sequence[int],
    sets: int = 1_000,
    *,
    seed: int = 0,
    folder: Path | str | None = None,
    overwrite: bool = False,
    keep: str = "all",
    max_bytes: int = MAX_COLLECTION_BYTES,
    jobs: Jobs = ONE_PROCESS,
    progress: Progress = SILENT,
) -> RowCollection:
    """Runs a head on inputs of every size, and keeps the logits of a sample.

    >>> import calibrate
    >>> rows = calibrate.collect("max-retrieval", sizes=[16, 64], sets=100)
    >>> [(size, shard.logits.shape) for size, shard in rows.shards()]
    [(16, (100, 16)), (64, (100, 64))]

    Args:
      head: see `calibrate.Head`; or the name of a built-in head, or "module:attribute".
      sizes: numbers of items n.
      sets: number of inputs of each size.
      seed: of the inputs.
      folder: of the collection, which the same call resumes; None keeps it in memory.
      overwrite: delete an earlier collection in the folder.
      keep: "all", at most 2,048 inputs of each size; or "misranked", only those.
      max_bytes: of the folder.
      jobs: processes that share the work into a folder; the result does not depend on them.
      progress: of the work into a folder; advances after each part.
    Returns:
      RowCollection: the inputs that are kept, and the numbers of all inputs by size.
    Raises:
      CalibrateError: the head lacks a member, a number is out of range, or the folder has another
        collection.
      QualityError: more than 1 % of the inputs have NaN, +inf or a masked target.
    Reference: Velickovic et al. 2024, appendix A.
    """
    loaded = load_head(head) if isinstance(head, str) else head
    check_head(loaded, f"of type {type(loaded).__name__}")
    sizes = [_in_range("sizes", size, 2, MAX_SIZE) for size in sizes]
    if not sizes:
        raise CalibrateError("sizes is empty; give numbers of items, such as [64, 256]")
    sets = _in_range("sets", sets, 1, MAX_SETS)
    seed = _in_range("seed", seed, 0, (1 << 64) - 1)
    place = None if folder is None else Path(folder)
    if overwrite and place:
        discard_collection(place)
    return collect_from_head(loaded, sizes, sets, seed, place, max_bytes, progress, keep, jobs)


def _in_range(name: str, value: Any, low: int, high: int) -> int:
    """An integer of Python or NumPy as one of Python; CalibrateError if it is out of range."""
    if not low <= value <= high:
        raise CalibrateError(f"{name} is {value}; give {low:,} to {high:,}")
    return index(value)


@default_errstate
def solve(rows: RowCollection | Path | str, jobs: Jobs = ONE_PROCESS) -> SolvedInputs:
    """Finds the temperature theta of each input that maximises the probability of its target.

    The inverse temperature beta = 1/theta solves E_beta[z] = z_t, where the mean is over
    softmax(beta z); see `calibrate.optimal_beta`.

    >>> import calibrate
    >>> solved = calibrate.solve(calibrate.collect("max-retrieval", sizes=[64], sets=100))
    >>> theta = solved.theta[solved.misranked]

    Args:
      rows: of `collect`, or the folder of a collection.
      jobs: processes that share the work; the result does not depend on them.
    Returns:
      SolvedInputs: `.n`, `.entropy`, `.beta`, `.theta`, `.status` and `.misranked` of every input
      that the collection keeps; inputs with NaN, +inf or a masked target are not kept.
    Raises:
      CalibrateError: the folder has no finished collection.
      QualityError: more than 1 % of the inputs have NaN, +inf or a masked target.
    Reference: Velickovic et al. 2024, section 3 and appendix A.
    """
    collection = rows if isinstance(rows, RowCollection) else open_collection(Path(rows))
    return solve_collection(collection, jobs)


@default_errstate
def fit_polynomial(
    solved: SolvedInputs,
    *,
    loss: str = LIKELIHOOD,
    min_entropy: float | None = None,
    min_beta: float | None = None,
    max_beta: float | None = None,
    seed: int = FitOptions.seed,
    name: str = "polynomial",
) -> Fit:
    """Fits beta(H) = c4 H^4 + c3 H^3 + c2 H^2 + c1 H + c0 to solved inputs.

    >>> import calibrate
    >>> rows = calibrate.collect("max-retrieval", sizes=[64, 256], sets=200)
    >>> fit = calibrate.fit_polynomial(calibrate.solve(rows))
    >>> len(fit.coefficients)
    5

    Args:
      solved: of `solve`.
      loss: "likelihood", of all inputs, with a penalty towards the best constant; or
        "least-squares", the paper's procedure: numpy.polyfit of the optimal beta of misranked
        inputs.
      min_entropy: nats, at and below which beta is 1; None: 0; 0.5 for least squares.
      min_beta, max_beta: bounds of beta; None: 1/1024 and 1024; 1 and 64 for least squares.
      seed: of the folds.
      name: of the fit.
    Returns:
      Fit: `.coefficients` are the five numbers, of H^4 to 1; `.r_squared` is the share of the
      variance of log beta that the entropy explains in misranked inputs; `.effective_degrees` is
      how much of the polynomial the inputs support (1 to 5); `.verdict` is the gain on held-out
      folds. If the inputs name heads, each head has a polynomial, in `.entries`.
    Raises:
      CalibrateError: an option is out of range, or the collection keeps misranked inputs only and
        the loss is "likelihood".
      QualityError: fewer than 100 inputs (for least squares: misranked ones) or 10 groups; or the
        inputs name heads, and none has a rule to save.
    Warns:
      UserWarning: the rule would not be saved.
    Reference: Velickovic et al. 2024, section 3 and appendix B.
    """
    if not isinstance(solved, SolvedInputs) or solved.collection is None:
        raise CalibrateError("give all inputs that calibrate.solve(rows) returned")
    options = FitOptions(None, loss, min_entropy, min_beta, max_beta, seed=seed)
    return fit_solved(solved.collection, solved, name, options, refuse=False).fit
