"""The max-retrieval head: its data, its network, its weights on disk."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calibrate.errors import CalibrateError
from calibrate.rows import max_retrieval
from calibrate.rows.heads import WEIGHTS_FOLDER, built_in_heads, load_head
from calibrate.storage.npz import read_arrays, write_arrays


@pytest.fixture(scope="module")
def head():
    return load_head("max-retrieval")


def test_data_is_as_in_appendix_a2():
    batch = max_retrieval.sample(3, 50, 4_000)
    assert batch.priority.shape == batch.category.shape == (4_000, 50)
    assert batch.priority.min() >= 0
    assert batch.priority.max() < 1
    assert batch.priority.mean() == pytest.approx(0.5, abs=0.01)
    assert batch.query.mean() == pytest.approx(0.5, abs=0.03)
    np.testing.assert_allclose(np.bincount(batch.category.ravel()) / 200_000, 0.1, atol=0.01)
    rows = np.arange(4_000)
    assert (batch.priority[rows, batch.target] == batch.priority.max(axis=1)).all()
    assert (batch.category[rows, batch.target] == batch.label).all()
    one, same, other = (max_retrieval.sample(seed, 9, 5) for seed in (1, 1, 2))
    assert all((a == b).all() for a, b in zip(one, same, strict=True))
    assert (one.priority != other.priority).any()


class FlaxHead(nn.Module):
    """The network of A.3 from stock layers, with plain softmax attention."""

    @nn.compact
    def __call__(self, items, query):
        dense = lambda name, n=128: nn.Dense(n, name=name)  # noqa: E731
        items = nn.gelu(dense("item_2")(nn.gelu(dense("item_1")(items))))
        query = dense("query_2")(nn.gelu(dense("query_1")(query)))
        attention = nn.MultiHeadDotProductAttention(1, qkv_features=128, name="attention")
        mixed = attention(query, items)[:, 0]
        return dense("answer_2", 10)(nn.gelu(dense("answer_1")(mixed)))


def as_flax(params):
    """Our parameters under Flax's names and shapes."""
    tree = {name: params[name] for name in params if not name.startswith("attention")}
    parts = {"query": (128, 1, 128), "key": (128, 1, 128), "value": (128, 1, 128)}
    attention = {
        part: {
            "kernel": params[f"attention_{part}"]["kernel"].reshape(shape),
            "bias": params[f"attention_{part}"]["bias"].reshape(1, 128),
        }
        for part, shape in parts.items()
    }
    output = params["attention_output"]
    attention["out"] = {"kernel": output["kernel"].reshape(1, 128, 128), "bias": output["bias"]}
    return {"params": tree | {"attention": attention}}


@pytest.mark.slow
def test_forward_pass_equals_the_network_from_stock_layers(head):
    """Products are reassociated in ours; the answers must be the same."""
    batch = head.sample(5, 33, 64)
    attended = head.attend(batch)
    ours = max_retrieval.answer(head.params, attended, jax.nn.softmax(attended.logits))
    items = jnp.concatenate(
        [batch.priority[..., None], jax.nn.one_hot(batch.category, 10)], axis=-1
    )
    stock = FlaxHead().apply(as_flax(head.params), items, batch.query[:, None, None])
    np.testing.assert_allclose(ours, stock, rtol=1e-4, atol=1e-4 * float(jnp.abs(stock).max()))


@pytest.mark.slow
def test_the_shipped_head_is_trained(head):
    """Near the paper's 98.6 % at n = 16, and far from it at n = 1,024 (seed 000, table 1)."""
    accuracy = {}
    for size, count in ((16, 2_048), (1_024, 256)):
        attended = head.attend(head.sample(11, size, count))
        right = head.correct(attended, jax.nn.softmax(attended.logits))
        accuracy[size] = float(right.mean())
    assert accuracy[16] > 0.96
    assert 0.2 < accuracy[1_024] < 0.8


def test_fingerprint_is_of_the_weights(head, tmp_path):
    assert load_head("max-retrieval-0").fingerprint == head.fingerprint
    path = tmp_path / "mine.npz"
    write_arrays(path, max_retrieval.flatten(head.params))
    mine = load_head(str(path))
    assert (mine.name, mine.fingerprint) == ("mine", head.fingerprint)
    changed = jax.tree.map(lambda leaf: leaf, head.params)
    changed["answer_2"]["bias"] = changed["answer_2"]["bias"].at[3].add(1e-6)
    assert max_retrieval.MaxRetrievalHead("x", changed).fingerprint != head.fingerprint


@pytest.mark.parametrize("reference", ["nope", "max-retrieval-77", "max-retrieval-", "none.npz"])
def test_unknown_heads_are_named(reference):
    with pytest.raises(CalibrateError, match=reference):
        load_head(reference)


@pytest.mark.parametrize(
    "damage",
    [
        lambda a: a.pop("item_1/bias"),
        lambda a: a.update({"item_1/bias": np.zeros(3, np.float32)}),
        lambda a: a.update({"item_1/bias": np.zeros(128)}),
        lambda a: a.update({"item_1/bias": np.full(128, np.nan, np.float32)}),
    ],
)
def test_damaged_weights_are_refused(head, tmp_path, damage):
    arrays = max_retrieval.flatten(head.params)
    damage(arrays)
    write_arrays(tmp_path / "mine.npz", arrays)
    with pytest.raises(CalibrateError, match=r"mine\.npz: 'item_1/bias' .*float32\(128,\)"):
        load_head(str(tmp_path / "mine.npz"))


def test_shipped_weights_carry_their_training_log():
    for name in built_in_heads()[1:]:
        arrays = read_arrays(WEIGHTS_FOLDER / f"{name}.npz")
        assert int(arrays["steps"]) == 100_000
        assert arrays["log/step"].tolist() == list(range(1_000, 100_001, 1_000))
        assert arrays["log/accuracy"][-1] > 0.98
