"""One table of cases that every backend's attention meets, and what they should give.

Letters for shapes: B batch, T queries, S keys, N query heads, K key heads, H width.
"""

import numpy as np
import reference

from calibrate.core.rule import ENTROPY_AND_SIZE, RuleForm
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit


def qkv(T=11, S=11, N=4, K=2, B=2, H=8, scale=2.0, dtype=np.float32):
    rng = np.random.default_rng([T, S, N, K])
    q = rng.standard_normal((B, T, N, H)) * scale
    k, v = rng.standard_normal((2, B, S, K, H))
    return tuple(x.astype(np.float32).astype(dtype) for x in (q, k, v))


def allowed(shape, is_causal=False, window=None, mask=None, lengths=(None, None)):
    """Which keys each query sees, (B, N, T, S), by the words of jax.nn's documentation."""
    T, S = shape[2:]
    t, s = np.arange(T)[:, None], np.arange(S)
    real = np.ones(shape, bool)
    if is_causal:
        real &= s <= t
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
        real &= (s >= t - left) & (s <= t + right)
    if mask is not None:
        real &= np.asarray(mask)
    for length, position in zip(lengths, (t, s), strict=True):
        if length is not None:
            real &= position < np.asarray(length)[:, None, None, None]
    return real


def expected(q, k, v, fit, bias=None, cap=None, scale=None, **masks):
    """In float64, with the whole matrix."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    z = np.einsum("btnh,bsnh->bnts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if cap:
        z = cap * np.tanh(z / cap)
    if bias is not None:
        z = z + np.asarray(bias, np.float64)
    real = allowed(z.shape, **masks)
    entry = fit.only
    weights = reference.adaptive_softmax(z, entry.coefficients, entry.domain, fit.rule, where=real)
    return np.einsum("bnts,bsnh->btnh", weights, v)


MASK = np.random.default_rng(3).random((2, 1, 11, 11)) < 0.6
MASK[..., 0] = True
ATTENTION_CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (3, 2)},
    "narrow window": {"local_window_size": 1},
    "causal window": {"is_causal": True, "local_window_size": (2, 5)},
    "mask": {"mask": MASK},
    "mask of one row": {"mask": MASK[:1, :, :1]},
    "mask of one column": {"mask": np.ones((2, 4, 11, 1), bool)},
    "bias": {"bias": np.random.default_rng(4).standard_normal((1, 4, 11, 11)).astype(np.float32)},
    "additive mask": {"bias": np.where(MASK, 0, np.finfo(np.float32).min).astype(np.float32)},
    "additive -inf": {"bias": np.where(MASK, 0, -np.inf).astype(np.float32)},
    "lengths": {"key_value_seq_lengths": np.array([11, 4], np.int32)},
    "causal lengths": {"is_causal": True, "key_value_seq_lengths": np.array([11, 4], np.int32)},
    "query lengths": {"query_seq_lengths": np.array([7, 11], np.int32)},
    "all": {
        "is_causal": True, "mask": MASK, "local_window_size": (6, 0),
        "bias": np.float32([[[[0.5]]]]), "key_value_seq_lengths": np.array([9, 11], np.int32),
        "scale": 0.5,
    },
}  # fmt: skip


BY_SIZE = Fit(RuleForm.log_size(0.5), (Entry((0.4, 0.4), (1.0, 8.0)),))
# It is smooth: gradients are compared with differences. Made of 4 to 55 items.
BY_BOTH = Fit(
    RuleForm(0.0, 0.5, kind=ENTROPY_AND_SIZE),
    (Entry((0.01, -0.1, 0.2, 0.7, 0.4, 0.06, -0.02, 0.3), (0.1, 5.0, 1.3, 4.0)),),
)


def in_words_of_the_reference(arguments):
    names = {"local_window_size": "window", "logits_soft_cap": "cap"}
    lengths = tuple(arguments.get(f"{x}_seq_lengths") for x in ("query", "key_value"))
    rest = {names.get(k, k): v for k, v in arguments.items() if "lengths" not in k}
    return rest | {"lengths": lengths}
