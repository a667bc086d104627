"""`calibrate run` on logits: one command, from arrays to the report."""

import itertools
import json
import os
import re
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from commands import call, refusal
from planted import planted_rows
from test_arrays import SIZES, by_size
from test_cli import columns_of
from test_score_logits import planted
from typer.testing import CliRunner

import calibrate
from calibrate.cli import row_scoring, run
from calibrate.cli.main import app
from calibrate.datasets.collection import open_collection
from calibrate.datasets.logits_files import Arrays
from calibrate.report.run_record import SolvedHead
from calibrate.rows.score_logits import score_logits
from calibrate.solver.solved_inputs import theta_quartiles
from calibrate.solver.solved_rows import solve_collection


@pytest.fixture
def own_rows(here):
    """A folder whose name is not one of a fit."""
    folder = here / "Own Rows"
    folder.mkdir()
    for n, logits, target in zip(SIZES, *by_size(), strict=True):
        np.savez(folder / f"{n}.npz", logits=logits, target=target)
    return folder


def test_all_rows_of_logits_are_fitted_as_by_the_function(own_rows):
    done = call("run", "--logits", "Own Rows", "--seed", "3", "--json")
    record, fit = json.loads(done.stdout), calibrate.fit(*by_size(), seed=3)
    saved = calibrate.load("own-rows")
    assert record["reference"] == saved.reference == "own-rows@1"
    assert saved == fit
    assert saved.evidence == fit.evidence
    assert saved.source["options"] == fit.source["options"]
    assert saved.evidence["inputs"]["fitted"] == 2 * 300
    assert record["verdict"] == fit.verdict
    assert fit.verdict in Path(record["report"]).read_text(encoding="utf-8").replace("&gt;", ">")


def test_the_scores_of_logits_are_those_of_held_out_folds(own_rows):
    out = call("run", "--logits", "Own Rows").stdout
    fit = calibrate.load("own-rows")
    assert out.splitlines()[0] == fit.verdict
    assert len(out.splitlines()) <= 25
    rows = {line.split()[0]: columns_of(line) for line in out.splitlines() if line.strip()}
    for of in fit.table.held_out:
        before, after = (f"{of[name]:.3f}" for name in ("nll_before", "nll_after"))
        assert rows[str(of["n"])][3:] == [before, after, f"{of['gain']:+.3f} ± {of['se']:.3f}"]
    for record in fit.table.kinds[1:]:
        assert f"{record['nll']:.3f}  {record['gain']:+.3f} ± {record['se']:.3f}" in out


def test_the_same_command_continues_and_names_what_differs(own_rows):
    first = call("run", "--logits", "Own Rows", "--seed", "3").stdout
    again = call("run", "--logits", "Own Rows", "--seed", "3")
    assert "runs/own-rows " in again.stderr
    assert "own-rows@1 " in again.stderr
    assert again.stdout == first
    whole = call("run", "--logits", "Own Rows", "--seed", "3", "--verbose")
    assert set(first.splitlines()) <= set(whole.stdout.splitlines())
    with pytest.warns(UserWarning, match="^own-rows "):
        score_logits(Arrays.read(own_rows), {"own-rows": calibrate.load("own-rows")})
    next(own_rows.iterdir()).unlink()
    line = refusal("run", "--logits", "Own Rows", "--seed", "3")
    assert "runs/own-rows" in line
    assert "sha256" not in line
    call("run", "--logits", "Own Rows", "--seed", "3", "--overwrite")
    assert calibrate.load("own-rows").version == 2
    assert open_collection(Path("runs/own-rows")).manifest["configuration"]["sizes"] == [SIZES[1]]


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
    assert "2 of 3 have a rule" in out
    assert "layer 0, head 3" in out
    assert "fits/heads/1.html" in out
    record = json.loads(call("fit", "runs/heads", "--name", "heads", "--json").stdout)
    assert [x["has_rule"] for x in record["heads"]] == [
        fit.entry_of(*head) is not None for head in heads
    ]


def test_heads_are_listed_by_falling_gain_twenty_at_most(here):
    pairs = [(i, j) for i in range(3) for j in range(8)]
    columns = planted(rows=120, n=16, heads=pairs)
    columns["logits"] *= 3
    np.savez("many.npz", **columns)
    out = call("run", "--logits", "many.npz", "--kind", "constant").stdout
    gains = {(x["layer"], x["head"]): x["gain"] for x in calibrate.load("many").evidence["heads"]}
    best = sorted(gains, key=gains.get, reverse=True)
    listed = [line for line in out.splitlines() if line.strip().startswith("layer ")]
    shown = [tuple(map(int, re.findall(r"\d+", line)[:2])) for line in listed]
    assert shown == best[:20]
    assert f"{gains[best[0]]:+.3f} ± " in listed[0]
    assert "And 4 more" in out


def test_the_best_constant_is_of_the_inputs_of_the_collection():
    rows = calibrate.collect("max-retrieval", [16, 64], 300)
    solved = SolvedHead(rows, solve_collection(rows))
    beta = row_scoring.fit_constant(solved)
    log_p = [solved.rows.log_p(beta * factor).mean() for factor in (0.98, 1, 1.02)]
    assert max(log_p) == log_p[1]
    misranked = calibrate.collect("max-retrieval", [64, 256], 300, keep="misranked")
    assert row_scoring.fit_constant(SolvedHead(misranked, solve_collection(misranked))) is None


def test_collections_and_solved_inputs_print_in_ten_lines_at_most(here):
    sizes = [2**i for i in range(2, 12)]
    rows = calibrate.collect("max-retrieval", sizes, 30, folder="runs/a")
    solved = calibrate.solve(rows)
    shown, of_command = str(solved), call("solve", "runs/a").stdout
    quartiles = np.quantile(
        solved.theta[solved.misranked], [0.25, 0.5, 0.75], method="inverted_cdf"
    )
    for text in (shown, of_command):
        assert len(text.strip().splitlines()) <= 10
        assert ", ".join(f"{theta:.3g}" for theta in quartiles) in text
        assert f"{solved.misranked.sum()} misranked" in text
    of_rows = str(rows)
    assert len(of_rows.splitlines()) <= 10
    for size in rows.manifest["sizes"]:
        assert f"n = {size['size']:,}: {size['misranked']}" in of_rows


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
    wanted = calibrate.load("mine", Path("whole-fits"))
    done = []
    while 0 not in done and len(done) < 20:
        with interrupt_at(3):
            result = CliRunner().invoke(app, command)
        if Path("fits/mine/1.json").exists():
            assert calibrate.load("mine") == wanted
        done.append(result.exit_code)
    assert done == [130] * (len(done) - 1) + [0]
    assert len(done) > 2
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


@pytest.mark.parametrize(
    ("option", "key", "value"),
    [
        ("--seed 5", "seed", 5), ("--kind constant", "kind", "constant"),
        ("--loss least-squares", "loss", "least-squares"), ("--paper", "loss", "least-squares"),
        ("--kind polynomial --min-entropy 0.25", "min_entropy", 0.25),
        ("--min-beta 0.5", "min_beta", 0.5), ("--max-beta 32", "max_beta", 32.0),
        ("--trained-up-to 16", "trained_up_to", 16), ("--tolerance 0.5", "tolerance", 0.5),
    ],
)  # fmt: skip
def test_every_option_of_the_fit_reaches_it(own_rows, monkeypatch, option, key, value):
    """The fit itself is not made."""
    options = options_of_run(monkeypatch, "--logits", "Own Rows", *option.split())
    assert getattr(options, key) == value
    assert getattr(options_of_run(monkeypatch, "--logits", "Own Rows"), key) != value


class Stop(Exception):
    """Ends a command where its arguments are known."""


def stop(*_):
    raise Stop


def options_of_run(monkeypatch, *arguments):
    """The options that `calibrate run` gives to the fit."""
    given = []

    def save_fit(collection, name, options, store):
        given.append(options)
        raise Stop

    monkeypatch.setattr(run, "save_fit", save_fit)
    CliRunner().invoke(app, ["run", *arguments])
    return given[0].resolved()


@pytest.mark.parametrize(
    ("option", "key", "value"),
    [("--seed 5", "seed", 5), ("--sizes 16", "sizes", [16]), ("--sets 70", "sets", 70),
     ("--head max-retrieval-3", "head", "max-retrieval-3")],
)  # fmt: skip
def test_every_option_of_the_data_reaches_the_collection(here, monkeypatch, option, key, value):
    base = {"--sizes": "16,32", "--sets": "64"}
    words = dict([option.split()])
    monkeypatch.setattr(run, "save_fit", stop)
    for name, options in (("base", base), ("other", base | words)):
        CliRunner().invoke(app, ["run", "--name", name, *itertools.chain(*options.items())])
    of_base, other = (open_collection(Path("runs") / x).configuration for x in ("base", "other"))
    assert other[key] == value != of_base[key]
