"""JAX and PyTorch behind one interface: what both softmaxes and attentions must do is tested once.

Arguments are NumPy's arrays, or arrays of the backend in another dtype; cases of attention are in
the words of jax.nn.dot_product_attention, and their arrays in its layout.
"""

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import allowed, in_words_of_the_reference

import calibrate
from calibrate.jax import attention, query_blocks


def set_blocks(monkeypatch, module, name="QUERY_BLOCKS", **sizes):
    """Cuts queries, or rows, into blocks of other sizes, as in a call of many."""
    monkeypatch.setattr(module, name, type(getattr(module, name))(**sizes))


def forget_attention():
    """What was compiled for one size of blocks, or one kind of device, is not for another."""
    attention._attend.clear_cache()
    _attention_gradients.clear_cache()


@partial(jax.jit, static_argnames="options")
@partial(jax.grad, argnums=(0, 1, 2))
def _attention_gradients(q, k, v, masks, fit, options):
    out = attention.dot_product_attention(q, k, v, coefficients=fit, **masks, **dict(options))
    return (out**2).sum()


class Jax:
    """The functions of calibrate, and JAX's own."""

    softmax = staticmethod(calibrate.adaptive_softmax)
    entropy = staticmethod(calibrate.entropy)
    inverse_temperature = staticmethod(calibrate.inverse_temperature)
    axis = "axis"  # what softmax calls it

    def array(self, x, dtype="float32"):
        return jnp.asarray(x).astype(dtype)

    def own_softmax(self, z, axis):
        return jax.nn.softmax(jnp.asarray(z), axis)

    def softmax_gradient(self, fit, **options):
        """A function of logits, mask and weights: the gradient of the weighted sum."""

        @jax.jit
        @jax.grad
        def gradient(z, where, weights):
            return (calibrate.adaptive_softmax(z, fit, where=where, **options) * weights).sum()

        return gradient

    def attend(self, arrays, fit, **case):
        return attention.dot_product_attention(*arrays, coefficients=fit, **case)

    def attention_gradients(self, arrays, fit, **case):
        """Gradients of the sum of squares, for queries, keys and values."""
        masks = {name: case.pop(name) for name in ("mask", "bias") if name in case}
        return _attention_gradients(*arrays, masks, fit, tuple(case.items()))

    def take_path(self, path, monkeypatch):
        """One block of queries for a call, or many."""
        if path == "many blocks":
            set_blocks(
                monkeypatch, query_blocks, logits=1, min_rows=3, max_rows=3, few_queries=3,
                causal_parts=2,
            )  # fmt: skip


class Torch:
    """The functions of calibrate.torch, and PyTorch's own."""

    axis = "dim"

    def __init__(self):
        import torch

        import calibrate.torch as ours

        torch.set_num_threads(1)  # tensors are small: threads would wait for each other
        self.torch, self.ours = torch, ours

    def array(self, x, dtype=None):
        dtype = getattr(self.torch, dtype) if dtype else None
        if x is None or self.torch.is_tensor(x):
            return x if dtype is None else x.to(dtype)
        return self.torch.tensor(np.asarray(x), dtype=dtype)

    def softmax(self, z, fit, dim=-1, where=None, **options):
        return self.ours.adaptive_softmax(self.array(z), fit, dim, self.array(where), **options)

    def entropy(self, z, dim=-1, where=None):
        return self.ours.entropy(self.array(z), dim, self.array(where))

    def inverse_temperature(self, H, fit, n=None):
        H, n = (self.array(x) if isinstance(x, np.ndarray) else x for x in (H, n))
        return self.ours.inverse_temperature(H, fit, n=n)

    def own_softmax(self, z, axis):
        return self.torch.softmax(self.array(z), axis)

    def softmax_gradient(self, fit, **options):
        def gradient(z, where, weights):
            z = self.array(z).detach().requires_grad_()
            probs = self.softmax(z, fit, where=where, **options)
            return self.torch.autograd.grad((probs * self.array(weights)).sum(), z)[0]

        return gradient

    def in_own_words(self, arrays, **case):
        """The tensors (B, heads, length, width), and the options, of a case."""
        more = {k: case.pop(k) for k in ("logits_soft_cap", "entropy_gradient") if k in case}
        words = in_words_of_the_reference(case)
        bias, scale = words.pop("bias", None), words.pop("scale", None)
        q, k, v = map(self.array, arrays)
        options = more | {"enable_gqa": q.shape[2] != k.shape[2], "scale": scale}
        if bias is None and not words.keys() - {"is_causal", "lengths"} and not any(
            x is not None for x in words["lengths"]
        ):  # fmt: skip
            options["is_causal"] = words.get("is_causal", False)
        else:
            real = allowed((q.shape[0], q.shape[2], q.shape[1], k.shape[1]), **words)
            mask = real if bias is None else np.where(real, bias, -np.inf).astype(np.float32)
            options["attn_mask"] = self.array(mask)
            if bias is not None:
                options["attn_mask"] = options["attn_mask"].to(q.dtype)
        return [x.transpose(1, 2) for x in (q, k, v)], options

    def attend(self, arrays, fit, **case):
        tensors, options = self.in_own_words(arrays, **case)
        attend = self.ours.scaled_dot_product_attention
        return attend(*tensors, coefficients=fit, **options).transpose(1, 2)

    def attention_gradients(self, arrays, fit, **case):
        arrays = [self.array(x).detach().requires_grad_() for x in arrays]
        return self.torch.autograd.grad((self.attend(arrays, fit, **case) ** 2).sum(), arrays)

    def take_path(self, path, monkeypatch):
        """Two calls of a stock kernel, one block of queries, or many."""
        from calibrate.torch import query_blocks

        small = {"logits": 1, "min_rows": 3} if path == "many blocks" else {}
        few = 0 if path == "two calls" else 1 << 30
        set_blocks(monkeypatch, query_blocks, few_queries=few, **small)


def values(x):
    """Numbers of any backend, in float64."""
    return np.asarray(x.detach().double() if hasattr(x, "detach") else x, np.float64)


def dtype_of(x):
    """The dtype's name, in any backend."""
    return str(x.dtype).removeprefix("torch.")


NO_TORCH = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="needs the extra torch"
)
# PyTorch's compiler uses what it deprecates.
OF_THE_COMPILER = [
    NO_TORCH,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
BACKENDS = [pytest.param(Jax, id="jax"), pytest.param(Torch, id="torch", marks=NO_TORCH)]
# One block of a call takes JAX another compilation: its cases are in test_attention.py.
PATHS = [
    pytest.param((Jax, "many blocks"), id="jax-many blocks"),
    *(
        pytest.param((Torch, path), id=f"torch-{path}", marks=NO_TORCH)
        for path in ("two calls", "one block", "many blocks")
    ),
]


def kinds_and_backends(kinds, quick, backends):
    """Each kind for each backend; kinds that are not quick are slow in JAX, which compiles them."""

    def marks(kind, backend):
        is_slow = backend.id.startswith("jax") and kind not in quick
        return [*backend.marks, pytest.mark.slow] if is_slow else backend.marks

    return [
        pytest.param(kind, *backend.values, id=f"{kind}-{backend.id}", marks=marks(kind, backend))
        for kind in kinds
        for backend in backends
    ]
