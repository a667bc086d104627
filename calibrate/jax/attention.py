"""Attention in JAX that applies a fit, in place of jax.nn.dot_product_attention.

Letters for shapes: B batch, T queries, S keys, N query heads, K key heads, G = N / K, H width.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from calibrate.jax import query_blocks
from calibrate.jax.masking import is_known, wide
from calibrate.jax.query_blocks import Band, KeyHead, attend_key_head, map_first_axis
from calibrate.jax.softmax import head_table
from calibrate.store.fit import Fit
from calibrate.store.inverse_temperature import check_fit

_NO_BOUND = 1 << 30  # keys; more than any array has, and twice as many are within int32


class AttentionArrays(NamedTuple):
    """The arrays of a call of attention."""

    q: jax.Array  # (B, T, N, H)
    k: jax.Array  # (B, S, K, H)
    v: jax.Array  # (B, S, K, any)
    bias: jax.Array | None  # (B, N, T, S), each axis possibly 1
    mask: jax.Array | None  # as bias
    n_queries: ArrayLike | None  # (B,)
    n_keys: ArrayLike | None  # (B,)


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    coefficients: Fit,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    logits_soft_cap: float | None = None,
    entropy_gradient: bool = True,
) -> jax.Array:
    """softmax(beta(H) z) V with z = scale Q K^T + bias and H the entropy of softmax(z).

    Fits by size have beta(n) or beta(H, n): n counts the keys that masks, lengths, causality and
    window leave; with a bias or a mask, those whose logit lies within 9,000 of the row's highest,
    so that a bias of -inf, -1e9 or the lowest number of a dtype masks.
    `partial(dot_product_attention, coefficients=fit)` takes the place of
    jax.nn.dot_product_attention: the same arguments and layout.

    Args:
      query: (B, T, N, H) or (T, N, H).
      key, value: (B, S, K, H) or (S, K, H); N is a multiple of K (grouped queries).
      bias: broadcastable to (B, N, T, S), added to the logits.
      mask: bool, broadcastable to (B, N, T, S), True for real keys.
      coefficients: a fit, from `calibrate.load`; per head: along N. Static under jit.
      scale: of the logits; None means 1 / sqrt(H).
      is_causal: query t sees keys 0 to t.
      query_seq_lengths: (B,) int; later queries give 0.
      key_value_seq_lengths: (B,) int; later keys are masked.
      local_window_size: (left, right) or one number for both: query t sees t - left to t + right.
      implementation: None or "xla"; others compute no entropy.
      return_residual: must be False: partial results of two sets of keys cannot be combined.
      logits_soft_cap: c, for logits c tanh(z / c) before bias and masks.
      entropy_gradient: whether gradients flow through H too; n has none.
    Returns:
      (B, T, N, H) of the query's dtype; entropy, beta and sums are computed in float32 or wider.
      A query that sees no key gives 0 (in jax.nn, the mean of all values). Give an attention sink
      as a key. Batch or heads that are sharded on an explicit mesh need jax.shard_map around the
      call.

      Keys that a query does not see may hold anything, even NaN: they change neither its result
      nor the gradients of the keys and values that it sees. If they are NaN or inf, its own
      gradient may be NaN (0 times NaN). Values must be finite.
    Raises:
      CoefficientsError: no fit was given, or it does not fit the heads.
      ValueError: shapes or dtypes that do not match, another implementation, or a residual.
      TypeError: complex arrays, which have no entropy.
    Reference: Velickovic et al. 2024, section 3.

    >>> import calibrate, jax
    >>> from calibrate.jax import dot_product_attention
    >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 11, 4, 8))
    >>> fit = calibrate.load("paper")
    >>> dot_product_attention(query, key, value, is_causal=True, coefficients=fit).shape
    (2, 11, 4, 8)
    """
    fit = check_fit(coefficients)
    if implementation not in (None, "xla") or return_residual:
        raise ValueError("only implementation='xla' without a residual can apply a fit")
    q, k, v = (_four_axes(x) for x in (query, key, value))
    bias, mask = (None if x is None else _four_axes(x) for x in (bias, mask))
    arrays = AttentionArrays(q, k, v, bias, mask, query_seq_lengths, key_value_seq_lengths)
    _check(arrays)
    band = _band(is_causal, local_window_size, q.shape[1], k.shape[1])
    scale = max(1, q.shape[-1]) ** -0.5 if scale is None else scale
    if jnp.ndim(scale):
        raise ValueError(f"scale has shape {jnp.shape(scale)}; give one number")
    soft_cap = None if logits_soft_cap is None else jnp.asarray(logits_soft_cap)
    out: jax.Array = _attend(arrays, scale, soft_cap, fit, band, entropy_gradient)
    return out.reshape(*jnp.shape(query)[:-1], out.shape[-1])


def _four_axes(x: ArrayLike) -> jax.Array:
    x = jnp.asarray(x)
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _check(arrays: AttentionArrays) -> None:
    """Raises ValueError or TypeError for shapes and dtypes that do not match."""
    q, k, v, bias, mask, *lengths = arrays
    if jnp.iscomplexobj(q):
        raise TypeError(f"query is {q.dtype}; give real numbers")
    B, S, K, H = k.shape
    alike = q.ndim == 4 and q.shape[::3] == (B, H) and v.shape[:3] == (B, S, K)
    if not alike or q.shape[2] % max(1, K):
        raise ValueError(
            f"query, key, value are {q.shape}, {k.shape}, {v.shape}; give (B, T, N, H)"
            ", (B, S, K, H) and (B, S, K, H), with N a multiple of K"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"query, key, value are {q.dtype}, {k.dtype}, {v.dtype}; give one dtype")
    full = (B, q.shape[2], q.shape[1], S)
    for name, x in (("bias", bias), ("mask", mask)):
        if x is not None and any(a not in (1, b) for a, b in zip(x.shape, full, strict=True)):
            raise ValueError(f"{name} is {x.shape}; give what broadcasts to {full}")
    if mask is not None and mask.dtype != bool:
        raise ValueError(f"mask is {mask.dtype}; give bool, or add it as a bias")
    for name, length in zip(("query", "key_value"), lengths, strict=True):
        x = None if length is None else jnp.asarray(length)
        if x is not None and (x.shape != (B,) or not jnp.issubdtype(x.dtype, jnp.integer)):
            raise ValueError(f"{name}_seq_lengths is {length}; give {B} integers")


def _band(is_causal: bool, window: int | tuple[int, int] | None, T: int, S: int) -> Band:
    if window is None:
        return Band(None, 0 if is_causal else None)
    left, right = (window, window) if isinstance(window, int) else map(int, window)
    T, S = (size if is_known(size) else _NO_BOUND for size in (T, S))
    return Band(min(left, T), min(right, 0 if is_causal else S))


@partial(jax.jit, static_argnames=("band", "entropy_gradient"))
def _attend(
    arrays: AttentionArrays,
    scale: ArrayLike,
    soft_cap: jax.Array | None,
    fit: Fit,
    band: Band,
    entropy_gradient: bool,
) -> jax.Array:
    """(B, T, N, H) of value's width: key head by key head of each sequence."""
    q, k, v, bias, mask, *lengths = arrays
    (B, T, N, H), K, dtype = q.shape, k.shape[2], wide(q.dtype)
    if 0 in (*q.shape, *k.shape, *v.shape):
        return jnp.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
    n_logits = B * N * T * k.shape[1]
    few = is_known(n_logits) and n_logits <= query_blocks.QUERY_BLOCKS.logits
    # On a CPU, many logits stay in cache if one head follows the other.
    at_once = few or jax.default_backend() != "cpu"
    table = head_table(fit, jax.ShapeDtypeStruct(q.shape, dtype), -2)
    if table is not None:
        table = jnp.moveaxis(table.reshape(-1, K, N // K), 1, 0)

    @partial(jax.checkpoint, prevent_cse=False)
    def attend_head(*parts: Any) -> jax.Array:
        q, k, v, bias, mask, n_queries, n_keys, table = parts
        n_parallel = B * K if at_once else 1
        head = KeyHead(fit, table, band, soft_cap, n_queries, n_keys, entropy_gradient, n_parallel)
        return attend_key_head(q, k, v, bias, mask, head)

    def attend_sequence(*parts: Any) -> jax.Array:
        *arrays, n_queries, n_keys = parts
        limits = (None if n is None else n[None] for n in (n_queries, n_keys))
        return map_first_axis(attend_head, *arrays, *limits, table, at_once=at_once)

    scaled = q.astype(dtype) * jnp.asarray(scale, dtype)
    by_key_head = jnp.moveaxis(scaled.reshape(B, T, K, N // K, H), 1, 3)
    k, v = (jnp.moveaxis(x, 1, 2).astype(dtype) for x in (k, v))
    bias, mask = (_split_heads(x, K) for x in (bias, mask))
    limits = (None if n is None else jnp.asarray(n) for n in lengths)
    out = map_first_axis(attend_sequence, by_key_head, k, v, bias, mask, *limits, at_once=at_once)
    return jnp.moveaxis(out, 3, 1).reshape(B, T, N, -1).astype(q.dtype)


def _split_heads(x: jax.Array | None, K: int) -> jax.Array | None:
    """(B, N, T, S) -> (B, K, G, T, S); axes of 1 stay."""
    if x is None or x.shape[1] == 1:
        return None if x is None else x[:, None]
    return x.reshape(x.shape[0], K, -1, *x.shape[2:])
