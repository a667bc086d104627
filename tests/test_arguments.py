"""Every argument of every public function changes its result, or is documented not to.

The test takes the arguments from the signature: a new one without a case fails. Cases are in
argument_cases.py, and those of PyTorch and of models here. Rows of weight 0 and masked items are in
test_left_out.py.
"""

import inspect
from functools import partial, wraps
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from argument_cases import (
    CASES,
    REAL,
    Cases,
    cases_of,
    change,
    gradient_of,
    record_array,
    record_fit,
    register_runtime,
)

import calibrate
import calibrate.jax

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of fits that gain nothing


def tensors(**arguments):
    """Arrays of NumPy as tensors of PyTorch."""
    import torch

    return {
        name: torch.tensor(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()
    }


def float64():
    import torch

    return {"dtype": torch.float64}


register_runtime("calibrate.torch", "dim", "torch", tensors, float64)


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
    from test_batch_fit import batches_of, log_p
    from tiny_causal import planted_model

    def log_p_of_halves(model, tokens):
        return log_p(model, tokens) / 2

    other = planted_model()
    other.model.layers[0].self_attn.q_proj.weight.mul_(0.5)
    changes = {
        "model": change(other),
        "batches": change(batches_of(48)),
        "log_p": change(log_p_of_halves),
        "template": change(["one", "other"] * 16),
        "size": change(40),
        "kind": change("log-size"),
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
    case = cases.changes[argument]
    arguments, function = cases.base | case.beside, cases.function
    if arguments.pop("differentiate", False):
        function = (gradient_of_torch if "torch" in name else gradient_of)(function)
    if changed:
        variadic = inspect.signature(cases.function).parameters[argument].kind.name == "VAR_KEYWORD"
        arguments |= case.value if variadic else {argument: case.value}
    folder.mkdir()
    monkeypatch.chdir(folder)
    if case.prepare:
        case.prepare()
    errors = case.raises or ()
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
    for argument, case in cases.changes.items():
        do = partial(call, name, argument, monkeypatch=monkeypatch)
        if case.beside or case.prepare:
            base = do(changed=False, folder=here / f"{argument} 0")
        else:
            base = first = first or do(changed=False, folder=here / f"{argument} 0")
        other = do(changed=True, folder=here / f"{argument} 1")
        assert (base == other) == case.alike, argument
        if case.raises:
            assert case.raises in (base, other), argument


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
