"""Training of heads: the same bytes from the seed, alone or beside others, interrupted or not."""

import time

import numpy as np
import pytest
import train_heads

from calibrate.rows import max_retrieval
from calibrate.rows.heads import load_head
from calibrate.storage.npz import read_arrays

CHECKPOINT = "max-retrieval-0.checkpoint.npz"
quiet = print  # a module-level function, as worker processes need


def of_one_size(seed, step):
    """Sets of one size, so that one step function is compiled."""
    return max_retrieval.sample([seed, step, 1], 5, train_heads.BATCH)


# Rows of the log every two steps, and checkpoints every ten.
quick = {"batch_at": of_one_size, "steps_per_log_row": 2}


def weights(folder):
    return train_heads.weights_path(folder, 0).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "jobs"), [(2, 1), (50, 2)])
def test_weights_do_not_depend_on_the_seeds_beside(tmp_path, steps, jobs, monkeypatch):
    # Workers share compiled code through this cache: compiling is most of their work here.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    both = train_heads.train_seeds([0, 1], steps, tmp_path / "both", jobs, quiet)
    alone = train_heads.train_seeds([1], steps, tmp_path / "alone", 1, quiet)
    assert both[1].read_bytes() == alone[0].read_bytes() != both[0].read_bytes()


@pytest.mark.slow
def test_an_interrupted_run_ends_with_the_same_bytes(tmp_path):
    def interrupt(seed, step):
        if step == 17:
            raise KeyboardInterrupt
        return of_one_size(seed, step)

    train_heads.train(0, 30, tmp_path / "whole", quiet, **quick)
    with pytest.raises(KeyboardInterrupt):
        train_heads.train(0, 30, tmp_path / "halves", quiet, **quick | {"batch_at": interrupt})
    assert int(read_arrays(tmp_path / "halves" / CHECKPOINT)["steps"]) == 10
    train_heads.train(0, 30, tmp_path / "halves", quiet, **quick)
    assert weights(tmp_path / "whole") == weights(tmp_path / "halves")


@pytest.mark.slow
def test_training_learns_and_logs(tmp_path, monkeypatch):
    reports = []
    monkeypatch.setattr(time, "monotonic", lambda: 1e6)  # a clock may stand still
    train_heads.train(0, 200, tmp_path, reports.append, **quick)
    arrays = read_arrays(train_heads.weights_path(tmp_path, 0))
    assert arrays["log/step"].tolist() == list(range(2, 201, 2))
    assert arrays["log/cross_entropy"][-1] < 0.6 * arrays["log/cross_entropy"][0]
    assert np.isfinite(arrays["log/kernel_squared_norm"]).all()
    assert reports[-1].startswith("seed 0  step 200/200  loss ")
    assert load_head(str(train_heads.weights_path(tmp_path, 0))).name == "max-retrieval-0"
