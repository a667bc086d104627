"""The command line as a whole: help, options, exit codes, and interrupts."""

import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest
import typer
from commands import call, refusal
from conftest import bytes_of
from typer.testing import CliRunner

import calibrate
from calibrate.cli import options
from calibrate.cli.main import app
from calibrate.cli.model_fit import model_fit_command
from calibrate.cli.run import name_after
from calibrate.core.rule import KINDS
from calibrate.defaults import LENGTHS
from calibrate.fitting.options import LOSSES


def commands(group=None, words=()):
    for name, command in (group or typer.main.get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*words, name))
        else:
            yield (*words, name), command


COMMANDS = dict(commands())
WORDS = pytest.mark.parametrize("words", COMMANDS, ids=" ".join)


def options_of(words):
    return [p for p in COMMANDS[words].params if p.param_type_name == "option"]


def help_of(*words):
    """The help in a terminal of 80 columns."""
    return CliRunner().invoke(app, [*words, "--help"], terminal_width=80).stdout


def example_of(words):
    """The arguments of the example of a command, which is the last line of its help."""
    example = help_of(*words).splitlines()[-1]
    command = f"  Example: calibrate {' '.join(words)} "
    assert f"{example} ".startswith(command)
    return shlex.split(example[len(command) :])


@WORDS
def test_help_lists_every_option_and_at_most_twelve_first(words):
    sections = re.split(r"\n(\w[\w ]*):\n", help_of(*words))
    shown = dict(zip(sections[1::2], sections[2::2], strict=True))
    assert len(re.findall(r"^  -", shown["Options"], re.MULTILINE)) <= 12
    listed = "".join(text for title, text in shown.items() if title.startswith("Options"))
    assert all(option.help and f"  {option.opts[0]} " in listed for option in options_of(words))
    assert "  --json " in listed


@WORDS
def test_help_is_on_its_own_command_and_ends_with_an_example_that_parses(words, here):
    Path("Qwen3").mkdir()
    COMMANDS[words].make_context(words[-1], example_of(words))
    text = help_of(*words)
    assert text.count("Example:") == text.count("calibrate ") == 1
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("group", [[], ["model"], ["fits"]])
def test_summaries_of_help_are_whole(group):
    assert "..." not in help_of(*group).split("Commands:")[1]


def test_literals_of_options_are_those_of_the_library():
    kinds = inspect.signature(model_fit_command).parameters["kind"].annotation
    assert get_args(get_args(kinds)[0]) == KINDS
    for option, names in ((options.RuleKind, KINDS), (options.Loss, LOSSES)):
        literal, none = get_args(get_args(option)[0])
        assert (get_args(literal), none) == (names, type(None))
    (lengths,) = (option for option in options_of(("model", "collect")) if option.name == "lengths")
    assert tuple(options.parse_sizes(lengths.default)) == LENGTHS


@pytest.mark.parametrize(
    ("command", "code", "value"),
    [
        ("collect --head nope", 1, "'nope'"),
        ("collect --logits no.npz", 1, "no.npz"),
        ("collect --logits x.npz --sets 1", 2, "--sets"),
        ("collect --logits x.npz --head max-retrieval", 2, "--logits"),
        ("collect --sizes 16,x", 2, "'x'"),
        ("collect --sets 0", 2, "--sets"),
        ("collect --max-bytes 1e999", 2, "--max-bytes"),
        ("fit nowhere --name x", 1, "nowhere "),
        ("fit nowhere --name ../x", 1, "'../x'"),
        ("fit nowhere --name x --loss some", 2, "'some'"),
        ("fit nowhere --name x --min-beta 2", 2, "--min-beta"),
        ("fit nowhere --name x --max-beta 2000", 2, "--max-beta"),
        ("fit nowhere --name x --paper --kind constant", 2, "constant"),
        ("run --name Bad-Name", 1, "'Bad-Name'"),
        ("run --loss least-squares --kind log-size", 2, "polynomial"),
        ("run --paper --loss likelihood", 2, "--paper"),
        ("run --kind constant --min-entropy 0.5", 2, "--min-entropy"),
        ("run --logits x.npz --sizes 16", 2, "--logits"),
        ("evaluate nope", 1, "'nope'"),
        ("evaluate --logits x.npz --sets 9", 2, "--logits"),
        ("report paper --out nope/r.html", 2, "'nope/r.html'"),
        ("report paper --out r.pdf", 2, "'r.pdf'"),
        ("solve nowhere --out theta.txt", 2, "'theta.txt'"),
        ("model fit nowhere --name x --tolerance 1", 2, "--trained-up-to"),
    ],
)
def test_a_refusal_has_an_exit_code_and_comes_before_the_work(here, command, code, value):
    assert value in refusal(*command.split(), code=code)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("model collect --model .", "--prompts"),
        ("export x --model .", "--out"),
        ("export --check x --out y", "--check"),
        ("export x --model . --out y.gguf --as lora", "--as lora"),
        ("export x --model . --out y --engine http://localhost", "--check"),
    ],
)
def test_options_of_models_that_exclude_each_other_are_a_usage_error(here, command, option):
    Path("config.json").write_text("{}")
    Path("model.safetensors").write_text("")
    assert option in refusal(*command.split(), code=2)


def test_a_device_that_is_not_there_is_named(here):
    pytest.importorskip("transformers", reason="needs the extra transformers")
    line = refusal("model", "collect", "--model", ".", "--task", "retrieval", "--device", "nothing")
    assert "--device nothing " in line


def test_calls_without_a_command_and_debug_which_raises_the_error():
    assert call("--version").stdout.strip() == calibrate.__version__
    assert "collect" in CliRunner().invoke(app, []).output
    result = CliRunner().invoke(app, ["--debug", "fit", "nowhere", "--name", "x"])
    assert isinstance(result.exception, calibrate.CalibrateError)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("16..128", [16, 32, 64, 128]),
        ("5..20", [5, 10, 20]),
        ("64,16,64", [16, 64]),
        ("16..32,100", [16, 32, 100]),
        ("1048576", [1 << 20]),
    ],
)
def test_sizes(text, sizes):
    assert options.parse_sizes(text) == sizes


def test_a_range_whose_end_is_not_reached_is_warned_of_once(here):
    stderr = call("collect", "--sizes", "5..17", "--sets", 8, "--out", "run").stderr
    assert stderr.count("warning: 5..17 ") == 1
    with pytest.warns(UserWarning, match="5..17 doubles"):
        assert options.parse_sizes("5..17") == [5, 10]


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("My Head_2.npz", "my-head_2"),
        ("数据", "mine"),
    ],
)
def test_a_fit_is_named_after_its_file(file, name):
    assert name_after(Path(file)) == name


# Python may end itself by the signal, which a shell shows as 130.
INTERRUPTED = 130, -signal.SIGINT


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_interrupt_is_130_and_the_same_command_carries_on(here, jobs):
    """Every process of the terminal gets the signal, as from Ctrl-C."""
    collect = ["collect", "--sizes", "64..4096", "--sets", "2048", "--out"]
    command = [sys.executable, "-m", "calibrate", *collect, "runs/a", "--jobs", str(jobs)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not list(Path("runs/a").glob("n*.npz")) and process.poll() is None:
        time.sleep(0.05)
    while process.poll() is None:  # the first is ignored if it falls into a callback of JAX
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(5)
    _, stderr = process.communicate(timeout=60)  # once nobody holds the pipe: no worker is left
    assert process.returncode in INTERRUPTED
    assert stderr.splitlines()[-1].startswith("calibrate: interrupted")
    assert "runs/a" in refusal("fit", "runs/a", "--name", "x")
    for folder in ("runs/a", "runs/b"):
        call(*collect, folder)
    assert bytes_of("runs/a") == bytes_of("runs/b")


@pytest.mark.slow
def test_interrupts_at_any_moment_are_130():
    """Also while threads of JAX are at work."""
    call("collect", "--sizes", "64..2048", "--sets", "2048", "--out", "runs/a")
    for tenth in range(0, 50, 10):
        command = [sys.executable, "-m", "calibrate", "fit", "runs/a", "--name", "x"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        process.stderr.read(1)  # it is at work: Python's own start is not ours to interrupt
        try:
            process.wait(tenth / 10)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)
        assert process.returncode in (0, *INTERRUPTED)


INTERRUPTING = """
import importlib.abc, os, runpy, signal, sys

awaited = sys.argv.pop(1)

class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *where):
        if name == awaited:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt())
runpy.run_module("calibrate", run_name="__main__")
"""


@pytest.mark.parametrize("module", ["typer", "calibrate.cli.main"])
def test_an_interrupt_while_the_command_itself_is_loaded_is_quiet(module):
    command = [sys.executable, "-c", INTERRUPTING, module, "fits", "verify"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in INTERRUPTED
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("calibrate: interrupted")
