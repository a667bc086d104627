"""Blocks: every row once and in order, one shape throughout."""

import numpy as np
import pytest

from calibrate.maths import row_blocks


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 100])
@pytest.mark.parametrize("n", [1, 5, 64, 1000])
def test_blocks_cover_the_rows_with_one_shape(monkeypatch, rows, n):
    monkeypatch.setattr(row_blocks, "ITEMS_PER_BLOCK", 64)
    logits = np.arange(rows * n, dtype=np.float32).reshape(rows, n)
    target = np.arange(rows)
    seen, shapes = [], set()
    for part, (z, t) in row_blocks.in_blocks(logits, target):
        count = part.stop - part.start
        np.testing.assert_array_equal(z[:count], logits[part])
        assert not z[count:].any()
        assert not t[count:].any()
        seen.extend(t[:count])
        shapes.add(z.shape)
    assert seen == list(range(rows))
    assert len(shapes) == min(rows, 1)
