"""Faults of the system: a collection is not lost, repeated or silently wrong."""

import builtins
import errno
import fcntl
import os
import runpy
import shutil
import threading
from pathlib import Path

import pytest
from conftest import ToyHead, bytes_of
from fake_progress import Told, stopping_after
from syscalls import Crash, Syscalls, failing

from calibrate.errors import CalibrateError
from calibrate.fitting.fit_collection import fit_collection
from calibrate.fitting.options import FitOptions
from calibrate.parallel import SILENT
from calibrate.rows.collect import collect_from_head
from calibrate.rows.collection import RowCollection, open_collection
from calibrate.rows.rows import parse_rows
from calibrate.rows.units import UnitSizes

ROOT = Path(__file__).parents[1]
FULL_DISK, DEATH = errno.ENOSPC, None  # death is that of the process


def run(folder, head=None, progress=SILENT, seed=0):
    """Four shards."""
    head = head or ToyHead()
    units = UnitSizes(max_sets=64)
    return collect_from_head(
        head, [8, 32], 128, seed, Path(folder), progress=progress, unit_sizes=units
    )


def visible(folder: Path) -> dict[str, bytes]:
    """All files but hidden ones: the lock, and attempts under way."""
    found = bytes_of(folder) if folder.exists() else {}
    return {name: data for name, data in found.items() if name[0] != "."}


def read_all(folder: Path) -> int:
    """The number of shards; each is sound."""
    shards = sorted(folder.glob("n*.npz"))
    return sum(len(parse_rows(x.read_bytes(), x).counts) > 0 for x in shards)


def interrupted(folder):
    """An unfinished collection with two of its four shards."""
    with pytest.raises(KeyboardInterrupt):
        run(folder, progress=stopping_after(2))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the dead
@pytest.mark.parametrize(
    ("begin", "fault"),
    [
        pytest.param(lambda folder: None, FULL_DISK, id="fresh-full disk", marks=pytest.mark.slow),
        pytest.param(lambda folder: None, DEATH, id="fresh-death"),
        pytest.param(interrupted, DEATH, id="interrupted-death", marks=pytest.mark.slow),
        pytest.param(interrupted, FULL_DISK, id="interrupted-full disk"),
    ],
)
def test_whatever_call_fails_nothing_is_half_written_and_the_same_command_finishes(
    here, begin, fault
):
    run("whole")
    begin(here / "start")
    wanted, start = visible(Path("whole")), visible(here / "start")
    sound = {name for name, data in start.items() if wanted.get(name) == data}
    at = 0
    while True:
        folder = here / f"at-{at}"
        if start:
            shutil.copytree(here / "start", folder)
        with Syscalls(at, fault) as syscalls:
            try:
                run(folder)
            except CalibrateError as failure:
                assert str(folder) in str(failure)  # noqa: PT017
            except (OSError, Crash) as failure:
                assert isinstance(failure, Crash) or syscalls.calls[at] == "os.listdir"  # noqa: PT017
        if not syscalls.reached:
            break
        found = visible(folder)
        assert all(found[name] == wanted[name] for name in sound)
        assert all(data in (wanted[name], start.get(name)) for name, data in found.items()
                   if name.startswith("n"))  # fmt: skip
        if "manifest.json" in found and not start:
            assert read_all(folder) <= 4
        run(folder)
        assert visible(folder) == wanted
        # A temporary name stays if its removal is what failed.
        assert syscalls.calls[at] == "os.unlink" or not list(folder.glob(".*.tmp"))
        shutil.rmtree(folder)
        at += 1
    assert at > 20
    assert visible(folder) == wanted


def test_of_two_collectors_one_waits_and_nothing_is_done_twice(here, monkeypatch):
    started, waits, tried, flock = threading.Event(), threading.Event(), [], fcntl.flock

    def watched(descriptor, operation):
        tried.append(operation)
        if len(tried) > 3:  # the second collector tries again
            waits.set()
        return flock(descriptor, operation)

    def go_on_once_the_other_waits(done):
        started.set()
        assert waits.wait(60)

    monkeypatch.setattr(fcntl, "flock", watched)
    heads = ToyHead(), ToyHead()
    first = threading.Thread(target=run, args=("run", heads[0], Told(go_on_once_the_other_waits)))
    first.start()
    assert started.wait(60)
    with pytest.warns(UserWarning, match="run"):
        run("run", heads[1])
    first.join(60)
    assert (heads[0].attended, heads[1].attended) == (2 * 128, 0)
    assert read_all(Path("run")) == 4


def test_without_locks_both_finish_with_the_same_bytes(here, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    run("whole")
    others = here / "run/.n00008-unit00001.npz.0123abcd.tmp"

    def let_the_other_run(done):
        if done == 1:
            others.touch()
            run("run")

    run("run", progress=Told(let_the_other_run))
    assert visible(Path("run")) == visible(Path("whole"))
    assert others.exists()


def make_read_only(monkeypatch):
    """A disk that takes nothing, for root too."""
    refuse, opened, allowed = failing(errno.EROFS), open, os.access

    def open_to_read(path, mode="r", **options):
        return opened(path, mode, **options) if mode in ("r", "rb") else refuse()

    monkeypatch.setattr(builtins, "open", open_to_read)
    monkeypatch.setattr(os, "access", lambda p, mode: mode != os.W_OK and allowed(p, mode))
    for name in ("mkdir", "replace", "link", "unlink"):
        monkeypatch.setattr(os, name, refuse)


def test_a_complete_collection_on_a_read_only_disk_is_as_good(here, monkeypatch):
    run("run")
    wanted = fit_constant(Path("run"))
    make_read_only(monkeypatch)
    head = ToyHead()
    assert run("run", head).manifest["status"] == "complete"
    assert head.attended == 0
    assert read_all(Path("run")) == 4
    assert fit_constant(Path("run")) == wanted


def fit_constant(folder):
    collection = open_collection(folder, RowCollection)
    return fit_collection(collection, "x", FitOptions("constant")).fit


def test_one_that_has_to_be_written_to_is_named(here, monkeypatch):
    interrupted(Path("run"))
    before = visible(Path("run"))
    make_read_only(monkeypatch)
    with pytest.raises(CalibrateError, match=r"run/manifest\.json"):
        run("run")
    assert visible(Path("run")) == before


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing(here, monkeypatch):
    counts = runpy.run_path(str(ROOT / "scripts" / "tools" / "soak.py"))["soak"](
        12, seed=0, place=here
    )
    assert (counts["kills"], counts["problems"]) == (12, 0)
    assert counts["finished"] >= 3
