"""Masked items: a fit, its evaluation, the estimator, and both runtimes count the same ones."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from backends import NO_TORCH, OF_THE_COMPILER, Torch, values

import calibrate
from calibrate.core.rule import ENTROPY_AND_SIZE, RuleForm
from calibrate.jax import attention
from calibrate.rows.logits_checks import in_float32
from calibrate.rows.score import betas_of_rows, softmax_at
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit

FITS = {
    "constant": Fit(RuleForm(0.0, 0.1), (Entry((0.0, 0.0, 0.0, 0.0, 0.5), (0.0, 9.0)),)),
    "log-size": Fit(RuleForm.log_size(0.1), (Entry((0.8, -0.5), (0.0, 9.0)),)),
    "entropy-and-size": Fit(
        RuleForm(0.0, 0.1, kind=ENTROPY_AND_SIZE),
        (Entry((0.0, 0.0, 0.02, 0.1, 0.2, 0.05, 0.0, 0.4), (0.0, 9.0, 0.0, 9.0)),),
    ),
}
N = 24
LEAST = {name: float(jnp.finfo(name).min) for name in ("float32", "bfloat16")}
PADDING = (-np.inf, "where", -1e9, *LEAST.values(), -10_000.0, -9_984.0)
SHIFTS = (0.0, 1e4, -1e4)


def cases():
    """Logits without padding, what is added to them, and the mask, (rows, N) each.

    Five rows of each padding and shift: with 3 to 24 real items, and one of padding alone. Logits
    are multiples of 1 / 256, which a shift of 10,000 does not round.
    """
    n_real = np.array([3, 9, 17, N, 0])
    rng, parts = np.random.default_rng(0), []
    for padding in PADDING:
        fill = 0.0 if padding == "where" else padding
        for shift in SHIFTS:
            z = np.round(512 * rng.standard_normal((len(n_real), N))) / 256
            real = np.arange(N) < n_real[:, None]
            if padding in (-np.inf, "where"):  # of which a row has no items
                real[-1] = True
            where = real if padding == "where" else np.ones_like(real)
            added = shift + np.where(real, 0.0, fill)
            parts.append((z, added, where))
    z, added, where = map(np.concatenate, zip(*parts, strict=True))
    return z.astype("float32"), added.astype("float32"), where


Z, ADDED, WHERE = cases()
LOGITS = Z + ADDED  # in float32, as softmax sees them
MASKED_BY_INF = np.where(WHERE, LOGITS, np.float32(-np.inf))


def expected(fit):
    """By the float64 reference."""
    entry = fit.only
    return reference.adaptive_softmax(LOGITS, entry.coefficients, entry.domain, fit.rule, -1, WHERE)


def by_rows(fit):
    z, _ = in_float32(LOGITS, WHERE)
    z = np.where(WHERE, z, -np.inf).astype("float32")
    return softmax_at(z, betas_of_rows(z, [fit]))[:, 0]


def by_estimator(fit):
    estimator = calibrate.SoftmaxCalibrator()
    estimator.coefficients_, estimator.n_features_in_ = fit, N
    return estimator.predict_proba(MASKED_BY_INF)


def by_softmax(fit):
    return calibrate.adaptive_softmax(LOGITS, fit, where=WHERE)


def by_softmax_without_a_mask(fit):
    return jax.jit(lambda z: calibrate.adaptive_softmax(z, fit))(MASKED_BY_INF)


def by_attention(fit):
    """Queries times the unit matrix are logits, and weights times it are weights."""
    unit = np.eye(N, dtype="float32")[None, :, None]
    bias = np.where(WHERE, ADDED, -np.inf)[None, None]
    return attention.dot_product_attention(
        Z[None, :, None], unit, unit, bias, coefficients=fit, scale=1.0
    )[0, :, 0]


def by_torch(fit):
    return Torch().softmax(LOGITS, fit, where=WHERE)


def by_torch_without_a_mask(fit):
    return Torch().softmax(MASKED_BY_INF, fit)


def by_torch_compiled(fit):
    torch = Torch().torch
    softmax = torch.compile(Torch().ours.adaptive_softmax)
    return softmax(torch.tensor(LOGITS), fit, where=torch.tensor(WHERE))


def by_torch_attention(fit):
    backend = Torch()
    unit = backend.array(np.eye(N, dtype="float32")[None, None])
    mask = backend.array(np.where(WHERE, ADDED, -np.inf).astype("float32"))
    attend = backend.ours.scaled_dot_product_attention
    return attend(backend.array(Z[None, None]), unit, unit, mask, coefficients=fit, scale=1.0)[0, 0]


ENDS = [
    by_rows, by_estimator, by_softmax, by_softmax_without_a_mask, by_attention,
    *(pytest.param(end, marks=NO_TORCH)
      for end in (by_torch, by_torch_without_a_mask, by_torch_attention)),
    pytest.param(by_torch_compiled, marks=OF_THE_COMPILER),
]  # fmt: skip


@pytest.mark.parametrize("kind", FITS)
@pytest.mark.parametrize("end", ENDS)
def test_all_ends_count_the_same_items(end, kind):
    np.testing.assert_allclose(values(end(FITS[kind])), expected(FITS[kind]), atol=5e-6)


def test_counting_padding_would_show():
    """In most rows of finite padding, and by more than the tolerance."""
    fit, finite = FITS["log-size"], np.isfinite(MASKED_BY_INF).sum(axis=1)
    line, domain = fit.only.coefficients, fit.only.domain
    beta = reference.inverse_temperature(None, line, domain, fit.rule, finite)
    wrong = reference.softmax(LOGITS, where=WHERE, beta=beta[:, None])
    assert (np.abs(wrong - expected(fit)).max(axis=1) > 0.01).mean() > 0.4


@NO_TORCH
def test_beyond_9000_an_item_is_masked_and_at_9000_it_is_not():
    rule = Fit(RuleForm.log_size(0.1), (Entry((1.0, 0.0), (0.0, 9.0)),))
    z = np.array([[1.0, 0.0, -8_999.0], [1.0, 0.0, -8_999.5], [1e4, 9_999.0, 1_000.0]], "float32")

    def transformed(z, fit):
        backend = Torch()
        softmax = partial(backend.ours.adaptive_softmax, coefficients=fit)
        return backend.torch.func.vmap(softmax)(backend.array(z))

    for softmax in (calibrate.adaptive_softmax, Torch().softmax, transformed):
        p = values(softmax(z, rule))
        np.testing.assert_allclose(np.log(p[:, 0] / p[:, 1]), np.log([3, 2, 3]), rtol=1e-5)
