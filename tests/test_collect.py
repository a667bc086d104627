"""Collect: what is kept and counted, resumed, bounded, and reproducible."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from conftest import ToyHead

from calibrate.errors import CalibrateError, QualityError
from calibrate.files import rows as files
from calibrate.files.collection import discard_collection, open_collection
from calibrate.files.manifest import PARTIAL, manifest_text
from calibrate.files.rows import (
    SHARD_OVERHEAD,
    RowCollection,
    row_bytes,
    shard_name,
)
from calibrate.maths import reference
from calibrate.rows import collect as pipeline
from calibrate.rows import work_units
from calibrate.rows.collect import collect

SIZES, SETS = [8, 64, 100], 300


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """Several units and pieces per size, as in large runs."""
    monkeypatch.setattr(work_units, "SETS_PER_UNIT", (1, 128))
    monkeypatch.setattr(work_units, "ITEMS_PER_PIECE", 2_500)


def run(folder, head=None, **changes):
    options = {"sizes": SIZES, "sets": SETS, "seed": 0, "keep": "misranked"} | changes
    return collect(head or ToyHead(), folder=folder, **options)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_keeps_exactly_the_misranked_rows(tmp_path):
    collection = run(tmp_path / "run")
    seen = dict.fromkeys(SIZES, 0)
    for size, shard in collection.shards():
        rows = np.arange(len(shard.target))
        at_target = shard.logits[rows, shard.target]
        assert (shard.logits.max(axis=1) > at_target).all()
        np.testing.assert_allclose(shard.entropy, reference.entropy(shard.logits), atol=1e-5)
        assert (np.diff(shard.index) > 0).all()
        seen[size] += len(rows)
    for counts in collection.manifest["sizes"]:
        assert counts["rows"] == SETS
        assert counts["misranked"] == counts["kept"] == seen[counts["size"]] > 0


def test_every_row_is_the_set_that_its_index_says(tmp_path):
    head = ToyHead()
    for size, shard in run(tmp_path / "run", head).shards():
        drawn = [
            head.sample(work_units.unit_seed("collect", 0, unit), size, unit.sets).logits
            for unit in work_units.plan_units(size, SETS)
        ]
        np.testing.assert_array_equal(np.concatenate(drawn)[shard.index], shard.logits)


def test_same_configuration_same_bytes(tmp_path):
    run(tmp_path / "one")
    run(tmp_path / "two")
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    run(tmp_path / "three", seed=1)
    assert files_of(tmp_path / "one") != files_of(tmp_path / "three")


def test_manifest_says_what_not_where_or_when(tmp_path):
    run(tmp_path / "run")
    text = (tmp_path / "run" / "manifest.json").read_text()
    assert str(tmp_path) not in text
    manifest = json.loads(text)
    assert manifest["configuration"] == {
        "head": "toy", "fingerprint": "sha256:toy-0.5", "sizes": SIZES, "sets": SETS, "seed": 0,
        "max_bytes": 10**9,
    }  # fmt: skip


def test_collect_and_evaluate_never_share_a_set():
    unit = work_units.plan_units(64, SETS)[0]
    assert work_units.unit_seed("collect", 0, unit) != work_units.unit_seed("evaluate", 0, unit)
    seeds = {
        work_units.unit_seed(stream, seed, unit)
        for stream in ("collect", "evaluate")
        for seed in range(5)
        for size in SIZES
        for unit in work_units.plan_units(size, SETS)
    }
    assert len(seeds) == 2 * 5 * len(SIZES) * 3


def test_an_interrupted_run_carries_on_to_the_same_bytes(tmp_path):
    run(tmp_path / "whole")
    head = ToyHead()

    def interrupt(progress):
        if progress.finished == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "halves", head, report=interrupt)
    with pytest.raises(CalibrateError, match="is unfinished; run the same"):
        open_collection(tmp_path / "halves")
    attended = head.attended
    resumed = []
    run(tmp_path / "halves", head, report=lambda p: resumed.append(p.resumed))
    assert resumed == [True] * 4 + [False] * 5
    assert head.attended == len(SIZES) * SETS  # nothing was computed twice
    assert attended > 0
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "halves")


def test_a_complete_run_is_not_run_again(tmp_path):
    run(tmp_path / "run")
    head = ToyHead()
    run(tmp_path / "run", head)
    assert head.attended == 0


def test_another_configuration_is_refused_with_the_difference(tmp_path):
    run(tmp_path / "run")
    before = files_of(tmp_path / "run")
    with pytest.raises(
        CalibrateError, match=r"sets is 300 in the folder and 400 in this call; seed is 0 in"
    ):
        run(tmp_path / "run", sets=400, seed=1)
    with pytest.raises(CalibrateError, match="head toy has changed since .*run was made"):
        run(tmp_path / "run", ToyHead(noise=1.0))
    assert files_of(tmp_path / "run") == before


def test_a_folder_of_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("important")
    with pytest.raises(
        CalibrateError, match="is not a collection and not empty; choose a new folder"
    ):
        run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_collection_is_discarded_and_nothing_else(tmp_path):
    folder = tmp_path / "run"
    discard_collection(folder)
    assert not folder.exists()
    run(folder)
    (folder / "scores-of-fits").mkdir()
    discard_collection(folder)
    assert [path.name for path in folder.iterdir()] == [".lock"]
    assert run(folder, seed=4).manifest["configuration"]["seed"] == 4
    for others in ("{", "[1]", '{"format": "web"}', '{"format": 1}'):
        (folder / "manifest.json").write_text(others)
        before = files_of(folder)
        with pytest.raises(CalibrateError, match="is not the manifest of a collection; choose"):
            discard_collection(folder)
        assert files_of(folder) == before


def test_a_collection_half_discarded_is_discarded_by_the_next(tmp_path, monkeypatch):
    run(tmp_path)
    unlink = Path.unlink

    def killed(path):
        if path.name == "manifest.json":
            raise KeyboardInterrupt
        unlink(path)

    monkeypatch.setattr(Path, "unlink", killed)
    with pytest.raises(KeyboardInterrupt):
        discard_collection(tmp_path)
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "manifest.json"]
    discard_collection(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("budget", [28_000, 35_000, 60_000])
def test_byte_budget_is_kept_by_the_lowest_hashes(tmp_path, budget):
    run(tmp_path / "all")
    largest = 0

    def measure(progress):
        nonlocal largest
        largest = max(largest, sum(map(len, files_of(tmp_path / "few").values())))

    few = run(tmp_path / "few", max_bytes=budget, report=measure)
    total = sum(map(len, files_of(tmp_path / "few").values()))
    assert max(total, largest) <= budget
    every = dict(_shards_by_name(open_collection(tmp_path / "all")))
    thinned = 0
    for name, shard in _shards_by_name(few):
        full = every[name]
        chosen = pipeline._lowest_hashes(full.index, len(shard.index))
        np.testing.assert_array_equal(full.index[chosen], shard.index)
        thinned += len(full.index) - len(shard.index)
    assert thinned > 0
    assert [c["misranked"] for c in few.manifest["sizes"]] == [
        c["misranked"] for c in open_collection(tmp_path / "all").manifest["sizes"]
    ]


def _shards_by_name(collection):
    for entry, (_, shard) in zip(collection.manifest["shards"], collection.shards(), strict=True):
        yield (entry["size"], entry["unit"]), shard


def test_an_impossible_budget_is_refused_with_the_least_possible(tmp_path):
    with pytest.raises(CalibrateError, match="too few for one row of each unit; give at least"):
        run(tmp_path / "run", max_bytes=9_000)
    assert not (tmp_path / "run").exists()


def test_hashes_choose_fairly():
    index = np.arange(100_000)
    chosen = pipeline._lowest_hashes(index, 10_000)
    assert len(chosen) == 10_000
    assert chosen.mean() == pytest.approx(50_000, rel=0.02)
    np.testing.assert_array_equal(
        np.sort(index[::-1][pipeline._lowest_hashes(index[::-1], 10_000)]), chosen
    )


def test_bad_rows_are_counted_by_reason_and_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(work_units, "SETS_PER_UNIT", (1, 512))

    def spoil(logits):
        if logits.shape[1] == 64:
            logits[0, 3] = np.nan
            logits[1, 5] = np.inf
            logits[2, :] = -np.inf

    head = ToyHead(spoil=spoil)
    collection = run(tmp_path / "run", head, sizes=[64], sets=1_024)
    (counts,) = collection.manifest["sizes"]
    n_units = len(work_units.plan_units(64, 1_024))
    assert (counts["nan"], counts["inf"], counts["masked_target"]) == (n_units,) * 3
    assert all(np.isfinite(shard.logits).all() for _, shard in collection.shards())


def test_too_many_bad_rows_are_exit_3(tmp_path):
    def spoil(logits):
        logits[::10, 0] = np.nan

    with pytest.raises(QualityError, match=r"of 900 rows are bad \(.* nan\), more than 1%") as e:
        run(tmp_path / "run", ToyHead(spoil=spoil))
    assert e.value.exit_code == 3


def test_ties_are_not_misranked(tmp_path):
    def tie(logits):
        logits[:] = 1.0

    collection = run(tmp_path / "run", ToyHead(spoil=tie), sizes=[8])
    (counts,) = collection.manifest["sizes"]
    assert (counts["ties"], counts["misranked"], counts["kept"]) == (SETS, 0, 0)


def test_masked_items_may_be_minus_infinity(tmp_path):
    def mask(logits):
        logits[:, -2:] = -np.inf

    collection = run(tmp_path / "run", ToyHead(spoil=mask), sizes=[300], sets=500)
    (counts,) = collection.manifest["sizes"]
    assert counts["nan"] == counts["inf"] == 0
    assert counts["kept"] > 0


def reopen(folder):
    """Makes a complete collection an unfinished one, all of whose shards are there."""
    configuration = open_collection(folder).configuration
    text = manifest_text(RowCollection, configuration, None, PARTIAL)
    (folder / "manifest.json").write_text(text)


@pytest.mark.parametrize("other", [(64, 0), (8, 1), (8, 2)])
def test_a_foreign_shard_in_an_unfinished_run_is_collected_again(tmp_path, other):
    """Of another size, of other sets of the same size, of fewer of them."""
    folder = tmp_path / "run"
    run(folder)
    before = files_of(folder)
    reopen(folder)
    (folder / shard_name(8, 0)).write_bytes((folder / shard_name(*other)).read_bytes())
    with pytest.warns(UserWarning, match="n00008-unit00000.npz is damaged; it is collected again"):
        run(folder)
    assert files_of(folder) == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: "{}",
        lambda text: "[1]",
        lambda text: '{"format": "x"}',
        lambda text: "\x00",
        lambda text: text.replace('"shards": [', '"shards": [1,'),
        lambda text: text.replace('"sizes"', '"dimensions"'),
        lambda text: text.replace('"kept"', '"held"'),
        lambda text: text.replace('"unit": 0', '"unit": "0"'),
        lambda text: text.replace('"unit": 1', '"unit": 0'),
        lambda text: text.replace('"complete"', '"finished"'),
        lambda text: text.replace('"status"', '"status": "partial", "status"'),
        lambda text: text.replace('"status"', '"x-more": NaN, "status"'),
        lambda text: text.replace('"seed": 0', '"seed": 0.5'),
        lambda text: text.replace('"sets": 300', '"sets": -300'),
        lambda text: text.replace('"rows": 300', '"rows": 3'),
        lambda text: text.replace('"rows": 300', '"rows": 1e999'),
        lambda text: text.replace('"rows": 300', f'"rows": {10**30}'),
        lambda text: text.replace('"rows": 300', f'"rows": {"9" * 5_000}'),
        lambda text: text.replace('"kept": ', '"kept": 9'),
        lambda text: text.replace('"bytes": ', f'"bytes": {10**9}'),
        lambda text: text.replace('"size": 8,', '"size": 9,'),
        lambda text: text.replace('"size": 8,', f'"size": {1 << 40},').replace(
            "\n   8,", f"\n   {1 << 40},"
        ),
        lambda text: text.replace("sha256:", "md5:"),
        lambda text: text.replace('"toy"', "7"),
        lambda text: "[" * 100_000,
    ],
)
def test_a_damaged_manifest_is_named(tmp_path, damage):
    run(tmp_path / "run")
    path = tmp_path / "run" / "manifest.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(CalibrateError, match=r"manifest\.json is not a manifest"):
        open_collection(tmp_path / "run")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (64, r"target of 64, which is not a position in \[0, 64\)"),
        (-1, "target of -1"),
        (0.5, "float64"),
    ],
)
def test_a_head_with_impossible_targets_is_refused(tmp_path, target, message):
    head = ToyHead()
    sample = head.sample
    head.sample = lambda *a: sample(*a)._replace(target=np.full(a[2], target))
    with pytest.raises(CalibrateError, match=message):
        run(tmp_path / "run", head, sizes=[64])


def test_a_batch_that_is_no_pytree_of_rows_is_refused(tmp_path):
    class Plain:
        target = np.zeros(64, np.int32)

    head = ToyHead()
    head.sample = lambda *a: Plain()
    with pytest.raises(CalibrateError, match="sample gave a Plain whose leaves are not 64 rows"):
        run(tmp_path / "run", head, sizes=[64], sets=64)


def state(folder):
    """What changes if a file is written again, even with the same bytes."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def exchange(path):
    """A sound shard, of a collection with another seed."""
    other = path.parent.with_name("other")
    run(other, seed=1)
    path.write_bytes((other / path.name).read_bytes())


DAMAGES = {
    "lost": (lambda path: path.unlink(), "missing"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-100]), "damaged"),
    "emptied": (lambda path: path.write_bytes(b""), "damaged"),
    "zeroed": (lambda path: path.write_bytes(bytes(path.stat().st_size)), "damaged"),
    "flipped": (lambda path: flip(path, 700), "damaged"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"0"), "damaged"),
    "exchanged": (exchange, "damaged"),
    "vast": (lambda path: os.truncate(path, 1 << 40), "damaged"),  # and sparse
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "damaged"),
    "endless": (lambda path: (path.unlink(), path.symlink_to("/dev/zero")), "damaged"),
}


def flip(path, at):
    data = path.read_bytes()
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


@pytest.mark.parametrize(
    ("damage", "complete"),
    [
        *((d, True) for d in DAMAGES),
        *((d, False) for d in sorted({*DAMAGES} - {"lost", "exchanged"})),
    ],
)
def test_a_damaged_shard_is_collected_again_and_no_other(tmp_path, damage, complete):
    folder = tmp_path / "run"
    run(folder)
    before = files_of(folder)
    if not complete:
        reopen(folder)
    untouched, path = state(folder), folder / shard_name(64, 1)
    inflict, word = DAMAGES[damage]
    inflict(path)
    if complete:
        with pytest.raises(CalibrateError, match=path.name):
            list(open_collection(folder).shards())
    resumed = []
    with pytest.warns(UserWarning, match=f"{path.name} is {word}; it is collected again"):
        run(str(folder), report=lambda p: resumed.append(p.resumed))
    assert resumed.count(False) == 1
    assert resumed.count(True) == (0 if complete else 8)
    assert files_of(folder) == before
    after = state(folder)
    changed = {name for name in after if after[name] != untouched[name]}
    assert changed == {path.name} | ({"manifest.json"} if not complete else set())


@pytest.mark.filterwarnings("ignore:.*it is collected again")
@pytest.mark.parametrize("begin", [lambda folder: None, lambda folder: reopen(folder)])
def test_a_folder_in_the_place_of_a_shard_is_named_and_stays(tmp_path, begin):
    folder = tmp_path / "run"
    run(folder)
    begin(folder)
    path = folder / shard_name(64, 1)
    path.unlink()
    path.mkdir()
    with pytest.raises(CalibrateError, match=r"cannot write .*n00064-unit00001\.npz: Is a direc"):
        run(folder)
    path.rmdir()
    run(folder)


def test_repair_does_not_bless_other_bytes_than_are_listed(tmp_path):
    """As on another machine; or it is the manifest that was changed."""
    folder = tmp_path / "run"
    run(folder)
    manifest = folder / "manifest.json"
    digest = json.loads(manifest.read_text())["shards"][3]["sha256"]
    manifest.write_text(manifest.read_text().replace(digest, "sha256:" + "0" * 64))
    before = state(folder)
    with (
        pytest.warns(UserWarning, match="n00064-unit00000.npz is damaged"),
        pytest.raises(CalibrateError, match="cannot be repaired: made again, it has another"),
    ):
        run(folder)
    assert state(folder) == before


def test_a_manifest_that_forgets_a_unit_is_refused(tmp_path):
    folder = tmp_path / "run"
    run(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    lost = manifest["shards"].pop()
    manifest["sizes"][-1]["kept"] -= lost["kept"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CalibrateError, match="does not list the shards of its configuration"):
        run(folder)


def test_a_killed_attempt_is_swept_when_the_run_resumes(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".n00064-unit00001.npz.00000000.tmp").write_bytes(bytes(1_000))
    run(folder)
    assert not list(folder.glob(".*.tmp"))


def test_file_overheads_are_upper_bounds(tmp_path):
    """The byte budget counts on them."""
    collection = run(tmp_path / "run", sizes=[8, 9, 10, 16384], sets=200)
    for entry in collection.manifest["shards"]:
        rows = entry["kept"] * row_bytes(entry["size"])
        assert entry["bytes"] - rows <= SHARD_OVERHEAD
    manifest = (tmp_path / "run" / "manifest.json").stat().st_size
    bound = files.MANIFEST_BASE + files.MANIFEST_PER_SIZE * 4
    assert manifest <= bound + files.MANIFEST_PER_SHARD * len(collection.manifest["shards"])


def test_all_good_rows_are_kept_up_to_a_share_of_each_size(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "MOST_KEPT_OF_ALL", 100)
    monkeypatch.setattr(work_units, "SETS_PER_UNIT", (1, 256))
    some = run(tmp_path / "some", sizes=[16, 64], sets=1_000)
    every = run(tmp_path / "every", sizes=[16, 64], sets=1_000, keep="all")
    for all_of, few in zip(every.manifest["sizes"], some.manifest["sizes"], strict=True):
        assert all_of["kept"] == 100
        assert all_of["misranked"] == few["misranked"] == few["kept"]
    ranks = [
        shard.logits.max(axis=1) > np.take_along_axis(shard.logits, shard.target[:, None], 1)[:, 0]
        for _, shard in every.shards()
    ]
    share = np.mean(np.concatenate(ranks))
    assert share == pytest.approx(
        sum(s["misranked"] for s in some.manifest["sizes"]) / 2_000, abs=0.1
    )
    with pytest.raises(
        CalibrateError, match="keep is 'all' in the folder and 'misranked' in this call"
    ):
        run(tmp_path / "every", sizes=[16, 64], sets=1_000)
    with pytest.raises(
        CalibrateError, match="keep is 'misranked' in the folder and 'all' in this call"
    ):
        run(tmp_path / "some", sizes=[16, 64], sets=1_000, keep="all")


class SeveralTargets(ToyHead):
    """Either of the two items with the highest values may win."""

    def sample(self, seed, size, count):
        batch = super().sample(seed, size, count)
        rng = np.random.default_rng(seed)
        value = rng.uniform(0, 6, (count, size))
        target = value >= np.sort(value, axis=1)[:, -2:-1]
        if self.spoil:
            target[3] = False
        return batch._replace(target=target)


def test_sets_of_targets(tmp_path):
    collection = run(tmp_path / "run", SeveralTargets(), sizes=[16, 64], sets=512)
    one = run(tmp_path / "one", sizes=[16, 64], sets=512)
    for (_, shard), (_, narrow) in zip(collection.shards(), one.shards(), strict=True):
        assert shard.target.dtype == bool
        assert (shard.target.sum(axis=1) == 2).all()
        best = np.where(shard.target, shard.logits, -np.inf).max(axis=1)
        assert (shard.logits.max(axis=1) > best).all()
        assert set(shard.index) < set(narrow.index)  # two are easier to rank first than one
    again = run(tmp_path / "again", SeveralTargets(), sizes=[16, 64], sets=512, max_bytes=30_000)
    assert sum(map(len, files_of(tmp_path / "again").values())) <= 30_000
    assert again.manifest["sizes"][1]["kept"] < collection.manifest["sizes"][1]["kept"]


def test_a_row_that_marks_no_target_is_bad(tmp_path):
    head = SeveralTargets(spoil=lambda logits: None)
    collection = run(tmp_path / "run", head, sizes=[16], sets=512)
    assert collection.manifest["sizes"][0]["masked_target"] == 4  # one of each unit


def test_a_tie_is_with_an_item_that_is_no_target():
    """Among several targets, too; two targets at the top are no tie."""
    cases = {
        "tie with a target below the other": ([2, 1, 2, 0], [1, 1, 0, 0], 1),
        "tie with both targets": ([2, 2, 2, 0], [1, 1, 0, 0], 1),
        "two targets at the top": ([2, 2, 1, 0], [1, 1, 0, 0], 0),
        "targets below the other": ([2, 1, 1, 0], [1, 1, 1, 0], 0),
        "misranked": ([1, 0, 2, 2], [1, 1, 0, 0], 0),
    }
    for name, (logits, target, ties) in cases.items():
        *_, counts = pipeline.examine(np.array([logits], np.float32), np.array([target], bool))
        assert dict(zip(files.COUNTS, counts.tolist(), strict=True))["ties"] == ties, name
