"""Solve: every row against the reference, one target or several."""

import numpy as np
import pytest
import reference
from conftest import ToyHead

from calibrate.datasets.collection import open_collection
from calibrate.parallel import Jobs
from calibrate.rows.collect import collect
from calibrate.solver.optimal_beta import INTERIOR
from calibrate.solver.solved_rows import solve_collection, solve_rows


def test_solves_every_row_as_the_reference_does(tmp_path):
    collect(ToyHead(noise=1.0), [16, 64, 256], 400, 0, tmp_path / "toy", keep="misranked")
    collection = open_collection(tmp_path / "toy")
    rows = solve_collection(collection)
    everything = [(s.logits[i], s.target[i]) for _, s in collection.shards() for i in range(5)]
    first = np.flatnonzero(np.diff(rows.size, prepend=0))
    for k, (logits, target) in enumerate(everything):
        row = first[k // 5] + k % 5
        expected = reference.optimal_beta(logits, target)
        assert rows.beta[row] == pytest.approx(expected, rel=1e-3)
        log_p = np.log(reference.softmax(logits, beta=2.0)[target])
        assert rows.profile.take(np.array([row])).log_p(np.array([2.0])) == pytest.approx(
            log_p, abs=1e-3
        )
    assert sum(rows.count_by_status().values()) == len(rows.beta)
    used = rows.fitted_by_least_squares()
    assert (rows.status[used] == INTERIOR).all()
    assert rows.misranked.all()


@pytest.mark.slow
def test_the_number_of_jobs_changes_nothing(tmp_path):
    collection = collect(ToyHead(noise=1.0), [16, 64, 256], 400, 0, tmp_path / "toy")
    one, two = (solve_collection(collection, jobs) for jobs in (Jobs(1), Jobs(2)))
    for a, b in zip(one[:-1], two[:-1], strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(one.profile.series, two.profile.series)


def test_masked_items_are_not_counted_and_ranks_are_known():
    z = np.array([[3, 1, -np.inf, 0], [3, 1, 2, 0]], np.float32)
    rows = solve_rows(z, np.array([0, 2], np.int32), reference.entropy(z), 4)
    np.testing.assert_array_equal(rows.items, [3, 4])
    np.testing.assert_array_equal(rows.size, [4, 4])
    np.testing.assert_array_equal(rows.misranked, [False, True])


def test_uniform_and_margin_are_of_unmasked_items():
    z = np.array([[3, 1, -np.inf, 0], [3, 1, 2, 0]], np.float32)
    rows = solve_rows(z, np.array([0, 2], np.int32), reference.entropy(z), 4)
    np.testing.assert_allclose(rows.uniform, -np.log([3, 4]))
    np.testing.assert_array_equal(rows.margin, [2, -1])
    several = np.array([[1, 1, 1, 0], [1, 0, 1, 0]], bool)
    rows = solve_rows(z, several, reference.entropy(z), 4)
    np.testing.assert_allclose(rows.uniform, np.log([2 / 3, 2 / 4]))
    np.testing.assert_array_equal(rows.margin, [3, 2])
