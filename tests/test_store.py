"""The store: how references resolve, and how versions are published."""

import threading

import pytest

import calibrate
from calibrate.files.coefficient_file import dumps
from calibrate.files.store import publish, published_store, stores, versions


def test_versions_count_up_and_the_highest_is_the_default(tmp_path, make_fit):
    for ceiling in (2.0, 3.0):
        publish(make_fit(max_beta=ceiling), tmp_path)
    assert versions(tmp_path, "made") == [1, 2]
    assert calibrate.load("made", tmp_path).rule.max_beta == 3
    assert calibrate.load("made@1", tmp_path).rule.max_beta == 2
    assert calibrate.load("made", tmp_path).path == tmp_path / "made" / "2.json"


def test_unchanged_fit_writes_nothing(tmp_path, make_fit):
    first, written = publish(make_fit(), tmp_path)
    assert written
    again, written = publish(make_fit(), tmp_path, unchanged=lambda newest, new: newest == new)
    assert not written
    assert again.path == first.path
    assert versions(tmp_path, "made") == [1]


def test_writers_at_once_get_different_versions(tmp_path, make_fit):
    taken = []
    threads = [
        threading.Thread(target=lambda: taken.append(publish(make_fit(), tmp_path)[0].version))
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == versions(tmp_path, "made") == list(range(1, 13))
    assert not list(tmp_path.glob("made/.*"))


def test_first_store_that_holds_the_name_decides(tmp_path, make_fit, monkeypatch):
    given, named, here = (tmp_path / d for d in ("given", "named", "here/fits"))
    monkeypatch.setenv("CALIBRATE_FITS", str(named))
    here.parent.mkdir()
    monkeypatch.chdir(here.parent)
    assert [s.resolve() for s in stores(given)] == [given, named, here, published_store()]
    assert calibrate.load("paper").path.parent == published_store() / "paper"
    for ceiling, store in ((4.0, here), (3.0, named), (2.0, given)):
        publish(make_fit(max_beta=ceiling), store)
        argument = given if store == given else None
        assert calibrate.load("made", argument).rule.max_beta == ceiling


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nothing", "no fit is named 'nothing'"),
        ("paper@99", "'paper@99' does not exist .* it has versions 1"),
        ("../paper", "does not exist"),
        ("Paper", "is no reference"),
        ("paper@", "is no reference"),
        ("paper@-1", "is no reference"),
        ("paper@" + "9" * 5_000, "is no reference"),
        ("a\0/b.json", "cannot read"),
        ("nowhere/fit.json", "nowhere/fit.json does not exist"),
    ],
)
def test_what_does_not_resolve_raises(reference, message):
    """Trap 5: a fit that is missing never acts as beta = 1."""
    with pytest.raises(calibrate.CoefficientsError, match=message):
        calibrate.load(reference)


def test_path_loads_as_it_is(tmp_path, make_fit):
    path = tmp_path / "any-name.json"
    path.write_text(dumps(make_fit()))
    assert calibrate.load(path) == calibrate.load(str(path)) == make_fit()


def test_a_file_in_another_files_place_is_refused(tmp_path, make_fit):
    published, _ = publish(make_fit(), tmp_path)
    published.path.rename(published.path.with_name("7.json"))
    with pytest.raises(calibrate.CoefficientsError, match="says that it is made@1"):
        calibrate.load("made@7", tmp_path)


def test_a_file_in_the_place_of_the_folder_is_one_error(tmp_path, make_fit):
    (tmp_path / "made").write_text("")
    with pytest.raises(calibrate.CoefficientsError, match="cannot write"):
        publish(make_fit(), tmp_path)


@pytest.mark.parametrize("name", ["x.json", "../x", "", "Upper", ".hidden", "a" * 65, "a/b"])
def test_names_stay_in_the_store(tmp_path, make_fit, name):
    with pytest.raises(calibrate.CoefficientsError, match="no name for a fit"):
        publish(make_fit(name=name), tmp_path)
    assert not list(tmp_path.iterdir())
