"""Softmax and attention in JAX that apply a fit; `flax.py` has those of Flax (extra "flax").

Registers `Fit` as a static node of JAX's pytrees, so that jitted functions take a fit as
an argument. The first use of calibrate's `adaptive_softmax`, `entropy` or `inverse_temperature`
imports this package, and a fit that is created while JAX is loaded registers its class itself. For
a fit that was loaded before JAX, and is an argument of a jitted function before any of these names
is used, write

    import calibrate.jax
"""

from calibrate.jax.attention import dot_product_attention
from calibrate.jax.shannon_entropy import entropy
from calibrate.jax.softmax import adaptive_softmax, inverse_temperature
from calibrate.store.fit import register_with_jax

__all__ = ["adaptive_softmax", "dot_product_attention", "entropy", "inverse_temperature"]

register_with_jax()
