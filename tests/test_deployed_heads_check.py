"""The package, and the second implementation of the study of deployed heads, agree held out."""

import deployed_heads_check as check
import numpy as np
import pytest
from scipy.special import log_softmax

import calibrate

N = 32
PLANTED = {"by entropy": lambda H: 0.5 + 0.6 * H, "constant": lambda H: np.full_like(H, 2.0)}


def planted_rows(planted, seed, count=2_000):
    """Logits and targets drawn from softmax(beta(H) z), in groups of ten rows."""
    rng = np.random.default_rng(seed)
    z = (rng.standard_normal((count, N)) * rng.uniform(0.5, 4, (count, 1))).astype(np.float32)
    log_p = log_softmax(z.astype(float), axis=1)
    beta = PLANTED[planted](-(np.exp(log_p) * log_p).sum(axis=1))
    target = (beta[:, None] * z + rng.gumbel(size=z.shape)).argmax(axis=1)
    return z, target, np.arange(count) // 10


def as_rows(z, target, group):
    right = np.arange(N) == target[:, None]
    return check.Rows(z.ravel().astype(float), right.ravel(), np.full(len(z), N), group)


def nll_of_package(fit, z, target):
    p = np.asarray(calibrate.adaptive_softmax(z, fit))
    return -np.log(p[np.arange(len(z)), target]).mean()


@pytest.mark.parametrize("planted", PLANTED)
def test_smoothed_quartics_agree_held_out(planted):
    z, target, group = planted_rows(planted, seed=0)
    new_z, new_target, new_group = planted_rows(planted, seed=1)
    fit = calibrate.fit(z, target, group=group, kind="polynomial")
    rule = check.smoothed("polynomial")(check.profiles_of(as_rows(z, target, group)))
    nll = -check.log_p(as_rows(new_z, new_target, new_group), rule).mean()
    assert nll == pytest.approx(nll_of_package(fit, new_z, new_target), abs=0.003)


def test_procedures_of_the_paper_agree_held_out():
    z, target, group = planted_rows("by entropy", seed=0)
    new_z, new_target, new_group = planted_rows("by entropy", seed=1)
    fit = calibrate.fit(z, target, group=group, loss="least-squares")
    rows = as_rows(z, target, group)
    rule = check.paper_procedure(rows, check.profiles_of(rows))
    nll = -check.log_p(as_rows(new_z, new_target, new_group), rule).mean()
    assert nll == pytest.approx(nll_of_package(fit, new_z, new_target), abs=1e-4)


def test_rows_of_a_file_are_scored_by_split(tmp_path):
    """Against log softmax; a masked item, and a second right one, count as such."""
    z, target, group = planted_rows("by entropy", seed=0, count=100)
    z[np.arange(100), (target + 1) % N] = -np.inf
    right = (np.arange(N) == target[:, None]) | (np.arange(N) == 7)
    columns = {"logits": z.ravel(), "lengths": np.full(100, N), "target": target, "group": group}
    log_p = log_softmax(z[group % 2 == 1].astype(float), axis=1)
    ones = {"target": np.arange(N) == target[:, None], "right": right}
    for name, chosen in ones.items():
        extra = {"right": right.ravel()} if name == "right" else {}
        np.savez(tmp_path / "rows.npz", **columns, split=group % 2, **extra)
        rows = check.read_rows(tmp_path / "rows.npz", check.TEST)
        expected = np.log((np.exp(log_p) * chosen[group % 2 == 1]).sum(axis=1))
        np.testing.assert_allclose(check.log_p(rows, lambda H, n: np.ones(len(H))), expected)
        assert (rows.n == N - 1).all()


def test_a_record_that_differs_is_found():
    nll = {"baseline": 1.5, "constant": 1.0}
    assert check.compare(nll, {"baseline": {"nll": 1.5}, "constant": {"nll": 1.0}}) == 0
    record = {"baseline": {"nll": 1.51}, "constant": {"nll": 1.0}}
    assert check.compare(nll, record) == pytest.approx(0.01)
