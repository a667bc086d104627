"""Your own coefficients for adaptive-temperature softmax: measured, fitted, versioned, loaded.

Importing this loads nothing but the version: names load what they need (NumPy, JAX) on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from calibrate.version import __version__ as __version__

if TYPE_CHECKING:
    from calibrate.array_fit import fit as fit
    from calibrate.batch_fit import fit_model as fit_model
    from calibrate.capturing import capture as capture
    from calibrate.conformance.check_softmax import SoftmaxCheck as SoftmaxCheck
    from calibrate.conformance.check_softmax import check_softmax as check_softmax
    from calibrate.core.commitment import commitment as commitment
    from calibrate.core.commitment import susceptibility as susceptibility
    from calibrate.errors import CalibrateError as CalibrateError
    from calibrate.errors import CoefficientsError as CoefficientsError
    from calibrate.jax.softmax import adaptive_softmax as adaptive_softmax
    from calibrate.jax.softmax import entropy as entropy
    from calibrate.jax.softmax import inverse_temperature as inverse_temperature
    from calibrate.pipeline import collect as collect
    from calibrate.pipeline import fit_polynomial as fit_polynomial
    from calibrate.pipeline import solve as solve
    from calibrate.rows.heads import Head as Head
    from calibrate.rows.optimal_beta import OptimalBeta as OptimalBeta
    from calibrate.rows.optimal_beta import optimal_beta as optimal_beta
    from calibrate.rows.solve import SolvedInputs as SolvedInputs
    from calibrate.sklearn import SoftmaxCalibrator as SoftmaxCalibrator
    from calibrate.storage.fingerprints import fingerprint as fingerprint
    from calibrate.store.fit import Fit as Fit
    from calibrate.store.fit import identity as identity
    from calibrate.store.loading import load as load

_NAMES_OF = {
    "array_fit": ["fit"],
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
__all__ = sorted(name for names in _NAMES_OF.values() for name in names)
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
