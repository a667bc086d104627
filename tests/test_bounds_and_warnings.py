"""What users are told of logits on another scale, of probabilities, and of files of other kinds."""

import re
import warnings

import numpy as np
import pytest

import calibrate
from calibrate.datasets.logits_files import Arrays
from calibrate.defaults import MIN_BETA_LIMIT
from calibrate.errors import DamagedError, QualityError
from calibrate.fitting.fit_collection import fit_collection
from calibrate.fitting.options import Options
from calibrate.rows import collect as collecting


def gumbel_targets(logits, sharp, seed=1):
    """Targets of which softmax(sharp * logits) is the distribution."""
    rng = np.random.default_rng(seed)
    return (sharp * logits + rng.gumbel(size=logits.shape)).argmax(1)


def cosines(rows=2_000, n=32):
    rng = np.random.default_rng(0)
    return np.clip(rng.normal(scale=0.1, size=(rows, n)) + 0.2, -1, 1)


def test_a_beta_at_its_upper_bound_names_bound_and_remedy():
    """Cosine similarities under a temperature of 0.005."""
    logits = cosines()
    target = gumbel_targets(logits, 200)
    with pytest.warns(UserWarning, match=r"\b64\b"):
        fit = calibrate.fit(logits, target)
    assert re.search(r"\b64\b", fit.quality["verdict"])
    assert "hard attention" not in str(fit.table)
    again = calibrate.fit(64 * logits, target)
    assert 64 * again.only.coefficients[-1] == pytest.approx(200, rel=0.1)


def test_a_beta_at_its_lower_bound_names_bound_and_remedy():
    """The targets are nearly perfect, of logits that are far too large."""
    logits = 3 * np.random.default_rng(0).normal(size=(4_000, 5))
    target = gumbel_targets(logits, 1)
    with pytest.warns(UserWarning, match="1/64"):
        fit = calibrate.fit(100 * logits, target)
    assert fit.outcome == "gain"
    again = calibrate.fit(100 / 64 * logits, target)
    assert again.only.coefficients[-1] / 64 == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize("kind", ["some", "a lucky draw", "coarse"])
def test_logits_without_information_are_refused_as_such(kind):
    """Also where more than a fifth are right by chance, or half, if ties with a target were."""
    rng = np.random.default_rng(0)
    logits = 300 * rng.normal(size=(2_000, 5))
    if kind == "coarse":
        logits = 300.0 * rng.integers(0, 2, (2_000, 5))
    target = np.random.default_rng(1).integers(0, 5, 2_000)
    if kind == "a lucky draw":
        target[:60] = logits[:60].argmax(1)
        assert 0.2 < (logits.argmax(1) == target).mean() < 0.225
    with pytest.raises(QualityError, match=r"argmax .*\d%.*\d%.* target "):
        calibrate.fit(logits, target)


@pytest.mark.parametrize("keep", ["all", "misranked"])
def test_rows_that_are_not_kept_show_that_logits_have_information(keep, tmp_path):
    """A third of the rows are ties, of which a sample has no count, and 38 % are right."""
    logits = 2 * np.round(1.5 * np.random.default_rng(0).normal(size=(2_000, 5)))
    arrays = {"logits": 100 * logits, "target": gumbel_targets(logits, 0.4)}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        of_arrays = Arrays.in_memory("mine", arrays)
        kept = collecting.collect_arrays(of_arrays, tmp_path / "run", keep=keep, max_rows=700)
        fit_collection(kept, "mine", Options(min_beta=MIN_BETA_LIMIT))
    assert any("1/64" in str(x.message) for x in told)


def test_no_bound_is_named_where_none_is_reached(recwarn):
    logits = np.random.default_rng(0).normal(size=(2_000, 16))
    calibrate.fit(logits, gumbel_targets(logits, 3))
    assert not recwarn.list


@pytest.mark.parametrize("kind", ["rounded", "cut"])
def test_probabilities_that_do_not_add_up_are_warned_of(kind):
    logits = 2 * np.random.default_rng(0).normal(size=(3_000, 8))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    p = np.round(p, 1) if kind == "rounded" else np.where(p < 0.1, 0, p)
    with pytest.warns(UserWarning, match=r"^logits .*\b0\b.*\b1\b.* softmax"):
        calibrate.fit(p, gumbel_targets(logits, 1))


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
        calibrate.fit(logits, target)


def test_a_mask_says_that_they_are_meant(recwarn):
    p, target = votes()
    logits = np.log(np.where(p > 0, p, 1))
    calibrate.fit(np.where(p > 0, logits, -np.inf), target, mask=p > 0)
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
