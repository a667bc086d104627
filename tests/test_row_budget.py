"""Sampling: what each unit of a collection may keep, by hand."""

from calibrate.files import rows as files
from calibrate.rows.collect import row_quotas
from calibrate.rows.work_units import Unit


def test_bytes_that_small_units_do_not_use_go_to_the_others():
    """A unit of one row takes 100 of 1,000 bytes; the other two have 450 each."""
    wanted = {Unit(8, 0, 0, 1): 1, Unit(8, 1, 1, 200): 90, Unit(16, 0, 0, 200): 90}
    row_bytes = {8: 100, 16: 40}
    overhead = files.MANIFEST_BASE + files.MANIFEST_PER_HEAD + 2 * files.MANIFEST_PER_SIZE
    overhead += 3 * (files.MANIFEST_PER_SHARD + files.SHARD_OVERHEAD)
    assert row_quotas(wanted, overhead + 1_000, row_bytes) == {8: 4, 16: 11}
    assert row_quotas(wanted, overhead + 10**6, row_bytes) == {8: 90, 16: 225}  # all of the largest
