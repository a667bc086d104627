"""Progress: a line now and then where stderr is no terminal, by a clock of the test's own."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from calibrate.cli.progress_bar import SECONDS_BETWEEN_LINES, Steps


@pytest.fixture
def clock():
    return SimpleNamespace(now=100.0)


@pytest.fixture
def steps(clock):
    """Steps on a stderr that is no terminal, with that clock."""
    return Steps(Console(file=io.StringIO(), soft_wrap=True), lambda: clock.now)


def lines(steps):
    return steps._screen.file.getvalue().splitlines()


def test_stages_have_a_line_each_ten_seconds_and_a_last_one(clock, steps):
    with steps:
        steps.begin("working", 100)
        for _ in range(100):
            clock.now += SECONDS_BETWEEN_LINES / 5
            steps.advance()
        steps.begin("judging", 2)  # has a time of its own
        for _ in range(2):
            clock.now += SECONDS_BETWEEN_LINES
            steps.advance()
    first, second, *others = lines(steps)
    assert first == "working: 100 steps"
    assert second == "working: 5 of 100 steps, about 0:03:10 left"
    assert others[8] == "working: 50 of 100 steps, about 0:01:40 left"
    assert others[-4:] == [
        "working: done in 0:03:20", "judging: 2 steps", "judging: 1 of 2 steps, about 0:00:10 left",
        "judging: done in 0:00:20",
    ]  # fmt: skip


@pytest.mark.parametrize("resumed", [0, 20])
def test_after_a_slow_start_the_time_left_only_falls(clock, steps, resumed):
    """A first step that compiles, others of different work that take as long as their work says."""
    work = [1, 4, 2, 8, 1, 3] * 10
    with steps:
        steps.begin("working", resumed + len(work), resumed + sum(work))
        for _ in range(resumed):
            steps.advance(1, resumed=True)
        clock.now += 60
        for amount in work:
            clock.now += 4 * amount
            steps.advance(amount)
    left = [line.split("about ")[1].split(" left")[0] for line in lines(steps) if "left" in line]
    assert len(left) > 20
    assert left == sorted(left, reverse=True)


@pytest.mark.parametrize(
    ("steps_of", "said"),
    [  # of different work, and done before; in no time
        ([(0, 400, True), (10, 100, False), (10, 400, False)],
         ["2 of 4 steps, about 0:00:50 left", "3 of 4 steps, about 0:00:04 left"]),
        ([(0, 100, False), (0, 100, False), (10, 800, False)],
         ["3 of 4 steps, about 0:00:01 left"]),
        ([(10, 400, True)], ["1 of 4 steps"]),
    ],
)  # fmt: skip
def test_the_time_left(clock, steps, steps_of, said):
    with steps:
        steps.begin("working", 4, 1_000)
        for seconds, work, resumed in steps_of:
            clock.now += seconds
            steps.advance(work, resumed)
    assert lines(steps)[1:] == [f"working: {text}" for text in said]
