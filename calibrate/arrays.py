"""`calibrate.fit`: a fit of logits in memory, with its verdict on held-out folds."""

import warnings
from collections.abc import Sequence
from typing import Any

from calibrate.core.tensors import default_errors
from calibrate.datasets.given_arrays import numpy_columns
from calibrate.datasets.logits_files import Arrays
from calibrate.datasets.row_quality import check_bad_rows, count_bad
from calibrate.defaults import NLL_TOLERANCE
from calibrate.errors import CalibrateError
from calibrate.fitting.fit import FitResult, fit_collection
from calibrate.fitting.options import LIKELIHOOD, FitOptions
from calibrate.rows.collect import collect_in_memory
from calibrate.store.fit import Fit
from calibrate.store.publishing import check_name

Array = Any  # what numpy.asarray takes, or a tensor of PyTorch


@default_errors
def fit(
    logits: Array | Sequence[Array],
    target: Array | Sequence[Array],
    mask: Array | Sequence[Array] | None = None,
    *,
    where: Array | Sequence[Array] | None = None,
    group: Array | Sequence[Array] | None = None,
    weight: Array | Sequence[Array] | None = None,
    layer: Array | Sequence[Array] | None = None,
    head: Array | Sequence[Array] | None = None,
    kind: str | None = None,
    loss: str = LIKELIHOOD,
    min_entropy: float | None = None,
    min_beta: float | None = None,
    max_beta: float | None = None,
    trained_up_to: int | None = None,
    tolerance: float = NLL_TOLERANCE,
    seed: int = 0,
    name: str = "arrays",
) -> Fit:
    """Fits the temperature rule of logits, and evaluates it on held-out folds.

    By default beta = 1/theta is a polynomial of degree 4 in the entropy, fitted by maximum
    likelihood with a penalty towards the best constant; see `calibrate.fitting.smoothed_fit`.

        import calibrate
        import numpy as np

        rng = np.random.default_rng(0)  # replace by your logits and targets
        score = rng.uniform(0, 6, (2000, 64))
        logits = score + 0.5 * rng.standard_normal(score.shape)
        target = score.argmax(axis=1)

        fit = calibrate.fit(logits, target)
        print(fit.verdict)
        print(fit.table)
        probs = calibrate.adaptive_softmax(logits, fit)
        fit.save("mine.json")  # calibrate.load("./mine.json") reads it

    Args:
      logits: (rows, n) float, the scores before softmax, -inf where masked; or, if n differs, a
        list of such arrays, and lists as long of the others, or a list of rows, (n,) each. Tensors
        of PyTorch will do, too.
      target: (rows,) int, the position of the right item; or (rows, n) bool, where several are.
      mask: (rows, n) or (n,) bool, True for real items.
      where: another name of mask, that of `adaptive_softmax`.
      group: (rows,) of any hashable values, the prompt or whatever makes rows dependent, equal in
        rows of one group; each row its own if None.
      weight: (rows,) float >= 0, of a row in every mean; 1 if None.
      layer, head: (rows,) int, the head of each row: each head then gets a rule of its own. Or
        (heads,) int, of logits (heads, rows, n); arrays that lack this axis are of all heads.
      kind: "constant", "log-size", "polynomial" or "entropy-and-size", which is returned whatever
        its verdict; None: a polynomial that must gain.
      loss: "likelihood" of all rows; or "least-squares", the paper's procedure.
      min_entropy: nats, at and below which beta is 1; None: 0, of least squares 0.5.
      min_beta, max_beta: bounds of beta; None: 1/1024 and 1024, of least squares 1 and 64.
      trained_up_to: largest n of the training data.
      tolerance: NLL in nats that may be lost at sizes up to it.
      seed: of the folds.
      name: of the fit.
    Returns:
      Fit, fitted to all rows: .coefficients, .verdict, .table, .r_squared, .effective_degrees,
      .save(path); .entries of several heads.
    Raises:
      CalibrateError: arrays of another shape, dtype or range.
      QualityError: fewer than 100 rows or 10 groups, more than 1 % of bad rows (NaN, +inf or a
        masked target), logits that tell nothing of the targets; or, without a kind, no significant
        gain of 0.01 nats over softmax.
    Warns:
      UserWarning: rows that were left out, a beta at its bound, targets that are ranked right in
        every row, or numbers that look like probabilities.
    """
    options = FitOptions(
        kind, loss, min_entropy, min_beta, max_beta, trained_up_to, tolerance, seed
    )
    if mask is not None and where is not None:
        raise CalibrateError("mask= and where= are two names of one array; give one of them")
    columns = {
        "logits": logits,
        "target": target,
        "mask": where if mask is None else mask,
        "layer": layer,
        "head": head,
        "weight": weight,
        "group": group,
    }
    return fit_arrays(columns, options, name).fit


def fit_arrays(columns: dict[str, Any], options: FitOptions, name: str) -> FitResult:
    """Fits arrays by name; see `fit`."""
    check_name(name)
    options.resolved()
    arrays = Arrays.in_memory(name, numpy_columns(columns))
    check_bad_rows({"sizes": [arrays.bad]}, arrays.has_mask)
    collection = collect_in_memory(arrays)
    result = fit_collection(collection, name, options)
    sizes = collection.manifest["sizes"]
    if bad := sum(map(count_bad, sizes)):
        n_rows = sum(size["rows"] for size in sizes)
        warnings.warn(
            f"{bad:,} of {n_rows:,} rows are left out: they have NaN, +inf or a masked target",
            stacklevel=3,
        )
    return result
