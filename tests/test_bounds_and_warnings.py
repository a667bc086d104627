"""What users are told of targets of probability 0, and of files of objects."""

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
        calibrate.fit_polynomial(solved)
    assert len(caught) > 1
    assert {warning.filename for warning in caught} == {__file__}


def test_targets_of_probability_0_are_bad_rows():
    logits = np.random.default_rng(0).normal(size=(1_000, 6))
    target = gumbel_targets(logits, 1)
    logits[np.arange(80), target[:80]] = -np.inf
    with pytest.raises(QualityError, match="80 masked_target"):
        calibrate.fit(logits, target)


def test_compressed_arrays_are_read_and_objects_are_not(tmp_path):
    logits = np.random.default_rng(0).normal(size=(200, 6)).astype(np.float32)
    target = logits.argmax(1)
    np.savez_compressed(tmp_path / "packed.npz", logits=logits, target=target)
    assert Arrays.read(tmp_path / "packed.npz").count(6) == 200
    ragged = np.array([logits[0], logits[1, :3]], dtype=object)
    np.savez(tmp_path / "ragged.npz", logits=ragged, target=target[:2])
    with pytest.raises(DamagedError, match=r"ragged\.npz .*numpy\.savez"):
        Arrays.read(tmp_path / "ragged.npz")
