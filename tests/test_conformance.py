"""Conformance vectors, and the check of somebody else's softmax: rights pass, faults are named."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
import reference
from backends import NO_TORCH
from commands import call
from vector_fits import fit_of_vectors

import calibrate
from calibrate.conformance.check_softmax import check_softmax
from calibrate.conformance.vectors import read_vectors, vector_rows
from calibrate.errors import CalibrateError

PAPER = (-0.037, 0.481, -2.3, 4.917, -1.791)
RULES = [rule["name"] for rule in read_vectors()["rules"]]


def expected_of(name):
    """The rows with their expected values by a rule of the vectors."""
    (rule,) = (rule for rule in read_vectors()["rules"] if rule["name"] == name)
    return [(row, rule["expected"][row.name]) for row in vector_rows()]


def shown(probabilities, expected):
    """The probabilities that the vectors list."""
    return np.asarray(probabilities, float)[expected.get("at", slice(None))]


@pytest.mark.parametrize("name", RULES)
def test_vectors_agree_with_the_float64_reference(name):
    fit = fit_of_vectors(name)
    entry = fit.entries[0]
    for row, expected in expected_of(name):
        if expected["n"] == 0:
            continue
        z = np.where(row.real, row.logits.astype(float), -np.inf)
        H, n = reference.entropy(z), int(row.real.sum())
        beta = reference.inverse_temperature(H, entry.coefficients, entry.domain, fit.rule, n)
        probs = reference.adaptive_softmax(z, entry.coefficients, entry.domain, fit.rule)
        assert expected["n"] == n
        np.testing.assert_allclose([expected["entropy"], expected["beta"]], [H, beta], 1e-11, 1e-13)
        np.testing.assert_allclose(expected["probabilities"], shown(probs, expected), 1e-9, 1e-300)


def test_vectors_at_50_digits():
    """One value of each step from mpmath, by another way than the script that writes them."""
    expected = {row.name: e for row, e in expected_of("published-polynomial")}["ramp of 8"]
    with mp.workdps(50):
        z = [mp.mpf(i) / 2 for i in range(8)]
        # The sum of a geometric series, and its derivative.
        r = mp.e**0.5
        Z = (r**8 - 1) / (r - 1)
        H = mp.log(Z) - mp.fsum(x * mp.e**x for x in z) / Z
        beta = mp.fsum(mp.mpf(repr(c)) * H ** (4 - k) for k, c in enumerate(PAPER))
        q = mp.e ** (beta / 2)
        top = q**7 * (q - 1) / (q**8 - 1)
    assert float(H) == pytest.approx(expected["entropy"], rel=1e-15)
    assert float(beta) == pytest.approx(expected["beta"], rel=1e-14)
    assert float(top) == pytest.approx(expected["probabilities"][7], rel=1e-14)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize(
    "name",
    ["constant", *(pytest.param(x, marks=pytest.mark.slow) for x in RULES if x != "constant")],
)
def test_our_runtime_in_jax_passes(name, dtype):
    fit = fit_of_vectors(name)

    def ours(z, where=None):
        return calibrate.adaptive_softmax(jnp.asarray(z).astype(dtype), fit, where=where)

    if dtype == "bfloat16":  # rounded logits are other rows, but for those that bfloat16 holds
        z = np.float32([1.1015625, -0.296875, 2.203125, 0.703125, 2.09375])
        (expected,) = (e for row, e in expected_of(name) if row.name.endswith("to bfloat16"))
        np.testing.assert_allclose(ours(z).astype(float), expected["probabilities"], 2**-8)
        return
    result = check_softmax(ours, fit)
    assert result.right, result
    assert result.faults == ()


@NO_TORCH
@pytest.mark.parametrize("name", RULES)
def test_our_runtime_in_pytorch_passes(name):
    import calibrate.torch

    fit = fit_of_vectors(name)

    def ours(z, dim=-1, where=None):
        return calibrate.torch.adaptive_softmax(z, fit, dim=dim, where=where)

    assert check_softmax(ours, fit).right


# A pasted snippet in NumPy, with each of its steps as an argument.


def softmax(z, axis=-1):
    with np.errstate(over="ignore", invalid="ignore"):
        w = np.exp(z - z.max(axis, keepdims=True))
        return w / w.sum(axis, keepdims=True)


def entropy(p, axis=-1, eps=0.0):
    with np.errstate(divide="ignore", invalid="ignore"):
        return -np.where(p > 0, p * np.log(p + eps), 0).sum(axis, keepdims=True)


def floor(H, beta):
    return np.where(H > 0.5, np.maximum(beta, 1), 1)


def pasted(
    z, *, poly=PAPER, entropy=entropy, guard=floor, apply=np.multiply, of=softmax, axis=-1
):  # fmt: skip
    H = entropy(of(z))
    return softmax(apply(z, guard(H, np.polyval(poly, H))), axis)


def of_sharpened(z):
    H = entropy(softmax(z))
    return softmax(z * floor(H, np.polyval(PAPER, H)))


def bits(p):
    return entropy(p) / np.log(2)


def divide(z, beta):
    with np.errstate(divide="ignore", invalid="ignore"):
        return z / beta


def never_called(z):
    def adaptive(z):  # patched into a module that has already been imported by name
        raise AssertionError

    return softmax(z)


def other_threshold(H, beta):
    return np.where(H > 1.2, np.maximum(beta, 1), 1)


def no_floor(H, beta):
    return np.where(H > 0.5, beta, 1)


def twice(z, beta):
    return z * beta**2


MUTANTS = {
    # Of public projects: an official repository, a Keras library, and a patch that is never called.
    "backwards": (partial(pasted, poly=PAPER[::-1]), {"reversed-coefficients"}),
    "backwards and inverted": (
        partial(pasted, poly=PAPER[::-1], apply=divide),
        {"reversed-coefficients", "theta-for-beta"},
    ),
    "never called": (never_called, {"plain-softmax"}),
    # Others.
    "inverted": (partial(pasted, apply=divide), {"theta-for-beta"}),
    "in bits": (partial(pasted, entropy=bits), {"entropy-in-bits"}),
    "in bits, inverted, backwards": (
        partial(pasted, entropy=bits, apply=divide, poly=PAPER[::-1]),
        {"entropy-in-bits", "theta-for-beta", "reversed-coefficients"},
    ),
    "of sharpened": (partial(pasted, of=of_sharpened), {"entropy-of-sharpened"}),
    "no floor": (partial(pasted, guard=no_floor), {"no-floor"}),
    "no floor, no threshold": (
        partial(pasted, guard=lambda H, beta: beta),
        {"no-floor", "no-threshold"},
    ),
    "other threshold": (partial(pasted, guard=other_threshold), {"differs"}),
    "epsilon": (partial(pasted, entropy=partial(entropy, eps=1e-3)), {"log-epsilon"}),
    "twice": (partial(pasted, apply=twice), {"scaled-twice"}),
    "twice, in bits": (
        partial(pasted, apply=twice, entropy=bits),
        {"scaled-twice", "entropy-in-bits"},
    ),
    "softmax along the first axis": (
        lambda z: pasted(z, axis=0),
        {"wrong-axis"},
    ),
    "entropy of the whole batch": (
        lambda z: pasted(z, entropy=lambda p: np.atleast_1d(entropy(p, None))),
        {"wrong-axis"},
    ),
    "coefficients of another head": (
        partial(pasted, poly=[0.01, 0.02, 0.1, 0.3, 1.0]),
        {"differs"},
    ),
    "squared weights": (lambda z: softmax(z) ** 2, {"differs"}),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_faults_are_named(name):
    function, faults = MUTANTS[name]
    result = check_softmax(function)
    assert not result.right
    assert set(result.faults) == faults, result
    assert all(fault in str(result) for fault in faults)


def in_jax(z):
    beta = calibrate.inverse_temperature(calibrate.entropy(z), calibrate.load("paper"))
    return jax.nn.softmax(z * beta[..., None])


RIGHTS = {
    "snippet": pasted,
    "epsilon of the paper": partial(pasted, entropy=partial(entropy, eps=1e-9)),
    "a row alone": lambda z: pasted(z[None])[0] if z.ndim == 1 else 1 / 0,
    "a batch of heads": lambda z: pasted(z) if z.ndim == 4 else 1 / 0,
    "axis": lambda z, axis=0: pasted(z) if axis == -1 else 1 / 0,
    "under jit": jax.jit(in_jax),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow) if x == "under jit" else x for x in RIGHTS]
)
def test_what_is_right_in_float32_is_not_blamed(name):
    result = check_softmax(RIGHTS[name])
    assert result.right, result
    assert result.error < 1e-4


def test_masked_items_that_count():
    def masked_after(z, mask):
        H = entropy(softmax(z))
        z = floor(H, np.polyval(PAPER, H)) * z
        return softmax(np.where(mask, z, -np.inf))

    assert check_softmax(masked_after).faults == ("entropy-of-masked-items",)
    size = fit_of_vectors("log-size")

    def counts_all(z):
        return softmax((0.375 * np.log(z.shape[-1]) + 0.5).clip(0.5) * z)

    assert check_softmax(counts_all, size).faults == ("entropy-of-masked-items",)


def unguarded(p):
    with np.errstate(divide="ignore", invalid="ignore"):
        return -(p * np.log(p)).sum(-1, keepdims=True)


def test_zero_log_zero():
    """Where the entropy is NaN: with the result NaN, or softmax, and beside another mistake."""
    result = check_softmax(partial(pasted, entropy=unguarded, guard=lambda H, beta: beta.clip(1)))
    assert result.faults == ("zero-log-zero",)
    assert np.isnan(result.error)
    assert check_softmax(partial(pasted, entropy=unguarded)).faults == ("zero-log-zero",)
    both = check_softmax(partial(pasted, entropy=unguarded, poly=PAPER[::-1]))
    assert set(both.faults) == {"zero-log-zero", "reversed-coefficients"}


def test_batches():
    """An entropy along the wrong axis is right for single rows, and may broadcast in a batch."""

    def without_keepdims(z):
        H = entropy(softmax(z))[..., 0]
        return softmax(floor(H, np.polyval(PAPER, H)) * z if z.ndim == 1 else (floor(H, 2 * H) * z))

    assert "wrong-axis" in check_softmax(without_keepdims).faults

    def of_heads(axes):
        def attention(z):
            assert z.ndim == 4
            H = np.asarray(entropy(softmax(z), axes))
            return softmax(floor(H, np.polyval(PAPER, H)) * z)

        return attention

    assert check_softmax(of_heads(-1)).right
    assert check_softmax(of_heads((-2, -1))).faults == ("wrong-axis",)
    assert check_softmax(of_heads((0, -1))).faults == ("wrong-axis",)

    def single(z):
        if z.ndim > 1:
            raise IndexError("one row")
        return pasted(z)

    result = check_softmax(single)
    assert result.right
    assert "IndexError" in result.note


def test_a_fit_of_ones_own(tmp_path):
    fit = fit_of_vectors("fitted-polynomial")
    fit.save(tmp_path / "mine.json")
    mine = calibrate.load(str(tmp_path / "mine.json"))

    def no_threshold(z):
        H = np.clip(entropy(softmax(z)), 0.125, 4)
        return softmax(np.clip(np.polyval(mine.coefficients, H), 0.5, 6) * z)

    assert check_softmax(no_threshold, mine).faults == ("no-threshold",)


def test_cannot_tell():
    with pytest.raises(CalibrateError, match="ZeroDivisionError"):
        check_softmax(lambda z: 1 / 0)
    with pytest.raises(CalibrateError):
        check_softmax(lambda z: z.sum())
    with pytest.raises(CalibrateError, match="allowed"):
        check_softmax(pasted, mask="allowed")


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "snippets.py").write_text(
        "import numpy as np\n"
        "def plain(z):\n"
        "    p = np.exp(z - z.max(-1, keepdims=True))\n"
        "    return p / p.sum(-1, keepdims=True)\n"
        "def broken(z):\n"
        "    raise KeyError('weights')\n"
    )
    done = call("check-softmax", "snippets:plain", "--json", code=3)
    assert json.loads(done.stdout)["faults"] == ["plain-softmax"]
    assert "KeyError" in call("check-softmax", "snippets:broken", code=1).stderr
    for absent in ("snippets:absent", "snippets", "no_such_module:f"):
        call("check-softmax", absent, code=1)
