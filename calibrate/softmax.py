"""Floor 2, the runtime in JAX: a softmax that applies a fit at inference."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from calibrate.errors import CoefficientsError
from calibrate.files.coefficients import Coefficients
from calibrate.maths.rule import beta_of_entropy
from calibrate.maths.shannon import Axis, centre


def inverse_temperature(H: ArrayLike, coefficients: Coefficients) -> jax.Array:
    """beta(H) of a fit: clip(p(clip(H, lo, hi)), min_beta, max_beta), and 1 where the rule is off.

    Args:
      H: entropy in nats, any shape; computed in float32 or wider.
      coefficients: a fit, from `calibrate.load`; static under jit.
    Returns:
      beta, of H's shape, dimensionless.
    Raises:
      CoefficientsError: no fit was given, or it distinguishes layers or heads.
    Reference: Velickovic et al. 2024, section 3.
    """
    return _inverse_temperature(H, _fit(coefficients))


@jax.jit
def _inverse_temperature(H: ArrayLike, coefficients: Coefficients) -> jax.Array:
    H = jnp.asarray(H)
    H = H.astype(jnp.promote_types(H.dtype, jnp.float32))
    entry = coefficients.only
    return beta_of_entropy(H, entry.coefficients, entry.domain, coefficients.rule, jnp)


def adaptive_softmax(
    logits: ArrayLike,
    coefficients: Coefficients,
    axis: Axis = -1,
    where: ArrayLike | None = None,
) -> jax.Array:
    """softmax(beta(H) z), with H the entropy of softmax(z): jax.nn.softmax, sharpened by a fit.

    Args:
      logits: any shape and real dtype; entropy and beta are computed in float32 or wider.
      coefficients: a fit, from `calibrate.load`; static under jit: another fit retraces.
      axis: the axis or axes of the items.
      where: bool, broadcastable to logits, True for real items; None means all. Masked items get
        probability 0 and count neither in the entropy nor in the normaliser.
    Returns:
      Probabilities, of the logits' shape and dtype. A row whose unmasked items are all -inf is
      NaN, as in jax.nn.softmax; a row that `where` masks throughout is 0.
    Raises:
      CoefficientsError: no fit was given, or it distinguishes layers or heads.
    Reference: Velickovic et al. 2024, section 3.
    """
    return _adaptive_softmax(logits, _fit(coefficients), axis, where)


@partial(jax.jit, static_argnames="axis")
def _adaptive_softmax(
    logits: ArrayLike, coefficients: Coefficients, axis: Axis, where: ArrayLike | None
) -> jax.Array:
    logits = jnp.asarray(logits)
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        logits = logits.astype(float)
    centred = centre(logits, axis, where)
    beta = _inverse_temperature(centred.entropy, coefficients)
    weights = jnp.where(centred.valid, jnp.exp(beta * centred.shifted), 0)
    probs = weights / jnp.sum(weights, axis, keepdims=True)
    if where is not None:
        probs = jnp.where(where, probs, 0)
    return probs.astype(logits.dtype)


def _fit(coefficients: Coefficients) -> Coefficients:
    """A name or None in place of a fit must not come out as a tracing error."""
    if not isinstance(coefficients, Coefficients):
        raise CoefficientsError(
            f"coefficients is {coefficients!r}; give a fit, such as calibrate.load('max-retrieval')"
        )
    return coefficients
