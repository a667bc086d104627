"""Collecting: rows kept and counted, resumption, limits, and reproducible bytes."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import reference
from conftest import ToyHead, bytes_of, reopen
from fake_progress import Told, stopping_after

import calibrate
from calibrate.errors import CalibrateError, QualityError
from calibrate.rows.collect import collect_from_head
from calibrate.rows.collection import open_collection, shard_name
from calibrate.rows.resume import discard_collection
from calibrate.rows.rows import COUNTS, Rows, examine_rows, hashes, row_bytes
from calibrate.rows.sampling import (
    MANIFEST_BASE,
    MANIFEST_PER_SHARD,
    MANIFEST_PER_SIZE,
    SHARD_OVERHEAD,
)
from calibrate.rows.score import score_head
from calibrate.rows.units import UnitSizes, plan_units, unit_seed
from calibrate.storage.npz import write_arrays

SIZES, SETS = [8, 64, 100], 300
# Several units and pieces of each size, as in large runs.
SMALL = UnitSizes(max_sets=128, items_per_piece=2_500)


def run(folder, head=None, **changes):
    options = {"sizes": SIZES, "sets": SETS, "seed": 0, "keep": "misranked", "unit_sizes": SMALL}
    return collect_from_head(head or ToyHead(), folder=folder, **options | changes)


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
            head.sample(unit_seed("collect", 0, unit), size, unit.sets).logits
            for unit in plan_units(size, SETS, SMALL)
        ]
        np.testing.assert_array_equal(np.concatenate(drawn)[shard.index], shard.logits)


def test_the_configuration_determines_the_bytes(tmp_path):
    run(tmp_path / "one")
    run(tmp_path / "two")
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")
    text = (tmp_path / "one" / "manifest.json").read_text()
    assert str(tmp_path) not in text
    assert json.loads(text)["configuration"] == {
        "head": "toy", "fingerprint": "sha256:toy-0.5", "sizes": SIZES, "sets": SETS, "seed": 0,
        "max_bytes": 10**9,
    }  # fmt: skip
    run(tmp_path / "three", seed=1)
    assert bytes_of(tmp_path / "one") != bytes_of(tmp_path / "three")


def test_collect_and_evaluate_never_share_a_set():
    seeds = {
        unit_seed(stream, seed, unit)
        for stream in ("collect", "evaluate")
        for seed in range(5)
        for size in SIZES
        for unit in plan_units(size, SETS, SMALL)
    }
    assert len(seeds) == 2 * 5 * len(SIZES) * 3
    drawn = []

    class Spy(ToyHead):
        def sample(self, seed, size, count):
            drawn.append((seed, size))
            return super().sample(seed, size, count)

    run(Path("run"), Spy())
    collected = set(drawn)
    drawn.clear()
    score_head(Spy(), SIZES, SETS, 0, {})
    assert (len(collected), len(set(drawn))) == (len(SIZES) * 3, len(SIZES))
    assert collected.isdisjoint(drawn)


def test_an_interrupted_run_resumes_to_the_same_bytes(tmp_path):
    run(tmp_path / "whole")
    head = ToyHead()

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "halves", head, progress=stopping_after(4))
    with pytest.raises(CalibrateError, match="halves"):
        open_collection(tmp_path / "halves")
    (tmp_path / "halves" / ".n00064-unit00001.npz.00000000.tmp").write_bytes(bytes(1_000))
    told = Told()
    run(tmp_path / "halves", head, progress=told)
    assert told.stages == [("collecting", 5, sum(work for work, _ in told.steps))]
    run(tmp_path / "halves", head)  # it is complete
    assert head.attended == len(SIZES) * SETS  # nothing was computed twice
    assert bytes_of(tmp_path / "whole") == bytes_of(tmp_path / "halves")


def test_another_collection_in_the_folder_is_refused_with_the_difference(tmp_path):
    run(tmp_path / "run")
    before = bytes_of(tmp_path / "run")
    for changes, message in (
        ({"sets": 400, "seed": 1}, "sets .*300 .*400 .*; seed .*0 .*1 "),
        ({"head": ToyHead(noise=1.0)}, "fingerprint"),
        ({"keep": "all"}, "keep .*'all'"),
    ):
        with pytest.raises(CalibrateError, match=message):
            run(tmp_path / "run", **changes)
    assert bytes_of(tmp_path / "run") == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("important")
    with pytest.raises(CalibrateError, match="mine"):
        run(tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_a_collection_is_discarded_and_nothing_else(tmp_path):
    folder = tmp_path / "run"
    discard_collection(folder)
    assert not folder.exists()
    run(folder)
    (folder / ".n00064-unit00001.npz.0123abcd.tmp").touch()
    discard_collection(folder)
    assert [path.name for path in folder.iterdir()] == [".lock"]
    for others in ("{", "[1]", '{"format": "web"}', '{"format": "calibrate.anything"}'):
        (folder / "manifest.json").write_text(others)
        with pytest.raises(CalibrateError, match="manifest"):
            discard_collection(folder)
        assert bytes_of(folder).keys() == {".lock", "manifest.json"}


@pytest.mark.parametrize("own", ["thesis.tex", "manifestXjson", "examples.npz", ".passes/x"])
def test_nothing_is_deleted_beside_other_files(tmp_path, own):
    collection = run(tmp_path / "run").folder
    (collection / own).parent.mkdir(exist_ok=True)
    (collection / own).write_text("important")
    os.symlink(collection, tmp_path / "link")
    before = sorted(collection.rglob("*"))
    for folder in (collection, tmp_path / "link"):
        with pytest.raises(CalibrateError, match=Path(own).parts[0]):
            discard_collection(folder)
    reopen(collection)
    run(collection)
    assert sorted(collection.rglob("*")) == before


def test_the_manifest_is_discarded_last(tmp_path, monkeypatch):
    """Until it is, the same command can resume the deletion."""
    folder, unlink, gone = run(tmp_path / "run").folder, os.unlink, []
    monkeypatch.setattr(os, "unlink", lambda path: (unlink(path), gone.append(Path(path).name)))
    discard_collection(folder)
    assert len(gone) > 3
    assert gone[-1] == "manifest.json"


def test_byte_budget_is_kept_by_the_lowest_hashes(tmp_path):
    every = run(tmp_path / "all")
    wholes = [shard for _, shard in every.shards()]

    def measure(done):
        assert sum(map(len, bytes_of(tmp_path / f"{budget}").values())) <= budget

    for budget in (28_000, 35_000, 60_000):
        few = run(tmp_path / f"{budget}", max_bytes=budget, progress=Told(measure))
        measure(None)
        thinned = 0
        for whole, (_, shard) in zip(wholes, few.shards(), strict=True):
            lowest = whole.index[np.argsort(hashes(whole.index))[: len(shard.index)]]
            np.testing.assert_array_equal(np.sort(lowest), shard.index)
            thinned += len(whole.index) - len(shard.index)
        assert thinned > 0
        misranked = [[c["misranked"] for c in x.manifest["sizes"]] for x in (few, every)]
        assert misranked[0] == misranked[1]
    with pytest.raises(CalibrateError, match=r"max_bytes .*\b9000\b.* \d+$"):
        run(tmp_path / "none", max_bytes=9_000)
    assert not (tmp_path / "none").exists()
    chosen = np.argsort(hashes(np.arange(100_000)))[:10_000]
    assert chosen.mean() == pytest.approx(50_000, rel=0.02)  # fair


def three_bad_rows(logits):
    logits[0, 3], logits[1, 5], logits[2, :] = np.nan, np.inf, -np.inf


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (three_bad_rows, {"nan": 4, "inf": 4, "masked_target": 4, "ties": 0}),  # of four units
        (lambda logits: logits.fill(1), {"ties": 2_048, "misranked": 0, "kept": 0}),
        (lambda logits: logits[:, -2:].fill(-np.inf), {"nan": 0, "inf": 0}),
    ],
)
def test_rows_are_counted_by_reason_and_bad_ones_left_out(tmp_path, spoil, expected):
    units = UnitSizes(max_sets=512)
    collection = run(
        tmp_path / "run", ToyHead(spoil=spoil), sizes=[300], sets=2_048, unit_sizes=units
    )
    (counts,) = collection.manifest["sizes"]
    assert {name: counts[name] for name in expected} == expected
    assert (counts["kept"] > 0) == ("kept" not in expected)
    for _, shard in collection.shards():
        assert not (np.isnan(shard.logits) | (shard.logits == np.inf)).any()


def test_too_many_bad_rows_are_exit_3(tmp_path):
    def spoil(logits):
        logits[::10, 0] = np.nan

    with pytest.raises(QualityError, match="900 .* nan"):
        run(tmp_path / "run", ToyHead(spoil=spoil))
    assert QualityError.exit_code == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: "[1]",
        lambda text: text.replace("0.1", "0.0"),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path, damage):
    run(tmp_path / "run")
    path = tmp_path / "run" / "manifest.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(CalibrateError, match=r"manifest\.json"):
        open_collection(tmp_path / "run")


def flip(path):
    data = path.read_bytes()
    path.write_bytes(data[:700] + bytes([data[700] ^ 1]) + data[701:])


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "flipped": flip,
    "lost": lambda path: path.unlink(),
    "of another unit": lambda path: path.write_bytes(
        path.with_name(shard_name(64, 0)).read_bytes()
    ),
}


def exchange(path):
    """Another size in place of the shard's own."""
    path.write_bytes(path.with_name(shard_name(8, 0)).read_bytes())


def other_arrays(path):
    write_arrays(path, {"foo": np.zeros(3)})


@pytest.mark.parametrize("damage", [*list(DAMAGES.values())[:2], exchange, other_arrays])
def test_a_damaged_shard_of_an_unfinished_collection_is_made_again(tmp_path, damage):
    folder = tmp_path / "run"
    run(folder)
    before = bytes_of(folder)
    reopen(folder)
    path = folder / shard_name(64, 1)
    damage(path)
    with pytest.warns(UserWarning, match=path.name):
        run(folder)
    assert bytes_of(folder) == before


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_of_a_collection_is_refused(tmp_path, damage):
    folder = tmp_path / "run"
    run(folder)
    path = folder / shard_name(64, 1)
    DAMAGES[damage](path)
    with pytest.raises(CalibrateError, match=path.name):
        list(run(folder).shards())


def test_file_overheads_are_upper_bounds(tmp_path):
    collection = run(tmp_path / "run", sizes=[8, 9, 10, 16384], sets=200)
    for entry in collection.manifest["shards"]:
        rows = entry["kept"] * row_bytes(entry["size"])
        assert entry["bytes"] - rows <= SHARD_OVERHEAD
    manifest = (tmp_path / "run" / "manifest.json").stat().st_size
    bound = MANIFEST_BASE + MANIFEST_PER_SIZE * 4
    assert manifest <= bound + MANIFEST_PER_SHARD * len(collection.manifest["shards"])


@pytest.mark.parametrize("of_unit", [256, 64])
def test_all_good_rows_are_kept_up_to_a_share_of_each_size(of_unit, tmp_path):
    draws = {"sizes": [16, 64], "sets": 3_000, "unit_sizes": UnitSizes(max_sets=of_unit)}
    some = run(tmp_path / "some", **draws)
    every = run(tmp_path / "every", **draws, keep="all")
    for all_of, few in zip(every.manifest["sizes"], some.manifest["sizes"], strict=True):
        assert all_of["kept"] == 2_048
        assert all_of["misranked"] == few["misranked"] == few["kept"]
    ranks = [
        shard.logits.max(axis=1) > np.take_along_axis(shard.logits, shard.target[:, None], 1)[:, 0]
        for _, shard in every.shards()
    ]
    of_all = sum(s["misranked"] for s in some.manifest["sizes"]) / 6_000
    assert np.mean(np.concatenate(ranks)) == pytest.approx(of_all, abs=0.1)


def test_a_head_may_return_tensors():
    torch = pytest.importorskip("torch", reason="needs the extra torch")

    class Tensors(ToyHead):
        def attend(self, batch):
            return batch._replace(logits=torch.tensor(super().attend(batch).logits))

    found, expected = (calibrate.collect(head, [16], 20) for head in (Tensors(), ToyHead()))
    assert found.digest == expected.digest


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("target", np.arange(20) + 4, r"'toy': sample gave a target of 16\b"),
        ("target", np.zeros(19, int), r"'toy': sample gave a target of int64\(19,\)"),
        ("logits", np.zeros((20, 8)), r"'toy': attend gave \.logits float64\(20, 8\)"),
        ("logits", np.zeros((20, 16), int), r"'toy': attend gave \.logits int64\(20, 16\)"),
    ],
)
def test_what_a_head_returns_is_checked(column, value, message):
    class Broken(ToyHead):
        def sample(self, *draws):
            return super().sample(*draws)._replace(**{column: value})

    with pytest.raises(CalibrateError, match=message):
        calibrate.collect(Broken(), [16], 20)


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
    assert sum(map(len, bytes_of(tmp_path / "again").values())) <= 30_000
    assert again.manifest["sizes"][1]["kept"] < collection.manifest["sizes"][1]["kept"]
    head = SeveralTargets(spoil=lambda logits: None)  # a row of each unit marks no target
    marks_none = run(tmp_path / "bad", head, sizes=[16], sets=512)
    assert marks_none.manifest["sizes"][0]["masked_target"] == 4


def test_ties_are_with_items_that_are_not_targets():
    """Two targets at the top are no tie, and neither is a misranked row."""
    logits = [[2, 1, 2, 0], [2, 2, 2, 0], [2, 2, 1, 0], [2, 1, 1, 0], [1, 0, 2, 2]]
    n_targets_of_rows = [2, 2, 2, 3, 2]  # the first items of each row
    for z, n_targets, ties in zip(logits, n_targets_of_rows, [1, 1, 0, 0, 0], strict=True):
        target = np.arange(4)[None] < n_targets
        *_, counts = examine_rows(Rows(np.array([z], np.float32), target))
        assert dict(zip(COUNTS, counts.tolist(), strict=True))["ties"] == ties, z
