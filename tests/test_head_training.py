"""Training of heads: the same bytes from the seed, alone or beside others, interrupted or not."""

import pytest
import train_heads

from calibrate.rows import max_retrieval
from calibrate.rows.heads import load_head
from calibrate.storage.npz import read_arrays


def of_one_size(seed, step):
    """Sets of one size, so that one step function is compiled."""
    return max_retrieval.sample([seed, step, 1], 5, train_heads.BATCH)


quick = {"batch_at": of_one_size, "steps_per_row": 10}


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "jobs"), [(2, 1), (50, 2)])
def test_weights_do_not_depend_on_the_seeds_beside(tmp_path, steps, jobs, monkeypatch):
    # Workers share compiled code through this cache: compiling is most of their work here.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    both = train_heads.train_seeds([0, 1], steps, tmp_path / "both", jobs)
    alone = train_heads.train_seeds([1], steps, tmp_path / "alone", 1)
    assert both[1].read_bytes() == alone[0].read_bytes() != both[0].read_bytes()


@pytest.mark.slow
def test_an_interrupted_run_ends_with_the_same_bytes(tmp_path):
    def interrupt(seed, step):
        if step == 17:
            raise KeyboardInterrupt
        return of_one_size(seed, step)

    whole, halves = tmp_path / "whole", tmp_path / "halves"
    path = train_heads.train(0, 35, whole, **quick)
    with pytest.raises(KeyboardInterrupt):
        train_heads.train(0, 35, halves, **quick | {"batch_at": interrupt})
    checkpoint = read_arrays(halves / "max-retrieval-0.checkpoint.npz")
    assert int(checkpoint["steps"]) == 10
    assert train_heads.train(0, 35, halves, **quick).read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_training_learns_and_logs(tmp_path):
    path = train_heads.train(0, 200, tmp_path, **quick)
    log = read_arrays(path)
    assert log["log/step"].tolist() == list(range(10, 201, 10))
    assert log["log/cross_entropy"][-1] < 0.6 * log["log/cross_entropy"][0]
    assert load_head(str(path)).name == "max-retrieval-0"
