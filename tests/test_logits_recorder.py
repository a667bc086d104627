"""The recorder: files, weights and groups of forward passes, and the budget of bytes."""

import numpy as np
import pytest
from conftest import bytes_of

from calibrate.errors import CalibrateError
from calibrate.rows.logits_files import Arrays
from calibrate.rows.recorder import FILE_OVERHEAD, Recorder
from calibrate.rows.rows import hashes


def record(recorder, n_passes, n_keys=20, first=0):
    for number in range(first, first + n_passes):
        recorder.next(query=0, target=number % n_keys)
        for layer in (0, 2):
            if recorder.wants(layer):
                logits = np.random.default_rng([number, layer]).standard_normal((1, 3, n_keys))
                recorder.add(layer, logits.astype(np.float32), n_keys)
    recorder.flush()


def test_a_file_for_each_pass_and_rows_for_each_head(here):
    recorder = Recorder(here / "run", 10**9)
    record(recorder, 5)
    recorder.finish()
    assert len(list((here / "run").iterdir())) == 5
    arrays = np.load(here / "run" / "pass000003.npz")
    assert arrays["logits"].shape == (6, 20)
    assert arrays["layer"].tolist() == [0, 0, 0, 2, 2, 2]
    assert arrays["head"].tolist() == [0, 1, 2, 0, 1, 2]
    assert (arrays["target"].argmax(axis=1) == 3).all()
    exact = np.random.default_rng([3, 2]).standard_normal((1, 3, 20)).astype(np.float32)
    np.testing.assert_array_equal(arrays["logits"][3:], exact[0])


def test_a_row_counts_by_its_heads_share_of_the_layers_attention_to_the_target(here):
    recorder = Recorder(here / "run", 10**9)
    recorder.next(query=0, target=[1, 0])
    z = np.zeros((2, 3, 2), np.float32)  # sequences, heads, keys
    z[0, 0, 1] = z[0, 1, 0] = np.log(3)  # 3/4, 1/4 and 1/2 for its target
    z[1, :, 1] = [np.log(7), np.log(3), -np.inf]  # 1/8, 1/4 and 1
    z[1, 2, 0] = -np.inf  # without a visible key, and so without a row
    recorder.add(0, z, 2)
    recorder.finish()
    arrays = np.load(here / "run" / "pass000000.npz")
    np.testing.assert_allclose(arrays["weight"], [1.5, 0.5, 1, 2 / 3, 4 / 3], rtol=1e-6)
    assert recorder.left_out == 1


@pytest.mark.parametrize("fill", [-np.inf, -1e9, float(np.finfo("float32").min)])
def test_finite_masks_are_recorded_as_masks(fill, here):
    recorder = Recorder(here / "run", 10**9)
    recorder.next(query=0, target=1)
    z = np.full((2, 1, 4), 1e4, np.float32)
    z[:, :, 3] = z[1, :, 1] = fill  # the second sequence does not see its target
    recorder.add(0, z, 4)
    recorder.finish()
    assert recorder.left_out == 1
    arrays = np.load(here / "run" / "pass000000.npz")
    np.testing.assert_array_equal(arrays["logits"], [[1e4, 1e4, 1e4, -np.inf]])


def record_batches(recorder, group):
    """Two passes of two sequences; the second sequence of the first does not see its target."""
    for number in range(2):
        recorder.next(query=0, target=1, **({} if group is None else {"group": group[number]}))
        for layer in (0, 1):
            z = np.zeros((2, 3, 4), np.float32)
            z[1, :, 1] = -np.inf if number == 0 else 0
            recorder.add(layer, z, 4)
    recorder.finish()


@pytest.mark.parametrize(
    ("group", "found"), [(None, [0, 1, 2]), ([5, [5, 8]], [5, 5, 8]), ([[4, 9], 3], [4, 3, 3])]
)
def test_a_group_for_each_sequence_of_each_pass(group, found, here):
    """In every layer and head of it; or whatever groups are given."""
    record_batches(Recorder(here / "run", 10**9), group)
    first, second = (np.load(here / "run" / f"pass00000{i}.npz")["group"] for i in (0, 1))
    assert first.tolist() == 6 * found[:1]
    assert second.tolist() == 2 * np.repeat(found[1:], 3).tolist()
    assert set(Arrays.read(here / "run").group) == set(found)


def test_groups_are_for_all_sequences_and_not_negative(here):
    with pytest.raises(CalibrateError, match=r"^group .*\b3 .*\b2 "):
        record_batches(Recorder(here / "one", 10**9), [[1, 2, 3]])
    with pytest.raises(CalibrateError, match="^group .*-1"):
        record_batches(Recorder(here / "two", 10**9), [-1])


def test_only_chosen_layers_and_heads_are_recorded(here):
    record(Recorder(here / "run", 10**9, layers=[2], heads=[0, 2]), 2)
    assert Arrays.read(here / "run").heads == [(2, 0), (2, 2)]


def test_the_budget_is_kept_by_an_unbiased_sample(here):
    most = 20_000
    record(Recorder(here / "run", most), 60)
    files = bytes_of("run")
    assert sum(map(len, files.values())) <= most
    name, data = files.popitem()
    held = sum(array.nbytes for array in np.load(here / "run" / name).values())
    assert held < len(data) <= held + FILE_OVERHEAD
    record(Recorder(here / "more", 10 * most), 60)
    assert files.keys() < bytes_of("more").keys()  # the lowest hashes stay
    numbers = sorted(int(name[4:10]) for name in files)
    assert 3 < len(numbers) < 30
    assert numbers[-1] > 30 > numbers[0]  # neither the first ones nor the last


def test_short_passes_do_not_replace_long_ones(here):
    recorder = Recorder(here / "run", 100_000)
    for number in range(100):
        record(recorder, 1, n_keys=4_000 if number % 2 else 20, first=number)
    kept = {int(name[4:10]) for name in bytes_of("run")}
    by_hash = np.argsort(hashes(np.arange(100))).tolist()
    assert kept == set(by_hash[: len(kept)])
    assert len(kept) > 1


def test_layers_that_keep_fewer_keys(here):
    recorder = Recorder(here / "run", 10**9)
    recorder.next(query=-1, target=-1)
    recorder.add(0, np.zeros((1, 1, 6), np.float32), 6)
    recorder.add(1, np.zeros((1, 1, 4), np.float32), 4)
    recorder.flush()
    arrays = Arrays.read(here / "run")
    assert arrays.sizes == [4, 6]
    assert [arrays.rows(size, 0, 1).target.tolist() for size in (4, 6)] == [[3], [5]]


def test_a_folder_that_holds_files_is_refused(here):
    (here / "note.txt").write_text("mine")
    with pytest.raises(CalibrateError, match=str(here)):
        Recorder(here, 10**9)


def test_groups_are_given_for_all_passes(here):
    recorder = Recorder(here / "three", 10**9)
    recorder.next(query=0, target=0, group=1)
    with pytest.raises(CalibrateError, match="^group "):
        recorder.next(query=0, target=0)
