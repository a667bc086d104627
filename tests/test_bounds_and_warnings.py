"""What users are told of logits on another scale, of probabilities, and of files of other kinds."""

import sys
import warnings

import numpy as np
import pytest
from conftest import ToyHead

import calibrate
from calibrate.errors import DamagedError, QualityError
from calibrate.rows.logits_files import Arrays


def gumbel_targets(logits, sharp, seed=1):
    """Targets of which softmax(sharp * logits) is the distribution."""
    rng = np.random.default_rng(seed)
    return (sharp * logits + rng.gumbel(size=logits.shape)).argmax(1)


def fit_quickly(logits, target, **options):
    """With too few groups for a slope."""
    groups = np.arange(len(target)) % 15
    return calibrate.fit(logits, target, group=groups, kind="constant", **options)


def test_no_bound_is_named_where_none_is_reached(recwarn):
    logits = np.random.default_rng(0).normal(size=(2_000, 16))
    calibrate.fit(logits, gumbel_targets(logits, 3))
    assert not recwarn.list


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python cannot skip files before 3.12")
def test_warnings_are_at_the_line_of_the_user():
    """Although NumPy's decorator and functions of the package lie between."""
    logits = np.random.default_rng(0).normal(size=(300, 8))
    target = logits.argmax(1)
    logits[0, 0] = np.nan
    solved = calibrate.solve(calibrate.collect(ToyHead(noise=0), sizes=[8], sets=300))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calibrate.fit(logits, target)
        n_of_arrays = len(caught)
        calibrate.fit_polynomial(solved)
    assert len(caught) > n_of_arrays > 1
    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.parametrize("kind", ["rounded", "cut"])
def test_probabilities_that_do_not_add_up_are_warned_of(kind):
    logits = 2 * np.random.default_rng(0).normal(size=(3_000, 8))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    p = np.round(p, 1) if kind == "rounded" else np.where(p < 0.1, 0, p)
    with pytest.warns(UserWarning, match=r"^logits .*\b0\b.*\b1\b.* softmax"):
        fit_quickly(p, gumbel_targets(logits, 1))


def votes(rows=3_000, n=8):
    """Shares of 20 votes, some 0, and targets that got one at least."""
    rng = np.random.default_rng(0)
    p = rng.multinomial(20, rng.dirichlet(np.full(n, 0.5), rows)) / 20
    return p, (p * (p > 0) + 1e-9 + 0.1 * rng.random((rows, n)) * (p > 0)).argmax(1)


def test_logarithms_of_zero_are_warned_of_as_masks():
    p, target = votes()
    with np.errstate(divide="ignore"):
        logits = np.log(p)
    n_zero = f"{(p == 0).sum():,}"
    with pytest.warns(UserWarning, match=rf"\b{n_zero}\b.* -inf"):
        fit_quickly(logits, target)


def test_a_mask_says_that_they_are_meant(recwarn):
    p, target = votes()
    logits = np.log(np.where(p > 0, p, 1))
    fit_quickly(np.where(p > 0, logits, -np.inf), target, mask=p > 0)
    assert not recwarn.list


def test_targets_of_probability_0_are_not_put_down_to_a_mask():
    logits = np.random.default_rng(0).normal(size=(1_000, 6))
    target = gumbel_targets(logits, 1)
    logits[np.arange(80), target[:80]] = -np.inf
    with pytest.raises(QualityError, match=r"80 masked_target.* -inf \(probability 0\)"):
        calibrate.fit(logits, target)
    with pytest.raises(QualityError, match=r"80 masked_target.* mask, True"):
        calibrate.fit(logits, target, mask=np.ones(6, bool))


def test_compressed_arrays_are_read_and_objects_are_not(tmp_path):
    logits = np.random.default_rng(0).normal(size=(200, 6)).astype(np.float32)
    target = logits.argmax(1)
    np.savez_compressed(tmp_path / "packed.npz", logits=logits, target=target)
    assert Arrays.read(tmp_path / "packed.npz").count(6) == 200
    ragged = np.array([logits[0], logits[1, :3]], dtype=object)
    np.savez(tmp_path / "ragged.npz", logits=ragged, target=target[:2])
    with pytest.raises(DamagedError, match=r"ragged\.npz .*numpy\.savez"):
        Arrays.read(tmp_path / "ragged.npz")
