"""scripts/train_heads: the same bytes from the seed, alone or beside others, interrupted or not."""

import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from calibrate.errors import CalibrateError
from calibrate.files.npz import read_arrays
from calibrate.rows.heads import load_head

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import training

CHECKPOINT = "max-retrieval-0.checkpoint.npz"
quiet = print  # a module-level function, as worker processes need


@pytest.fixture
def quick(monkeypatch):
    """One set size, so that one step function is compiled; rows and checkpoints every few steps."""
    monkeypatch.setattr(training, "SIZES", (5, 5))
    monkeypatch.setattr(training, "STEPS_PER_LOG_ROW", 5)
    monkeypatch.setattr(training, "STEPS_PER_CHECKPOINT", 10)


def weights(folder):
    return training.weights_path(folder, 0).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "jobs"), [(2, 1), (50, 2)])
def test_weights_do_not_depend_on_the_seeds_beside(tmp_path, steps, jobs, monkeypatch):
    # Workers share compiled code through this cache: compiling is most of their work here.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    both = training.train_seeds([0, 1], steps, tmp_path / "both", jobs, quiet)
    alone = training.train_seeds([1], steps, tmp_path / "alone", 1, quiet)
    assert both[1].read_bytes() == alone[0].read_bytes() != both[0].read_bytes()


@pytest.mark.slow
def test_an_interrupted_run_ends_with_the_same_bytes(tmp_path, quick, monkeypatch):
    training.train(0, 30, tmp_path / "whole", quiet)
    batch = training._training_batch

    def interrupt(seed, step):
        if step == 17:
            raise KeyboardInterrupt
        return batch(seed, step)

    monkeypatch.setattr(training, "_training_batch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        training.train(0, 30, tmp_path / "halves", quiet)
    assert int(read_arrays(tmp_path / "halves" / CHECKPOINT)["steps"]) == 10
    monkeypatch.setattr(training, "_training_batch", batch)
    training.train(0, 30, tmp_path / "halves", quiet)
    assert weights(tmp_path / "whole") == weights(tmp_path / "halves")


@pytest.mark.slow
def test_training_learns_and_logs(tmp_path, quick, monkeypatch):
    reports = []
    monkeypatch.setattr(time, "monotonic", lambda: 1e6)  # a clock may stand still
    training.train(0, 200, tmp_path, reports.append)
    arrays = read_arrays(training.weights_path(tmp_path, 0))
    assert arrays["log/step"].tolist() == list(range(5, 201, 5))
    assert arrays["log/cross_entropy"][-1] < 0.6 * arrays["log/cross_entropy"][0]
    assert np.isfinite(arrays["log/kernel_squared_norm"]).all()
    assert reports[-1].startswith("seed 0  step 200/200  loss ")
    assert load_head(str(training.weights_path(tmp_path, 0))).name == "max-retrieval-0"


def test_initial_parameters_follow_flax_and_l2_is_of_kernels_only():
    params = training.initial_params(0)
    moved = jax.tree.map(lambda leaf: leaf + 0.1, params)
    gradient = jax.grad(lambda p: training.L2 / 2 * training._kernel_norm(p))(moved)
    for layer, (n_inputs, _) in training.head.LAYERS.items():
        assert (params[layer]["bias"] == 0).all()
        if n_inputs > 1:
            assert params[layer]["kernel"].std() * n_inputs**0.5 == pytest.approx(1, abs=0.1)
        np.testing.assert_allclose(gradient[layer]["kernel"], 1e-3 * moved[layer]["kernel"])
        assert (gradient[layer]["bias"] == 0).all()


def test_a_finished_head_is_left_alone_and_carried_on_but_never_overwritten(tmp_path, quick):
    training.train(0, 10, tmp_path, quiet)
    first, reports = weights(tmp_path), []
    training.train(0, 10, tmp_path, reports.append)
    assert (reports, weights(tmp_path)) == ([], first)
    training.train(0, 20, tmp_path, quiet)
    longer = weights(tmp_path)
    assert longer != first
    with pytest.raises(CalibrateError, match="with 20 steps, which 10 steps would overwrite"):
        training.train(0, 10, tmp_path, quiet)
    checkpoint = tmp_path / CHECKPOINT
    checkpoint.write_bytes(checkpoint.read_bytes()[:-100])
    with pytest.raises(CalibrateError, match=r"checkpoint\.npz is not a readable npz"):
        training.train(0, 30, tmp_path, quiet)
    checkpoint.unlink()
    for steps in (10, 30):
        with pytest.raises(CalibrateError, match="would overwrite"):
            training.train(0, steps, tmp_path, quiet)
    assert weights(tmp_path) == longer
