"""Progress: a line now and then where stderr is no terminal, by a clock of the test's own."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from calibrate.cli import progress
from calibrate.cli.progress import SECONDS_BETWEEN_LINES, Heartbeat, Steps, in_words
from calibrate.report import streams


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """The clock of progress and of stderr."""
    clock = Clock()
    for module in (progress, streams):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(streams.stderr, "printed_at", clock.now)
    return clock


def lines(capsys):
    return capsys.readouterr().err.splitlines()


def test_at_most_one_line_in_ten_seconds_with_the_time_left(capsys, clock):
    with Steps("working", 100) as steps:
        for _ in range(50):
            clock.now += SECONDS_BETWEEN_LINES / 5
            steps.advance()
    said = lines(capsys)
    assert len(said) == 10
    assert said[0] == "working: 5 of 100 steps, about 3:10 min left"
    assert said[-1] == "working: 50 of 100 steps, about 1:40 min left"


def test_lines_of_their_own_put_it_off(capsys, clock):
    with Steps("working", 4) as steps:
        for line in (None, "n = 16", None, None):
            clock.now += 6
            steps.advance(line)
    assert lines(capsys) == ["n = 16", "working: 4 of 4 steps, about 1 s left"]


@pytest.mark.parametrize(
    ("steps_of", "said"),
    [  # of different work, and done before; in no time
        ([(0, 400, True), (10, 100, False), (10, 400, False)],
         ["working: 2 of 4 steps, about 50 s left", "working: 3 of 4 steps, about 4 s left"]),
        ([(0, 100, False), (0, 100, False), (10, 800, False)],
         ["working: 3 of 4 steps, about 1 s left"]),
    ],
)  # fmt: skip
def test_the_time_left(capsys, clock, steps_of, said):
    with Steps("working", 4, work=1_000) as steps:
        for seconds, work, resumed in steps_of:
            clock.now += seconds
            steps.advance(work=work, resumed=resumed)
    assert lines(capsys) == said


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "1 s"), (59.4, "59 s"), (65, "1:05 min"), (3_599, "59:59 min"), (7_380, "2:03 h")],
)
def test_durations_in_words(seconds, words):
    assert in_words(seconds) == words


def test_the_most_steps_that_there_may_be(capsys, clock):
    with Steps("fitting", 100, at_most=True) as steps:
        for _ in range(20):
            steps.advance()  # not needed, and in no time
        clock.now += SECONDS_BETWEEN_LINES
        steps.advance()
        steps.begin("judging", 4)
        clock.now += SECONDS_BETWEEN_LINES
        steps.advance()
    assert lines(capsys) == [
        "fitting: 21 of at most 100 steps, at most 38 s left",
        "judging: 1 of at most 4 steps, at most 30 s left",
    ]


@pytest.fixture
def heartbeat(clock):
    streams.stderr.print("loading")
    return Heartbeat()


def test_a_silent_piece_of_work_tells_every_ten_seconds_that_it_goes_on(capsys, clock, heartbeat):
    for _ in range(25):
        clock.now += 1
        heartbeat.beat()
    streams.stderr.print("solving")
    assert heartbeat.beat() == SECONDS_BETWEEN_LINES
    clock.now += 10
    heartbeat.beat()
    assert lines(capsys) == [
        "loading", "  still at work after 10 s", "  still at work after 20 s",
        "solving", "  still at work after 10 s",
    ]  # fmt: skip


def test_a_silent_step_tells_how_far_the_steps_are(capsys, clock, heartbeat):
    with Steps("collecting", 4) as steps:
        for seconds in (10, 10, 5, 10):
            clock.now += seconds
            heartbeat.beat()
            if seconds == 5:
                steps.advance()
    assert lines(capsys)[1:] == [
        "collecting: 0 of 4 steps, 10 s so far", "collecting: 0 of 4 steps, 20 s so far",
        "collecting: 1 of 4 steps, about 1:15 min left",
    ]  # fmt: skip


def test_the_heart_beats_by_itself(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.01)
    told = ""
    with Heartbeat():
        while told.count("still at work") < 2:  # or it never ends
            told += capsys.readouterr().err


@pytest.mark.parametrize(
    ("terminal", "wanted", "shown"),
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_a_spinner_of_library_code_is_on_a_terminal_alone(monkeypatch, terminal, wanted, shown):
    written = io.StringIO()
    monkeypatch.setattr(streams, "stderr", Console(file=written, force_terminal=terminal))
    with streams.spinner("calibrate.fit", wanted):
        pass
    assert ("calibrate.fit" in written.getvalue()) == shown
