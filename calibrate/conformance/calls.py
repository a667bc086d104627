"""Calls somebody else's softmax with arrays of the library that it takes."""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from calibrate.conformance.vectors import VectorRow
from calibrate.core.masking import on_cpu
from calibrate.errors import CalibrateError
from calibrate.rows.heads import import_attribute

MASK_NAMES = "where", "mask"
AXIS_NAMES = "axis", "dim"
SINGLE_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1, 1))  # before the n items of a row
BATCHED_ITEMS = 6, 8  # lengths of which there are several rows
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10}  # precision of output dtypes; others: float32
_A = TypeVar("_A")
_R = TypeVar("_R")
Maker = Callable[[np.ndarray], Any]  # an array of NumPy as one of another library


class Outputs:
    """The probabilities that a function gives for some rows.

    Attributes:
      alone: of each row, given as an array (n,), (1, n) or (1, 1, 1, n), the first that it takes.
      batches: of each row again, given together with other rows of its length, for every shape that
        the function takes: (m, n), and (m, 1, 1, n), (1, m, 1, n) and (1, 1, m, n) as in attention.
        The probabilities of rows that are not in a batch are those of `alone`.
      failure: why it takes no batch; None if it does.
      eps: the precision of its output dtype.
    """

    def __init__(self, function: Callable[..., Any], rows: Sequence[VectorRow], mask: str | None):
        self._function, self._mask, self.eps = function, mask, float(np.finfo(np.float32).eps)
        self._options = {name: -1 for name in AXIS_NAMES if name in _keywords(function)}
        self._makers = _makers()
        failures = list[BaseException]()
        tried = _try_each(lambda shape: self._call_alone(rows, shape), SINGLE_SHAPES, failures)
        alone = next(tried, None)
        if alone is None:
            raise CalibrateError(_describe_failure(failures[0])) from failures[0]
        self.alone: list[np.ndarray] = alone
        failures.clear()
        self.batches: list[list[np.ndarray]] = list(
            _try_each(partial(self._call_in_batches, rows), range(4), failures)
        )
        self.failure: BaseException | None = None if self.batches else failures[0]

    def _call_alone(self, rows: Sequence[VectorRow], shape: tuple[int, ...]) -> list[np.ndarray]:
        return [self._call([row], (*shape, len(row.logits)))[0] for row in rows]

    def _call_in_batches(self, rows: Sequence[VectorRow], place: int) -> list[np.ndarray]:
        """The rows of BATCHED_ITEMS items as one array; its rows stand along one of its axes.

        The array is square, so that an entropy without its axis broadcasts along the wrong one.
        """
        outputs = list(self.alone)
        for n in BATCHED_ITEMS:
            members = [i for i, row in enumerate(rows) if len(row.logits) == n]
            members = np.resize(members, n).tolist()
            shape = [(n,), (n, 1, 1), (1, n, 1), (1, 1, n)][place]
            of_batch = self._call([rows[i] for i in members], (*shape, n))
            for i, output in zip(members, of_batch, strict=True):
                outputs[i] = output
        return outputs

    def _call(self, rows: Sequence[VectorRow], shape: tuple[int, ...]) -> np.ndarray:
        """(rows, n) probabilities of rows that are given as an array of a shape.

        The first library whose arrays the function takes is kept.
        """
        logits = np.stack([row.logits for row in rows])
        masks = [np.ones_like(row.logits, bool) if row.mask is None else row.mask for row in rows]
        failures = list[BaseException]()
        call = partial(self._call_with, logits.reshape(shape), np.reshape(masks, shape))
        result = next(_try_each(call, self._makers, failures), None)
        if result is not None:
            return result.reshape(logits.shape)
        # An error of its own says more than that of a library which it does not take.
        own = [x for x in failures if not isinstance(x, TypeError | AttributeError)]
        raise (own or failures)[0]

    def _call_with(self, logits: np.ndarray, mask: np.ndarray, make: Maker) -> np.ndarray:
        options = dict(self._options)
        if self._mask is not None:
            options[self._mask] = make(mask)
        with np.errstate(all="ignore"):
            result = self._function(make(logits), **options)
        array = np.asarray(on_cpu(result, "the result"))
        if array.shape != logits.shape:
            raise CalibrateError(
                f"it gives the shape {array.shape} for logits {logits.shape}; wrap it to give "
                "weights alone"
            )
        self._makers = [make]
        name = str(getattr(result, "dtype", "float32")).removeprefix("torch.")
        self.eps = max(self.eps, EPS.get(name, 0.0))
        return array.astype(float)


def _try_each(
    call: Callable[[_A], _R], arguments: Iterable[_A], failures: list[BaseException]
) -> Iterator[_R]:
    """The results of the calls that succeed; appends what the others raise."""
    for argument in arguments:
        try:
            result = call(argument)
        except (Exception, SystemExit) as failure:
            failures.append(failure)
        else:
            yield result


def _makers() -> list[Maker]:
    """Array constructors of NumPy, and of the libraries that are imported."""
    makers: list[Maker] = [np.array]
    if torch := sys.modules.get("torch"):
        makers.append(lambda array: torch.from_numpy(np.array(array)))
    if jax := sys.modules.get("jax"):
        makers.append(jax.numpy.asarray)
    return makers


def mask_keyword(function: Callable[..., Any], mask: str | None) -> str | None:
    """The name of the argument that takes a bool mask, True for real items; None without one."""
    names = _keywords(function)
    if mask is not None and mask not in names:
        raise CalibrateError(f"mask is {mask!r}; the function takes {', '.join(names)}")
    return mask or next((name for name in MASK_NAMES if name in names), None)


def _keywords(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        return []


def _describe_failure(failure: BaseException) -> str:
    remedy = ""
    if isinstance(failure, TypeError) and "argument" in str(failure):
        remedy = (
            "; give a function of logits alone, such as lambda z: f(z, scale=1), an instance of a "
            "class, or the name of its mask by mask="
        )
    return f"the function raises {type(failure).__name__}: {failure}{remedy}"


def load_function(reference: str) -> Callable[..., Any]:
    """The function at MODULE:FUNCTION; modules are searched in the working folder first."""
    try:
        function: Callable[..., Any] = import_attribute(reference, Path.cwd())
    except (Exception, SystemExit) as failure:
        raise CalibrateError(
            f"loading {reference!r} failed with {type(failure).__name__}: {failure}; give "
            f"MODULE:FUNCTION, such as my_model:softmax, of a module in {Path.cwd()}"
        ) from failure
    return function
