"""The max-retrieval head: data, network and weights (Velickovic et al. 2024, appendix A).

An input has n items, each with a priority and a class; the head must report the class of the item
with the highest priority. Its network is one dot-product attention head between two small MLPs, so
that the attention weights are the head's belief in which item that is.

Two products are reassociated, so that projections run once per input and not once per item: the
logits are h_i . (K^T Q q), and the attended value is V (sum a_i h_i).
"""

import hashlib
import math
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from calibrate.errors import CalibrateError
from calibrate.rows.root_finding import jax_defaults
from calibrate.storage.npz import read_arrays

N_CLASSES = 10
N_FEATURES = 128

# (inputs, outputs) of each dense layer, in the order of the code in A.3.
LAYERS = {
    "item_1": (1 + N_CLASSES, N_FEATURES),
    "item_2": (N_FEATURES, N_FEATURES),
    "query_1": (1, N_FEATURES),
    "query_2": (N_FEATURES, N_FEATURES),
    "attention_query": (N_FEATURES, N_FEATURES),
    "attention_key": (N_FEATURES, N_FEATURES),
    "attention_value": (N_FEATURES, N_FEATURES),
    "attention_output": (N_FEATURES, N_FEATURES),
    "answer_1": (N_FEATURES, N_FEATURES),
    "answer_2": (N_FEATURES, N_CLASSES),
}

Params = dict[str, dict[str, jax.Array]]


class Batch(NamedTuple):
    """`count` inputs of `size` items each (A.2)."""

    priority: np.ndarray  # (count, size) float32, U(0, 1)
    category: np.ndarray  # (count, size) int8, the class of each item
    query: np.ndarray  # (count,) float32, U(0, 1)
    target: np.ndarray  # (count,) int32, the item with the highest priority
    label: np.ndarray  # (count,) int8, its class


TRAINED_SIZES = (5, 16)  # least and most items of an input


class Attended(NamedTuple):
    """The result of a forward pass up to the attention."""

    logits: jax.Array  # (count, size)
    features: jax.Array  # (count, size, N_FEATURES), the embedded items
    label: ArrayLike  # (count,)


class MaxRetrievalHead:
    """A trained max-retrieval head; see `calibrate.Head`."""

    trained_up_to = TRAINED_SIZES[1]

    def __init__(self, name: str, params: Params):
        self.name = name
        self.params = params
        self.fingerprint = _fingerprint(params)

    def sample(self, seed: int, size: int, count: int) -> Batch:
        return sample(seed, size, count)

    def attend(self, batch: Batch) -> Attended:
        with jax_defaults():
            attended: Attended = _attend(self.params, batch)
        return attended

    def correct(self, attended: Attended, weights: jax.Array) -> jax.Array:
        with jax_defaults():
            correct: jax.Array = answer(self.params, attended, weights).argmax(-1) == attended.label
        return correct

    def correct_each(self, attended: Attended, weights: jax.Array) -> jax.Array:
        with jax_defaults():
            correct: jax.Array = _correct_each(self.params, attended, weights)
        return correct


def sample(seed: int | list[int], size: int, count: int) -> Batch:
    """Draws `count` inputs of `size` items; the same seed gives the same inputs."""
    rng = np.random.default_rng(seed)
    priority = rng.random((count, size), dtype=np.float32)
    category = rng.integers(0, N_CLASSES, (count, size), dtype=np.int8)
    query = rng.random(count, dtype=np.float32)
    target = priority.argmax(axis=1).astype(np.int32)
    label = np.take_along_axis(category, target[:, None], axis=1)[:, 0]
    return Batch(priority, category, query, target, label)


def attention_logits(params: Params, batch: Batch) -> Attended:
    """Runs the forward pass up to the attention logits (A.3, equations 5 to 7)."""
    features, query = _embed_items(params, batch), _embed_query(params, batch.query)
    key = params["attention_key"]
    direction = query @ key["kernel"].T
    logits = jnp.einsum("bnf,bf->bn", features, direction) + (query @ key["bias"])[:, None]
    return Attended(logits, features, batch.label)


def _embed_items(params: Params, batch: Batch) -> jax.Array:
    """Embedded items, (count, size, N_FEATURES)."""
    # The product of a one-hot vector and the kernel is a row of the kernel.
    first = params["item_1"]
    hidden = batch.priority[..., None] * first["kernel"][0] + first["kernel"][1:][batch.category]
    features: jax.Array = jax.nn.gelu(_dense(params["item_2"], jax.nn.gelu(hidden + first["bias"])))
    return features


def _embed_query(params: Params, query: ArrayLike) -> jax.Array:
    """Queries divided by sqrt(N_FEATURES), (count, N_FEATURES)."""
    hidden = jax.nn.gelu(_dense(params["query_1"], jnp.asarray(query)[:, None]))
    query = _dense(params["attention_query"], _dense(params["query_2"], hidden))
    return query / math.sqrt(N_FEATURES)


def answer(params: Params, attended: Attended, weights: jax.Array) -> jax.Array:
    """Class logits (count, N_CLASSES) for attention weights (count, size) (equations 9 and 10)."""
    mixed = jnp.einsum("bn,bnf->bf", weights, attended.features)
    value = _dense(params["attention_value"], mixed)
    output = _dense(params["attention_output"], value)
    return _dense(params["answer_2"], jax.nn.gelu(_dense(params["answer_1"], output)))


_attend = jax.jit(attention_logits)


@jax.jit
def _correct_each(params: Params, attended: Attended, weights: jax.Array) -> jax.Array:
    """bool (count, rules) for weights (count, rules, size); multiplies out three linear layers."""
    chain = [params[layer] for layer in ("attention_value", "attention_output", "answer_1")]
    kernel, bias = jnp.eye(N_FEATURES), jnp.zeros(N_FEATURES)
    for layer in chain:
        kernel, bias = kernel @ layer["kernel"], _dense(layer, bias)
    hidden = jax.nn.gelu(weights @ attended.features @ kernel + bias)
    return _dense(params["answer_2"], hidden).argmax(axis=-1) == jnp.expand_dims(attended.label, 1)


def _dense(layer: dict[str, jax.Array], inputs: ArrayLike) -> jax.Array:
    return jnp.asarray(inputs) @ layer["kernel"] + layer["bias"]


def _fingerprint(params: Params) -> str:
    """sha256 of the names, shapes and float32 bytes of all parameters."""
    digest = hashlib.sha256(b"max-retrieval")
    for name, array in flatten(params).items():
        digest.update(f"|{name}{array.shape}".encode())
        digest.update(array.tobytes())
    return "sha256:" + digest.hexdigest()


def flatten(params: Params) -> dict[str, np.ndarray]:
    """Parameters as one flat mapping, "layer/kernel" and "layer/bias", in the order of LAYERS."""
    return {
        f"{layer}/{part}": np.asarray(params[layer][part], np.float32)
        for layer in LAYERS
        for part in ("kernel", "bias")
    }


def unflatten(arrays: dict[str, np.ndarray], path: Path) -> Params:
    """Inverts `flatten` for arrays read from `path`; CalibrateError if they are invalid."""
    params: Params = {}
    for layer, (n_inputs, n_outputs) in LAYERS.items():
        shapes = {"kernel": (n_inputs, n_outputs), "bias": (n_outputs,)}
        for part, shape in shapes.items():
            array = arrays.get(f"{layer}/{part}", np.zeros(()))
            if array.shape != shape or array.dtype != np.float32 or not np.isfinite(array).all():
                raise CalibrateError(
                    f"{path}: '{layer}/{part}' is not finite float32{shape}; these are not "
                    "max-retrieval weights"
                )
            params.setdefault(layer, {})[part] = jax.device_put(array)
    return params


def load_max_retrieval(name: str, path: Path) -> MaxRetrievalHead:
    """Loads the head whose weights are the npz file at `path`."""
    return MaxRetrievalHead(name, unflatten(read_arrays(path), path))
