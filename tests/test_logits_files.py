"""Logits on disk: set sizes, checks, and the collection that is made of them."""

import os
from pathlib import Path

import numpy as np
import pytest
import reference
from commands import call

import calibrate
from calibrate.errors import CalibrateError, QualityError
from calibrate.fitting.fit_rule import fit_rule
from calibrate.fitting.options import FitOptions
from calibrate.rows.collect import collect_arrays
from calibrate.rows.collection import open_collection
from calibrate.rows.logits_files import Arrays
from calibrate.rows.solve import solve_collection


def scores(rows=300, n=40, seed=0):
    rng = np.random.default_rng(seed)
    value = rng.uniform(0, 6, (rows, n))
    return value + 0.7 * rng.standard_normal(value.shape), value.argmax(axis=1)


def save(path, **arrays):
    path.parent.mkdir(exist_ok=True)
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("masked_by", ["mask", "-inf", "finfo.min", "one mask for all"])
@pytest.mark.parametrize("several", [False, True])
def test_masked_items_are_left_out_and_targets_move_along(masked_by, several, here):
    rng = np.random.default_rng(1)
    logits, target = scores()
    real = rng.random((300, 40)) < rng.uniform(0.2, 1, (300, 1))
    if masked_by == "one mask for all":
        real = np.broadcast_to(rng.random(40) < 0.7, logits.shape)
    else:
        real[np.arange(300), target] = True
    targets = logits > 4 if several else target
    given = {"logits": logits, "target": targets}
    fill = {"-inf": -np.inf, "finfo.min": np.finfo(float).min}.get(masked_by)
    if fill is None:
        given["mask"] = real[0] if masked_by == "one mask for all" else real
    else:
        given["logits"] = np.where(real, logits, fill)
    arrays = Arrays.read(save(here / "mine.npz", **given))
    n_real = real.sum(axis=1)
    bins = 2 ** np.ceil(np.log2(np.maximum(n_real, 2)))
    assert sum(arrays.count(size) for size in arrays.sizes) == 300
    for size in arrays.sizes:
        rows, mine = arrays.rows(size, 0, 300), np.flatnonzero(bins == 2 ** np.ceil(np.log2(size)))
        assert size == max(2, n_real[mine].max())
        for i, z, t in zip(mine, rows.logits, rows.target, strict=True):
            if not several and not real[i, target[i]]:
                assert z[t] == -np.inf  # counted as bad
                continue
            np.testing.assert_array_equal(z[np.isfinite(z)], logits[i, real[i]].astype(np.float32))
            if several:
                np.testing.assert_array_equal(t[: n_real[i]], targets[i, real[i]])
                assert not t[n_real[i] :].any()
            else:
                assert z[t] == np.float32(logits[i, target[i]])


def test_a_folder_of_files_of_several_lengths(here):
    folder = here / "logged"
    for i, n in enumerate((10, 16, 17, 100)):
        logits, target = scores(20, n, seed=i)
        save(folder / f"{i}.npz", logits=logits, target=target)
    arrays = Arrays.read(folder)
    assert (arrays.name, arrays.sizes) == ("logged", [16, 17, 100])
    assert [arrays.count(size) for size in arrays.sizes] == [40, 20, 20]
    both = arrays.rows(16, 10, 20)
    np.testing.assert_array_equal(both.logits[:10, :10], scores(20, 10)[0][10:].astype(np.float32))
    assert (both.logits[:10, 10:] == -np.inf).all()
    (folder / "._0.npz").write_bytes(b"of macOS")
    moved = Arrays.read(folder).fingerprint
    save(folder / "1.npz", **dict(zip(("logits", "target"), scores(20, 16, seed=9), strict=True)))
    assert Arrays.read(folder).fingerprint != moved


@pytest.mark.parametrize(("path", "name"), [(".", "logged"), ("../logged", "logged"), ("..", "up")])
def test_a_folder_has_its_own_name_however_it_is_given(here, monkeypatch, path, name):
    (here / "up" / "logged").mkdir(parents=True)
    monkeypatch.chdir(here / "up" / "logged")
    for folder in (here / "up", here / "up" / "logged"):
        save(folder / "a.npz", logits=LOGITS, target=TARGET)
    assert Arrays.read(Path(path)).name == name


def test_positions_and_masks_of_targets_go_together(here):
    folder = here / "mixed"
    save(folder / "a.npz", logits=LOGITS, target=TARGET)
    save(folder / "b.npz", logits=LOGITS, target=np.arange(8) == TARGET[:, None])
    arrays = Arrays.read(folder)
    assert not arrays.sets_of_targets
    np.testing.assert_array_equal(arrays.rows(8, 0, 12).target, np.tile(TARGET, 2))
    second = np.sort(LOGITS)[:, [-2]]
    save(folder / "c.npz", logits=LOGITS, target=np.greater_equal(LOGITS, second))
    arrays = Arrays.read(folder)
    assert arrays.sets_of_targets
    assert arrays.rows(8, 0, 18).target.sum(axis=1).tolist() == 12 * [1] + 6 * [2]


def test_a_collection_of_arrays(here):
    logits, target = scores(3_000, 50)
    logits[0, 3], logits[1, 2] = np.nan, 1e300  # beyond float32
    mask = np.ones_like(logits, bool)
    mask[2, target[2]] = False
    path = save(here / "mine.npz", logits=logits, target=target, mask=mask)
    arrays = Arrays.read(path)
    assert (arrays.name, arrays.sizes, arrays.count(50)) == ("mine", [50], 3_000)
    collection = collect_arrays(arrays, here / "run")
    (counts,) = collection.manifest["sizes"]
    expected = {"rows": 3_000, "nan": 1, "inf": 1, "masked_target": 1, "kept": 2_997}
    assert counts.items() >= expected.items()
    ((size, shard),) = collection.shards()
    assert size == 50
    assert shard.layer is shard.head is shard.group is None
    np.testing.assert_allclose(shard.entropy, reference.entropy(shard.logits), atol=1e-5)
    np.testing.assert_array_equal(shard.logits, logits[shard.index].astype(np.float32))
    np.testing.assert_array_equal(shard.target, target[shard.index])
    assert collect_arrays(Arrays.read(path), here / "again").digest == collection.digest
    finite = np.where(logits < 1e9, logits, 0)
    save(here / "inverted.npz", logits=finite, target=target, mask=np.arange(50) != target[:, None])
    with pytest.raises(QualityError, match=r"3000 masked_target.* mask, True"):
        collect_arrays(Arrays.read(here / "inverted.npz"), here / "inverted")


def test_heads_stay_apart(here):
    logits, target = scores(200, 20)
    layer, head = np.arange(200) // 100, np.arange(200) % 4
    arrays = Arrays.read(save(here / "m.npz", logits=logits, target=target, layer=layer, head=head))
    assert arrays.heads == [(i, j) for i in range(2) for j in range(4)]
    ((_, shard),) = collect_arrays(arrays, here / "run").shards()
    np.testing.assert_array_equal(shard.layer, layer[shard.index])
    np.testing.assert_array_equal(shard.head, head[shard.index])
    one = Arrays.read(save(here / "one.npz", logits=logits, target=target, head=np.full(200, 7)))
    ((_, shard),) = collect_arrays(one, here / "of-one").shards()
    assert (set(shard.layer), set(shard.head)) == ({-1}, {7})


def test_rows_keep_their_weights(here):
    """A row of weight 3 counts as three copies."""
    logits, target = scores(600, 20)
    weight = np.where(np.arange(600) < 200, 3.0, 1.0)
    weighed = save(here / "weighed.npz", logits=logits, target=target, weight=weight)
    ((_, shard),) = collect_arrays(Arrays.read(weighed), here / "run").shards()
    np.testing.assert_array_equal(shard.weight, weight[shard.index])
    thrice = np.repeat(np.arange(600), weight.astype(int))
    repeated = save(here / "repeated.npz", logits=logits[thrice], target=target[thrice])
    collect_arrays(Arrays.read(repeated), here / "other")
    one, other = (solve_collection(open_collection(here / name)) for name in ("run", "other"))
    for kind, rtol in (("constant", 1e-6), ("polynomial", 0.1)):  # in other folds
        options = FitOptions(kind).resolved()
        found, expected = (fit_rule(rows, kind, options).coefficients for rows in (one, other))
        x = np.linspace(1.5, 2.5, 9)
        np.testing.assert_allclose(np.polyval(found, x), np.polyval(expected, x), rtol=rtol)


def test_rows_keep_their_groups(here):
    logits, target = scores(300, 20)
    group = np.random.default_rng(0).integers(0, 2**62, 40)[np.arange(300) % 40]
    for i, part in enumerate(np.array_split(np.arange(300), 2)):
        save(here / "mine" / f"{i}.npz", logits=logits[part], target=target[part],
             group=group[part])  # fmt: skip
    arrays = Arrays.read(here / "mine")
    with pytest.warns(UserWarning, match=r"\b142 .*\b300 .* 20,000 "):
        collection = collect_arrays(arrays, here / "run", max_bytes=20_000)
    ((_, shard),) = collection.shards()
    assert 50 < len(shard.index) < 250
    np.testing.assert_array_equal(shard.group, group[shard.index])
    np.testing.assert_array_equal(solve_collection(collection).group, shard.group)
    assert sum(path.stat().st_size for path in (here / "run").iterdir()) <= 20_000


LOGITS, TARGET = scores(6, 8)


@pytest.mark.parametrize("case", ["rounded", "NaN", "padding", "behind a mask", "under a mask"])
def test_probabilities_that_are_not_exact_are_refused(case, here):
    logits, target = scores(20, 8)
    mask = (np.arange(8) < 5) | (np.arange(8) == target[:, None])
    weights = reference.softmax(logits, where=mask if case == "under a mask" else None)
    if case == "rounded":
        weights = np.round(weights * 256) / 256
    elif case in ("NaN", "padding"):
        weights[3] = np.nan if case == "NaN" else 0
    others = {"mask": mask} if "mask" in case else {}
    path = save(here / "mine.npz", logits=weights, target=target, **others)
    with pytest.raises(CalibrateError, match=r">= 0 .*\b1\b"):
        Arrays.read(path)


@pytest.mark.parametrize("logits", [LOGITS - LOGITS.min(), np.zeros((6, 8)), LOGITS * np.nan])
def test_logits_that_are_no_probabilities_are_taken(logits, here):
    assert Arrays.read(save(here / "mine.npz", logits=logits, target=TARGET)).count(8) == 6


def test_files_without_arrays_are_refused(here):
    (here / "text.npz").write_text("logits")
    np.savez(here / "objects.npz", logits=np.array([{}]))
    (here / "mine.pt").write_bytes((here / "objects.npz").read_bytes())  # PyTorch writes zip files
    (here / "empty").mkdir()
    (here / "vast.npz").touch()
    os.truncate(here / "vast.npz", 1 << 40)  # sparse
    save(here / "mixed" / "a.npz", logits=LOGITS, target=TARGET)
    save(here / "mixed" / "b.npz", logits=LOGITS, target=TARGET, layer=TARGET)
    for name, message in (
        ("absent.npz", "absent.npz"), ("text.npz", "text.npz"),
        ("objects.npz", r"objects\.npz.*numpy\.savez"), ("mine.pt", r"mine\.pt "),
        ("empty", r"empty .*\.npz"),
        ("vast.npz", "17,179,869,184"),
        ("mixed", "layer"),
    ):  # fmt: skip
        with pytest.raises(CalibrateError, match=message):
            Arrays.read(here / name)


@pytest.mark.slow
def test_the_commands(here):
    logits, target = scores(2_000, 64)
    for name in ("model.v1", "model.v2"):  # names with dots stay apart
        save(here / f"{name}.npz", logits=logits, target=target)
        call("collect", "--logits", f"{name}.npz")
    assert sorted(os.listdir("runs")) == ["model.v1", "model.v2"]
    call("fit", "runs/model.v1", "--name", "example")
    source = calibrate.load("example").source
    assert source["fingerprint"] == Arrays.read(here / "model.v1.npz").fingerprint
    assert "runs/model.v1 " in call("collect", "--logits", "model.v1.npz").stderr


def test_the_budget_holds_for_the_names_of_many_heads(here):
    """The manifest names each."""
    n_heads, rng = 2_000, np.random.default_rng(0)
    z = rng.standard_normal((n_heads, 4)).astype(np.float32)
    layer, head = np.divmod(np.arange(n_heads) * 16, 32_000)
    np.savez("many.npz", logits=z, target=z.argmax(1), layer=layer, head=head)
    with pytest.raises(CalibrateError, match=r"max_bytes.* \d+$") as few:
        collect_arrays(Arrays.read(here / "many.npz"), here / "run", max_bytes=20_000)
    for max_bytes in (int(str(few.value).split()[-1]), 150_000):
        folder = here / str(max_bytes)
        collect_arrays(Arrays.read(here / "many.npz"), folder, max_bytes)
        assert sum(file.stat().st_size for file in folder.iterdir()) <= max_bytes


def test_the_least_budget_that_a_refusal_names_is_enough_for_every_size(here):
    for n in (4, 256):
        logits, target = scores(50, n)
        save(here / "two" / f"{n}.npz", logits=logits, target=target)
    with pytest.raises(CalibrateError, match=r"max_bytes.* \d+$") as few:
        collect_arrays(Arrays.read(here / "two"), here / "run", max_bytes=1_000)
    with pytest.warns(UserWarning, match=r"\b100 rows"):
        kept = collect_arrays(
            Arrays.read(here / "two"), here / "run", int(str(few.value).split()[-1])
        )
    assert [size["kept"] > 0 for size in kept.manifest["sizes"]] == [True, True]


def test_sets_of_targets_and_a_mask_in_one_file_of_a_folder(here):
    two = np.greater_equal(LOGITS, np.sort(LOGITS)[:, [-2]])
    save(here / "mine" / "a.npz", logits=LOGITS, target=two, mask=np.ones(8, bool))
    save(here / "mine" / "b.npz", logits=LOGITS, target=TARGET)
    arrays = Arrays.read(here / "mine")
    assert arrays.sets_of_targets
    assert arrays.rows(8, 0, 12).target.sum(axis=1).tolist() == 6 * [2] + 6 * [1]


@pytest.mark.parametrize(
    ("dtype", "mask"),
    [("float32", np.finfo("float32").min), ("float64", np.finfo("float64").min),
     ("float16", np.finfo("float16").min), ("float32", -1e4), ("float32", "-1e4 added")],
)  # fmt: skip
def test_finite_masks_mask_as_infinity_does(here, dtype, mask, recwarn):
    rng = np.random.default_rng(0)
    z = rng.standard_normal((300, 32)).astype(dtype)
    masked = np.arange(32) >= rng.choice([12, 32], (300, 1))
    for name, fill in (("inf", -np.inf), ("finite", mask if mask != "-1e4 added" else z - 1e4)):
        logits = np.where(masked, np.array(fill, dtype), z)
        np.savez(f"{name}.npz", logits=logits, target=np.zeros(300, int))
        collect_arrays(Arrays.read(here / f"{name}.npz"), here / name)
    one, other = (open_collection(here / name).manifest for name in ("inf", "finite"))
    assert (one["sizes"], one["shards"]) == (other["sizes"], other["shards"])
    assert [size["size"] for size in one["sizes"]] == [12, 32]
    assert len(recwarn) == (dtype != "float64")  # beyond float32, and so infinite
    for message in (str(warning.message) for warning in recwarn):
        assert f"finite.npz has {masked.sum():,} " in message
        assert " 9,000 " in message


def test_numbers_above_those_that_mask_or_under_a_mask_are_real(here, recwarn):
    z = np.random.default_rng(0).standard_normal((300, 32)).astype("float32")
    z[:, 12:] -= 8_000
    assert Arrays.read(save(here / "low.npz", logits=z, target=np.zeros(300, int))).sizes == [32]
    columns = {"logits": np.where(np.arange(32) < 6, z, -1e9), "target": np.zeros(300, int)}
    save(here / "masked.npz", **columns, mask=np.arange(32) < 6)
    collect_arrays(Arrays.read(here / "masked.npz"), here / "run")
    assert not recwarn.list  # of the 26 x 300 that the mask masks too


def test_targets_beyond_what_float32_holds_are_masked_ones(here):
    """Their log-probability is -inf at a large beta, and its derivatives are NaN."""
    z = np.random.default_rng(0).standard_normal((1_000, 8)).astype(np.float32)
    target = z.argmax(axis=1)
    z[0, target[0]] = np.finfo(np.float32).min
    z[1, target[1] - 1] = 3e38
    np.savez("wild.npz", logits=z, target=target)
    with pytest.warns(UserWarning, match="8 finite logits"):
        arrays = Arrays.read(here / "wild.npz")  # 7 are below 3e38
    collection = collect_arrays(arrays, here / "run")
    assert sum(size["masked_target"] for size in collection.manifest["sizes"]) == 2
    assert np.isfinite(solve_collection(collection).profile.series).all()
