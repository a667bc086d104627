"""Your own coefficients for adaptive-temperature softmax: measured, fitted, versioned, loaded.

Importing this loads NumPy at most; the names computed with JAX load it on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from calibrate.errors import CalibrateError, CoefficientsError
from calibrate.files.coefficients import Coefficients, identity
from calibrate.files.store import load

if TYPE_CHECKING:
    from calibrate.maths.shannon import entropy
    from calibrate.maths.solver import OptimalBeta, optimal_beta
    from calibrate.softmax import adaptive_softmax, inverse_temperature

__all__ = [
    "CalibrateError",
    "Coefficients",
    "CoefficientsError",
    "OptimalBeta",
    "adaptive_softmax",
    "entropy",
    "identity",
    "inverse_temperature",
    "load",
    "optimal_beta",
]

_NEEDS_JAX = {
    "OptimalBeta": "calibrate.maths.solver",
    "adaptive_softmax": "calibrate.softmax",
    "entropy": "calibrate.maths.shannon",
    "inverse_temperature": "calibrate.softmax",
    "optimal_beta": "calibrate.maths.solver",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("calibrate")
    if name in _NEEDS_JAX:
        value = getattr(importlib.import_module(_NEEDS_JAX[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_NEEDS_JAX, "__version__"})
