"""Text of files on the terminal, and output that nobody takes: one line, and no command to it."""

import errno
import io
import json
import os
import sys
from pathlib import Path

import pytest
from commands import call, refusal

from calibrate.__main__ import main
from calibrate.errors import CalibrateError
from calibrate.report import terminal
from calibrate.report.blocks import Result, Table
from calibrate.report.terminal import Screen, Steps, show
from calibrate.store.fit import dumps

HOSTILE = "[bold]\x1b[31m\x1b]8;;http:x\x1b\\\0\x9b1A\u202e\u2066\udcff\x7f"
SHOWN = r"[bold]\x1b[31m\x1b]8;;http:x\x1b" + r"\\x00\x9b1A\u202e\u2066\udcff\x7f"


def test_text_of_files_is_escaped(here, make_fit, capsys):
    document = json.loads(dumps(make_fit()))
    document |= {"x-n": HOSTILE}
    folder = Path(HOSTILE.replace("/", "").replace("\0", "") + "\nline 2")
    folder.mkdir()
    fit = folder / "fit.json"
    fit.write_text(json.dumps(document))
    told = call("fits", "show", fit)
    assert "bold]" in told.stdout
    assert (told.stdout + told.stderr).replace("\n", "").isprintable()
    assert "\n" not in refusal("diagnose", folder)
    assert "\x7f" not in call("fits", "show", fit, "--json").stdout
    show(Result([Table([HOSTILE], [[HOSTILE]])], None))
    assert capsys.readouterr().out.count(SHOWN) == 2


def test_a_long_message_is_cut_in_the_middle():
    told = str(CalibrateError("a" * 1_500 + "z" * 9_000))
    assert told == f"{'a' * 1_000} ... {'z' * 1_000}"


def test_a_bar_has_colours_and_its_title_has_none():
    plain = {"highlight": False, "markup": False, "soft_wrap": True, "width": 200}
    screen = Screen(file=io.StringIO(), force_terminal=True, **plain)
    with Steps(screen=screen) as steps:
        steps.begin(f"measuring {HOSTILE}", 2)
        steps.advance()
        screen.print(f"drawing into {HOSTILE}")
    told = screen.file.getvalue()
    assert r"measuring [bold]\x1b[31m" in told
    assert f"drawing into {SHOWN}" in told
    assert "\x1b[3" in told  # colours of the bar
    assert "\x1b[31m" not in told
    assert not {*"\0\x9b\u202e"} & {*told}


def ends(monkeypatch, capsys, stdout, *arguments):
    """The exit code and messages of a process whose output goes to a file."""
    monkeypatch.setattr(sys, "argv", ["calibrate", *arguments])
    with stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as end:
            main()
    with terminal.stdout.capture():
        pass  # what the device did not take: the next command would print it
    return end.value.code, capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
@pytest.mark.parametrize("buffering", [{}, {"write_through": True}])
@pytest.mark.parametrize("words", ["--version", "--help", "fits list", "fits list --json"])
def test_a_full_disk_is_one_line(monkeypatch, capsys, words, buffering):
    full = io.TextIOWrapper(io.FileIO("/dev/full", "w"), **buffering)
    code, told = ends(monkeypatch, capsys, full, *words.split())
    assert (code, told.count("\n")) == (1, 1)
    assert os.strerror(errno.ENOSPC) in told


def test_a_reader_who_has_left_hears_nothing(monkeypatch, capsys):
    read, write = os.pipe()
    os.close(read)
    assert ends(monkeypatch, capsys, os.fdopen(write, "w"), "--version") == (1, "")
