"""Attention in Flax that applies a fit, and capture of the logits of its modules (extra "flax")."""

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calibrate.errors import CalibrateError, install
from calibrate.jax.attention import dot_product_attention
from calibrate.jax.masking import wide
from calibrate.jax.softmax import adaptive_softmax
from calibrate.rows.recorder import Recorder
from calibrate.store.fit import Fit
from calibrate.store.inverse_temperature import check_fit

try:
    from flax import nnx
except ImportError as missing:
    raise ImportError(f"calibrate.jax.flax needs Flax: {install('flax')}") from missing


def attention_fn(coefficients: Fit) -> Callable[..., jax.Array]:
    """The `attention_fn` of nnx.MultiHeadAttention and linen.MultiHeadDotProductAttention.

    Args:
      coefficients: a fit, from `calibrate.load`; per head: along the modules' heads.
    Returns:
      A function with the arguments of flax.nnx.dot_product_attention and of its linen twin. It
      applies mask, bias, causality, dropout (after the entropy), dtype, precision, grouped queries,
      sown weights and force_fp32_for_softmax (a result in float32 or wider); entropy, beta and
      softmax are computed in float32 or wider. A query that sees no key gives 0.
    Raises:
      CoefficientsError: no fit was given; when called, one that does not fit the heads.
      ValueError, TypeError: when called, with a custom einsum, other shapes or complex arrays.
    Reference: Velickovic et al. 2024, section 3.
    """
    fit = check_fit(coefficients)

    # Both modules read the signature, and pass only the arguments that it names.
    def attend(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        force_fp32_for_softmax: bool = False,
        is_causal: bool = False,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
    ) -> jax.Array:
        if qk_attn_weights_einsum or attn_weights_value_einsum:
            raise ValueError(
                "a custom einsum is set; calibrate.jax.flax cannot use it, leave it out"
            )
        _check(query, key, value)
        query, key, value = _cast_to_one_dtype((query, key, value), dtype, force_fp32_for_softmax)
        mask = None if mask is None else mask.astype(bool)
        drops = dropout_rate > 0 and not deterministic
        if module is None and precision is None and not drops:
            return _attend_without_weights(query, key, value, bias, mask, is_causal, fit)
        weights = _weights(_logits(query, key, bias, precision), mask, is_causal, fit)
        weights = weights.astype(query.dtype)
        if module is not None:
            _sow(module, weights)
        if drops:
            weights = _drop(weights, dropout_rng, dropout_rate, broadcast_dropout)
        value = _repeat_key_heads(value, weights.shape[-3])
        return jnp.einsum("...hqk,...khd->...qhd", weights, value, precision=precision)

    return attend


def _check(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    """Raises ValueError or TypeError: other batch axes would be paired wrongly, or broadcast."""
    if any(jnp.iscomplexobj(x) for x in (query, key, value)):
        raise TypeError("query, key or value is complex; give real numbers")
    q, k, v = (x.shape for x in (query, key, value))
    fits = len(q) > 2 and q[:-3] == k[:-3] == v[:-3] and q[-1] == k[-1] and k[-3:-1] == v[-3:-1]
    if not fits or q[-2] % max(1, k[-2]):
        raise ValueError(
            f"query, key, value are {q}, {k}, {v}; give (..., T, N, H), (..., S, K, H) and "
            "(..., S, K, any width), of one batch, N a multiple of K"
        )


def _cast_to_one_dtype(
    arrays: tuple[jax.Array, jax.Array, jax.Array], dtype: Any, for_softmax_in_float32: bool
) -> tuple[jax.Array, ...]:
    """The arrays in a dtype, by default their common one."""
    dtype = dtype or jnp.result_type(*arrays, float)
    dtype = wide(jnp.dtype(dtype)) if for_softmax_in_float32 else dtype
    return tuple(x.astype(dtype) for x in arrays)


def _attend_without_weights(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    is_causal: bool,
    fit: Fit,
) -> jax.Array:
    """Attention without the matrix of weights; batch axes become one."""
    batch = query.shape[:-3]

    def one_batch_axis(x: jax.Array | None) -> jax.Array | None:
        if x is None or len(batch) == 1:
            return x
        x = x.reshape((1,) * (3 - x.ndim) + x.shape)
        return jnp.broadcast_to(x, batch + x.shape[-3:]).reshape(-1, *x.shape[-3:])

    q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    out = dot_product_attention(
        q, k, v, one_batch_axis(bias), one_batch_axis(mask), is_causal=is_causal, coefficients=fit
    )
    return out.reshape(*query.shape[:-1], value.shape[-1])


def _weights(z: jax.Array, mask: jax.Array | None, is_causal: bool, fit: Fit) -> jax.Array:
    """The weights of attention, of logits (..., heads, queries, keys)."""
    real = z != -jnp.inf  # so that a query without keys gives 0
    if is_causal:
        real &= jnp.tril(jnp.ones(z.shape[-2:], bool))
    return adaptive_softmax(z, fit, where=real if mask is None else real & mask)


def _logits(query: jax.Array, key: jax.Array, bias: jax.Array | None, precision: Any) -> jax.Array:
    """(..., heads, queries, keys), in float32 or wider."""
    q, k = (_repeat_key_heads(x, query.shape[-2]).astype(wide(query.dtype)) for x in (query, key))
    z: jax.Array = jnp.einsum("...qhd,...khd->...hqk", q, k, precision=precision)
    z = z * q.shape[-1] ** -0.5
    return z if bias is None else z + bias


def _repeat_key_heads(x: jax.Array, n_heads: int) -> jax.Array:
    """Grouped key heads (..., heads, width), each repeated for the query heads of its group."""
    return jnp.repeat(x, n_heads // max(1, x.shape[-2]), axis=-2)


def _sow(module: Any, weights: jax.Array) -> None:
    """Stores the weights in an nnx or linen module, where Flax's own attention stores them."""
    kind = nnx.Intermediate if isinstance(module, nnx.Module) else "intermediates"
    module.sow(kind, "attention_weights", weights)


def _drop(weights: jax.Array, rng: jax.Array | None, rate: float, broadcast: bool) -> jax.Array:
    """Flax's dropout of attention weights, the same for all heads and sequences if `broadcast`."""
    if rng is None:
        raise ValueError("dropout needs dropout_rng; give a key, or deterministic=True")
    shape = weights.shape[-2:] if broadcast else weights.shape
    keep = jax.random.bernoulli(rng, 1 - rate, (1,) * (weights.ndim - len(shape)) + shape)
    return weights * (keep.astype(weights.dtype) / jnp.asarray(1 - rate, weights.dtype))


@contextmanager
def capture(
    model: Any,
    folder: Path,
    *,
    layers: Collection[int] | None = None,
    heads: Collection[int] | None = None,
    max_bytes: int = 10**9,
) -> Iterator[Recorder]:
    """Records the logits of an nnx model's heads before softmax, while it runs outside of jit.

    As calibrate.transformers.capture: `recorder.next(query, target)` names the positions, and the
    next call of every nnx.MultiHeadAttention is recorded at them. A layer's number is its place
    among those that nnx.iter_modules finds.

    Args:
      model: an nnx module.
      folder: a new one, of npz files as `calibrate collect --logits` takes them.
      layers: their numbers; None means all.
      heads: query heads; None means all.
      max_bytes: of the folder; a fair sample of the forward passes that exceed it stays.
    Raises:
      CalibrateError: a folder with files, a model under jit or without such a module, a position
        out of range, or nothing recorded.
    """
    modules = [m for _, m in nnx.iter_modules(model) if isinstance(m, nnx.MultiHeadAttention)]
    if not modules:
        raise CalibrateError(f"{type(model).__name__} has no nnx.MultiHeadAttention to record")
    recorder = Recorder(Path(folder), max_bytes, layers, heads)
    own = [module.attention_fn for module in modules]
    try:
        for layer, module in enumerate(modules):
            module.attention_fn = _recording(module.attention_fn, layer, recorder)
        yield recorder
        recorder.finish()
    finally:
        for module, function in zip(modules, own, strict=True):
            module.attention_fn = function


def _recording(
    function: Callable[..., jax.Array], layer: int, recorder: Recorder
) -> Callable[..., jax.Array]:
    """The attention function with recording, of the same signature."""
    signature = inspect.signature(function)

    @wraps(function)
    def attend(*arguments: Any, **options: Any) -> jax.Array:
        if recorder.wants(layer):
            call = signature.bind(*arguments, **options).arguments
            z = _logits_to_record(recorder, call)
            recorder.add(layer, z, z.shape[2])
        return function(*arguments, **options)

    return attend


def _logits_to_record(recorder: Recorder, call: dict[str, Any]) -> np.ndarray:
    """(sequences, heads, keys) of queries at one position each, from the arguments of a call."""
    query, key = (call[x].reshape(-1, *call[x].shape[-3:]) for x in ("query", "key"))
    if isinstance(query, jax.core.Tracer):
        raise CalibrateError("the model runs under jit; run it without, to record its logits")
    (B, T, N, _), S = query.shape, key.shape[1]
    positions, rows = recorder.queries(B, T), np.arange(B)
    z = _logits(query[rows, positions][:, None], key, None, call.get("precision"))[:, :, 0]

    def at_queries(x: jax.Array) -> jax.Array:
        x = jnp.broadcast_to(x, (*x.shape[:-3], N, T, S) if x.ndim > 2 else (N, T, S))
        return jnp.broadcast_to(x.reshape(-1, N, T, S), (B, N, T, S))[rows, :, positions]

    if call.get("bias") is not None:
        z = z + at_queries(call["bias"])
    if call.get("mask") is not None:
        z = jnp.where(at_queries(call["mask"]).astype(bool), z, -jnp.inf)
    if call.get("is_causal"):
        z = jnp.where(jnp.arange(S) <= positions[:, None, None], z, -jnp.inf)
    return np.asarray(z, np.float32)
