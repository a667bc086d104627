"""Cases of test_arguments.py: of public functions of NumPy and JAX.

The functions of `CASES` give, for a public function, the arguments of a first call and a change of
each argument.
"""

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from conftest import ToyHead

import calibrate
import calibrate.jax
from calibrate.errors import CalibrateError, CoefficientsError
from calibrate.parallel import Jobs


class Change(NamedTuple):
    """Another value of an argument; `beside` are further arguments of both calls."""

    value: Any
    beside: dict[str, Any]
    alike: bool  # documented not to change the result
    raises: type[Exception] | None  # by one of the two calls
    prepare: Callable[[], Any] | None  # called before both calls


class Cases(NamedTuple):
    """A function, the arguments of the first call, and a change of each argument."""

    function: Callable[..., Any]
    record: Callable[[Any], Any]  # what is compared of a result
    base: dict[str, Any]
    changes: dict[str, Change]


def change(value, /, alike=False, raises=None, prepare=None, **beside):
    return Change(value, beside, alike, raises, prepare)


CASES: dict[str, Callable[[], Cases]] = {}


def cases_of(name, needs="numpy"):
    """Registers the cases of a function. They are made for each call, which may change a model."""

    def register(make):
        if find_spec(needs):
            CASES[name] = make
        return make

    return register


RNG = np.random.default_rng(0)
LOGITS, OTHER = RNG.normal(size=(2, 3, 5)).astype(np.float32)
REAL = np.arange(5) < 4
TARGET = np.array([0, 1, 2])
GROUPS, FEWER = np.arange(300) % 15, np.arange(300) % 10  # too few for a slope: a fit is quick


@cache
def scored(noise=0.7, n=16, rows=300):
    """Logits and targets of a noisy scorer; no target is the last item."""
    rng = np.random.default_rng(n)
    value = rng.uniform(0, 6, (rows, n))
    value[:, -1] = 0
    return value + noise * rng.standard_normal(value.shape), value.argmax(axis=1)


TARGETS_WITH_ERRORS = np.where(np.arange(300) % 10, scored()[1], 0)


@cache
def by_size():
    """A log-size rule."""
    logits, target = zip(*(scored(n=n) for n in (16, 64)), strict=True)
    return calibrate.fit(list(logits), list(target), kind="log-size")


@cache
def rows_of(noise):
    return calibrate.collect(ToyHead(noise), [32], 400)


@cache
def solved(noise):
    return calibrate.solve(rows_of(noise))


def record_fit(fit):
    return fit.name, fit.rule, fit.entries, fit.evidence


def record_solved(solved):
    arrays = solved.n, solved.entropy, solved.beta, solved.misranked
    return [array.tolist() for array in arrays]


def record_array(array):
    array = np.asarray(array)
    return str(array.dtype), np.round(array.astype(float), 6).tolist()


class Steps:
    """Progress that counts finished steps."""

    done = 0

    def begin(self, stage, total, work=None):
        pass

    def advance(self, work=1.0, resumed=False):
        self.done += 1


@cases_of("calibrate.collect")
def _():
    def record(rows):
        return record_solved(calibrate.solve(rows)), sorted(Path().glob("*/*.json"))

    def of_another_seed():
        calibrate.collect(ToyHead(1.0), [16, 32], 64, seed=9, folder="run")

    run = {"folder": "run"}
    changes = {
        "head": change(ToyHead(0.5)),
        "sizes": change([16, 33]),
        "sets": change(65),
        "seed": change(1),
        "folder": change("run"),
        "overwrite": change(True, raises=CalibrateError, prepare=of_another_seed, **run),
        "keep": change("misranked"),
        "max_bytes": change(12_000, **run),
        "jobs": change(Jobs(2), alike=True, **run),
        "progress": change(Steps(), alike=True, **run),
    }
    return Cases(
        calibrate.collect, record, {"head": ToyHead(1.0), "sizes": [16, 32], "sets": 64}, changes
    )


@cases_of("calibrate.solve")
def _():
    changes = {"rows": change(rows_of(0.5)), "jobs": change(Jobs(2), alike=True)}
    return Cases(calibrate.solve, record_solved, {"rows": rows_of(1.0)}, changes)


@cases_of("calibrate.fit_polynomial")
def _():
    changes = {
        "solved": change(solved(0.5)),
        "loss": change("least-squares"),
        "min_entropy": change(1.2),
        "min_beta": change(0.5),
        "max_beta": change(1.2),
        "seed": change(5),
        "name": change("other"),
    }
    return Cases(calibrate.fit_polynomial, record_fit, {"solved": solved(1.0)}, changes)


@cases_of("calibrate.fit")
def _():
    logits, target = scored()
    changes = {
        "logits": change(scored(noise=0.9)[0]),
        "target": change(TARGETS_WITH_ERRORS),
        "mask": change(np.arange(16) < 15),
        "group": change(FEWER),
        "weight": change(np.arange(300) % 3 / 2),
        "layer": change(np.arange(300) % 2),
        "head": change(np.arange(300) % 2),
        "kind": change("constant"),
        "loss": change("least-squares"),
        "min_entropy": change(1.2),
        "min_beta": change(0.5),
        "max_beta": change(1.2),
        "trained_up_to": change(8),
        "tolerance": change(0.1),
        "seed": change(5),
        "name": change("other"),
    }
    base = {"logits": logits, "target": target, "group": GROUPS}
    base |= {"kind": "polynomial", "trained_up_to": 16}
    return Cases(calibrate.fit, record_fit, base, changes)


@cases_of("calibrate.SoftmaxCalibrator")
def _():
    X, y = scored()

    def record(calibrator):
        return record_fit(calibrator.fit(X, y, GROUPS).coefficients_), calibrator.verdict_

    changes = {"kind": change("constant"), "seed": change(7)}
    return Cases(calibrate.SoftmaxCalibrator, record, {"kind": "polynomial"}, changes)


@cases_of("calibrate.Fit().save")
def _():
    def another_file():
        calibrate.identity().save("fit.json")

    changes = {
        "path": change("other.json"),
        "overwrite": change(True, raises=CoefficientsError, prepare=another_file),
    }

    def record(path):
        return str(path), path.read_text()

    return Cases(calibrate.load("paper").save, record, {"path": "fit.json"}, changes)


@cases_of("calibrate.load")
def _():
    def fits_of_ones_own():
        Path("own/paper").mkdir(parents=True)
        replace(by_size(), name="paper").save("own/paper/1.json")

    changes = {
        "reference": change("max-retrieval"),
        "store": change("own", prepare=fits_of_ones_own),
        "fingerprint": change("sha256:another", raises=CoefficientsError),
    }
    return Cases(calibrate.load, record_fit, {"reference": "paper"}, changes)


@cases_of("calibrate.fingerprint")
def _():
    return Cases(calibrate.fingerprint, str, {"source": [1, 2]}, {"source": change([1, 3])})


@cases_of("calibrate.identity")
def _():
    return Cases(calibrate.identity, record_fit, {}, {})


@cases_of("calibrate.optimal_beta")
def _():
    changes = {
        "logits": change(OTHER),
        "target": change(TARGET[::-1]),
        "where": change(np.arange(5) < [[3], [4], [5]]),
    }
    base = {"logits": LOGITS, "target": TARGET}
    return Cases(calibrate.optimal_beta, lambda result: record_array(result.beta), base, changes)


@cases_of("calibrate.commitment")
def _():
    changes = {"logits": change(OTHER), "where": change(REAL)}
    return Cases(calibrate.commitment, record_array, {"logits": LOGITS}, changes)


@cases_of("calibrate.susceptibility")
def _():
    changes = {"logits": change(OTHER), "where": change(REAL)}
    return Cases(calibrate.susceptibility, record_array, {"logits": LOGITS}, changes)


def gradient_of(function):
    """The gradient by `logits` or `query` of the sum of squares of what a function returns."""

    def differentiated(**arguments):
        name = "logits" if "logits" in arguments else "query"
        x = arguments.pop(name)
        return jax.grad(lambda x: (function(**{name: x}, **arguments) ** 2).sum())(x)

    return differentiated


def register_runtime(package, axis, needs="numpy", convert=dict, more_of_softmax=dict):
    """Registers the cases of the functions that each framework has.

    Args:
      axis: the name of this argument.
      convert: makes the framework's arrays of keywords.
      more_of_softmax: gives further arguments of softmax.
    """

    def function(name):
        return getattr(importlib.import_module(package), name)

    def changes(**values):
        return {name: change(value) for name, value in convert(**values).items()}

    @cases_of(f"{package}.entropy", needs)
    def _():
        changed = changes(logits=OTHER, **{axis: 0}, where=REAL)
        return Cases(function("entropy"), record_array, convert(logits=LOGITS), changed)

    @cases_of(f"{package}.inverse_temperature", needs)
    def _():
        changed = changes(H=np.float32([1, 2.5]), coefficients=calibrate.load("max-retrieval"))
        changed["n"] = change(64, coefficients=by_size(), H=None, raises=CoefficientsError)
        base = convert(H=np.float32([1, 2]), coefficients=calibrate.load("paper"))
        return Cases(function("inverse_temperature"), record_array, base, changed)

    @cases_of(f"{package}.adaptive_softmax", needs)
    def _():
        changed = changes(
            logits=OTHER, coefficients=calibrate.identity(), **{axis: 0}, where=REAL,
            **more_of_softmax(),
        )  # fmt: skip
        changed["entropy_gradient"] = change(False, differentiate=True)
        base = convert(logits=LOGITS, coefficients=calibrate.load("paper"))
        return Cases(function("adaptive_softmax"), record_array, base, changed)


register_runtime("calibrate.jax", "axis")


@cases_of("calibrate.jax.dot_product_attention")
def _():
    q, k, v, other = np.random.default_rng(1).normal(size=(4, 1, 5, 2, 4)).astype(np.float32)
    changes = {
        "query": change(other),
        "key": change(other),
        "value": change(other),
        "bias": change(np.float32([0, 1, 0, 0, 0])),
        "mask": change(REAL),
        "coefficients": change(calibrate.identity()),
        "scale": change(0.3),
        "is_causal": change(True),
        "query_seq_lengths": change(np.int32([3])),
        "key_value_seq_lengths": change(np.int32([3])),
        "local_window_size": change(1),
        "implementation": change("xla", alike=True),  # the only one; see test_attention.py
        "return_residual": change(True, raises=ValueError),
        "logits_soft_cap": change(0.5),
        "entropy_gradient": change(False, differentiate=True),
    }
    base = {"query": 3 * q, "key": k, "value": v, "coefficients": calibrate.load("paper")}
    return Cases(calibrate.jax.dot_product_attention, record_array, base, changes)
