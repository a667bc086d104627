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
from typing import get_args

import numpy as np
import pytest
import typer
from commands import call, refusal
from conftest import ToyHead, bytes_of
from typer.testing import CliRunner

import calibrate
from calibrate.cli import model_fit, options
from calibrate.cli.main import app
from calibrate.cli.run import name_after
from calibrate.core.rule import KINDS
from calibrate.defaults import LENGTHS
from calibrate.fitting.options import LOSSES, FitOptions
from calibrate.rows.collect import collect

SMALL = ["--sizes", "64,512", "--sets", "512"]


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("collected") / "a"
    call("collect", *SMALL, "--out", folder)
    return folder


@pytest.fixture
def run_a(here, collected):
    return Path(shutil.copytree(collected, "runs/a"))


def columns_of(line):
    return re.split(r"\s{2,}", line.strip())


def test_the_main_job(here):
    """A screen: the verdict of the file, five rules on new inputs, the rule, and how to load it."""
    done = call("run", *SMALL)
    out, fit = done.stdout, calibrate.load("quickstart")
    assert len(out.splitlines()) <= 25
    assert "warning" not in done.stderr
    assert out.splitlines()[0] == fit.verdict
    assert fit.verdict.startswith("polynomial: NLL ")
    assert f'fit = calibrate.load("{here / "fits/quickstart/1.json"}")' in out
    rows = {line.split()[0]: columns_of(line) for line in out.splitlines() if line.strip()}
    solved = calibrate.solve("runs/quickstart")
    for size in (64, 512):
        n_misranked = solved.misranked[solved.n == size].sum()
        assert rows[str(size)][1] == f"{n_misranked} of 512 ({n_misranked / 512:.1%})"
    baseline, published, own, constant, argmax = map(float, rows["512"][2:])
    assert 50 < baseline < published < own
    assert abs(own - constant) < 1
    assert own < argmax < 80
    baseline, published, own, constant = map(float, rows["NLL,"][1:5])
    assert max(own, constant) < published < baseline
    assert rows["NLL,"][5] == "·"
    assert float(rows["ECE,"][3]) < float(rows["ECE,"][1])
    numbers = ", ".join(f"{c:.6g}" for c in fit.coefficients)
    assert f"{numbers} (of H^4, H^3, H^2, H, 1)" in out
    assert f"{fit.effective_degrees:.1f} of 5" in out
    assert f"R^2 of log beta    {fit.r_squared:.2f}" in out
    quartiles = np.quantile(
        solved.theta[solved.misranked], [0.25, 0.5, 0.75], method="inverted_cdf"
    )
    assert ", ".join(f"{theta:.3g}" for theta in quartiles) in out
    assert "quickstart@1" in (here / "fits/quickstart/1.html").read_text(encoding="utf-8")


def test_run_saves_one_fit_and_scores_the_rule_that_it_saves(here, run_a):
    run_a.rename("runs/q")
    for version, (asked, kind) in enumerate(
        [(["--paper"], "polynomial"), (["--kind", "constant"], "constant")], 1
    ):
        done = call("run", *SMALL, "--name", "q", *asked, "--json")
        record, fit = json.loads(done.stdout), calibrate.load(f"q@{version}")
        assert (record["reference"], fit.rule.kind) == (f"q@{version}", kind)
        rules = record["scores"]["all"]["rules"]
        both = {"baseline", "paper", "hard", f"q@{version}"}
        assert set(rules) == both | ({"constant"} if kind != "constant" else set())
        assert rules[f"q@{version}"]["log_p"]["gain"] > 0
    assert [path.name for path in Path("fits").iterdir() if path.is_dir()] == ["q"]


def test_a_head_without_correct_is_scored_by_its_nll(here, monkeypatch):
    (here / "unscored_head.py").write_text(UNSCORED_HEAD)
    monkeypatch.syspath_prepend(here)
    out = call("run", "--head", "unscored_head:Head", "--sizes", "16,64", "--sets", "256").stdout
    assert "NLL of the target, nats, of 512 new inputs" in out
    assert "Accuracy" not in out


UNSCORED_HEAD = """
from collections import namedtuple

import calibrate
import numpy as np

Batch = namedtuple("Batch", "logits target")


class Head:
    name = "unscored"
    fingerprint = calibrate.fingerprint({"noise": 0.7})

    def sample(self, seed, size, count):
        rng = np.random.default_rng(seed)
        logits = rng.uniform(0, 6, (count, size))
        target = (2 * logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
        return Batch(logits.astype(np.float32), target.astype(np.int32))

    def attend(self, batch):
        return batch
"""


def test_collect_then_fit_then_load(run_a):
    again = call("collect", *SMALL, "--out", run_a)
    assert "misranked" in again.stdout
    assert "runs/a " in again.stderr
    counts = json.loads(call("collect", *SMALL, "--out", run_a, "--json").stdout)
    assert [size["size"] for size in counts["sizes"]] == [64, 512]
    out = call("fit", run_a, "--name", "mine").stdout
    fit = calibrate.load("mine")
    assert re.search(rf"verdict +{re.escape(fit.verdict)}\n", out)
    assert re.search(r"inputs +1,024: ", out)
    rows = {line.split()[0]: columns_of(line) for line in out.splitlines() if line.strip()}
    for size, held_out in zip(counts["sizes"], fit.table.held_out, strict=True):
        row = rows[str(size["size"])]
        assert row[1:3] == ["512", f"{size['misranked']} of 512 ({size['misranked'] / 512:.1%})"]
        assert row[3:5] == [f"{held_out['nll_before']:.3f}", f"{held_out['nll_after']:.3f}"]
        assert row[5] == f"{held_out['gain']:+.3f} ± {held_out['se']:.3f}"
    for record in fit.table.kinds[1:]:
        assert f"{record['gain']:+.3f} ± {record['se']:.3f}" in out
    assert ", ".join(f"{c:.6g}" for c in fit.coefficients) in out
    record = json.loads(call("fit", run_a, "--name", "mine", "--paper", "--json").stdout)
    assert record["reference"] == "mine@2"
    entries = record["fit"]["entries"]
    assert list(calibrate.load("mine").coefficients) == entries[0]["coefficients"]
    assert record["theta"].keys() == {"0.25", "0.5", "0.75"}
    shown = call("fits", "show", "mine@1").stdout
    assert fit.verdict in shown
    assert f"{fit.table.held_out[1]['nll_after']:.3f}" in shown


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
    for kind in ([], ["--kind", "constant"]):
        line = refusal("fit", "runs/shuffled", "--name", "none", *kind, code=3)
        assert "tell nothing of the targets" in line
    assert not Path("fits").exists()


def test_a_calibrated_head_is_exit_3_unless_a_kind_is_named(here):
    class Calibrated(ToyHead):
        def sample(self, seed, size, count):
            batch = super().sample(seed, size, count)
            rng = np.random.default_rng([seed, 1])
            drawn = (batch.logits + rng.gumbel(size=batch.logits.shape)).argmax(axis=1)
            return batch._replace(target=drawn)

    collect(Calibrated(), [16, 64], 512, 0, Path("runs/calibrated"))
    assert "no significant gain" in refusal("fit", "runs/calibrated", "--name", "x", code=3)
    assert not Path("fits").exists()
    call("fit", "runs/calibrated", "--name", "x", "--kind", "constant")
    fit = calibrate.load("x")
    assert fit.table.kinds[1]["gain"] < 0.01
    assert fit.coefficients == pytest.approx((1,), abs=0.1)


def test_too_few_inputs_or_the_wrong_ones_are_refused(here):
    collect(ToyHead(), [64], 64, 0, Path("runs/few"))
    assert re.search(r"\b64 .* 100 ", refusal("fit", "runs/few", "--name", "few", code=3))
    collect(ToyHead(), [64, 512], 512, 0, Path("runs/a"), keep="misranked")
    line = refusal("fit", "runs/a", "--name", "mine", code=1)
    assert "--loss least-squares" in line
    assert not Path("fits").exists()
    call("fit", "runs/a", "--name", "mine", "--paper")
    assert "no verdict" in calibrate.load("mine").verdict


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
    assert re.search(r"file +st\[v1\]/paper/1\.json\n", result.stdout)
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
        ("run --paper --kind constant", "polynomial"),
        ("run --loss least-squares --kind log-size", "polynomial"),
        ("run --paper --loss likelihood", "--paper"),
        ("run --kind constant --min-entropy 0.5", "--min-entropy"),
        ("run --logits x.npz --sizes 16", "--logits"),
        ("collect --logits x.npz --head max-retrieval", "--logits"),
        ("evaluate --logits x.npz --sets 9", "--logits"),
        ("fit runs/a --name x --paper --kind constant", "polynomial"),
        ("fit runs/a --name x --max-beta 2000", "--max-beta"),
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
        (("run",), "--head --name --sizes --kind --tolerance --seed --store --json"),
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
    assert differ == {"sets", "sizes"}
    assert "run and report end at 4096" in help_of[("collect",)]
    assert "run draws fewer than collect" in help_of[("run",)]


@pytest.mark.parametrize("group", [[], ["model"], ["fits"]])
def test_summaries_of_help_are_whole(group):
    listed = call(*group, "--help").stdout.split("Commands:")[1]
    assert "..." not in listed


@pytest.mark.parametrize("command", ["fit", "run"])
def test_every_option_of_a_fit_reaches_it(command, monkeypatch, run_a):
    asked = {
        "kind": "polynomial", "loss": "least-squares", "min_entropy": 0.25, "min_beta": 0.5,
        "max_beta": 100.0, "trained_up_to": 64, "tolerance": 0.02, "seed": 7,
    }  # fmt: skip
    given = []
    monkeypatch.setattr(
        "calibrate.fitting.fit.fit_collection",
        lambda collection, name, options, *others: given.append(options) or stop(),
    )
    place = [str(run_a)] if command == "fit" else [*SMALL, "--overwrite"]
    words = [word for key, x in asked.items() for word in (f"--{key.replace('_', '-')}", str(x))]
    for some in (words, ["--paper", "--min-beta", "0.5"], []):
        refusal(command, *place, "--name", "x", *some, "--store", "fits")
    assert given == [
        FitOptions(**asked), FitOptions(loss="least-squares", min_beta=0.5), FitOptions(),
    ]  # fmt: skip


def stop():
    raise calibrate.CalibrateError("as far as the test goes")


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
    assert "the paper's published polynomial  " not in ranked  # scored once
    assert "warning: max-retrieval@1 " in first.stderr
    out = first.stdout
    assert out.index("max-retrieval-1: NLL") < out.index("max-retrieval-1: Accuracy, %")
    assert "…" not in out  # no cell is cut
    record = json.loads(call(*command.split(), "--json").stdout)
    assert record["of"]["name"] == "max-retrieval-1"
    assert [rule["rule"] for rule in record["rules"]] == [
        "baseline", "max-retrieval@1", "paper", "hard", "log-n", "rounded",
    ]  # fmt: skip
    scores = record["sizes"][1]["rules"]["max-retrieval@1"]
    by_nll, by_accuracy = (x for x in out.splitlines() if x.strip().startswith("512 "))
    log_p, right = scores["log_p"], scores["right"]
    assert f"{-log_p['mean']:.3f} ({-log_p['gain']:+.3f} ± {log_p['gain_error']:.3f})" in by_nll
    assert f"{100 * right['mean']:.1f} ({100 * right['gain']:+.1f} ± " in by_accuracy
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


def test_the_kinds_and_losses_of_the_options_are_all_that_there_are():
    of_models = inspect.signature(model_fit.fit).parameters["kind"].annotation
    assert get_args(get_args(of_models)[0]) == KINDS
    for option, names in ((options.RuleKind, KINDS), (options.Loss, LOSSES)):
        literal, none = get_args(get_args(option)[0])
        assert (get_args(literal), none) == (names, type(None))


def test_the_lengths_of_the_options_are_those_of_the_library():
    (lengths,) = (p for p in COMMANDS["model", "collect"].params if p.name == "lengths")
    assert tuple(options.parse_sizes(lengths.default)) == LENGTHS
