"""Forecast: what `collect --dry-run` says, beside what is collected; and nothing is written."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from conftest import ToyHead
from typer.testing import CliRunner

from calibrate.cli.main import app
from calibrate.collecting.collect import collect, source_of_head
from calibrate.collecting.forecast import forecast
from calibrate.parallel.jobs import Jobs


def ticking(step):
    """A clock that moves on whenever it is looked at."""
    now = [0.0]

    def clock():
        now[0] += step
        return now[0]

    return clock


@pytest.mark.parametrize(
    ("keep", "max_bytes"), [("all", 10**9), ("misranked", 10**9), ("all", 10**6)]
)
def test_rows_and_bytes_are_those_of_the_collection(tmp_path, keep, max_bytes):
    head, arguments = ToyHead(), ([16, 1024], 3_000, 0)
    expected = forecast(source_of_head(head, *arguments), max_bytes, keep)
    assert head.attended < 2 * 3_000  # twice a piece, and not all of 16
    found = collect(head, *arguments, tmp_path / "run", max_bytes, keep=keep)
    for size, counts in zip(expected.sizes, found.manifest["sizes"], strict=True):
        assert size.sets == counts["rows"]
        assert size.rows == pytest.approx(counts["kept"], rel=0.5 if keep == "misranked" else 0.01)
    on_disk = sum(path.stat().st_size for path in (tmp_path / "run").iterdir())
    assert on_disk / 2 < expected.bytes < 2 * on_disk


def test_the_time_is_that_of_a_hundredth_times_a_hundred():
    source = source_of_head(ToyHead(), [2_048], 10_000, 0)
    one, two = (forecast(source, 10**9, jobs=Jobs(n), clock=ticking(0.5)) for n in (1, 2))
    assert one.seconds == pytest.approx(0.5 * 10_000 / 100)
    assert two.seconds == one.seconds / 2


def test_the_time_is_shared_by_no_more_processes_than_there_are_units():
    source = source_of_head(ToyHead(), [16], 500, 0)
    assert len(source.units) == 1
    one, many = (forecast(source, 10**9, jobs=Jobs(n), clock=ticking(0.5)) for n in (1, 8))
    assert many.seconds == one.seconds


def test_what_each_process_does_once_is_not_shared():
    ticks = iter([0.0, 5.0, 5.5])  # begun, compiled, and run again
    source = source_of_head(ToyHead(), [2_048], 10_000, 0)
    found = forecast(source, 10**9, jobs=Jobs(2), clock=lambda: next(ticks))
    assert found.seconds == pytest.approx(4.5 + 0.5 * 100 / 2)


def test_dry_run_says_rows_bytes_and_time_and_writes_nothing(here):
    common = ["collect", "--sizes", "16,64", "--sets", "200", "--out", "runs/a", "--dry-run"]
    done = CliRunner().invoke(app, common)
    assert done.exit_code == 0, done.output
    assert "400 rows" in done.stdout
    assert "nothing was written" in done.stdout
    narrow = CliRunner().invoke(app, common, env={"COLUMNS": "20"})
    assert "…" not in narrow.stdout
    record = json.loads(CliRunner().invoke(app, [*common, "--json"]).stdout)
    assert record["rows"] == sum(size["rows"] for size in record["sizes"]) == 400
    assert record["bytes"] > 400 * 4 * 16
    assert record["seconds"] > 0
    assert os.listdir(here) == []


def test_dry_run_of_arrays(here):
    z = np.random.default_rng(0).standard_normal((500, 40)).astype(np.float32)
    np.savez("model.npz", logits=z, target=z.argmax(axis=1))
    done = CliRunner().invoke(app, ["collect", "--logits", "model.npz", "--dry-run", "--json"])
    assert json.loads(done.stdout)["rows"] == 500
    assert not Path("runs").exists()
