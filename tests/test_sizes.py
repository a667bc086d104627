"""Sizes on both sides of each bound: counts, positions and units beyond 8 and 16 bits."""

import json
from pathlib import Path

import numpy as np
import pytest

import calibrate
from calibrate.core import row_batches
from calibrate.core.row_batches import SMALL_BATCH_FACTOR, in_batches, row_entropy
from calibrate.core.rule import RuleForm
from calibrate.errors import CalibrateError
from calibrate.prompts.examples import Cell, Example, ExampleSet, parse_examples
from calibrate.rows import max_retrieval
from calibrate.rows.collect import collect_arrays
from calibrate.rows.collection import open_collection
from calibrate.rows.logits_files import Arrays, set_sizes
from calibrate.rows.optimal_beta import INTERIOR
from calibrate.rows.rows import MAX_HEAD_INDEX
from calibrate.rows.solve import solve_rows
from calibrate.rows.units import UnitSizes, plan_units
from calibrate.store.coefficient_fields import MAX_INDEX
from calibrate.store.entries import Entry
from calibrate.store.fit import Fit, dumps
from calibrate.store.loading import loads

BITS_8, BITS_15, BITS_16 = 1 << 8, 1 << 15, 1 << 16
BOUNDS = (BITS_8, BITS_15, BITS_16)
AROUND = [bound + step for bound in BOUNDS for step in (-1, 0, 1)]  # 255, 256, 257, 32,767, ...


def one_above(n, targets):
    """Rows of zeros but for the target's 1 and a 2: the best beta is log(n - 2) / 2."""
    z = np.zeros((len(targets), n), np.float32)
    z[:, 0] = 2
    z[np.arange(len(targets)), targets] = 1
    return z


@pytest.mark.parametrize("n", [300, 40_000, 70_000])
def test_targets_far_along_a_row(n):
    targets = np.array([1, n - 1, *(at for at in AROUND if at < n)])
    beta, status = calibrate.optimal_beta(one_above(n, targets), targets)
    assert (status == INTERIOR).all()
    np.testing.assert_allclose(beta, np.log(n - 2) / 2, rtol=1e-5)


@pytest.mark.slow
def test_rows_from_a_file_to_a_collection(here):
    """Targets and sizes of long rows, as they were written."""
    n = BITS_16 + 3
    targets = np.array([at for at in AROUND for _ in range(2)])
    z = one_above(n, targets)
    n_real = np.resize([n - 1, n], len(targets))
    z[np.arange(n) >= n_real[:, None]] = -np.inf
    np.savez("long.npz", logits=z, target=targets)
    arrays = Arrays.read(Path("long.npz"))
    collect_arrays(arrays, here / "run")
    found = []
    for _, shard in open_collection(here / "run").shards():
        logits, target = shard.logits, shard.target
        assert (logits[np.arange(len(target)), target] == 1).all()
        solved = solve_rows(logits, target, shard.entropy, logits.shape[1])
        np.testing.assert_array_equal(solved.n, (logits > -np.inf).sum(axis=1))
        np.testing.assert_array_equal(solved.size, logits.shape[1])
        found += zip(target.tolist(), solved.n.tolist(), strict=True)
    assert sorted(found) == sorted(zip(targets.tolist(), n_real.tolist(), strict=True))


def test_the_set_size_of_a_row_is_the_largest_in_its_octave():
    n_real = np.array([1, 2, 3, 4, *(n for n in AROUND)], np.int32)
    size = set_sizes(n_real)
    #        above 128 to 256   257  to 32,768     ... 65,536
    wanted = [2, 2, 4, 4, 256, 256, 257, 32768, 32768, 65536, 65536, 65536, 65537]
    assert size.tolist() == wanted


def test_many_rows_and_many_files():
    """A row's number in its file, and its file's number, have more than 16 and 8 bits."""
    n = BITS_16 + 5
    np.savez("many.npz", logits=np.stack([np.arange(n), np.zeros(n)], 1).astype(np.float32),
             target=np.zeros(n, int))  # fmt: skip
    with pytest.warns(UserWarning, match="56,540 finite logits"):
        arrays = Arrays.read(Path("many.npz"))
    for first in (*AROUND, n - 1):
        assert arrays.rows(2, first, 1).logits[0, 0] == first
    folder = Path("files")
    folder.mkdir()
    for i in range(BITS_8 + 2):
        np.savez(folder / f"{i:04d}.npz", logits=np.array([[i, -1.0]]), target=[0])
    arrays = Arrays.read(folder)
    assert arrays.rows(2, 0, 999).logits[:, 0].tolist() == list(range(BITS_8 + 2))


@pytest.mark.parametrize("name", ["layer", "head"])
def test_the_last_layer_and_head(name, here):
    columns = {"logits": 3 * np.eye(2), "target": [0, 0], "layer": [0, 1], "head": [0, 1]}
    np.savez("last.npz", **columns | {name: [0, MAX_HEAD_INDEX]})
    arrays = Arrays.read(Path("last.npz"))
    assert getattr(arrays.rows(2, 0, 2), name).tolist() == [0, MAX_HEAD_INDEX]
    np.savez("beyond.npz", **columns | {name: [0, MAX_HEAD_INDEX + 1]})
    with pytest.raises(CalibrateError, match=name):
        Arrays.read(Path("beyond.npz"))
    assert MAX_INDEX == MAX_HEAD_INDEX
    fit = Fit(RuleForm.log_size(), (Entry((0.0, 2.0), (0.0, 9.0), **{name: MAX_INDEX}),))
    assert getattr(loads(dumps(fit).encode()).entries[0], name) == MAX_INDEX
    said = json.loads(dumps(fit))
    said["entries"][0][name] = MAX_INDEX + 1
    with pytest.raises(CalibrateError, match=rf"32767 .*{name}"):
        loads(json.dumps(said).encode())


def test_the_heads_own_targets():
    """Of rows longer than 65,536; max-retrieval draws them itself."""
    batch = max_retrieval.sample(0, BITS_16 + 100, 12)
    targets = batch.priority.argmax(axis=1)
    assert (targets < BITS_15).any()
    assert (targets >= BITS_15).any()
    np.testing.assert_array_equal(batch.target, targets)


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 1024])
@pytest.mark.parametrize("n", [8, 9, 16, 17, 64, 65, 512, 513, 4096, 4097])
def test_batches_have_every_row_once_and_one_shape(rows, n):
    """Around widths of powers of 2 and of 8, and around a batch of few rows."""
    z = np.arange(rows * n, dtype=np.float32).reshape(rows, n)
    seen, shapes = np.full((rows, n), np.nan), set()
    for part, (batch, own) in in_batches(z, np.arange(rows)):
        count = part.stop - part.start
        shapes.add((batch.shape, own.shape))
        seen[part] = batch[:count, :n]
        assert own[:count].tolist() == list(range(part.start, part.stop))
        assert (batch[:count, n:] == -np.inf).all()
    np.testing.assert_array_equal(seen, z)
    ((shape, of_own),) = shapes
    assert of_own == (shape[0],)
    assert shape[1] & (shape[1] - 1) == 0
    assert shape[0] * shape[1] <= max(row_batches.ITEMS_PER_BATCH, shape[1])
    few = max(1, row_batches.ITEMS_PER_BATCH // shape[1] // SMALL_BATCH_FACTOR)
    assert (shape[0] == few) == (rows <= few or few == row_batches.ITEMS_PER_BATCH // shape[1])


@pytest.mark.parametrize("n", AROUND)
def test_entropies_of_rows_around_the_length_of_a_batch(n):
    z = np.zeros((3, n), np.float32)
    z[1, 1:] = -np.inf
    np.testing.assert_allclose(row_entropy(z), [np.log(n), 0, np.log(n)], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "size", [BITS_8 - 1, BITS_8, BITS_8 + 1, BITS_16 - 1, BITS_16, BITS_16 + 1]
)
def test_units_hold_every_set_once(size):
    """About as many items each, but for few and for many sets."""
    units_of = UnitSizes()
    least, most = units_of.min_sets, units_of.max_sets
    for sets in (1, least, least + 1, most, most + 1):
        units = plan_units(size, sets)
        assert [unit.number for unit in units] == list(range(len(units)))
        assert sum(unit.sets for unit in units) == sets
        starts = np.cumsum([0, *(unit.sets for unit in units)])[:-1]
        assert [unit.first for unit in units] == starts.tolist()
        largest = units[0].sets
        assert largest == sets or least <= largest <= most
        assert largest in (sets, least, most) or largest == units_of.items // size


def test_long_examples_and_large_vocabularies(here):
    n = BITS_16 + 10
    tokens = np.arange(n, dtype=np.int32) + 100_000
    starts = [1, *AROUND, n - 1]
    cells = tuple(Cell(f"c{i}", n, False) for i in range(BITS_8 + 2))
    examples = ExampleSet(cells, tuple(Example(tokens, at, i) for i, at in enumerate(starts)))
    found = parse_examples(examples.pack(), here / "examples.npz", cells)
    assert [example.start for example in found.examples] == starts
    assert all((example.tokens == tokens).all() for example in found.examples)
    np.testing.assert_array_equal(found.n_answer(range(len(starts))), n - np.array(starts))
    last = ExampleSet(cells, tuple(Example(tokens[:3], 1, i) for i in range(len(cells))))
    found = parse_examples(last.pack(), here / "examples.npz", cells)
    assert [example.cell for example in found.examples] == list(range(len(cells)))
