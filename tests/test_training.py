"""Training: the same bytes from the seed, alone or beside others, interrupted or not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from calibrate.errors import CalibrateError
from calibrate.files.npz import read_arrays
from calibrate.rows import training
from calibrate.rows.heads import load_head

quiet = print  # a module-level function, as worker processes need


@pytest.fixture
def quick(monkeypatch):
    """One set size, so that one step function is compiled; rows and checkpoints every few steps."""
    monkeypatch.setattr(training, "SIZES", (5, 5))
    monkeypatch.setattr(training, "STEPS_PER_LOG_ROW", 5)
    monkeypatch.setattr(training, "STEPS_PER_CHECKPOINT", 10)


@pytest.mark.slow
def test_weights_do_not_depend_on_the_seeds_beside(tmp_path, monkeypatch):
    # Workers share compiled code through this cache: compiling is most of their work here.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    both = training.train_seeds([0, 1], 2, tmp_path / "both", 1, quiet)
    alone = training.train_seeds([1], 2, tmp_path / "alone", 1, quiet)
    assert both[1].read_bytes() == alone[0].read_bytes()
    assert both[0].read_bytes() != both[1].read_bytes()


@pytest.mark.slow
def test_nor_on_how_many_are_trained_at_once(tmp_path):
    together = training.train_seeds([0, 1], 50, tmp_path / "together", 2, quiet)
    in_turn = training.train_seeds([0, 1], 50, tmp_path / "in_turn", 1, quiet)
    for one, other in zip(together, in_turn, strict=True):
        assert one.read_bytes() == other.read_bytes()


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
    assert int(read_arrays(tmp_path / "halves/max-retrieval-0.checkpoint.npz")["steps"]) == 10
    monkeypatch.setattr(training, "_training_batch", batch)
    training.train(0, 30, tmp_path / "halves", quiet)
    whole, halves = (tmp_path / d / "max-retrieval-0.npz" for d in ("whole", "halves"))
    assert whole.read_bytes() == halves.read_bytes()


@pytest.mark.slow
def test_kill_9_and_resume_ends_with_the_same_bytes(tmp_path):
    script = f"""
from pathlib import Path
from calibrate.rows import training
training.SIZES, training.STEPS_PER_LOG_ROW, training.STEPS_PER_CHECKPOINT = (5, 5), 50, 50
training.train(0, 3000, Path({str(tmp_path)!r}) / "FOLDER", print)
"""
    run = [sys.executable, "-c", script.replace("FOLDER", "whole")]
    subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
    run = [sys.executable, "-c", script.replace("FOLDER", "killed")]
    kills = 0
    for delay in (0.1, 0.5, 1.5):
        process = subprocess.Popen(run, stdout=subprocess.DEVNULL)
        checkpoint = tmp_path / "killed/max-retrieval-0.checkpoint.npz"
        while not checkpoint.exists() and process.poll() is None:
            time.sleep(0.05)
        time.sleep(delay)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills > 0
    subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
    whole, killed = (tmp_path / d / "max-retrieval-0.npz" for d in ("whole", "killed"))
    assert whole.read_bytes() == killed.read_bytes()


@pytest.mark.slow
def test_training_learns_and_logs(tmp_path, quick):
    reports = []
    training.train(0, 200, tmp_path, reports.append)
    arrays = read_arrays(training.weights_path(tmp_path, 0))
    assert arrays["log/step"].tolist() == list(range(5, 201, 5))
    assert arrays["log/cross_entropy"][-1] < 0.6 * arrays["log/cross_entropy"][0]
    assert np.isfinite(arrays["log/kernel_squared_norm"]).all()
    last = reports[-1]
    assert (last.step, last.steps, last.seconds_left) == (200, 200, 0)
    assert last.steps_per_second > 0
    assert load_head(str(training.weights_path(tmp_path, 0))).name == "max-retrieval-0"


def test_a_finished_head_is_left_alone_and_can_be_carried_on(tmp_path, quick):
    training.train(0, 10, tmp_path, quiet)
    path = training.weights_path(tmp_path, 0)
    first = path.read_bytes()
    reports = []
    training.train(0, 10, tmp_path, reports.append)
    assert not reports
    assert path.read_bytes() == first
    training.train(0, 20, tmp_path, quiet)
    assert int(read_arrays(path)["steps"]) == 20


def test_l2_is_half_lambda_w_squared_on_kernels_only():
    """The gradient of the L2 term is lambda * w on kernels and 0 on biases."""
    import jax

    params = training.head.initial_params(0)
    params = jax.tree.map(lambda leaf: leaf + 0.1, params)
    gradient = jax.grad(lambda p: training.L2 / 2 * training._kernel_norm(p))(params)
    for layer in params:
        np.testing.assert_allclose(gradient[layer]["kernel"], 1e-3 * params[layer]["kernel"])
        assert (gradient[layer]["bias"] == 0).all()


def test_a_damaged_checkpoint_is_named(tmp_path, quick):
    training.train(0, 10, tmp_path, quiet)
    checkpoint = tmp_path / "max-retrieval-0.checkpoint.npz"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-100])
    with pytest.raises(CalibrateError, match=r"checkpoint\.npz is not a readable npz"):
        training.train(0, 20, tmp_path, quiet)


def test_a_longer_run_is_not_overwritten(tmp_path, quick):
    training.train(0, 20, tmp_path, quiet)
    path = training.weights_path(tmp_path, 0)
    before = path.read_bytes()
    with pytest.raises(CalibrateError, match="with 20 steps, which 10 steps would overwrite"):
        training.train(0, 10, tmp_path, quiet)
    path.with_suffix(".checkpoint.npz").unlink()
    for steps in (10, 30):
        with pytest.raises(CalibrateError, match="would overwrite"):
            training.train(0, steps, tmp_path, quiet)
    assert path.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_the_command(tmp_path, blow):
    command = [sys.executable, "-m", "calibrate", "train", "--seeds", "0-1", "--jobs", "2",
               "--out", str(tmp_path)]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    children = []
    while len(children) < 2:
        time.sleep(0.2)
        children = spawned_by(process.pid)
    time.sleep(6)
    process.send_signal(blow)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == (130 if blow == signal.SIGINT else -9)
    assert "Traceback" not in stderr
    deadline = time.monotonic() + 300
    while any(os.path.exists(f"/proc/{pid}") for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def spawned_by(parent):
    """Worker processes of a command (the resource trackers are none)."""
    pids = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in pids}
    return [pid for pid, command in commands.items() if "popen_loky" in command]
