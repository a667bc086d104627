"""Calls somebody else's softmax with arrays of the library that it takes."""

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.conformance.vectors import VectorRow
from calibrate.core.masking import on_cpu
from calibrate.errors import CalibrateError
from calibrate.rows.heads import import_attribute

MASK_NAMES = "where", "mask"
AXIS_NAMES = "axis", "dim"
BATCHED_ITEMS = 6, 8  # lengths of which there are several rows
Maker = Callable[[np.ndarray], Any]  # an array of NumPy as one of another library


class CannotTellError(CalibrateError):
    """The function raised, or gave no probabilities, for every library and shape."""


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
        call = _Call(function, mask)
        masks = [_mask_argument(row, mask) for row in rows]
        shapes: list[tuple[int, ...]] = [(), (1,), (1, 1, 1)]
        failures = list[BaseException]()
        for shape in shapes:
            try:
                self.alone = [
                    call(row.logits, real, (*shape, len(row.logits)))
                    for row, real in zip(rows, masks, strict=True)
                ]
                break
            except (Exception, SystemExit) as failure:
                failures.append(failure)
        else:
            raise CannotTellError(_raised(failures[0])) from failures[0]
        self.eps = call.eps
        self.batches: list[list[np.ndarray]] = []
        failures = []
        for place in range(4):
            try:
                self.batches.append(self._in_batches(call, rows, masks, place))
            except (Exception, SystemExit) as failure:
                failures.append(failure)
        self.failure = None if self.batches else failures[0]

    def _in_batches(
        self,
        call: "_Call",
        rows: Sequence[VectorRow],
        masks: Sequence[np.ndarray | None],
        place: int,
    ) -> list[np.ndarray]:
        """The rows of BATCHED_ITEMS items as one array; its rows stand along one of its axes.

        The array is square, so that an entropy without its axis broadcasts along the wrong one.
        """
        outputs = list(self.alone)
        for n in BATCHED_ITEMS:
            members = [i for i, row in enumerate(rows) if len(row.logits) == n]
            members = np.resize(members, n).tolist()
            logits = np.stack([rows[i].logits for i in members])
            real = [mask for i in members if (mask := masks[i]) is not None]
            shape = [(n,), (n, 1, 1), (1, n, 1), (1, 1, n)][place]
            result = call(logits, np.stack(real) if real else None, (*shape, n))
            outputs_of = dict(zip(members, result, strict=True))
            outputs = [outputs_of.get(i, output) for i, output in enumerate(outputs)]
        return outputs


def _mask_argument(row: VectorRow, keyword: str | None) -> np.ndarray | None:
    """The mask of a row, if the function takes one: all items are real without one."""
    if keyword is None:
        return None
    return np.ones(len(row.logits), bool) if row.mask is None else row.mask


class _Call:
    """A function of NumPy's arrays, whatever library it takes; the first that works is kept."""

    def __init__(self, function: Callable[..., Any], mask: str | None):
        self.function, self.mask, self.eps = function, mask, float(np.finfo(np.float32).eps)
        names = _keywords(function)
        self.options = {name: -1 for name in AXIS_NAMES if name in names}
        self.makers: list[Maker] = [np.array, *_makers()]

    def __call__(
        self, logits: np.ndarray, mask: np.ndarray | None, shape: tuple[int, ...]
    ) -> np.ndarray:
        """The probabilities, of the shape of logits, which are given in another shape."""
        failures = list[BaseException]()
        for make in list(self.makers):
            try:
                result = self._call(make, logits.reshape(shape), mask)
            except (Exception, SystemExit) as failure:
                failures.append(failure)
                continue
            self.makers = [make]
            return result.reshape(logits.shape)
        # An error of its own says more than that of a library which it does not take.
        own = [x for x in failures if not isinstance(x, TypeError | AttributeError)]
        raise (own or failures)[0]

    def _call(self, make: Maker, logits: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
        given = dict(self.options)
        if mask is not None:
            assert self.mask is not None
            given[self.mask] = make(mask.reshape(logits.shape))
        with np.errstate(all="ignore"):
            result = self.function(make(logits), **given)
        if isinstance(result, list | tuple):
            raise CannotTellError(
                f"it gives a {type(result).__name__}; wrap it to give weights alone"
            )
        array = np.asarray(on_cpu(result, "the result"))
        if array.shape != logits.shape:
            raise CannotTellError(f"it gives the shape {array.shape} for logits {logits.shape}")
        self.eps = max(self.eps, _eps(result))
        return array.astype(float)


def mask_keyword(function: Callable[..., Any], mask: str | None) -> str | None:
    """The name of the argument that takes a bool mask, True for real items; None without one."""
    names = _keywords(function)
    if mask is not None:
        if mask not in names:
            raise CalibrateError(f"mask is {mask!r}; the function takes {', '.join(names)}")
        return mask
    return next((name for name in MASK_NAMES if name in names), None)


def _keywords(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        return []


def _makers() -> list[Maker]:
    """Array constructors of the libraries that the function's module has imported."""
    makers: list[Maker] = []
    if torch := sys.modules.get("torch"):
        makers.append(lambda array: torch.from_numpy(np.array(array)))
    if jax := sys.modules.get("jax"):
        makers.append(lambda array: jax.numpy.asarray(array))
    return makers


def _eps(result: Any) -> float:
    """The precision of a dtype of 16 bits: 2^-7 of bfloat16; 0 of wider ones."""
    name = str(getattr(result, "dtype", "float32")).removeprefix("torch.")
    return {"bfloat16": 2.0**-7, "float16": 2.0**-10}.get(name, 0.0)


def _raised(failure: BaseException) -> str:
    if isinstance(failure, CannotTellError):
        return str(failure)
    remedy = ""
    if isinstance(failure, TypeError) and "argument" in str(failure):
        remedy = (
            "; give a function of logits alone, such as lambda z: f(z, scale=1), an instance of a "
            "class, or the name of its mask by mask="
        )
    return f"the function raises {type(failure).__name__}: {failure}{remedy}"


def load_function(reference: str) -> Callable[..., Any]:
    """The function at MODULE:FUNCTION; modules are searched in the working folder first.

    Raises:
      CalibrateError: another spelling, or there is no such function.
    """
    folder = Path.cwd()
    if not re.fullmatch("[^:]+:[^:]+", reference):
        raise CalibrateError(f"{reference!r} is no MODULE:FUNCTION, such as my_model:softmax")
    try:
        function: Callable[..., Any] = import_attribute(reference, folder)
    except (Exception, SystemExit) as failure:
        raise CalibrateError(
            f"loading {reference!r} failed with {type(failure).__name__}: {failure}; modules are "
            f"searched in {folder} first"
        ) from failure
    if not callable(function):
        raise CalibrateError(f"{reference!r} is a {type(function).__name__}; name a function")
    return function
