"""`run`, `collect`, `fit` and `evaluate`: from inputs of a head or logits to a fit and a report."""

import itertools
import json
import os
import re
import shutil
from contextlib import chdir, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from commands import call, refusal
from conftest import ToyHead
from planted import planted_rows
from test_arrays import SIZES, by_size
from test_score_logits import planted
from typer.testing import CliRunner

import calibrate
from calibrate.cli.main import app
from calibrate.cli.row_scoring import best_constant
from calibrate.core.rule import formula
from calibrate.fitting.options import FitOptions
from calibrate.report.page import Picture
from calibrate.rows.collect import collect_from_head
from calibrate.rows.collection import open_collection
from calibrate.rows.logits_files import Arrays
from calibrate.rows.score import score_logits
from calibrate.rows.solve import solve_collection, theta_quartiles

SMALL = ["--sizes", "64,512", "--sets", "512"]


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """The folder and the output of a run on a head, whose report has its pictures."""
    with chdir(tmp_path_factory.mktemp("first")):
        return Path.cwd(), call("run", *SMALL, "--store", "fits")


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Reports of other runs have no pictures, which take most of the time of a small run."""
    draw = "calibrate.report.page.draw_picture"
    monkeypatch.setattr(draw, lambda title, *_, **__: Picture("", title, ""))


@pytest.fixture
def run_a(here, first_run):
    return Path(shutil.copytree(first_run[0] / "runs/quickstart", "runs/a"))


@pytest.fixture
def own_rows(here):
    """A folder of logits, whose name is not one of a fit."""
    folder = here / "Own Rows"
    folder.mkdir()
    for n, logits, target in zip(SIZES, *by_size(), strict=True):
        np.savez(folder / f"{n}.npz", logits=logits, target=target)
    return folder


def cells_by_row(out):
    """The cells of each line, by its first word."""
    lines = [line for line in out.splitlines() if line.strip()]
    return {line.split()[0]: re.split(r"\s{2,}", line.strip()) for line in lines}


def tables_of(page):
    return re.findall(r"<table.*?</table>", page, re.DOTALL)


def quartiles_text(solved):
    shares = (0.25, 0.5, 0.75)
    theta = np.quantile(solved.theta[solved.misranked], shares, method="inverted_cdf")
    return ", ".join(f"{x:.3g}" for x in theta)


def test_a_run_on_a_head_prints_one_screen(first_run, monkeypatch):
    """The verdict of the file, five rules on new inputs, the rule, and the line that loads it."""
    folder, done = first_run
    monkeypatch.chdir(folder)
    out, fit = done.stdout, calibrate.load("quickstart")
    assert len(out.splitlines()) <= 30
    assert "warning" not in done.stderr
    assert out.startswith(f"{fit.verdict}\n\n")
    assert 'fit = calibrate.load("quickstart@1")' in out
    rows = cells_by_row(out)
    baseline, own, constant, published, argmax = map(float, rows["512"][1:])
    assert 50 < baseline < published < own < argmax < 80
    assert abs(own - constant) < 1
    rules = ("this", "constant", "published", "baseline")
    nll, ece = ([float(rows[rule][i].removeprefix("* ")) for rule in rules] for i in (2, 3))
    assert max(nll[:2]) < nll[2] < nll[3]
    assert ece[0] < ece[3]
    assert f"{formula('polynomial', fit.coefficients)}\n" in out
    advice = "calibrate fit runs/quickstart --kind constant --name quickstart-constant\n"
    assert (advice in out) == ("`--kind constant`" in fit.verdict)
    report = (folder / "fits/quickstart/1.html").read_text(encoding="utf-8")
    assert "quickstart@1" in report
    assert report.count("data:image/png;base64,iVBOR") > 3
    call("report", "quickstart", "--sets", "512", "--out", "r.html")  # of the same sizes
    again = Path("r.html").read_text(encoding="utf-8")
    assert tables_of(again) == tables_of(report) != []


def test_options_of_run_reach_the_collection_and_the_fit(here):
    data = {"head": "max-retrieval-3", "sizes": [16, 32], "sets": 70, "seed": 5}
    words = "--head max-retrieval-3 --sizes 16,32 --sets 70 --seed 5 --kind constant --name x"
    record = json.loads(call("run", *words.split(), "--json").stdout)
    configuration = open_collection(Path("runs/x")).configuration
    assert {name: configuration[name] for name in data} == data
    assert record["reference"] == "x@1"
    options = calibrate.load("x").source["options"]
    assert (options["kind"], options["seed"]) == ("constant", 5)
    assert set(record["scores"]["all"]["rules"]) == {"baseline", "paper", "hard", "x@1"}


FIT_OPTIONS = {
    "kind": "polynomial", "loss": "least-squares", "min_entropy": 0.25, "min_beta": 0.5,
    "max_beta": 100.0, "trained_up_to": 8, "tolerance": 0.02, "seed": 7,
}  # fmt: skip


@pytest.mark.parametrize("command", ["fit", "run"])
def test_every_option_of_a_fit_reaches_it(command, own_rows):
    words = ["--logits", "Own Rows"]
    if command == "fit":
        call("collect", *words, "--out", "runs/x")
        words = ["runs/x"]
    for key, value in FIT_OPTIONS.items():
        words += [f"--{key.replace('_', '-')}", str(value)]
    call(command, *words, "--name", "x", "--store", "fits")
    options = calibrate.load("x").source["options"]
    assert {key: options[key] for key in FIT_OPTIONS} == FIT_OPTIONS
    defaults = FitOptions()
    assert all(getattr(defaults, key) != value for key, value in FIT_OPTIONS.items())


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


def test_a_head_without_correct_is_scored_by_its_nll(here, monkeypatch):
    (here / "unscored_head.py").write_text(UNSCORED_HEAD)
    monkeypatch.syspath_prepend(here)
    words = "--head unscored_head:Head --sizes 16 --sets 256 --kind constant"
    out = call("run", *words.split()).stdout
    assert "NLL, nats, by n" in out
    assert "Accuracy" not in out


def test_collect_then_fit_then_load(run_a):
    counts = json.loads(call("collect", *SMALL, "--out", run_a, "--json").stdout)
    assert [size["size"] for size in counts["sizes"]] == [64, 512]
    out = call("fit", run_a, "--name", "mine").stdout
    fit, rows = calibrate.load("mine"), cells_by_row(out)
    first, *others = fit.verdict.split("\n")
    assert re.search(rf"verdict +{re.escape(first)}\n", out)
    assert all(re.search(rf"\n +{re.escape(line)}\n", out) for line in others)
    assert re.search(r"inputs +1,024: ", out)
    for size, held_out in zip(counts["sizes"], fit.evidence["held_out"], strict=True):
        nll = [f"{held_out[key]:.3f}" for key in ("nll_before", "nll_after")]
        gain = f"{held_out['nll_before'] - held_out['nll_after']:+.3f} ± {held_out['se']:.3f}"
        assert rows[str(size["size"])][1:5] == ["512", *nll, gain]
    for record in fit.evidence["kinds"][1:]:
        assert f"{record['gain']:+.3f} ± {record['se']:.3f}" in out
    record = json.loads(call("fit", run_a, "--name", "mine", "--paper", "--json").stdout)
    assert record["reference"] == "mine@2"
    assert list(calibrate.load("mine").coefficients) == record["fit"]["entries"][0]["coefficients"]
    assert first in call("fits", "show", "mine@1").stdout
    Path("fits/mine/2.json").write_text("{}")
    damaged = call("fit", run_a, "--name", "mine", "--paper")
    assert " fits/mine/3.json" in damaged.stdout


def head_of(targets):
    """A toy head whose targets are drawn anew: `targets` takes a generator and logits."""

    class Drawn(ToyHead):
        def sample(self, seed, size, count):
            batch = super().sample(seed, size, count)
            return batch._replace(target=targets(np.random.default_rng([seed, 1]), batch.logits))

    return Drawn()


def test_exit_3_without_a_gain_unless_a_kind_is_named(here):
    uniform = head_of(lambda rng, z: rng.integers(0, z.shape[1], len(z)))
    calibrated = head_of(lambda rng, z: (z + rng.gumbel(size=z.shape)).argmax(axis=1))
    collect_from_head(uniform, [16], 512, 0, Path("runs/uniform"))
    collect_from_head(calibrated, [16], 512, 0, Path("runs/calibrated"))
    for words in ("runs/uniform", "runs/uniform --kind constant", "runs/calibrated"):
        refusal("fit", *words.split(), "--name", "x", code=3)
    assert not Path("fits").exists()
    call("fit", "runs/calibrated", "--name", "x", "--kind", "constant")
    assert calibrate.load("x").coefficients == pytest.approx((1,), abs=0.1)


def test_misranked_inputs_alone_are_fitted_by_least_squares(here):
    collect_from_head(ToyHead(), [64, 512], 512, 0, Path("runs/a"), keep="misranked")
    assert "--loss least-squares" in refusal("fit", "runs/a", "--name", "mine")
    call("fit", "runs/a", "--name", "mine", "--paper")
    assert calibrate.load("mine").source["options"]["loss"] == "least-squares"


@pytest.mark.parametrize("command", [("fit", "runs/a", "--name", "mine"), ("run", *SMALL)])
def test_a_store_that_cannot_be_written_is_found_before_the_work(command, run_a):
    before = sorted(Path("runs").rglob("*"))
    Path("fits").write_text("")
    (line,) = call(*command, "--store", "fits/mine", code=1).stderr.splitlines()
    assert "fits/mine/" in line
    assert sorted(Path("runs").rglob("*")) == before


def test_names_are_printed_as_they_are(run_a):
    run_a.rename("runs/[red]a")
    result = call("fit", "runs/[red]a", "--name", "paper", "--store", "st[v1]", "--paper")
    assert re.search(r"file +st\[v1\]/paper/1\.json\n", result.stdout)
    assert "runs/[red]a" in result.stderr


@pytest.mark.slow
def test_a_run_on_logits_is_the_function_fit_continues_and_names_what_differs(own_rows):
    first = call("run", "--logits", "Own Rows", "--seed", "3").stdout
    fit, saved = calibrate.fit(*by_size(), seed=3), calibrate.load("own-rows")
    record = json.loads(call("run", "--logits", "Own Rows", "--seed", "3", "--json").stdout)
    assert record["reference"] == saved.reference == "own-rows@1"
    assert saved == fit
    assert saved.evidence == fit.evidence
    assert saved.source["options"] == fit.source["options"]
    assert record["verdict"] == fit.verdict
    page = re.sub("</?code>", "`", Path(record["report"]).read_text(encoding="utf-8"))
    assert all(line in page for line in fit.verdict.replace("->", "→").split("\n"))
    assert len(first.splitlines()) <= 30
    rows = cells_by_row(first)
    for record in calibrate.load("own-rows").evidence["held_out"]:
        nll = [f"{record[name]:.3f}" for name in ("nll_before", "nll_after")]
        gain = record["nll_before"] - record["nll_after"]
        assert rows[str(record["n"])][2:] == [*nll, f"{gain:+.3f} ± {record['se']:.3f}"]
    again = call("run", "--logits", "Own Rows", "--seed", "3")
    assert "runs/own-rows " in again.stderr
    assert "own-rows@1 " in again.stderr
    assert first == again.stdout
    with pytest.warns(UserWarning, match="^own-rows "):
        score_logits(Arrays.read(own_rows), {"own-rows": calibrate.load("own-rows")})
    next(own_rows.iterdir()).unlink()
    line = refusal("run", "--logits", "Own Rows", "--seed", "3")
    assert "runs/own-rows" in line
    assert "sha256" not in line
    call("run", "--logits", "Own Rows", "--seed", "3", "--overwrite", "--kind", "constant")
    assert calibrate.load("own-rows").version == 2
    assert open_collection(Path("runs/own-rows")).manifest["configuration"]["sizes"] == [SIZES[1]]


@pytest.mark.slow
def test_rows_of_several_heads_have_a_rule_for_each_that_gains(here):
    columns = planted(rows=300)
    masked = np.where(columns["mask"], columns["logits"], -np.inf)
    drawn = (masked + np.random.default_rng(0).gumbel(size=masked.shape)).argmax(axis=1)
    is_calibrated = (columns["layer"] == 0) & (columns["head"] == 0)
    columns["target"] = np.where(is_calibrated, drawn, columns["target"])
    np.savez("heads.npz", **columns)
    out = call("run", "--logits", "heads.npz").stdout
    fit = calibrate.load("heads")
    heads = {(x["layer"], x["head"]): x for x in fit.evidence["heads"]}
    assert set(heads) == {(0, 0), (0, 3), (2, 1)}
    assert [(entry.layer, entry.head) for entry in fit.entries] == [(0, 3), (2, 1)]
    for part in ("2 of 3 have a rule", "layer 0, head 3", "fits/heads/1.html"):
        assert part in out
    record = json.loads(call("run", "--logits", "heads.npz", "--json").stdout)
    assert [x["has_rule"] for x in record["heads"]] == [
        fit.entry_of(*head) is not None for head in heads
    ]


@pytest.mark.slow
def test_heads_are_listed_by_falling_gain_twenty_at_most(here):
    pairs = [(i, j) for i in range(3) for j in range(8)]
    columns = planted(rows=120, n=16, heads=pairs)
    columns["logits"] *= 3
    np.savez("many.npz", **columns)
    out = call("run", "--logits", "many.npz", "--kind", "constant").stdout
    gains = {(x["layer"], x["head"]): x["gain"] for x in calibrate.load("many").evidence["heads"]}
    best = sorted(gains, key=gains.get, reverse=True)
    listed = [line for line in out.splitlines() if line.strip().startswith("layer ")]
    assert [tuple(map(int, re.findall(r"\d+", line)[:2])) for line in listed] == best[:20]
    assert f"{gains[best[0]]:+.3f} ± " in listed[0]
    assert "And 4 more" in out


def test_evaluate_prints_tables_or_json(here):
    words = ["evaluate", "max-retrieval@1", "--head", "max-retrieval-1", "--sizes", "16,64"]
    words += ["--sets", "256"]
    done = call(*words, "paper")
    compared = done.stdout.split("Rules on 512 new inputs of max-retrieval-1")[1]
    assert compared.count("paper@1  ") == 1
    assert "published polynomial  " not in compared  # scored once
    assert "warning: max-retrieval@1 " in done.stderr
    assert "…" not in done.stdout  # no cell is cut
    assert re.search(r"log n / log 16 +log-n scaling", done.stdout)
    record = json.loads(call(*words, "paper", "--json").stdout)
    assert record["of"]["name"] == "max-retrieval-1"
    assert list(record["rules"]) == [
        "baseline", "max-retrieval@1", "paper@1", "log n / log 16", "hard",
    ]  # fmt: skip
    scores = record["sizes"][1]["rules"]["max-retrieval@1"]
    accuracy, nll, _, gain = (x for x in done.stdout.splitlines() if x.strip().startswith("64 "))
    log_p, right = scores["log_p"], scores["right"]
    assert f" {100 * right['mean']:.1f} " in accuracy
    assert f" {-log_p['mean']:.3f} " in nll
    assert f" {log_p['gain']:+.3f} ± {log_p['gain_error']:.3f} " in gain
    assert not list(here.iterdir())  # nothing is collected, fitted or kept


def test_the_best_constant_has_the_highest_likelihood():
    rows = solve_collection(calibrate.collect("max-retrieval", [16, 64], 300))
    beta = best_constant(rows)
    log_p = [rows.log_p(beta * factor).mean() for factor in (0.98, 1, 1.02)]
    assert max(log_p) == log_p[1]
    assert best_constant(rows.take(rows.misranked)) is None  # it would be biased


def test_collections_and_solved_inputs_print_in_ten_lines_at_most(here):
    rows = calibrate.collect(ToyHead(), [4 + i for i in range(10)], 30, folder="runs/a")
    solved = calibrate.solve(rows)
    for text in (str(solved), call("solve", "runs/a").stdout):
        assert len(text.strip().splitlines()) <= 10
        assert quartiles_text(solved) in text
        assert f"{solved.misranked.sum()} misranked" in text
    assert len(str(rows).splitlines()) <= 10
    for size in rows.manifest["sizes"]:
        assert f"n = {size['size']:,}: {size['misranked']}" in str(rows)


def test_theta_of_misranked_inputs_without_an_optimum_is_infinite():
    rows = planted_rows(lambda H, n: np.zeros_like(H), (16,), count=200)
    assert (rows.beta[rows.misranked] == 0).mean() > 0.5
    assert theta_quartiles(rows)[1:].tolist() == [np.inf, np.inf]
    weighted = rows._replace(weight=np.where(rows.beta == 0, 0, 1).astype(np.float32))
    assert np.isfinite(theta_quartiles(weighted)).all()
    assert np.isnan(theta_quartiles(rows.take(~rows.misranked))).all()


@pytest.mark.slow
def test_a_run_interrupted_again_and_again(own_rows):
    """The same command until it is done: the same fit, and no file that is not whole."""
    command = ["run", "--logits", str(own_rows), "--name", "mine"]
    call(*command)
    Path("runs").rename("whole-runs")
    Path("fits").rename("whole-fits")
    whole = calibrate.load("mine", Path("whole-fits"))
    codes = []
    while 0 not in codes and len(codes) < 20:
        with interrupt_at(3):
            result = CliRunner().invoke(app, command)
        if Path("fits/mine/1.json").exists():
            assert calibrate.load("mine") == whole
        codes.append(result.exit_code)
    assert codes == [130] * (len(codes) - 1) + [0]
    assert len(codes) > 2
    assert names("runs") == names("whole-runs")
    assert names("fits") == names("whole-fits")


def names(folder):
    paths = (str(path.relative_to(folder)) for path in Path(folder).rglob("*"))
    return {path for path in paths if "/." not in f"/{path}"}


@contextmanager
def interrupt_at(files):
    """Ctrl-C when so many files are about to get their names."""
    with pytest.MonkeyPatch.context() as patch:
        count = itertools.count(1)

        def interrupted(original, *arguments):
            if next(count) == files:
                raise KeyboardInterrupt
            original(*arguments)

        for name in ("link", "replace"):
            patch.setattr(os, name, partial(interrupted, getattr(os, name)))
        yield
