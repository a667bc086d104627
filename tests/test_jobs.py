"""Jobs: results and bytes that do not depend on where tasks run, and errors of dead workers."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from commands import call, refusal
from conftest import ToyHead, bytes_of
from tasks import die, double, fail, load_twice, span

from calibrate import parallel
from calibrate.errors import CalibrateError, QualityError
from calibrate.parallel import Jobs, run
from calibrate.rows.collect import collect_arrays, collect_from_head
from calibrate.rows.heads import load_head
from calibrate.rows.logits_files import Arrays
from calibrate.rows.units import UnitSizes

SIZES, SETS = [8, 64], 384  # three units each
TWO = Jobs(2)


class Once(ToyHead):
    """A head that does something bad the first time that it sees sets of 64."""

    def __init__(self, marker: Path, misfortune):
        super().__init__()
        self.marker, self.misfortune = marker, misfortune

    def attend(self, batch):
        if batch.logits.shape[1] == 64 and not self.marker.exists():
            self.marker.write_text(str(os.getpid()))
            self.misfortune()
        return super().attend(batch)


hang = partial(time.sleep, 3_600)


def collected(folder, jobs=TWO, head=None, sizes=SIZES, sets=SETS):
    units = UnitSizes(max_sets=128)
    collect_from_head(head or ToyHead(), sizes, sets, 0, folder, jobs=jobs, unit_sizes=units)
    return bytes_of(folder)


@pytest.mark.parametrize("jobs", [Jobs(), TWO])
def test_results_are_in_the_order_of_the_tasks_and_each_is_reported(jobs):
    seen = []
    tasks = (partial(double, i) for i in range(20))
    assert run(tasks, jobs, seen.append) == sorted(seen) == [2 * i for i in range(20)]
    assert run([], jobs) == []


@pytest.mark.parametrize("jobs", [Jobs(), TWO])
def test_warnings_of_a_task_are_repeated(jobs, capfd):
    with pytest.warns(UserWarning, match="a shard is damaged"):
        run([partial(warnings.warn, "a shard is damaged"), os.getpid], jobs)
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_arrays_are_collected_by_several_processes(here):
    Path("logits").mkdir()
    for i in range(3):
        z = np.random.default_rng(i).standard_normal((200, 40)).astype(np.float32)
        np.savez(f"logits/{i}.npz", logits=z, target=z.argmax(axis=1), head=np.arange(200) % 4)
    arrays = Arrays.read(Path("logits"))
    for n in (1, 2):
        collect_arrays(arrays, Path(f"runs/{n}"), jobs=Jobs(n))
    assert bytes_of(Path("runs/1")) == bytes_of(Path("runs/2"))


MODULE = """
from conftest import ToyHead

class Head(ToyHead):
    def __reduce__(self):
        raise TypeError("too large to be sent")
"""


@pytest.mark.slow
def test_workers_load_a_head_by_its_reference(here):
    Path("head_of_jobs.py").write_text(MODULE)
    common = ["collect", "--head", "head_of_jobs:Head", "--sizes", "8,64", "--sets", "300"]
    for n in (1, 2):
        call(*common, "--out", f"runs/{n}", "--jobs", n)
    assert bytes_of(Path("runs/1")) == bytes_of(Path("runs/2"))


@pytest.mark.slow
def test_after_a_worker_dies_the_same_call_resumes(tmp_path):
    """With the bytes of a run without a failure."""
    head, whole = Once(tmp_path / "marker", die), collected(tmp_path / "whole", Jobs())
    with pytest.raises(CalibrateError, match="a worker process died"):
        collected(tmp_path / "run", TWO, head)
    kept = {name: data for name, data in bytes_of(tmp_path / "run").items() if name[0] == "n"}
    assert kept.items() <= whole.items()
    head.marker.touch()  # a worker may not have come so far
    assert collected(tmp_path / "run", Jobs(), head) == whole


def test_the_error_of_a_task_is_raised():
    with pytest.raises(QualityError, match="^no such layer$"):
        run([partial(abs, 1), fail], TWO)


def test_processes_of_one_thread_even_if_there_is_one(monkeypatch):
    monkeypatch.setenv("NPROC", "7")
    spans = sorted(run([partial(span, 0.1)] * 3, Jobs(1, threads=1)))
    for (_, end, pid, threads), (begun, *_) in pairwise(spans):
        assert end <= begun
        assert pid != os.getpid()
        assert threads == "1"
    assert run([partial(os.getenv, "NPROC")], TWO) == ["7"]


def test_a_loaded_head_is_sent_by_its_reference(here):
    head = load_head("max-retrieval-1")
    assert len(pickle.dumps(head)) < 1_000
    assert run([partial(load_twice, pickle.dumps(head))] * 2, TWO) == [(head.fingerprint, True)] * 2
    load, (_, *others) = head.__reduce__()
    with pytest.raises(CalibrateError, match="'max-retrieval-2' .*sha256:.*sha256:"):
        load("max-retrieval-2", *others)


ORPHANS = """
import os, time
from calibrate import parallel

def write(i):
    time.sleep(2)
    open(f"by-an-orphan-{i}", "w").close()

begin = parallel._begin_worker

def begin_late(*arguments):
    time.sleep(1)
    begin(*arguments)

if __name__ == "__main__":
    from functools import partial
    parallel._begin_worker = begin_late
    parallel.threading.Timer(0.5, os._exit, [130]).start()
    parallel.run([partial(write, i) for i in range(2)], parallel.Jobs(2))
"""


def test_a_worker_whose_parent_is_killed_before_it_begins_does_not_work(here):
    command = [sys.executable, "-c", ORPHANS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 130  # once nobody holds the pipe: no worker is left
    assert list(here.iterdir()) == []


@pytest.fixture(scope="module")
def distributed():
    return pytest.importorskip("distributed", reason="needs the extra dask")


def test_dask_that_is_absent_is_one_line(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    message = refusal("collect", "--sizes", "8", "--dask", "tcp://127.0.0.1:9", "--out", "r")
    assert "pip install -e '.[dask]'" in message


@pytest.fixture
def cluster(distributed):
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0", silence_logs=50,
        scheduler_kwargs={"allowed_failures": 0},
    ) as cluster:  # fmt: skip
        yield cluster


@pytest.mark.slow
def test_a_cluster_gives_results_warnings_and_failures(cluster):
    jobs = Jobs(dask=cluster.scheduler_address)
    seen = []
    found = run((partial(double, i) for i in range(20)), jobs, seen.append)
    assert found == sorted(seen) == [2 * i for i in range(20)]
    with pytest.warns(UserWarning, match="a shard is damaged"):
        _, pid = run([partial(warnings.warn, "a shard is damaged"), os.getpid], jobs)
    assert pid != os.getpid()
    with pytest.raises(QualityError, match="^no such layer"):
        run([os.getpid, fail], jobs)
    with pytest.raises(CalibrateError, match=r"(?s)the cluster did not finish a task.*died"):
        run([die], jobs)


def test_no_scheduler_and_no_worker_are_one_line(distributed, monkeypatch):
    monkeypatch.setattr(parallel, "SECONDS_TO_CONNECT", 0.5)
    with distributed.LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0") as cluster:
        for address in ("tcp://127.0.0.1:9", cluster.scheduler_address):
            with pytest.raises(CalibrateError, match=address):
                run([partial(double, 1)], Jobs(dask=address))


@pytest.mark.slow
def test_a_cluster_that_loses_a_worker_finishes_the_run(tmp_path, distributed):
    """Killed from outside; the cluster gives its task to another worker."""
    whole = collected(tmp_path / "whole", Jobs())
    marker = tmp_path / "marker"

    def kill():
        while not marker.exists() or not marker.read_text():
            time.sleep(0.01)
        os.kill(int(marker.read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0", silence_logs=50
    ) as cluster:
        jobs = Jobs(dask=cluster.scheduler_address)
        assert collected(tmp_path / "run", jobs, Once(marker, hang)) == whole
    killer.join()
