"""Your own coefficients for adaptive-temperature softmax: measured, fitted, versioned, loaded.

Importing this loads nothing else: names load what they need (NumPy, JAX) on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from calibrate.array_fit import fit
    from calibrate.capturing import capture
    from calibrate.errors import CalibrateError, CoefficientsError
    from calibrate.files.coefficients import Coefficients, identity
    from calibrate.files.store import load
    from calibrate.maths.shannon_entropy import entropy
    from calibrate.maths.solver import OptimalBeta, optimal_beta
    from calibrate.rows.heads import Head
    from calibrate.sklearn import SoftmaxCalibrator
    from calibrate.softmax import adaptive_softmax, inverse_temperature

__all__ = [
    "CalibrateError",
    "Coefficients",
    "CoefficientsError",
    "Head",
    "OptimalBeta",
    "SoftmaxCalibrator",
    "adaptive_softmax",
    "capture",
    "entropy",
    "fit",
    "identity",
    "inverse_temperature",
    "load",
    "optimal_beta",
]

_LOADED_ON_USE = {
    "CalibrateError": "calibrate.errors",
    "Coefficients": "calibrate.files.coefficients",
    "CoefficientsError": "calibrate.errors",
    "Head": "calibrate.rows.heads",
    "OptimalBeta": "calibrate.maths.solver",
    "adaptive_softmax": "calibrate.softmax",
    "SoftmaxCalibrator": "calibrate.sklearn",
    "capture": "calibrate.capturing",
    "entropy": "calibrate.maths.shannon_entropy",
    "fit": "calibrate.array_fit",
    "identity": "calibrate.files.coefficients",
    "inverse_temperature": "calibrate.softmax",
    "load": "calibrate.files.store",
    "optimal_beta": "calibrate.maths.solver",
}


def __getattr__(name: str) -> Any:
    if name in _LOADED_ON_USE:
        value = getattr(importlib.import_module(_LOADED_ON_USE[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    dunders = {name for name in globals() if name.startswith("__")}
    return sorted({*__all__, *dunders})
