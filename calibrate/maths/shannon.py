"""Entropy of softmax(z) in JAX, from centred logits in one pass and at least float32."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

Axis = int | Sequence[int]


class Centred(NamedTuple):
    """Logits less their maximum, and the two sums that entropy needs; axes kept."""

    shifted: jax.Array  # z - max z, finite; 0 where masked
    valid: jax.Array  # bool: unmasked and not -inf
    weights: jax.Array  # w = exp(shifted); 0 where masked
    normaliser: jax.Array  # Z = sum w
    first_moment: jax.Array  # S = sum w (z - max z)

    @property
    def entropy(self) -> jax.Array:
        """H = log Z - S / Z; 0 for a row without valid items."""
        # A row without valid items has S = 0; Z = 1 keeps its value and its gradient finite.
        normaliser = jnp.where(self.normaliser == 0, 1, self.normaliser)
        return jnp.log(normaliser) - self.first_moment / normaliser


def centre(logits: ArrayLike, axis: Axis, where: ArrayLike | None) -> Centred:
    """Centres logits (any shape) along `axis` in float32 or wider, masked items left out."""
    logits = jnp.asarray(logits)
    z = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    valid = z != -jnp.inf
    if where is not None:
        valid = valid & where
    peak = jnp.max(z, axis, keepdims=True, where=valid, initial=-jnp.inf)
    peak = jax.lax.stop_gradient(jnp.where(peak == -jnp.inf, 0, peak))
    # A masked item is replaced before the subtraction, so that no gradient passes through it;
    # the lower bound keeps 0 * shifted at 0 where a finite mask would overflow.
    shifted = jnp.where(valid, jnp.where(valid, z, 0) - peak, 0)
    shifted = jnp.maximum(shifted, jnp.finfo(z.dtype).min)
    weights = jnp.where(valid, jnp.exp(shifted), 0)
    normaliser = jnp.sum(weights, axis, keepdims=True)
    first_moment = jnp.sum(weights * shifted, axis, keepdims=True)
    return Centred(shifted, valid, weights, normaliser, first_moment)


@partial(jax.jit, static_argnames="axis")
def entropy(logits: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None) -> jax.Array:
    """Shannon entropy of softmax(logits), H = log Z - S / Z.

    With w = exp(z - max z): Z = sum w and S = sum w (z - max z).

    Args:
      logits: any shape and real dtype; -inf counts as masked.
      axis: the axis or axes of the items.
      where: bool, broadcastable to logits, True for real items; None means all.
    Returns:
      H in nats without the item axes, float32 or wider; 0 where every item is masked by `where`,
      NaN where all unmasked items are -inf (there is no distribution).
    Reference: Velickovic et al. 2024, section 3.
    """
    centred = centre(logits, axis, where)
    unmasked = jnp.ones_like(centred.valid) if where is None else jnp.asarray(where)
    undefined = (centred.normaliser == 0) & jnp.any(
        jnp.broadcast_to(unmasked, centred.valid.shape), axis, keepdims=True
    )
    return jnp.squeeze(jnp.where(undefined, jnp.nan, centred.entropy), axis)
