"""The store: how references resolve, how versions are saved, and what no crash can do."""

import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import bytes_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from syscalls import Crash, Syscalls, failing

import calibrate
from calibrate.core.rule import RuleForm
from calibrate.report.store_records import audit_store
from calibrate.store.coefficient_file import MAX_FIT_BYTES
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit, dumps
from calibrate.store.loading import read_version
from calibrate.store.references import (
    list_files,
    list_names,
    list_places,
    list_versions,
    published_store,
)
from calibrate.store.saving import save_to_store


def fit(name="made", ceiling=64.0):
    return Fit(
        RuleForm(max_beta=ceiling), (Entry((0.0, 0.0, 0.0, 1.0, 1.0), (0.2, 4.0)),), name=name
    )


def refuses(message, call, *arguments, **options):
    with pytest.raises(calibrate.CoefficientsError, match=message) as caught:
        call(*arguments, **options)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 2_100


def failures(store):
    return [found["error"] for found in audit_store(store) if found["error"]]


def test_versions_count_up_and_the_highest_is_the_default(tmp_path):
    for number in range(1, 12):
        assert save_to_store(fit(ceiling=number + 1.0), tmp_path)[0].version == number
    assert list_versions(tmp_path, "made") == list(range(1, 12))
    assert calibrate.load("made@1", tmp_path).rule.max_beta == 2
    assert calibrate.load("made", tmp_path).path == tmp_path / "made" / "11.json"


def test_unchanged_fit_writes_nothing(tmp_path):
    first, written = save_to_store(fit(), tmp_path)
    before = bytes_of(tmp_path / "made")
    again, again_written = save_to_store(fit(), tmp_path)
    assert (written, again_written, again.path) == (True, False, first.path)
    assert bytes_of(tmp_path / "made") == before


def test_a_file_that_was_copied_into_a_store_counts_as_its_version(tmp_path):
    shutil.copytree(published_store() / "paper", tmp_path / "paper")
    assert save_to_store(fit("paper"), tmp_path)[0].version == 2


def test_nothing_is_written_over_files(tmp_path):
    store = tmp_path / "fits"
    store.mkdir()
    (store / "made").write_text("")
    with pytest.raises(calibrate.CalibrateError, match="made/1.json: Not a directory"):
        save_to_store(fit(), store)
    with pytest.raises(calibrate.CalibrateError, match="made/.lock: "):
        save_to_store(fit(), store / "made")


@pytest.mark.parametrize("store", ["nowhere", __file__])
def test_a_store_that_is_not_a_folder_is_refused(store):
    refuses(re.escape(store), calibrate.load, "paper", store)


WRITER = """
import sys, errno, fcntl, os
from dataclasses import replace
from pathlib import Path
from calibrate.store.fit import identity
from calibrate.store.saving import save_to_store
def no_locks(*_):
    raise OSError(errno.ENOLCK, "No locks available")
if sys.argv[2] == "no locks":
    fcntl.flock = no_locks
for number in range(20):
    made = replace(identity(), source={"seed": 100 * os.getpid() + number})
    print(save_to_store(made, Path(sys.argv[1]))[0].version, flush=True)
"""


@pytest.mark.parametrize("locks", ["locks", "no locks"])
def test_processes_at_once_get_different_versions(tmp_path, locks):
    """Exclusive names are enough, and nobody removes another's temporary file."""
    command = [sys.executable, "-c", WRITER, str(tmp_path), locks]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    taken = [int(line) for process in processes for line in process.communicate()[0].split()]
    assert len(set(taken)) == 60
    assert sorted(taken) == list_versions(tmp_path, "identity")
    assert failures(tmp_path) == []


def test_without_locks_the_exclusive_name_keeps_writers_apart(tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", failing(errno.EOPNOTSUPP))
    save_to_store(fit(), tmp_path)
    link = os.link

    def late(source, target):
        """Another writer takes the number between our look at the folder and our file."""
        if Path(target).name == "2.json":
            Path(target).write_text(dumps(replace(fit(ceiling=5.0), version=2)))
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    assert save_to_store(fit(ceiling=3.0), tmp_path)[0].version == 3
    assert calibrate.load("made@2", tmp_path).rule.max_beta == 5
    assert failures(tmp_path) == []


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_hard_links_files_are_saved_all_the_same(tmp_path, monkeypatch, code):
    monkeypatch.setattr(os, "link", failing(code))
    taken = [
        save_to_store(fit(ceiling=ceiling), tmp_path)[0].version for ceiling in (2.0, 3.0, 4.0)
    ]
    assert taken == [1, 2, 3]
    assert failures(tmp_path) == []
    assert not list(tmp_path.glob("made/.*"))


def test_first_store_that_holds_the_name_decides(tmp_path, monkeypatch):
    given, named, here = (tmp_path / d for d in ("given", "named", "here/fits"))
    given.mkdir()
    monkeypatch.setenv("CALIBRATE_FITS", str(named))
    here.parent.mkdir()
    monkeypatch.chdir(here.parent)
    assert [folder.resolve() for _, folder in list_places(given)] == [
        given,
        named,
        here,
        published_store(),
    ]
    assert calibrate.load("paper").path.parent == published_store() / "paper"
    for ceiling, store in ((4.0, here), (3.0, named), (2.0, given)):
        save_to_store(fit(ceiling=ceiling), store)
        argument = given if store == given else None
        assert calibrate.load("made", argument).rule.max_beta == ceiling


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nothing", "'nothing' .*here|'nothing' .*fits"),
        ("paper@99", "'paper@99' .*paper; .*: paper@1"),
        ("paper@stable", "^'paper@stable' .*NAME@VERSION"),
        ("../paper", r"^\.\./paper "),
        (None, "^None "),
        (b"paper", "^b'paper' "),
        *(
            (f"paper{which}", f"^'paper{which}' .*NAME@VERSION")
            for which in ("@", "@01", "@1@1", "S")
        ),
        ("nowhere/fit.json", "^nowhere/fit.json "),
        ("\x1b[2J/a.json", r"^\\x1b\[2J/a\.json "),
        ("x" * 10**5, "^'xxx"),
    ],
)
def test_a_reference_to_nothing_raises(reference, message):
    """Trap 5: a fit that is missing never acts as beta = 1."""
    refuses(message, calibrate.load, reference)


def test_a_file_is_loaded_under_its_own_version_and_no_bad_one_stands_in_the_way(tmp_path):
    path = save_to_store(fit(), tmp_path)[0].path
    assert calibrate.load(path) == calibrate.load(str(path)) == fit()
    path.rename(path.with_name("7.json"))
    refuses(r"7\.json .*made@1", calibrate.load, "made@7", tmp_path)
    path.with_name("7.json").write_text("{}")
    assert save_to_store(fit(), tmp_path)[0].version == 8


def test_a_fit_that_cannot_be_loaded_is_not_saved(tmp_path):
    notes = {"x-notes": "x" * MAX_FIT_BYTES}
    entries = (Entry((0.0, 0.0, 0.0, 0.0, 1.5), (0.5, 3.0)),)
    refuses(
        "longer than", save_to_store, Fit(RuleForm(), entries, name="big", extra=notes), tmp_path
    )
    odd = Fit(RuleForm(), entries, name="odd", source={"head": "two\nlines"})
    refuses(r"source\.head", save_to_store, odd, tmp_path)
    alien = Fit(RuleForm(), entries, name="alien", evidence={"inputs": {1, 2}})
    refuses("^alien@1 .*JSON", save_to_store, alien, tmp_path)
    assert list_names(tmp_path) == []


BAD_NAMES = ["x.json", "../x", "", "Upper", ".hidden", "a" * 65, "a/b", None, 3]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_stay_in_the_store(tmp_path, name):
    refuses(f"^{re.escape(repr(name))} ", save_to_store, fit(name), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_fit_for_another_head_or_none_is_refused():
    ours, other = calibrate.load("max-retrieval").fingerprint, "sha256:" + "0" * 64
    assert calibrate.load("max-retrieval", fingerprint=ours).fingerprint == ours
    made_for = f"'max-retrieval-0' .*{other};"
    refuses(made_for, calibrate.load, "max-retrieval", fingerprint=other)
    refuses("'none in particular' .*sha256:0", calibrate.load, "paper", fingerprint=other)


def saving_calls():
    with tempfile.TemporaryDirectory() as folder:
        save_to_store(fit(), Path(folder))
        with Syscalls() as syscalls:
            save_to_store(fit(ceiling=3.0), Path(folder))
    return list(enumerate(syscalls.calls))


CALLS = saving_calls()


@pytest.mark.parametrize(("at", "name"), CALLS, ids=[f"{i}-{name}" for i, name in CALLS])
@pytest.mark.parametrize("empty", [False, True], ids=["second", "first"])
def test_a_disk_that_is_full_at_any_call(tmp_path, at, name, empty):
    """One line, nothing torn, nothing lost, and the next attempt succeeds."""
    store = tmp_path / "fits"
    if not empty:
        save_to_store(fit(), store)
    with Syscalls(at, errno.ENOSPC) as syscalls:
        try:
            number = save_to_store(fit(ceiling=3.0), store)[0].version
        except calibrate.CalibrateError as error:
            assert os.strerror(errno.ENOSPC) in str(error)  # noqa: PT017
            assert "\n" not in str(error)  # noqa: PT017
            number = None
    assert syscalls.reached or empty
    present = list_versions(store, "made")
    assert set(present) <= {1, 2}
    assert number is None or present[-1] == number
    assert failures(store) == []
    again, _ = save_to_store(fit(ceiling=4.0), store)
    assert again.version == max([0, *present]) + 1
    assert not list(store.glob("made/.*.tmp"))


class StoreMachine(RuleBasedStateMachine):
    """Save, delete, each complete; a save may die between any two system calls."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.store = Path(self.folder.name) / "fits"
        self.files = {}  # version -> max_beta
        self.ceiling = 1.0

    def teardown(self):
        self.folder.cleanup()

    @rule(at=st.none() | st.integers(0, 25))
    def save(self, at):
        self.ceiling += 1
        try:
            with Syscalls(at):
                save_to_store(fit(ceiling=self.ceiling), self.store)
            done = True
        except Crash:
            done = False
        new = set(list_versions(self.store, "made")) - set(self.files)
        assert len(new) == 1 if done else len(new) <= 1
        for version in new:
            assert version == max([0, *self.files]) + 1
            self.files[version] = self.ceiling

    @precondition(lambda self: self.files)
    @rule(data=st.data())
    def delete(self, data):
        version = data.draw(st.sampled_from(sorted(self.files)))
        (self.store / "made" / f"{version}.json").unlink()
        del self.files[version]

    @invariant()
    def the_store_is_what_was_done(self):
        found = {int(path.stem): path for path in list_files(self.store, "made")}
        assert sorted(self.files) == list(found)
        for version, ceiling in self.files.items():
            assert read_version(found[version]).rule.max_beta == ceiling


@pytest.mark.parametrize(
    ("examples", "steps"), [(12, 20), pytest.param(300, 50, marks=pytest.mark.slow)]
)
def test_the_store_survives_any_history(examples, steps):
    case = StoreMachine.TestCase
    case.settings = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    case("runTest").runTest()
