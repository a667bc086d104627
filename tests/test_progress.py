"""Progress on stderr: a bar with the time left on a terminal, and nothing elsewhere."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from calibrate.report.terminal import Steps


@pytest.fixture
def clock():
    return SimpleNamespace(now=100.0)


def steps_on(clock, **options):
    screen = Console(file=io.StringIO(), width=100, **options)
    return Steps(screen, lambda: clock.now), screen.file


def seconds_left(steps):
    """The estimate of the bar; None before the first step."""
    return steps._bar.tasks[0].time_remaining


def test_a_pipe_has_no_progress(clock):
    steps, file = steps_on(clock)
    with steps:
        steps.begin("working", 2)
        for _ in range(2):
            clock.now += 60
            steps.advance()
    assert (steps.done, steps.total) == (2, 2)
    assert file.getvalue() == ""


def test_a_terminal_has_the_stage_and_the_time_left(clock):
    steps, file = steps_on(clock, force_terminal=True)
    with steps:
        steps.begin("working", 4)
        clock.now += 10
        steps.advance()
    assert "working" in file.getvalue()
    assert "0:00:30" in file.getvalue()


def test_each_stage_has_a_time_of_its_own(clock):
    steps, _ = steps_on(clock)
    steps.begin("working", 100)
    for _ in range(50):
        clock.now += 2
        steps.advance()
    assert seconds_left(steps) == 100
    steps.begin("judging", 2)
    assert seconds_left(steps) is None
    clock.now += 7
    steps.advance()
    assert seconds_left(steps) == 7


@pytest.mark.parametrize(
    ("steps_of", "left"),
    [  # (seconds, work, resumed) of each step
        ([(0, 400, True), (10, 100, False)], 50),
        ([(0, 400, True), (10, 100, False), (10, 400, False)], 4),
        ([(0, 100, False), (0, 100, False), (10, 800, False)], 0),
        ([(10, 400, True)], None),
    ],
)
def test_the_time_left_follows_from_work_done_in_this_run(clock, steps_of, left):
    steps, _ = steps_on(clock)
    steps.begin("working", 4, 1_000)
    for seconds, work, resumed in steps_of:
        clock.now += seconds
        steps.advance(work, resumed)
    assert seconds_left(steps) == left
