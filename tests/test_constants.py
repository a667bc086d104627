"""A constant gives softmax(beta z) in every runtime, of any kind and at an entropy of 0 too."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from backends import BACKENDS, NO_TORCH, OF_THE_COMPILER, PATHS, Torch, dtype_of, values

import calibrate
from calibrate.core.rule import (
    CONSTANT,
    ENTROPY_AND_SIZE,
    LOG_SIZE,
    POLYNOMIAL,
    RuleForm,
    beta_of,
    slope_of,
)
from calibrate.jax import attention
from calibrate.rows.score import betas_of_rows, softmax_at
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit

BETA = 0.02
POWERS = (0.0, 0.0, 0.0, 0.0, BETA)
ENTRIES = {
    CONSTANT: Entry((BETA,)),
    LOG_SIZE: Entry((0.0, BETA), (0.5, 5.0)),
    POLYNOMIAL: Entry(POWERS, (0.0, 6.0)),
    ENTROPY_AND_SIZE: Entry((*POWERS, 0.0, 0.0, 0.0), (0.1, 6.0, 0.5, 5.0)),
}
FITS = {kind: Fit(RuleForm(0.0, 1 / 64, kind=kind), (entry,)) for kind, entry in ENTRIES.items()}
PER_HEAD = {
    CONSTANT: (Entry((BETA,), head=0), Entry((BETA,), head=1)),
    POLYNOMIAL: (Entry(POWERS, (0.0, 6.0), head=0), Entry(POWERS, (0.1, 6.0), head=1)),
}
PER_HEAD = {
    kind: Fit(RuleForm(0.0, 1 / 64, kind=kind), entries) for kind, entries in PER_HEAD.items()
}
GAPS = (0.0, 3.0, 20.0, 50.0, 87.5, 90.0, 104.5, 200.0, 746.0, 800.0)
# The other weights of a row underflow, and its entropy is 0, from a gap of 87 in JAX on, of 104 in
# float32 and of 745 in float64.
ROWS = np.array([[-32.0 * (gap > 0), gap, 0.0] for gap in GAPS])
RIGHT = reference.softmax(ROWS, beta=BETA)


@pytest.mark.parametrize("kind", FITS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_softmax_of_a_constant_is_that_of_logits_times_it(backend, dtype, kind):
    backend = backend()
    logits = backend.array(ROWS, dtype)
    probs = backend.softmax(logits, FITS[kind])
    assert dtype_of(probs) == dtype
    right = reference.softmax(values(logits), beta=BETA)
    np.testing.assert_allclose(values(probs), right, rtol=1e-2 if dtype == "bfloat16" else 2e-5)
    beta = values(backend.inverse_temperature(np.zeros(3, np.float32), FITS[kind], n=3))
    np.testing.assert_allclose(beta, BETA, rtol=1e-6)


@pytest.mark.parametrize("kind", PER_HEAD)
@pytest.mark.parametrize("backend", BACKENDS)
def test_softmax_with_a_constant_for_each_head(backend, kind):
    backend, zeros = backend(), np.zeros_like(ROWS)
    fit = replace(PER_HEAD[kind], entries=PER_HEAD[kind].entries[1:])
    logits = backend.array(np.stack([zeros, ROWS]))
    expected = [reference.softmax(zeros), RIGHT]
    np.testing.assert_allclose(values(backend.softmax(logits, fit)), expected, rtol=2e-5)
    both = backend.softmax(backend.array(np.stack([ROWS, ROWS])), PER_HEAD[kind])
    np.testing.assert_allclose(values(both), [RIGHT, RIGHT], rtol=2e-5)


@pytest.mark.parametrize("kind", FITS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_a_constant(backend, kind):
    backend, weights = backend(), np.arange(3, dtype=np.float32)
    actual = values(backend.softmax_gradient(FITS[kind])(ROWS.astype("float32"), None, weights))
    exact = BETA * RIGHT * (weights - (RIGHT @ weights)[:, None])
    np.testing.assert_allclose(actual, exact, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("fit", [*FITS.values(), *PER_HEAD.values()])
def test_a_constant_needs_neither_entropy_nor_size(fit):
    assert fit.ignores_inputs
    assert not fit.needs_entropy
    assert not fit.needs_size
    program = jax.make_jaxpr(lambda z: calibrate.adaptive_softmax(z, fit))(jnp.zeros((2, 4, 8)))
    assert " log " not in str(program)


@pytest.mark.parametrize(
    ("rule", "coefficients"),
    [
        (RuleForm(0.5, 1 / 64), POWERS),  # 1 for small entropies
        (RuleForm(0.0, 1 / 64, outside="identity"), POWERS),  # 1 outside the domain
        (RuleForm(0.0, 1 / 64), (0.0, 0.0, 0.0, 1e-9, BETA)),
    ],
    ids=["threshold", "identity outside", "slope"],
)
def test_what_looks_like_a_constant_and_is_none(rule, coefficients):
    fit = Fit(rule, (Entry(coefficients, (0.1, 6.0)),))
    assert fit.needs_entropy
    assert fit.only.constant_beta(rule) is None
    program = jax.make_jaxpr(lambda z: calibrate.adaptive_softmax(z, fit))(jnp.zeros((4, 8)))
    assert " log " in str(program)


def test_in_float64():
    with jax.enable_x64(True):
        for fit in FITS.values():
            probs = calibrate.adaptive_softmax(jnp.asarray(ROWS), fit)
            np.testing.assert_allclose(probs, RIGHT, rtol=1e-12)


@NO_TORCH
@pytest.mark.parametrize("kind", FITS)
def test_in_float64_of_torch_and_by_its_single_operations(kind):
    torch = Torch().torch
    softmax, logits = Torch().ours.adaptive_softmax, torch.tensor(ROWS)
    one_by_one = torch.func.vmap(lambda row: softmax(row, FITS[kind]))
    for function in (lambda z: softmax(z, FITS[kind]), one_by_one):
        np.testing.assert_allclose(function(logits), RIGHT, rtol=1e-12)


@pytest.mark.parametrize(
    "fit",
    [pytest.param(fit, marks=OF_THE_COMPILER) for fit in (*FITS.values(), *PER_HEAD.values())],
    ids=[*FITS, *(f"{kind} per head" for kind in PER_HEAD)],
)
def test_compiled_by_torch(fit):
    """A threshold of 0 is an input of the compiled program then."""
    torch = Torch().torch
    compiled = torch.compile(Torch().ours.adaptive_softmax)
    probs = compiled(torch.tensor(np.stack([ROWS, ROWS]), dtype=torch.float32), fit)
    np.testing.assert_allclose(probs, [RIGHT, RIGHT], rtol=2e-5)


@pytest.mark.parametrize("kind", [CONSTANT, POLYNOMIAL])
@pytest.mark.parametrize("backend_and_path", PATHS)
def test_attention_with_a_constant(backend_and_path, kind, monkeypatch):
    backend, path = backend_and_path[0](), backend_and_path[1]
    backend.take_path(path, monkeypatch)
    logits = np.zeros((len(GAPS), 16), np.float32)
    logits[:, :3] = ROWS
    logits[:, 3:] = ROWS[:, :1]
    unit = np.eye(16, dtype=np.float32)[None, :, None]
    attended = backend.attend((logits[None, :, None], unit, unit), FITS[kind], scale=1.0)
    right = reference.softmax(logits, beta=BETA)
    np.testing.assert_allclose(values(attended)[0, :, 0], right, rtol=1e-4)


@pytest.mark.parametrize("kind", [CONSTANT, POLYNOMIAL])
def test_one_block_of_attention_in_jax(kind):
    unit = np.eye(3, dtype=np.float32)[None, :, None]
    query = ROWS.astype(np.float32)[None, :, None]
    out = attention.dot_product_attention(query, unit, unit, coefficients=FITS[kind], scale=1.0)
    np.testing.assert_allclose(out[0, :, 0], RIGHT, rtol=2e-5)


@pytest.mark.parametrize("kind", FITS)
def test_estimator_and_evaluation(kind):
    estimator = calibrate.SoftmaxCalibrator()
    estimator.coefficients_, estimator.n_features_in_ = FITS[kind], 3
    np.testing.assert_allclose(estimator.predict_proba(ROWS), RIGHT, rtol=1e-12)
    z = ROWS.astype(np.float32)
    weights = softmax_at(z, betas_of_rows(z, [FITS[kind]]))[:, 0]
    np.testing.assert_allclose(weights, RIGHT, rtol=2e-5)


@pytest.mark.parametrize("least", [0.0, 0.5])
@pytest.mark.parametrize("xp", [np, jnp])
def test_a_threshold_may_be_a_number_or_one_of_each_head(xp, least):
    line, domain = (0.0, 0.0, 0.0, 0.1, 0.2), (0.0, 6.0)
    H = xp.asarray([0.0, 0.5, 0.6, 2.0])
    actual = []
    for given in (least, xp.asarray(least), xp.full(4, least)):
        rule = RuleForm(given, 1 / 64)
        beta = beta_of(H, None, line, domain, rule, xp)
        actual.append([beta, slope_of(H, None, beta, line, domain, rule, xp)])
    beta, slope = ([1, 1, 0.26, 0.4], [0, 0, 0.1, 0.1]) if least else (
        [0.2, 0.25, 0.26, 0.4], [0, 0.1, 0.1, 0.1]
    )  # fmt: skip
    np.testing.assert_allclose(np.array(actual, float), [[beta, slope]] * 3, rtol=1e-6)


@pytest.mark.slow
def test_inputs_whose_entropy_rounds_to_0_are_fitted_and_scored():
    """Overconfident logits: with beta = 1 on such inputs, log p of many targets was -inf."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(4000, 5))
    target = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    logits = (50 * z).astype(np.float32)
    fit = calibrate.fit(logits, target, kind="constant")
    (beta,) = fit.coefficients
    assert beta == pytest.approx(1 / 50, rel=0.1)
    assert (np.asarray(calibrate.entropy(logits)) == 0).sum() > 100
    right = reference.softmax(logits, beta=beta)
    np.testing.assert_allclose(calibrate.adaptive_softmax(logits, fit), right, atol=1e-6)
    nll = -np.log(right[np.arange(len(z)), target]).mean()
    (record,) = [record for record in fit.evidence["kinds"] if record["kind"] == "constant"]
    assert record["nll"] == pytest.approx(nll, abs=2e-3)
    assert fit.evidence["inputs"]["fitted"] == fit.evidence["inputs"]["seen"] == len(z)
