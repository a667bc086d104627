"""Files appear whole or not at all; arrays are read without trust."""

import errno
import os
import pickle
import re
import stat
from pathlib import Path

import numpy as np
import pytest
from conftest import bytes_of
from syscalls import Syscalls, failing

from calibrate.errors import CalibrateError, DamagedError
from calibrate.storage.atomic_io import (
    new_file,
    remove_leftovers,
    whole_folder,
    write_atomically,
)
from calibrate.storage.npz import read_arrays, write_arrays

ARRAYS = {"x": np.arange(100.0), "layer/y": np.int64(7)}


@pytest.fixture
def npz(tmp_path):
    path = tmp_path / "a.npz"
    write_arrays(path, ARRAYS)
    return path


def test_arrays_round_trip_in_the_same_bytes(tmp_path, npz):
    found = read_arrays(npz)
    np.testing.assert_equal(found, ARRAYS)
    write_arrays(tmp_path / "b.npz", found)
    assert (tmp_path / "b.npz").read_bytes() == npz.read_bytes()


class Pickled:
    def __reduce__(self):
        return os.mkdir, ("made",)


def test_nothing_is_unpickled(here):
    np.savez("objects.npz", x=np.array([Pickled()]))
    Path("pickle.npz").write_bytes(pickle.dumps(Pickled()))
    for name in ("objects.npz", "pickle.npz"):
        with pytest.raises(DamagedError, match=name):
            read_arrays(Path(name))
    assert not Path("made").exists()


def test_a_file_larger_than_its_limit_is_refused_unread(npz):
    os.truncate(npz, 100 << 30)  # sparse
    with pytest.raises(DamagedError, match="107,374,182,400"):
        read_arrays(npz)


@pytest.mark.parametrize("exclusive", [False, True])
def test_a_full_disk_leaves_nothing_behind(tmp_path, exclusive):
    """Whichever call fails, there is the old file or the new one, whole, and no other."""
    path = tmp_path / "out" / "a.json"
    at, outcomes = 0, set()
    while True:
        path.unlink(missing_ok=True)
        if not exclusive:
            write_atomically(path, b"old")
        with Syscalls(at, errno.ENOSPC) as syscalls:
            try:
                write_atomically(path, b"new", exclusive=exclusive)
            except CalibrateError as error:
                assert re.search(r"cannot write .*a\.json: No space left.*free some", str(error))  # noqa: PT017
                outcomes.add("refused")
        if not syscalls.reached:
            break
        left = [entry.name for entry in path.parent.iterdir()] if path.parent.exists() else []
        # A temporary name stays only if its removal is what failed.
        assert syscalls.calls[at] == "os.unlink" or set(left) <= {"a.json"}
        if path.exists():
            assert path.read_bytes() in (b"old", b"new")
        at += 1
    assert outcomes == {"refused"}
    assert at > 8
    assert path.read_bytes() == b"new"


def new_text(path):
    with new_file(path) as temporary:
        temporary.write_text("new")


def new_folder(path):
    with whole_folder(path) as folder:
        (folder / "a").mkdir()  # no file's own fsync hides that the folder needs one


@pytest.mark.parametrize(
    "write", [lambda path: write_atomically(path, b"new"), new_text, new_folder]
)
def test_what_is_written_is_on_the_disk_before_it_has_its_name(tmp_path, write):
    """And the name before the call returns: a power cut leaves the whole, or nothing."""
    path = tmp_path / "name"
    with Syscalls() as syscalls:
        write(path)
    done = list(zip(syscalls.calls, syscalls.paths, strict=True))
    renamed = [i for i, (call, _) in enumerate(done) if call == "os.replace"][-1]
    temporary = done[renamed][1]
    assert os.path.dirname(temporary) == str(tmp_path)
    assert ("os.fsync", temporary) in done[:renamed]
    assert ("os.fsync", str(tmp_path)) in done[renamed:]


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    for name in (".a.json.1234abcd.tmp", ".b.json.1234abcd.tmp", "a.json"):
        (tmp_path / name).write_text("")
    remove_leftovers(tmp_path, "a.json")
    assert sorted(os.listdir(tmp_path)) == [".b.json.1234abcd.tmp", "a.json"]
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("link", [os.link, failing(errno.EPERM)])
def test_exclusive_never_overwrites(tmp_path, monkeypatch, link):
    monkeypatch.setattr(os, "link", link)
    write_atomically(tmp_path / "a", b"first", exclusive=True)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "a", b"second", exclusive=True)
    assert bytes_of(tmp_path) == {"a": b"first"}
    (tmp_path / "b").symlink_to("nowhere")
    with pytest.raises(CalibrateError, match="/b "), new_file(tmp_path / "b") as new:
        new.write_bytes(b"third")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_disk_without_fsync_of_folders_is_written_to(tmp_path, monkeypatch, code):
    """As of some network disks; fsync of a file must succeed."""
    fsync = os.fsync
    fails = failing(code)

    def fsync_of_files(descriptor):
        (fails if stat.S_ISDIR(os.fstat(descriptor).st_mode) else fsync)(descriptor)

    monkeypatch.setattr(os, "fsync", fsync_of_files)
    write_atomically(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(CalibrateError, match=os.strerror(code)):
        write_atomically(tmp_path / "b", b"new")
    assert not (tmp_path / "b").exists()
