"""Softmax and attention in JAX that apply a fit; `flax.py` has those of Flax (extra "flax").

Importing this package registers `Fit` as a static node of JAX's pytrees, so that jitted functions
take a fit as an argument. The first use of calibrate's `adaptive_softmax`, `entropy` or
`inverse_temperature` imports it, and a fit that is created after JAX was imported registers its
class itself. There is one other case: a fit that was loaded before JAX, and that a jitted function
takes before any of these names is used. For it, write

    import calibrate.jax
"""

from calibrate.jax.attention import dot_product_attention
from calibrate.jax.softmax import adaptive_softmax, entropy, inverse_temperature
from calibrate.store.fit import register_with_jax

__all__ = ["adaptive_softmax", "dot_product_attention", "entropy", "inverse_temperature"]

register_with_jax()
