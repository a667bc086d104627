"""Progress: a line now and then where stderr is no terminal, by a clock of the test's own."""

from types import SimpleNamespace

import pytest

from calibrate.cli.progress_bar import SECONDS_BETWEEN_LINES, Heartbeat, Steps
from calibrate.report.streams import Messages


@pytest.fixture
def clock():
    return SimpleNamespace(now=100.0)


@pytest.fixture
def screen(clock):
    """A stderr that is no terminal, with that clock."""
    plain = {"highlight": False, "markup": False, "soft_wrap": True}
    return Messages(lambda: clock.now, stderr=True, **plain)


@pytest.fixture
def heartbeat(screen):
    screen.print("loading")
    return Heartbeat(screen)


def lines(capsys):
    return capsys.readouterr().err.splitlines()


def test_at_most_one_line_in_ten_seconds_with_the_time_left(capsys, clock, screen, heartbeat):
    with Steps(screen=screen) as steps:
        steps.begin("working", 100)
        for _ in range(50):
            clock.now += SECONDS_BETWEEN_LINES / 5
            steps.advance()
            heartbeat.beat()
        first, *others = lines(capsys)[1:]
        assert first == "working: 5 of 100 steps, about 0:03:10 left"
        assert others[8:] == ["working: 50 of 100 steps, about 0:01:40 left"]
        steps.begin("judging", 4)  # has a time of its own
        clock.now += SECONDS_BETWEEN_LINES
        steps.advance()
        heartbeat.beat()
    assert lines(capsys) == ["judging: 1 of 4 steps, about 0:00:30 left"]


@pytest.mark.parametrize("resumed", [0, 20])
def test_after_a_slow_start_the_time_left_only_falls(capsys, clock, screen, heartbeat, resumed):
    """A first step that compiles, others of different work that take as long as their work says."""
    work = [1, 4, 2, 8, 1, 3] * 10
    with Steps(screen=screen) as steps:
        steps.begin("working", resumed + len(work), resumed + sum(work))
        for _ in range(resumed):
            steps.advance(1, resumed=True)
        clock.now += 60
        for amount in work:
            clock.now += 4 * amount
            steps.advance(amount)
            heartbeat.beat()
    left = [
        line.split("about ")[1].split(" left")[0] for line in lines(capsys)[1:] if "left" in line
    ]
    assert len(left) > 20
    assert left == sorted(left, reverse=True)


@pytest.mark.parametrize(
    ("steps_of", "said"),
    [  # of different work, and done before; in no time
        ([(0, 400, True), (10, 100, False), (10, 400, False)],
         ["working: 2 of 4 steps, about 0:00:50 left",
          "working: 3 of 4 steps, about 0:00:04 left"]),
        ([(0, 100, False), (0, 100, False), (10, 800, False)],
         ["working: 3 of 4 steps, about 0:00:01 left"]),
    ],
)  # fmt: skip
def test_the_time_left(capsys, clock, screen, heartbeat, steps_of, said):
    with Steps(screen=screen) as steps:
        steps.begin("working", 4, 1_000)
        for seconds, work, resumed in steps_of:
            clock.now += seconds
            steps.advance(work, resumed)
            heartbeat.beat()
    assert lines(capsys)[1:] == said


def test_a_silent_piece_of_work_tells_every_ten_seconds_that_it_goes_on(
    capsys, clock, screen, heartbeat
):
    for _ in range(25):
        clock.now += 1
        heartbeat.beat()
    screen.print("solving")
    assert heartbeat.beat() == SECONDS_BETWEEN_LINES
    clock.now += 10
    heartbeat.beat()
    assert lines(capsys) == [
        "loading", "  still at work, 0:00:10 so far", "  still at work, 0:00:20 so far",
        "solving", "  still at work, 0:00:35 so far",
    ]  # fmt: skip


def test_a_silent_step_tells_how_far_the_steps_are(capsys, clock, screen, heartbeat):
    with Steps(screen=screen) as steps:
        steps.begin("collecting", 4)
        for _ in range(2):
            clock.now += SECONDS_BETWEEN_LINES
            heartbeat.beat()
    assert lines(capsys)[1:] == [
        f"collecting: 0 of 4 steps, 0:00:{seconds} so far" for seconds in (10, 20)
    ]


def test_silence_before_the_work_began_does_not_count(capsys, clock, screen):
    screen.print("of an earlier command")
    clock.now += 10 * SECONDS_BETWEEN_LINES
    heartbeat = Heartbeat(screen)
    assert heartbeat.beat() == SECONDS_BETWEEN_LINES
    clock.now += SECONDS_BETWEEN_LINES
    heartbeat.beat()
    assert lines(capsys)[1:] == ["  still at work, 0:00:10 so far"]


def test_the_heart_beats_by_itself(capsys):
    told = ""
    with Heartbeat(seconds=0.01):
        while told.count("still at work") < 2:  # or it never ends
            told += capsys.readouterr().err
