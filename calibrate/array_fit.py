"""`calibrate.fit`: a fit of logits in memory, with its verdict on held-out folds."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from calibrate.core.masking import MaskedArrayError, default_errstate, on_cpu
from calibrate.errors import CalibrateError, warn_user
from calibrate.fitting.fit_collection import FitResult, fit_collection
from calibrate.fitting.options import FitOptions
from calibrate.rows.collect import collect_arrays
from calibrate.rows.logits_files import Arrays
from calibrate.rows.rows import count_bad
from calibrate.store.fit import Fit
from calibrate.store.references import check_name

ArrayOrTensor = Any  # argument of numpy.asarray, or a tensor of PyTorch
OneOrSeveral = ArrayOrTensor | Sequence[ArrayOrTensor]


@default_errstate
def fit(
    logits: OneOrSeveral,
    target: OneOrSeveral,
    mask: OneOrSeveral | None = None,
    *,
    group: OneOrSeveral | None = None,
    weight: OneOrSeveral | None = None,
    layer: OneOrSeveral | None = None,
    head: OneOrSeveral | None = None,
    kind: str | None = FitOptions.kind,
    loss: str = FitOptions.loss,
    min_entropy: float | None = FitOptions.min_entropy,
    min_beta: float | None = FitOptions.min_beta,
    max_beta: float | None = FitOptions.max_beta,
    trained_up_to: int | None = FitOptions.trained_up_to,
    tolerance: float = FitOptions.tolerance,
    seed: int = FitOptions.seed,
    name: str = "arrays",
) -> Fit:
    """Fits the temperature rule of logits, and evaluates it on held-out folds.

    By default beta = 1/theta is a polynomial of degree 4 in the entropy of softmax(z), fitted by
    maximum likelihood with a penalty towards the best constant.

    >>> import calibrate
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)  # replace by your logits and targets
    >>> value = rng.uniform(0, 6, (1000, 32))
    >>> logits = value + 0.5 * rng.standard_normal(value.shape)
    >>> fit = calibrate.fit(logits, target=value.argmax(axis=1))
    >>> verdict, table = fit.verdict, fit.table
    >>> probs = calibrate.adaptive_softmax(logits, fit)
    >>> fit.save("mine.json")  # doctest: +SKIP

    Args:
      logits: (rows, n) float, the scores before softmax, -inf where masked. If n differs: a list of
        such arrays, and lists of the same length for the other arrays; or pad with -inf. PyTorch
        tensors are also accepted.
      target: (rows,) int, the position of the right item; or (rows, n) bool, True at each of
        several right ones.
      mask: (rows, n) or (n,) bool, True for real items.
      group: (rows,) of numbers or strings, equal in rows that depend on each other, such as those
        of one prompt; None: each row is its own group.
      weight: (rows,) float >= 0, of a row in every mean; None: 1.
      layer, head: (rows,) int, the head of each row; each head is then fitted separately. Or
        (heads,) int, for logits (heads, rows, n); arrays without this axis are the same for all
        heads.
      kind: "constant", "log-size", "polynomial" or "entropy-and-size", which is returned whatever
        its verdict; None: a polynomial that must gain.
      loss: "likelihood" of all rows; or "least-squares", the paper's procedure.
      min_entropy: nats, at and below which beta is 1; None: 0; 0.5 for least squares.
      min_beta, max_beta: bounds of beta; None: 1/1024 and 1024; 1 and 64 for least squares.
      trained_up_to: largest n of the training data.
      tolerance: NLL in nats that may be lost at sizes up to it.
      seed: of the folds.
      name: of the fit.
    Returns:
      Fit, fitted to all rows: .coefficients, .verdict, .table, .r_squared, .effective_degrees,
      .save(path); .entries of several heads.
    Raises:
      CalibrateError: arrays of another shape, dtype or range, or probabilities in place of logits.
      QualityError: fewer than 100 rows or 10 groups, more than 1 % of bad rows (NaN, +inf or a
        masked target), logits that do not depend on the targets; or, without a kind, no significant
        gain of 0.01 nats over softmax.
    Warns:
      UserWarning: rows that were left out.
    Reference: Velickovic et al. 2024, section 3.
    """
    options = FitOptions(
        kind, loss, min_entropy, min_beta, max_beta, trained_up_to, tolerance, seed
    )
    columns = {
        "logits": logits,
        "target": target,
        "mask": mask,
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
    collection = collect_arrays(arrays)
    result = fit_collection(collection, name, options)
    sizes = collection.manifest["sizes"]
    if bad := sum(map(count_bad, sizes)):
        n_rows = sum(size["rows"] for size in sizes)
        warn_user(
            f"{bad:,} of {n_rows:,} rows are left out: they have NaN, +inf or a masked target"
        )
    return result


def numpy_columns(columns: dict[str, Any]) -> dict[str, np.ndarray] | list[dict[str, np.ndarray]]:
    """Converts arrays, tensors or lists to NumPy; a list of parts has one for each n.

    Args:
      columns: as `fit` takes them, by name; None is left out.
    Raises:
      CalibrateError: a value is no array, or a masked one, or lists have different lengths.
    """
    required = ("logits", "target")
    given = {name: v for name, v in columns.items() if v is not None or name in required}
    logits = given["logits"]
    if not (isinstance(logits, list | tuple) and logits and np.ndim(logits[0]) in (2, 3)):
        group = _number_groups([given.pop("group")])[0] if "group" in given else None
        arrays = {name: _to_numpy(value, name) for name, value in given.items()}
        return arrays if group is None else {**arrays, "group": group}
    for name, value in given.items():
        if not isinstance(value, list | tuple) or len(value) != len(logits):
            raise CalibrateError(f"{name} is not a list of {len(logits)} arrays, as logits is")
    groups = _number_groups(given.pop("group")) if "group" in given else []
    parts = [
        {name: _to_numpy(value[i], name) for name, value in given.items()}
        for i in range(len(logits))
    ]
    return [{**part, "group": groups[i]} if groups else part for i, part in enumerate(parts)]


def _number_groups(parts: Sequence[Any]) -> list[np.ndarray]:
    """Groups of each part as integers >= 0, in the order of their values.

    Raises:
      CalibrateError: a value is missing (NaN, NaT, None), or values cannot be compared.
    """
    arrays = [_to_numpy(part, "group") for part in parts]
    values = np.concatenate([array.ravel() for array in arrays])
    try:
        is_missing = values != values  # NaN and NaT, also among Python objects
        if np.any(is_missing):
            raise CalibrateError(f"group has {values[is_missing][0]}; give each row its group")
        numbers = np.unique(values, return_inverse=True)[1]
    except TypeError as failure:  # None, pandas.NA, or numbers beside strings
        raise CalibrateError(f"group has values that cannot be sorted ({failure})") from None
    ends = np.cumsum([array.size for array in arrays])[:-1]
    each = np.split(numbers, ends)
    return [part.reshape(array.shape) for part, array in zip(each, arrays, strict=True)]


def _to_numpy(value: Any, name: str) -> np.ndarray:
    """Converts an argument to an array of NumPy; CalibrateError if it is not an array."""
    try:
        array = np.asarray(on_cpu(value, name))
    except MaskedArrayError as failure:
        raise CalibrateError(str(failure)) from None
    except Exception as failure:  # ragged lists, tensors without data
        raise CalibrateError(
            f"{name} is a {type(value).__name__} that NumPy cannot read ({failure}); give an array"
        ) from failure
    is_narrow = array.dtype.kind == "V" and "float" in array.dtype.name  # JAX's 16 and 8 bits
    return array.astype(np.float32) if is_narrow else array
