"""Your own coefficients for adaptive-temperature softmax: measured, fitted, versioned, loaded.

Importing this loads nothing but the version: names load what they need (NumPy, JAX) on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from calibrate.version import __version__ as __version__

if TYPE_CHECKING:
    from calibrate.arrays import fit
    from calibrate.batch_fit import fit_model
    from calibrate.capturing import capture
    from calibrate.conformance.check_softmax import SoftmaxCheck, check_softmax
    from calibrate.core.commitment import commitment, susceptibility
    from calibrate.errors import CalibrateError, CoefficientsError
    from calibrate.jax.softmax import adaptive_softmax, entropy, inverse_temperature
    from calibrate.pipeline import collect, fit_polynomial, solve
    from calibrate.rows.heads import Head
    from calibrate.rows.optimal_beta import OptimalBeta, optimal_beta
    from calibrate.rows.solve import SolvedInputs
    from calibrate.sklearn import SoftmaxCalibrator
    from calibrate.storage.fingerprints import fingerprint
    from calibrate.store.fit import Fit, identity
    from calibrate.store.loading import load

__all__ = [
    "CalibrateError",
    "CoefficientsError",
    "Fit",
    "Head",
    "OptimalBeta",
    "SoftmaxCalibrator",
    "SoftmaxCheck",
    "SolvedInputs",
    "adaptive_softmax",
    "capture",
    "check_softmax",
    "collect",
    "commitment",
    "entropy",
    "fingerprint",
    "fit",
    "fit_model",
    "fit_polynomial",
    "identity",
    "inverse_temperature",
    "load",
    "optimal_beta",
    "solve",
    "susceptibility",
]

_NAMES_OF = {
    "arrays": ["fit"],
    "batch_fit": ["fit_model"],
    "capturing": ["capture"],
    "conformance.check_softmax": ["SoftmaxCheck", "check_softmax"],
    "core.commitment": ["commitment", "susceptibility"],
    "errors": ["CalibrateError", "CoefficientsError"],
    "storage.fingerprints": ["fingerprint"],
    "store.fit": ["Fit", "identity"],
    "store.loading": ["load"],
    "rows.optimal_beta": ["OptimalBeta", "optimal_beta"],
    "rows.solve": ["SolvedInputs"],
    "pipeline": ["collect", "fit_polynomial", "solve"],
    "rows.heads": ["Head"],
    "sklearn": ["SoftmaxCalibrator"],
    "jax.softmax": ["adaptive_softmax", "entropy", "inverse_temperature"],
}


_MODULES = ("jax", "pipeline", "torch", "transformers")  # public ones, imported on first use


def __getattr__(name: str) -> Any:
    for module, names in _NAMES_OF.items():
        if name in names:
            value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            globals()[name] = value
            return value
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    dunders = {name for name in globals() if name.startswith("__")}
    return sorted({*__all__, *dunders})
