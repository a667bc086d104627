"""Batches: every row once and in order, in one shape; few shapes for many numbers of items."""

import numpy as np
import pytest

from calibrate.maths import row_batches


@pytest.mark.parametrize("rows", [0, 1, 8, 100])
@pytest.mark.parametrize("n", [1, 5, 1000])
def test_batches_cover_the_rows_with_one_shape(monkeypatch, rows, n):
    monkeypatch.setattr(row_batches, "ITEMS_PER_BATCH", 64)
    logits = np.arange(rows * n, dtype=np.float32).reshape(rows, n)
    target, sets = np.arange(rows), logits % 2 == 0
    seen, shapes = [], set()
    for part, (z, t, s) in row_batches.in_batches(logits, target, sets):
        count = part.stop - part.start
        np.testing.assert_array_equal(z[:count, :n], logits[part])
        np.testing.assert_array_equal(s[:count, :n], sets[part])
        assert (z[:count, n:] == -np.inf).all()
        assert not z[count:].any()
        assert not t[count:].any()
        assert not s[:, n:].any()
        assert z.shape == s.shape
        seen.extend(t[:count])
        shapes.add(z.shape)
    assert seen == list(range(rows))
    assert len(shapes) == min(rows, 1)


def test_few_shapes_for_any_number_of_items():
    widths = {
        z.shape for n in range(1, 300) for _, (z,) in row_batches.in_batches(np.zeros((40, n)))
    }
    assert {width for _, width in widths} == {64, 512}
