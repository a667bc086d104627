"""Entropy of softmax(z) in JAX, from centred logits in one pass and at least float32."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

Axis = int | Sequence[int] | None


class Centred(NamedTuple):
    """What entropy, and its derivative, need of a row; axes kept."""

    shifted: jax.Array  # z - max z; -inf where masked
    weights: jax.Array  # w = exp(shifted); 0 where masked
    normaliser: jax.Array  # Z = sum w; 1 for a row without items
    mean: jax.Array  # sum w (z - max z) / Z

    @property
    def entropy(self) -> jax.Array:
        """H = log Z - mean; 0 for a row without items."""
        return jnp.log(self.normaliser) - self.mean

    def entropy_tangent(self, tangent: jax.Array, axis: Axis) -> jax.Array:
        """dH = -sum q (log q + H) dz, and log q + H = shifted - mean."""
        excess = jnp.where(self.weights == 0, 0, self.weights * (self.shifted - self.mean))
        return -jnp.sum(excess * tangent, axis, keepdims=True) / self.normaliser


def real_logits(logits: ArrayLike, where: ArrayLike | None) -> jax.Array:
    """Logits in float32 or wider, -inf where they are masked."""
    z = jnp.asarray(logits)
    if not jnp.issubdtype(z.dtype, jnp.floating):
        z = z.astype(float)
    z = z.astype(jnp.promote_types(z.dtype, jnp.float32))
    return z if where is None else jnp.where(where, z, -jnp.inf)


def centre(z: jax.Array, axis: Axis) -> Centred:
    """Centres float logits, whose masked items are -inf."""
    peak = jnp.max(z, axis, keepdims=True, initial=-jnp.inf)
    shifted = z - jax.lax.stop_gradient(jnp.where(peak == -jnp.inf, 0, peak))
    weights = jnp.exp(shifted)
    normaliser = jnp.sum(weights, axis, keepdims=True)
    normaliser = jnp.where(normaliser == 0, 1, normaliser)
    # 0 * -inf is NaN: what has no weight has no part in the mean.
    first_moment = jnp.sum(jnp.where(weights == 0, 0, weights * shifted), axis, keepdims=True)
    return Centred(shifted, weights, normaliser, first_moment / normaliser)


@partial(jax.jit, static_argnames="axis")
def entropy(logits: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None) -> jax.Array:
    """Shannon entropy of softmax(logits), H = log Z - S / Z.

    With w = exp(z - max z): Z = sum w and S = sum w (z - max z).

    Args:
      logits: any shape and real dtype; -inf counts as masked.
      axis: the axis or axes of the items; None means all.
      where: bool, broadcastable to logits, True for real items; None means all.
    Returns:
      H in nats without the item axes, float32 or wider; 0 where every item is masked by `where`,
      NaN where all unmasked items are -inf (there is no distribution).
    Reference: Velickovic et al. 2024, section 3.
    """
    z = real_logits(logits, where)
    unmasked = True if where is None else jnp.broadcast_to(where, z.shape)
    undefined = jnp.all(z == -jnp.inf, axis) & jnp.any(unmasked & jnp.ones_like(z, bool), axis)
    return jnp.where(undefined, jnp.nan, jnp.squeeze(_entropy(z, axis), axis))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _entropy(z: jax.Array, axis: Axis) -> jax.Array:
    return centre(z, axis).entropy


@_entropy.defjvp
def _entropy_jvp(
    axis: Axis, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    centred = centre(primals[0], axis)
    return centred.entropy, centred.entropy_tangent(tangents[0], axis)
