"""The command line: what it prints, where, and with which exit code."""

import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import typer
from conftest import ToyHead, bytes_of
from planted import NO_GAIN
from typer.testing import CliRunner

import calibrate
from calibrate.cli import model_fit, options
from calibrate.cli.fit import fit_options
from calibrate.cli.main import app
from calibrate.cli.run import name_after
from calibrate.core.rule_kinds import KINDS
from calibrate.defaults import LENGTHS
from calibrate.fitting.options import Options
from calibrate.report.polynomial_record import selected_label
from calibrate.rows.collect import collect

SMALL = ["--sizes", "64,512", "--sets", "512"]


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def refusal(*arguments, code=1):
    """The one line that a failing command says last."""
    result = call(*arguments, code=code)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("collected") / "a"
    call("collect", *SMALL, "--out", folder)
    return folder


@pytest.fixture
def run_a(here, collected):
    return Path(shutil.copytree(collected, "runs/a"))


def test_the_main_job(here):
    """A screen: one verdict, the report, accuracies, the polynomial, and the lines that load."""
    out = call("run", *SMALL).stdout
    assert "how sharp" not in out.lower()
    assert f'fit = calibrate.load("{here / "fits/quickstart/1.json"}")' in out
    rows = [line.split() for line in out.splitlines() if line.strip().startswith(("64 ", "512 "))]
    plain, polynomial, own = (float(rows[1][i]) for i in (5, 7, 8))
    assert 50 < plain < polynomial < own < 80
    assert len(out.split("How to use it")[0].strip().splitlines()) < 24
    fitted = calibrate.load("quickstart-polynomial")
    numbers = ", ".join(f"{c:.4g}" for c in fitted.only.coefficients)
    assert f"coefficients    {numbers} (of H^4 to 1)\n" in out
    assert f"R^2 of log beta {fitted.r_squared:.2f}: the entropy tells" in out
    assert "selected: constant" in out
    assert out.lstrip().startswith("Use quickstart@1 (constant, beta = ")
    solved = calibrate.solve("runs/quickstart")
    for size, row in zip((64, 512), rows, strict=True):
        n_misranked = solved.misranked[solved.n == size].sum()
        assert row[1:5] == [str(n_misranked), "of", "512", f"({n_misranked / 512:.1%})"]
    assert "quickstart@1" in (here / "fits/quickstart/1.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "label", "published"),
    [
        (["--paper"], "polynomial (log-least-squares)", ["q"]),
        (["--kind", "polynomial", "--loss", "least-squares"], "polynomial (least-squares)",
         ["q", "q-polynomial"]),
        (["--kind", "polynomial", "--q", "0.25"], "polynomial (q = 0.25)", ["q", "q-polynomial"]),
    ],
)  # fmt: skip
def test_run_names_the_objective_and_publishes_each_rule_once(
    here, run_a, options, label, published
):
    run_a.rename("runs/q")
    record = json.loads(call("run", *SMALL, "--name", "q", *options, "--json").stdout)
    fit = calibrate.load("q")
    assert selected_label(fit) == label
    assert sorted(path.parent.name for path in Path("fits").glob("*/1.json")) == published
    assert record["polynomial"]["reference"] == f"{published[-1]}@1"
    assert ("procedure" in record["scores"]["all"]["rules"]) == (len(published) == 2)


def test_collect_then_fit_then_load(run_a):
    again = call("collect", *SMALL, "--out", run_a)
    assert "misranked" in again.stdout
    assert "runs/a " in again.stderr
    counts = json.loads(call("collect", *SMALL, "--out", run_a, "--json").stdout)
    assert [size["size"] for size in counts["sizes"]] == [64, 512]
    published = call("fit", run_a, "--name", "mine", "--kind", "polynomial")
    shown = ("beta(H)", "domain", "NLL of the target in nats, held out", "polynomial gains")
    assert all(words in published.stdout for words in shown)
    assert published.stdout.index("polynomial gains") < published.stdout.index("beta(H)")
    record = json.loads(call("fit", run_a, "--name", "mine", "--paper", "--json").stdout)
    assert record["reference"] == "mine@2"
    entries = record["fit"]["entries"]
    assert list(calibrate.load("mine").only.coefficients) == entries[0]["coefficients"]


def test_names_that_are_nearly_right_are_suggested(run_a):
    call("fit", run_a, "--name", "quickstart", "--paper")
    assert refusal("fits", "show", "quikstart").endswith(" quickstart?")
    assert refusal("fits", "show", "unlike").endswith("; `calibrate fit` makes one")
    shutil.copy("fits/quickstart/1.json", "mine.json")
    assert refusal("fits", "show", "mine").endswith(" ./mine.json")


def test_shuffled_targets_are_exit_3_and_why(here):
    class Shuffled(ToyHead):
        def sample(self, seed, size, count):
            batch = super().sample(seed, size, count)
            return batch._replace(target=np.random.default_rng(seed).integers(0, size, count))

    collect(Shuffled(), [64, 512], 512, 0, Path("runs/shuffled"))
    line = refusal("fit", "runs/shuffled", "--name", "none", code=3)
    assert re.search(NO_GAIN, line)
    assert not Path("fits").exists()


def test_too_few_rows_or_the_wrong_ones_are_refused(here):
    collect(ToyHead(), [64], 64, 0, Path("runs/few"))
    line = refusal("fit", "runs/few", "--name", "few", code=3)
    assert re.search(r"\b64 usable rows.* 100 ", line)
    collect(ToyHead(), [64, 512], 512, 0, Path("runs/a"), keep="misranked")
    line = refusal("fit", "runs/a", "--name", "mine", "--rows", "all", code=1)
    assert "--rows misranked" in line
    assert not Path("fits").exists()


@pytest.mark.parametrize("command", [("fit", "runs/a", "--name", "mine"), ("run", *SMALL)])
def test_a_store_that_cannot_be_written_is_found_before_the_work(command, run_a):
    before = sorted(Path("runs").rglob("*"))
    Path("fits").write_text("")
    (line,) = call(*command, "--store", "fits/mine", code=1).stderr.splitlines()
    assert "fits/mine/.lock: Not a directory; " in line
    assert sorted(Path("runs").rglob("*")) == before


def test_a_mangled_newest_version_is_named_and_left_behind(run_a):
    call("fit", run_a, "--name", "mine", "--paper")
    path = Path("fits/mine/1.json")
    path.write_text(path.read_text().replace("0.5", "0.6", 1))
    result = call("fit", run_a, "--name", "mine", "--paper")
    assert "warning: fits/mine/1.json: " in result.stderr
    assert f'calibrate.load("{path.absolute().with_name("2.json")}")' in result.stdout


def test_names_are_printed_as_they_are(run_a):
    run_a.rename("runs/[red]a")
    result = call("fit", "runs/[red]a", "--name", "paper", "--store", "st[v1]", "--paper")
    assert "file       st[v1]/paper/1.json" in result.stdout
    assert "runs/[red]a" in result.stderr


# Python may end itself by the signal, which a shell shows as 130.
INTERRUPTED = 130, -signal.SIGINT


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_interrupt_is_130_and_the_same_command_carries_on(here, jobs):
    """As Ctrl-C does: every process of the terminal gets the signal."""
    asked = ["collect", "--sizes", "64..4096", "--sets", "2048", "--out"]
    command = [sys.executable, "-m", "calibrate", *asked, "runs/a", "--jobs", str(jobs)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not list(Path("runs/a").glob("n*.npz")) and process.poll() is None:
        time.sleep(0.05)
    while process.poll() is None:  # the first is ignored if it falls into a callback of JAX
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(5)
    _, stderr = process.communicate(timeout=60)  # once nobody holds the pipe: no worker is left
    assert process.returncode in INTERRUPTED
    assert stderr.splitlines()[-1].startswith("calibrate: interrupted")
    assert "--allow-partial" in refusal("fit", "runs/a", "--name", "x")
    for folder in ("runs/a", "runs/b"):
        call(*asked, folder)
    assert bytes_of("runs/a") == bytes_of("runs/b")


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


@pytest.mark.parametrize("module", ["calibrate.errors", "typer", "calibrate.cli.main"])
def test_an_interrupt_while_the_command_itself_is_loaded_is_quiet(module):
    command = [sys.executable, "-c", INTERRUPTING, module, "fits", "verify"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in INTERRUPTED
    assert done.stderr == "calibrate: interrupted; run the same command again to continue\n"


def commands(group=None, words=()):
    for name, command in (group or typer.main.get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*words, name))
        else:
            yield (*words, name), command


COMMANDS = dict(commands())
WORDS = pytest.mark.parametrize("words", COMMANDS, ids=" ".join)


@WORDS
def test_help_fits_a_screen_and_has_an_example(words):
    done = CliRunner().invoke(app, [*words, "--help"], terminal_width=100)
    lines = done.stdout.splitlines()
    assert len(lines) <= 45
    assert any(line.startswith(f"  Example: calibrate {' '.join(words)}") for line in lines)


@WORDS
def test_every_option_is_documented_and_tested(words):
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.py"))
    options = [p for p in COMMANDS[words].params if p.param_type_name == "option"]
    assert "--json" in {name for option in options for name in option.opts}
    for option in options:
        assert option.help, option.opts
        assert re.search(rf"[ \"]{option.opts[0]}[ \"]", tests), option.opts


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("run --paper --q 0.5", "--paper"),
        ("run --loss least-squares", "--kind polynomial"),
        ("run --kind polynomial --loss least-squares --q 0.5", "--q"),
        ("run --logits x.npz --sizes 16", "--logits"),
        ("collect --logits x.npz --head max-retrieval", "--logits"),
        ("evaluate --logits x.npz --sets 9", "--logits"),
        ("fit runs/a --name x --min-entropy 0.5 --paper", "--paper"),
        ("fit runs/a --name x --head x:y --q 0.5", "--q"),
        ("fit runs/a --name x --kind polynomial --loss least-squares --tolerance 1", "--tolerance"),
        ("model fit runs/a --name x --tolerance 1", "--trained-up-to"),
        ("model collect --model .", "--prompts"),
        ("export x --model .", "--out"),
        ("export --check x --out y", "--check"),
        ("export x --model . --out y --max-rank 2", "--as lora"),
        ("export x --model . --out y.gguf --as lora", "--as lora"),
        ("export x --model . --out y --engine http://localhost", "--check"),
    ],
)
def test_options_that_exclude_each_other_are_a_usage_error(here, words, option):
    Path("config.json").write_text("{}")
    Path("model.safetensors").write_text("")
    assert option in refusal(*words.split(), code=2)


def test_options_stand_in_the_order_of_use_and_say_where_defaults_differ():
    help_of = {words: " ".join(call(*words, "--help").stdout.split()) for words in COMMANDS}
    for words, names in (
        (("run",), "--head --name --sizes --kind --seed --store --json"),
        (("fit",), "--name --kind --trained-up-to --tolerance --jobs --timeout --store --json"),
        (("export",), "--model --out --check --engine --served-model-name --prompts --store"),
        (("model", "collect"), "--model --out --prompts --task --retention-text --lengths --json"),
        (("model", "fit"), "--model --name --kind --trained-up-to --tolerance --max-kl --jobs"),
    ):
        shown = help_of[words].split("Options: ")[1]
        places = [re.search(rf"{name} <|{name} [A-Z]", shown).start() for name in names.split()]
        assert places == sorted(places)
    defaults = {}
    for command in COMMANDS.values():
        for option in command.params:
            if option.param_type_name == "option" and option.default not in (None, False):
                defaults.setdefault(option.name, set()).add(option.default)
    differ = {name for name, values in defaults.items() if len(values) > 1}
    assert differ == {"kind", "sets", "sizes"}
    assert "run and report end at 4096" in help_of[("collect",)]
    assert "run draws fewer than collect" in help_of[("run",)]


@pytest.mark.parametrize("group", [[], ["model"], ["fits"]])
def test_summaries_of_help_are_whole(group):
    listed = call(*group, "--help").stdout.split("Commands:")[1]
    assert "..." not in listed


def test_every_option_of_a_fit_reaches_it():
    asked = {"rows": "misranked", "min_entropy": 0.25, "q": 0.5, "trained_up_to": 64}
    asked |= {"tolerance": 0.02, "loss": "likelihood"}
    drawn, arrays, captured = (
        SimpleNamespace(configuration=of, heads=heads)
        for of, heads in (({}, []), ({"of": "logits"}, []), ({"of": "logits"}, [(0, 0)]))
    )
    options = fit_options(drawn, False, "polynomial", 0.5, **asked)
    assert options == Options(kind="polynomial", min_beta=0.5, **asked)
    least = [fit_options(of, False, "auto", None).min_beta for of in (drawn, arrays, captured)]
    assert least == [1, 1 / 64, 1]
    assert fit_options(drawn, False, "auto", None) == Options()
    assert fit_options(arrays, True, "auto", None) == Options(
        "misranked", 0.5, kind="polynomial", loss="log-least-squares", min_beta=1
    )


def test_calls_without_a_command_and_debug_which_shows_the_traceback():
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


def test_the_end_of_a_range_that_is_not_reached_is_told_once(here):
    told = call("collect", "--sizes", "5..17", "--sets", 8, "--out", "run").stderr
    assert told.count("warning: 5..17 doubles and ends at 10; for 17 write 5..17,17\n") == 1
    assert options.parse_sizes("5..17") == [5, 10]


@pytest.mark.parametrize(
    ("file", "name"),
    [("Ünïcode name.npz", "unicode-name"), ("Straße_Łódź.npz", "strasse_lodz"), ("数据", "mine")],
)
def test_names_of_files_keep_their_letters(file, name):
    assert name_after(Path(file)) == name


def test_a_device_that_is_not_there_is_named(here):
    pytest.importorskip("transformers", reason="needs the extra transformers")
    line = refusal("model", "collect", "--model", ".", "--task", "retrieval", "--device", "nothing")
    assert "--device nothing cannot be used: " in line
    assert line.endswith("; give cpu")


def test_evaluate_prints_a_table_or_json(here):
    command = "evaluate --head max-retrieval-1 --sizes 16,512 --sets 256 --fits max-retrieval@1"
    first = call(*command.split())
    ranked = call(*command.split(), "paper").stdout.split("Ranked")[1]
    assert ranked.count("paper@1  ") == 1
    assert "the paper's published polynomial  " not in ranked
    assert "warning: max-retrieval@1 " in first.stderr
    out = first.stdout
    assert "max-retrieval-1: Accuracy, %" in out
    assert "…" not in out  # no cell is cut
    record = json.loads(call(*command.split(), "--json").stdout)
    assert record["of"]["name"] == "max-retrieval-1"
    assert [rule["rule"] for rule in record["rules"]] == [
        "plain", "max-retrieval@1", "paper", "hard", "log-n", "rounded",
    ]  # fmt: skip
    found = record["sizes"][1]["rules"]["max-retrieval@1"]["right"]
    row = next(line for line in out.splitlines() if line.strip().startswith("512 "))
    shown = f"{100 * found['mean']:.1f} ({100 * found['gain']:+.1f} ± "
    assert shown in row
    assert not list(here.iterdir())  # nothing is collected, fitted or kept


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


def test_the_kinds_of_rule_of_the_options_are_all_that_there_are():
    of_models = inspect.signature(model_fit.fit).parameters["kind"].annotation
    for kind, kinds in ((options.RuleKind, ("auto", *KINDS)), (of_models, tuple(KINDS))):
        assert get_args(get_args(kind)[0]) == kinds


def test_the_lengths_of_the_options_are_those_of_the_library():
    (lengths,) = (p for p in COMMANDS["model", "collect"].params if p.name == "lengths")
    assert tuple(options.parse_sizes(lengths.default)) == LENGTHS
