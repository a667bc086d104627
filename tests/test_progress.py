"""Progress: a line now and then where stderr is no terminal, by a clock of the test's own."""

import pytest

from calibrate.cli.progress import SECONDS_BETWEEN_LINES, Steps, in_words


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def lines(capsys):
    return capsys.readouterr().err.splitlines()


def test_at_most_one_line_in_ten_seconds_with_the_time_left(capsys, clock):
    with Steps("working", 100, clock=clock) as steps:
        for _ in range(50):
            clock.now += SECONDS_BETWEEN_LINES / 5
            steps.advance()
    said = lines(capsys)
    assert len(said) == 10
    assert said[0] == "working: 5 of 100 steps, about 3:10 min left"
    assert said[-1] == "working: 50 of 100 steps, about 1:40 min left"


def test_lines_of_their_own_put_it_off(capsys, clock):
    with Steps("working", 4, clock=clock) as steps:
        for line in (None, "n = 16", None, None):
            clock.now += 6
            steps.advance(line)
    assert lines(capsys) == ["n = 16", "working: 4 of 4 steps, about 1 s left"]


def test_steps_of_different_work_and_those_that_were_done_before(capsys, clock):
    with Steps("working", 4, work=1_000, clock=clock) as steps:
        steps.advance(work=400, resumed=True)
        clock.now += 10
        steps.advance(work=100)
        clock.now += 10
        steps.advance(work=400)
    assert lines(capsys) == [
        "working: 2 of 4 steps, about 50 s left",
        "working: 3 of 4 steps, about 4 s left",
    ]


def test_a_clock_that_stands_still_or_goes_back_says_nothing_wrong(capsys, clock):
    with Steps("working", 3, clock=clock) as steps:
        steps.advance()
        clock.now -= 50
        steps.advance()
        clock.now += 60 + SECONDS_BETWEEN_LINES
        steps.advance()
    assert lines(capsys) == ["working: 3 of 3 steps, about 1 s left"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "1 s"), (59.4, "59 s"), (65, "1:05 min"), (3_599, "59:59 min"), (7_380, "2:03 h")],
)
def test_durations_in_words(seconds, words):
    assert in_words(seconds) == words


def test_the_most_steps_that_there_may_be(capsys, clock):
    with Steps("fitting", 100, at_most=True, clock=clock) as steps:
        for _ in range(20):
            steps.advance(resumed=True)  # not needed
        clock.now += SECONDS_BETWEEN_LINES
        steps.advance()
    (said,) = lines(capsys)
    assert said == "fitting: 21 of at most 100 steps, at most 13:10 min left"
