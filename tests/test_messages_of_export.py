"""Wording of messages about what cannot be exported exactly."""

import pytest
from messages import says
from test_export_plan import ALIKE, log_size

from calibrate.errors import CoefficientsError
from calibrate.export.plan import make_plan


@pytest.mark.parametrize(
    ("lines", "options", "context", "message"),
    [
        (
            [(0.5, 0.1)] * 4,
            {},
            1024,
            (
                "unnamed@1, layer 0, head 0: not exactly a line in log n: its bounds make beta "
                "0.25 at n = 1 and 3.566 at n = 1,024, instead of 0.1 and 3.566, and engines "
                "have no bounds; make the nearest fit that engines run: calibrate model fit RUN "
                "--for-export"
            ),
        ),
        (
            [(2.0, 4.0)] * 4,
            {},
            1024,
            (
                "unnamed@1, layer 0, head 0: not exactly a line in log n: its bounds make beta 4 "
                "at n = 1 and 16 at n = 1,024, instead of 4 and 17.86, and engines have no "
                "bounds; make the nearest fit that engines run: calibrate model fit RUN "
                "--for-export"
            ),
        ),
        (
            [(-0.1, 2.0)] * 4,
            {},
            1024,
            (
                "unnamed@1, layer 0, head 0: not exactly a line in log n: its bounds make beta 2 "
                "at n = 1 and 1.376 at n = 1,024, instead of 2 and 1.307, and engines have no "
                "bounds; make the nearest fit that engines run: calibrate model fit RUN "
                "--for-export"
            ),
        ),
        (
            [(-0.1, 2.0)] * 4,
            {"domain": (2.0, 7.0)},
            1024,
            (
                "unnamed@1, layer 0, head 0: not exactly a line in log n: its bounds make beta "
                "1.8 at n = 1 and 1.307 at n = 1,024, instead of 2 and 1.307, and engines have "
                "no bounds; make the nearest fit that engines run: calibrate model fit RUN "
                "--for-export"
            ),
        ),
        (
            ALIKE,
            {"bounds": (0.25, 7.0)},
            None,
            (
                "unnamed@1, layer 0, head 0: not exactly a line in log n: its bounds make beta 1 "
                "at n = 1 and 7 at n = 6,235,149,080,811,616,743,911,849,984, instead of 1 and "
                "7.4, and engines have no bounds; make the nearest fit that engines run: "
                "calibrate model fit RUN --for-export"
            ),
        ),
        (
            [*ALIKE[:3], (0.3, 1.0)],
            {},
            1024,
            (
                "unnamed@1 has heads with different kappa / b: 0.1 to 0.3; engines have one for "
                "all heads; make the nearest fit that engines run: calibrate model fit RUN "
                "--for-export"
            ),
        ),
        (
            ALIKE[:1],
            {},
            1024,
            (
                "unnamed@1 has heads with different kappa / b: 0 to 0.1; engines have one for "
                "all heads; make the nearest fit that engines run: calibrate model fit RUN "
                "--for-export"
            ),
        ),
        (
            [(0.0, 1.1)] * 5,
            {},
            1024,
            (
                "unnamed@1 has an entry for layer 2, and the model has 2 layers; give the model "
                "that the fit was made for"
            ),
        ),
    ],
)
def test_lines_that_engines_cannot_run_are_refused(lines, options, context, message):
    with says(CoefficientsError, message):
        make_plan(log_size(*lines, **options), 2, 2, context)
