"""A row of weight 0 is a row that is absent, and a masked item an item that is absent."""

from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from commands import call
from conftest import ToyHead

import calibrate
import calibrate.jax

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of fits that gain nothing
HIGH = 90.0  # a logit that would decide a row, if the item counted
FEW_GROUPS = np.arange(200) % 15  # too few for a slope: a fit is quick


@cache
def scored(n, rows=200):
    """Logits and targets."""
    rng = np.random.default_rng(n)
    value = rng.uniform(0, 6, (rows, n))
    logits = value + 0.7 * rng.standard_normal(value.shape)
    return logits.astype(np.float32), value.argmax(axis=1)


def with_masked_items(logits, way):
    """(logits, mask): with three more items at the end, masked in one of two ways; or without."""
    if way == "absent":
        return logits, None
    pad = [(0, 0)] * (logits.ndim - 1) + [(0, 3)]
    if way == "-inf":
        return np.pad(logits, pad, constant_values=-np.inf), None
    n = logits.shape[-1]
    return np.pad(logits, pad, constant_values=HIGH), np.arange(n + 3) < n


@cache
def by_size():
    """A rule that depends on the entropy and on the number of items."""
    logits, target = zip(*(scored(n) for n in (16, 40)), strict=True)
    return calibrate.fit(list(logits), list(target), kind="entropy-and-size")


def held_out(fit):
    """The coefficients, and the held-out NLL by the number of items."""
    record = [(x["n"], x["nll_before"], x["nll_after"]) for x in fit.evidence["held_out"]]
    return np.array([*fit.coefficients, *np.ravel(record)])


# Results of public functions for logits whose masked items are given in one of the ways.
PATHS = {}


def path(function):
    PATHS[function.__name__] = function
    return function


@path
def optimal_beta(way):
    logits, target = scored(13, rows=9)
    logits, where = with_masked_items(logits, way)
    where = None if where is None else np.broadcast_to(where, logits.shape)
    return calibrate.optimal_beta(logits, (target + 1) % 13, where).beta


@path
def commitment(way):
    return calibrate.commitment(*with_masked_items(scored(13)[0], way))


@path
def susceptibility(way):
    return calibrate.susceptibility(*with_masked_items(scored(13)[0], way))


@path
def entropy(way):
    logits, where = with_masked_items(scored(13)[0], way)
    return calibrate.entropy(logits, where=where)


@path
def adaptive_softmax(way):
    logits, where = with_masked_items(scored(13)[0], way)
    return calibrate.adaptive_softmax(logits, by_size(), where=where)[:, :13]


@path
def fit(way):
    sizes = [(*with_masked_items(scored(n)[0], way), scored(n)[1]) for n in (16, 40)]
    logits, mask, target = map(list, zip(*sizes, strict=True))
    mask = None if mask[0] is None else mask
    return held_out(calibrate.fit(logits, target, mask, kind="entropy-and-size"))


@path
def files_of_logits(way):
    """Of the commands `collect` and `fit`."""
    Path("rows").mkdir()
    for n in (16, 40):
        logits, mask = with_masked_items(scored(n)[0], way)
        arrays = {"group": FEW_GROUPS} if mask is None else {"group": FEW_GROUPS, "mask": mask}
        np.savez(f"rows/{n}.npz", logits=logits, target=scored(n)[1], **arrays)
    call("collect", "--logits", "rows")
    call("fit", "runs/rows", "--name", "mine", "--kind", "log-size")
    return held_out(calibrate.load("mine"))


@path
def calibrator(way):
    logits, target = scored(16)
    logits, mask = with_masked_items(logits, way)
    logits = logits if mask is None else np.where(mask, logits, -np.inf)
    calibrator = calibrate.SoftmaxCalibrator("constant").fit(logits, target, FEW_GROUPS)
    return calibrator.predict_proba(logits)[:, :16]


@path
def head(way):
    """Of `collect` and `solve`; a head masks by -inf."""

    class Masked(ToyHead):
        def sample(self, seed, size, count):
            batch = super().sample(0, 13, count)
            logits, mask = with_masked_items(batch.logits, way)
            logits = logits if mask is None else np.where(mask, logits, np.float32(-np.inf))
            return batch._replace(logits=logits)

    solved = calibrate.solve(calibrate.collect(Masked(1.0), [13 if way == "absent" else 16], 99))
    return np.array([solved.n, solved.entropy, solved.beta, solved.misranked])


def attention(function, axis, arrays, way, masks):
    """Attention of five queries to 13 keys along an axis, and perhaps three masked ones."""
    rng = np.random.default_rng(0)
    shape = [1, 2, 2, 8]
    q, k, v = (rng.normal(size=[*shape[:axis], n, *shape[axis + 1 :]]) for n in (5, 13, 13))
    if way == "absent":
        return function(*map(arrays, (q, k, v)))
    pad = [(0, 3 if i == axis else 0) for i in range(4)]
    k, v = (np.pad(x, pad, constant_values=9) for x in (k, v))
    real = np.arange(16) < 13
    mask = real if way == "where" else np.where(real, 0, -np.inf).astype(np.float32)
    return function(*map(arrays, (q, k, v)), **{masks[way]: mask})


@path
def dot_product_attention(way):
    function = partial(calibrate.jax.dot_product_attention, coefficients=by_size())
    return attention(function, 1, np.float32, way, {"where": "mask", "-inf": "bias"})


def torch_path(function):
    if find_spec("transformers"):
        PATHS[function.__name__] = function


def torch_logits(way):
    import torch

    logits, where = with_masked_items(scored(13)[0], way)
    return torch.tensor(logits), None if where is None else torch.tensor(where)


@torch_path
def torch_entropy(way):
    import calibrate.torch

    logits, where = torch_logits(way)
    return calibrate.torch.entropy(logits, where=where)


@torch_path
def torch_adaptive_softmax(way):
    import calibrate.torch

    logits, where = torch_logits(way)
    return calibrate.torch.adaptive_softmax(logits, by_size(), where=where)[:, :13]


@torch_path
def scaled_dot_product_attention(way):
    import torch

    import calibrate.torch

    def function(q, k, v, attn_mask=None):
        mask = None if attn_mask is None else torch.tensor(attn_mask)
        attend = calibrate.torch.scaled_dot_product_attention
        return attend(q, k, v, mask, coefficients=by_size())

    tensor = partial(torch.tensor, dtype=torch.float32)
    return attention(function, 2, tensor, way, dict.fromkeys(("where", "-inf"), "attn_mask"))


@torch_path
def applied_model(way):
    """An encoder of Transformers; its tokens are masked, whatever the mask is made of."""
    import torch
    from tiny_models import tiny_model

    import calibrate.transformers

    model = calibrate.transformers.apply(tiny_model("bert"), by_size())
    tokens = torch.arange(5, 18)[None]
    mask = torch.ones(1, 13)
    if way != "absent":
        tokens, mask = (torch.nn.functional.pad(x, (0, 3)) for x in (tokens, mask))
    with torch.no_grad():
        return model(tokens, attention_mask=mask)[0][:, :13]


SLOW = {"dot_product_attention", "fit"}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow if x in SLOW else ()) for x in PATHS]
)
def test_a_masked_item_is_absent(name, here, monkeypatch):
    results = {}
    for way in ("absent", "where", "-inf"):
        (here / way).mkdir()
        monkeypatch.chdir(here / way)
        results[way] = np.asarray(PATHS[name](way), np.float64)
    for way in ("where", "-inf"):
        np.testing.assert_allclose(results[way], results["absent"], rtol=2e-5, atol=2e-6)


def with_more_rows(weight, n_groups):
    """Columns of rows in groups; every fifth row is weightless, or absent."""
    logits, target = scored(16, rows=300)
    group, count = np.arange(300) // (300 // n_groups), np.arange(300) % 5 > 0
    wrong = np.where(np.eye(16)[(target + 1) % 16] > 0, HIGH, logits)
    columns = {
        "logits": np.where(count[:, None], logits, wrong), "target": target, "group": group,
        "weight": weight * (1 + group % 3) * count,
    }  # fmt: skip
    return columns, {name: x[count] for name, x in columns.items()}


def weights_in_files(columns):
    """Of the commands `collect` and `fit`."""
    Path("rows").mkdir()
    np.savez("rows/1.npz", **columns)
    call("collect", "--logits", "rows")
    call("fit", "runs/rows", "--name", "mine", "--kind", "polynomial")
    return held_out(calibrate.load("mine"))


def weights_in_estimator(columns):
    X, y, groups, weight = columns.values()
    return held_out(calibrate.SoftmaxCalibrator("constant").fit(X, y, groups, weight).coefficients_)


def weights_in_fit(columns, **options):
    return held_out(calibrate.fit(**columns, **options))


# With 60 groups a fit has a slope, with 15 it is quick.
WEIGHTED = {
    "files": (weights_in_files, 15),
    "estimator": (weights_in_estimator, 15),
    "polynomial": (partial(weights_in_fit, kind="polynomial"), 60),
    "least squares": (partial(weights_in_fit, kind="polynomial", loss="least-squares"), 15),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_a_row_of_weight_0_is_absent(name, here, monkeypatch):
    fit, n_groups = WEIGHTED[name]
    results = []
    for i, columns in enumerate(with_more_rows(0.5, n_groups)):
        (here / str(i)).mkdir()
        monkeypatch.chdir(here / str(i))
        results.append(fit(columns))
    np.testing.assert_allclose(*results, rtol=1e-6)
