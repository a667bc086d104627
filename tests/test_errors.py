"""Messages: what they say to users of Python and of the command line, and which names they use."""

import ast
import inspect
import pickle
import re
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import call, refusal
from conftest import reopen
from typer.main import get_command

import calibrate
from calibrate.cli.main import app
from calibrate.cli.option_names import option_of, with_options
from calibrate.datasets.collection import open_collection
from calibrate.datasets.examples import ExampleCollection
from calibrate.datasets.row_collection import RowCollection
from calibrate.errors import CalibrateError, QualityError, as_option, command
from calibrate.parallel import Jobs, run
from calibrate.rows.diagnosis import diagnose
from calibrate.rows.heads import load_head

ROOT = Path(__file__).parents[1]
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
# Of commands of others that messages tell to run: hf download, vllm serve.
FOREIGN = {
    "--local-dir", "--merge", "--hf-overrides", "--model-path", "--json-model-override-args",
    "--override-kv", "--enable-lora", "--max-lora-rank", "--lora-modules", "--model-impl",
}  # fmt: skip


def texts_of(path):
    """(line, text) of every string of a module that is no docstring."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.lineno, node.value


def test_options_are_named_by_the_command_line_alone():
    """And by verdicts, which files keep."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {option}"
        for path in sorted((ROOT / "calibrate").rglob("*.py"))
        if path.relative_to(ROOT / "calibrate").parts[0] != "cli" and path.name != "verdict.py"
        for line, text in texts_of(path)
        for option in OPTION.findall(text)
        if option not in FOREIGN
    ]
    assert not found, "name parameters as Python has them:\n" + "\n".join(found)


ALL = {"--max-kl", "--kind", "--overwrite", "--model", "--out", "--trained-up-to", "--loss"}


@pytest.mark.parametrize(
    ("in_python", "in_command"),
    [
        ("lower max_kl=, or", "lower --max-kl, or"),
        ("(max_kl=)?", "(--max-kl)?"),
        ('kind="log-size"; x', "--kind log-size; x"),
        ("overwrite=True to", "--overwrite to"),
        ("trained_up_to=64.", "--trained-up-to 64."),
        ("trained_up_to=0.5,", "--trained-up-to 0.5,"),
        ("trained_up_to=1e-05", "--trained-up-to 1e-05"),
        ("trained_up_to=1e+16", "--trained-up-to 1e+16"),
        ("trained_up_to=inf", "--trained-up-to inf"),
        ("max_kl=0.1 and rows=", "--max-kl 0.1 and rows="),  # not declared
        ("up_max_kl=0.1", "up_max_kl=0.1"),
        ("fit again, or max_kl=0.1", "fit again, or --max-kl 0.1"),
        ("fit again, or for_export=True", "fit again"),  # an option of other commands
        ("fit again or for_export=", "fit again"),
    ],
)
def test_a_command_shows_its_options_in_place_of_parameters(in_python, in_command):
    declared = ("max_kl", "kind", "overwrite", "trained_up_to", "for_export")
    error = CalibrateError(in_python, parameter=declared)
    assert str(error) == error.args[0] == in_python
    assert with_options(error, ALL) == in_command


def test_the_parameters_of_an_error_survive_another_process():
    sent = pickle.loads(pickle.dumps(QualityError('give rows="misranked"', parameter="rows")))
    assert isinstance(sent, QualityError)
    assert sent.parameters == ("rows",)
    with pytest.raises(CalibrateError) as failed:
        run([fail, fail], Jobs(2))
    assert failed.value.parameters == ("max_kl", "rows")


def fail():
    raise CalibrateError("give max_kl= or rows=", parameter=("max_kl", "rows"))


def test_text_of_others_is_escaped():
    error = CalibrateError("x\x1b[31m\ufdd0 is no file; give model=", parameter="model")
    assert str(error) == "x\\x1b[31m\\ufdd0 is no file; give model="


def test_a_folder_is_the_option_that_a_command_has():
    assert option_of({"--out", "--name"}, "folder") == "--out"
    assert option_of({"--name"}, "folder") == "--name"
    assert command("model fit RUN", for_export=True, kind="constant") == (
        "calibrate model fit RUN --for-export --kind constant"
    )


def options_of(words):
    """The options of a command, "model fit" for instance."""
    group = get_command(app)
    for word in words.split():
        group = group.commands[word]
    return {name for option in group.params for name in option.opts}


def test_commands_of_messages_exist():
    """Calls of `command` with literal arguments, wherever they stand."""
    n = 0
    for path in (ROOT / "calibrate").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "command":
                continue
            words = node.args[0] if node.args else None
            if not isinstance(words, ast.Constant) or not isinstance(words.value, str):
                continue
            known = options_of(re.sub(r"\b[A-Z]+\b", "", words.value))
            assert {as_option(keyword.arg, "") for keyword in node.keywords} <= known, path
            n += 1
    assert n > 5


def test_a_parameter_of_an_error_is_an_option_of_some_command():
    commands = ["collect", "fit", "export", "model collect", "model fit", "model evaluate"]
    known = set().union(*map(options_of, commands))
    names = set()
    for path in (ROOT / "calibrate").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "parameter":
                names |= {x.value for x in ast.walk(node.value) if isinstance(x, ast.Constant)}
    assert len(names) > 8
    assert {option_of(known, name) for name in names} <= known


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with collections of a head: of all rows, of misranked ones, of a part."""
    folder = tmp_path_factory.mktemp("messages")
    small = ("--sizes", 16, "--sets", 64)
    call("collect", *small, "--out", folder / "all")
    call("collect", *small, "--keep", "misranked", "--out", folder / "misranked")
    call("collect", *small, "--out", folder / "part")
    reopen(folder / "part")
    return folder


def other_sets(home):
    calibrate.collect("max-retrieval", [16], 65, folder=home / "all")


def all_of_misranked(home):
    calibrate.fit_polynomial(calibrate.solve(home / "misranked"))


def diagnosis_of_misranked(home):
    diagnose(open_collection(home / "misranked", RowCollection))


def unfinished(home):
    calibrate.solve(home / "part")


def absent_module(home):
    load_head("no_such_module:head")


# A call in Python, the same on the command line, and what the message names in each.
FAILURES = {
    other_sets: (
        "collect --sizes 16 --sets 65 --out {home}/all",
        "overwrite=True",
        "--overwrite",
    ),
    all_of_misranked: (
        "fit {home}/misranked --name x",
        'loss="least-squares"',
        "--loss least-squares",
    ),
    diagnosis_of_misranked: ("diagnose {home}/misranked", *2 * ["misranked"]),
    unfinished: ("solve {home}/part", *2 * ["`calibrate fit --allow-partial`"]),
    absent_module: (
        "collect --head no_such_module:head --sizes 16",
        *2 * ["no_such_module"],
    ),
}


@pytest.mark.parametrize("fails", FAILURES, ids=lambda x: x.__name__)
def test_a_failure_is_told_in_python_and_by_a_command(home, fails):
    words, in_python, in_command = FAILURES[fails]
    with pytest.raises(CalibrateError) as failed:
        fails(home)
    assert in_python in str(failed.value)
    command, *arguments = words.format(home=home).split()
    line = refusal(command, *arguments)
    assert in_command in line
    own = OPTION.findall(re.sub("`.*?`", "", line))  # without commands to run
    assert set(own) <= options_of(command)


@pytest.mark.parametrize(
    ("fails", "function"),
    [(other_sets, calibrate.collect), (all_of_misranked, calibrate.fit_polynomial)],
)
def test_parameters_of_a_failure_are_those_of_the_function(home, fails, function):
    with pytest.raises(CalibrateError) as failed:
        fails(home)
    names = failed.value.parameters
    assert names
    assert {*names} <= inspect.signature(function).parameters.keys()


def test_a_run_into_another_collection_names_its_own_option(here):
    call("collect", "--sizes", 16, "--sets", 64, "--out", "runs/x")
    line = refusal("run", "--sizes", 16, "--sets", 65, "--name", "x")
    assert {"--name", "--overwrite"} <= set(OPTION.findall(line))


def no_engine():
    from calibrate.export.engine import Engine

    Engine("nowhere", None, 0)


def no_kind_for_engines():
    from calibrate.export.plan import Exportable
    from calibrate.model.options import ModelOptions

    ModelOptions(kind="entropy-and-size", engines=Exportable("each head", ""))


def no_model(folder=Path("here")):
    ExampleCollection.recorded_model(SimpleNamespace(folder=folder))


def too_slow():
    run([partial(time.sleep, 60)], Jobs(2, timeout=0.2))


# What raises, in which command; and a part of the message in each spelling.
SPELLINGS = {
    no_engine: ("export", "engine= ", "--engine "),
    no_kind_for_engines: ("model fit", 'kind="constant"', "--kind constant"),
    no_model: ("model fit", "model=", "--model"),
    too_slow: ("collect", "timeout=", "--timeout"),
}


@pytest.mark.parametrize("fails", SPELLINGS, ids=lambda x: x.__name__)
def test_parameters_of_a_failure_are_options_of_its_command(fails):
    words, in_python, in_command = SPELLINGS[fails]
    with pytest.raises(CalibrateError, match=re.escape(in_python)) as failed:
        fails()
    options = options_of(words)
    message = with_options(failed.value, options)
    assert in_command in message
    assert set(OPTION.findall(message)) <= options
