"""Every argument of every public function changes its result, or is documented not to.

The functions of `CASES` give, for a public function, the arguments of a first call and a change of
each argument. The test takes the arguments from the signature: a new one without a case fails. Rows
of weight 0 and masked items are in test_left_out.py.
"""

import http.server
import inspect
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from conftest import ToyHead

import calibrate
import calibrate.jax
from calibrate.errors import CalibrateError, CoefficientsError
from calibrate.parallel import Jobs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of fits that gain nothing


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


@cases_of("calibrate.SoftmaxCalibrator().fit")
def _():
    def record(calibrator):
        return record_fit(calibrator.coefficients_)

    X, y = scored()
    changes = {
        "X": change(scored(noise=0.9)[0]),
        "y": change(TARGETS_WITH_ERRORS),
        "groups": change(FEWER),
        "sample_weight": change(np.arange(300) % 3 / 2),
    }
    fit = calibrate.SoftmaxCalibrator("constant").fit
    return Cases(fit, record, {"X": X, "y": y, "groups": GROUPS}, changes)


@cache
def calibrator():
    return calibrate.SoftmaxCalibrator("constant").fit(*scored(), GROUPS)


def estimator_cases(method, *changed):
    X, y = scored()
    values = {"X": (X, scored(noise=0.9)[0]), "y": (y, TARGETS_WITH_ERRORS)}
    base = {name: values[name][0] for name in changed}
    changes = {name: change(values[name][1]) for name in changed}
    return Cases(getattr(calibrator(), method), record_array, base, changes)


cases_of("calibrate.SoftmaxCalibrator().predict")(partial(estimator_cases, "predict", "X"))
cases_of("calibrate.SoftmaxCalibrator().predict_proba")(
    partial(estimator_cases, "predict_proba", "X")
)
cases_of("calibrate.SoftmaxCalibrator().score")(partial(estimator_cases, "score", "X", "y"))


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


@cache
def address_without_pin():
    """The address of a coefficient file on a server of this machine."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(calibrate.load("paper").path.read_bytes())

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/fit.json"


@cases_of("calibrate.load")
def _():
    def fits_of_ones_own():
        Path("own/paper").mkdir(parents=True)
        replace(by_size(), name="paper").save("own/paper/1.json")

    changes = {
        "reference": change("max-retrieval"),
        "store": change("own", prepare=fits_of_ones_own),
        "fingerprint": change("sha256:another", raises=CoefficientsError),
        "allow_unpinned": change(True, raises=CoefficientsError, reference=address_without_pin()),
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


@cases_of("calibrate.jax.entropy")
def _():
    changes = {"logits": change(OTHER), "axis": change(0), "where": change(REAL)}
    return Cases(calibrate.jax.entropy, record_array, {"logits": LOGITS}, changes)


@cases_of("calibrate.jax.inverse_temperature")
def _():
    changes = {
        "H": change(np.float32([1.0, 2.5])),
        "coefficients": change(calibrate.load("max-retrieval")),
        "n": change(64, coefficients=by_size(), H=None, raises=CoefficientsError),
    }
    base = {"H": np.float32([1.0, 2.0]), "coefficients": calibrate.load("paper")}
    return Cases(calibrate.jax.inverse_temperature, record_array, base, changes)


def gradient_of(function):
    """The gradient by `logits` or `query` of the sum of squares of what a function returns."""

    def differentiated(**arguments):
        name = "logits" if "logits" in arguments else "query"
        x = arguments.pop(name)
        return jax.grad(lambda x: (function(**{name: x}, **arguments) ** 2).sum())(x)

    return differentiated


@cases_of("calibrate.jax.adaptive_softmax")
def _():
    changes = {
        "logits": change(OTHER),
        "coefficients": change(calibrate.identity()),
        "axis": change(0),
        "where": change(REAL),
        "entropy_gradient": change(False, differentiate=True),
    }
    base = {"logits": LOGITS, "coefficients": calibrate.load("paper")}
    return Cases(calibrate.jax.adaptive_softmax, record_array, base, changes)


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


def tensors(**arguments):
    """Arrays of NumPy as tensors of PyTorch."""
    import torch

    return {
        name: torch.tensor(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()
    }


@cases_of("calibrate.torch.entropy", "torch")
def _():
    import calibrate.torch

    values = tensors(logits=OTHER, dim=0, where=REAL)
    changes = {name: change(value) for name, value in values.items()}
    return Cases(calibrate.torch.entropy, record_array, tensors(logits=LOGITS), changes)


@cases_of("calibrate.torch.inverse_temperature", "torch")
def _():
    import calibrate.torch

    values = tensors(H=np.float32([1.0, 2.5]), coefficients=calibrate.load("max-retrieval"))
    changes = {name: change(value) for name, value in values.items()}
    changes["n"] = change(64, coefficients=by_size(), H=None, raises=CoefficientsError)
    base = tensors(H=np.float32([1.0, 2.0]), coefficients=calibrate.load("paper"))
    return Cases(calibrate.torch.inverse_temperature, record_array, base, changes)


@cases_of("calibrate.torch.adaptive_softmax", "torch")
def _():
    import torch

    import calibrate.torch

    values = tensors(
        logits=OTHER, coefficients=calibrate.identity(), dim=0, where=REAL, dtype=torch.float64
    )
    changes = {name: change(value) for name, value in values.items()}
    changes["entropy_gradient"] = change(False, differentiate=True)
    base = tensors(logits=LOGITS, coefficients=calibrate.load("paper"))
    return Cases(calibrate.torch.adaptive_softmax, record_array, base, changes)


@cases_of("calibrate.torch.scaled_dot_product_attention", "torch")
def _():
    import torch

    import calibrate.torch

    q, k, v, other = np.random.default_rng(1).normal(size=(4, 1, 2, 5, 4)).astype(np.float32)
    values = tensors(
        query=other, key=other, value=other, attn_mask=REAL, is_causal=True, scale=0.3,
        coefficients=calibrate.identity(), logits_soft_cap=0.5, sinks=np.float32([1, 2]),
    )  # fmt: skip
    changes = {name: change(value) for name, value in values.items()}
    changes["dropout_p"] = change(0.5, prepare=partial(torch.manual_seed, 0))
    changes["enable_gqa"] = change(True, raises=ValueError, **tensors(key=k[:, :1], value=v[:, :1]))
    changes["entropy_gradient"] = change(False, differentiate=True)
    base = tensors(query=3 * q, key=k, value=v, coefficients=calibrate.load("paper"))
    return Cases(calibrate.torch.scaled_dot_product_attention, record_array, base, changes)


def gradient_of_torch(function):
    """As `gradient_of`."""
    import torch

    def differentiated(**arguments):
        name = "logits" if "logits" in arguments else "query"
        arguments[name].requires_grad_()
        return torch.autograd.grad((function(**arguments) ** 2).sum(), arguments[name])[0]

    return differentiated


def outputs_of(model):
    """The outputs of a model for some tokens."""
    import torch

    with torch.no_grad():
        return record_array(model(torch.arange(5, 45).reshape(2, 20))[0])


@cases_of("calibrate.transformers.apply", "transformers")
def _():
    import torch
    from tiny_models import tiny_model

    import calibrate.transformers

    changes = {
        "model": change(tiny_model("mbart")),
        "fit": change(calibrate.identity()),
        "part": change("encoder_attn"),
        # For the verification alone.
        "inputs": change({"input_ids": torch.arange(5)[None]}, alike=True),
    }
    base = {"model": tiny_model("bart"), "fit": calibrate.load("paper")}
    return Cases(calibrate.transformers.apply, outputs_of, base, changes)


def capture_cases(capture, **changes):
    """Of a recording of three forward passes."""
    import torch
    from tiny_models import tiny_model

    @wraps(capture)
    def run(model, folder, **options):
        with capture(model, folder, **options) as recorder:
            for query in (5, 7, 9):
                recorder.next(query=query, target=3)
                model(torch.arange(5, 25)[None])

    def record(_):
        files = sorted(Path().glob("*/*.npz"))
        return [(str(file), [array.tolist() for array in np.load(file).values()]) for file in files]

    changes = {
        "model": change(tiny_model("mbart")),
        "folder": change(Path("other")),
        **{name: change(value) for name, value in changes.items()},
    }
    base = {"model": tiny_model("bart"), "folder": Path("run"), "part": "encoder_attn"}
    return Cases(run, record, base, changes)


@cases_of("calibrate.transformers.capture", "transformers")
def _():
    import calibrate.transformers

    options = {"part": "encoder.layers", "layers": [0], "heads": [1, 2], "max_bytes": 4_000}
    return capture_cases(calibrate.transformers.capture, **options)


@cases_of("calibrate.capture", "transformers")
def _():
    return capture_cases(calibrate.capture, options={"heads": [1, 2]})


@cases_of("calibrate.fit_model", "transformers")
def _():
    from test_batch_fit import batches_of, log_p, log_probs
    from tiny_causal import planted_model

    def log_p_of_halves(model, tokens):
        return log_p(model, tokens) / 2

    other = planted_model()
    other.model.layers[0].self_attn.q_proj.weight.mul_(0.5)
    retention = {"protect": batches_of(32), "log_probs": log_probs}
    changes = {
        "model": change(other),
        "batches": change(batches_of(48)),
        "log_p": change(log_p_of_halves),
        "protect": change(retention["protect"], log_probs=log_probs, max_kl=0.02),
        "log_probs": change(lambda *batch: log_probs(*batch)[..., :9], max_kl=0.02, **retention),
        "template": change(["one", "other"] * 16),
        "size": change(40),
        "kind": change("log-size"),
        "max_kl": change(0.02, **retention),
        "interpolation": change(0.5),
        "steps": change(3),
        "seed": change(5),
        "name": change("other"),
    }
    base = {"model": planted_model(), "batches": batches_of(), "log_p": log_p, "steps": 6}
    return Cases(calibrate.fit_model, record_fit, base | {"size": 20}, changes)


@pytest.fixture(autouse=True)
def cache_of_ones_own(here, monkeypatch):
    """Downloads do not go into the user's cache, nor through a proxy."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    monkeypatch.setenv("no_proxy", "*")


def call(name, argument, changed, folder, monkeypatch):
    """The record of the first or of the changed call in a new folder; or the error it raises."""
    cases = CASES[name]()
    change = cases.changes[argument]
    arguments, function = cases.base | change.beside, cases.function
    if arguments.pop("differentiate", False):
        function = (gradient_of_torch if "torch" in name else gradient_of)(function)
    if changed:
        variadic = inspect.signature(cases.function).parameters[argument].kind.name == "VAR_KEYWORD"
        arguments |= change.value if variadic else {argument: change.value}
    folder.mkdir()
    monkeypatch.chdir(folder)
    if change.prepare:
        change.prepare()
    errors = change.raises or ()
    try:
        return cases.record(function(**arguments))
    except errors as failure:
        return type(failure)


# Each takes several seconds.
SLOW = {
    "calibrate.collect",
    "calibrate.fit_model",
    "calibrate.fit_polynomial",
    "calibrate.jax.adaptive_softmax",
    "calibrate.jax.dot_product_attention",
}


@cases_of("calibrate.check_softmax")
def _():
    def softmax(z):
        weights = np.exp(z - z.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    def paper(z, real=None):
        z = z if real is None else np.where(real, z, -np.inf)
        p = softmax(z)
        H = -np.sum(p * np.log(np.where(p > 0, p, 1)), -1, keepdims=True)
        return softmax(
            calibrate.load("paper").only.beta_at(H, None, calibrate.load("paper").rule) * z
        )

    changes = {
        "function": change(softmax),
        "fit": change("max-retrieval"),
        "mask": change("real", function=lambda z, real=None: paper(z)),
    }
    return Cases(calibrate.check_softmax, str, {"function": paper}, changes)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow if x in SLOW else []) for x in CASES]
)
def test_every_argument_changes_the_result_or_is_documented_not_to(name, here, monkeypatch):
    cases = CASES[name]()
    assert cases.changes.keys() == inspect.signature(cases.function).parameters.keys()
    first = None  # the record of the first call, without further arguments
    for argument, change in cases.changes.items():
        do = partial(call, name, argument, monkeypatch=monkeypatch)
        if change.beside or change.prepare:
            base = do(changed=False, folder=here / f"{argument} 0")
        else:
            base = first = first or do(changed=False, folder=here / f"{argument} 0")
        other = do(changed=True, folder=here / f"{argument} 1")
        assert (base == other) == change.alike, argument
        if change.raises:
            assert change.raises in (base, other), argument


def test_every_public_function_has_cases():
    functions = {
        f"{module.__name__}.{name}"
        for module in (calibrate, calibrate.jax)
        for name in module.__all__
        if inspect.isfunction(getattr(module, name))
    }
    aliases = {f"calibrate.{name}" for name in calibrate.jax.__all__}
    of_models = {"calibrate.capture", "calibrate.fit_model"}  # their cases need an extra
    assert functions - aliases - of_models <= CASES.keys()
    assert not find_spec("transformers") or of_models <= CASES.keys()
