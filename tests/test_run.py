"""`calibrate run` on logits: one command, from arrays to the report."""

import itertools
import json
import os
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from test_array_fit import SIZES, by_size
from test_cli import call, refusal
from typer.testing import CliRunner

import calibrate
from calibrate.cli import row_scoring
from calibrate.cli.main import app
from calibrate.datasets.collection import open_collection
from calibrate.datasets.logits_files import Arrays
from calibrate.errors import QualityError
from calibrate.report.blocks import as_json
from calibrate.report.scores_record import ScoresRecord
from calibrate.rows.score_logits import score_logits
from calibrate.solver.solved_rows import solve_collection


@pytest.fixture
def own_rows(here):
    """A folder whose name is not one of a fit."""
    folder = here / "Own Rows"
    folder.mkdir()
    for n, logits, target in zip(SIZES, *by_size(), strict=True):
        np.savez(folder / f"{n}.npz", logits=logits, target=target)
    return folder


def test_logits_are_fitted_and_judged_by_rows_held_out(own_rows):
    done = call("run", "--logits", "Own Rows", "--seed", "3", "--json")
    record, fit = json.loads(done.stdout), calibrate.fit(*by_size(), seed=3)
    published = calibrate.load("own-rows")
    assert record["reference"] == published.reference == "own-rows@1"
    assert published == fit
    assert published.source | {"head": "", "collection": ""} == fit.source | {
        "head": "", "collection": "",
    }  # fmt: skip
    ours = as_json(ScoresRecord(fit.evidence))["all"]["rules"]
    for name, theirs in (("plain", "plain"), ("own-rows@1", "this fit")):
        found = record["scores"]["all"]["rules"][name]
        for measure in ("log_p", "p"):
            assert found[measure]["mean"] == pytest.approx(ours[theirs][measure]["mean"])
    assert "120 rows of Own Rows" in record["verdict"]
    page = Path(record["report"]).read_text(encoding="utf-8")
    assert record["verdict"].split(":")[0] in page
    again = call("run", "--logits", "Own Rows", "--seed", "3")
    assert "runs/own-rows " in again.stderr
    assert "own-rows@1 " in again.stderr
    assert "fits/own-rows/1.html" in again.stdout
    whole = call("run", "--logits", "Own Rows", "--seed", "3", "--verbose")
    assert len(whole.stdout.splitlines()) > len(again.stdout.splitlines())
    assert "calibrate.load(" in again.stdout
    with pytest.warns(UserWarning, match="^own-rows "):
        score_logits(Arrays.read(own_rows), {"own-rows": published})
    assert "seed is 3 " in refusal("run", "--logits", "Own Rows")
    next(own_rows.iterdir()).unlink()
    line = refusal("run", "--logits", "Own Rows", "--seed", "3")
    assert "runs/own-rows" in line
    assert "sha256" not in line
    done = call("run", "--logits", "Own Rows", "--seed", "3", "--overwrite")
    assert "Use own-rows@2 (constant, beta = " in done.stdout
    assert open_collection(Path("runs/own-rows")).manifest["configuration"]["sizes"] == [SIZES[1]]


CALIBRATED_HEAD = """
import jax
import jax.numpy as jnp
from collections import namedtuple

import calibrate

Batch = namedtuple("Batch", "items target logits", defaults=[None])


class Head:
    name = "calibrated"
    fingerprint = calibrate.fingerprint({"scale": jnp.array([2.0])})

    def sample(self, seed, size, count):
        of_items, of_targets = jax.random.split(jax.random.key(seed >> 1))
        items = jax.random.normal(of_items, (count, size))
        return Batch(items, jax.random.categorical(of_targets, 2 * items, axis=-1))

    def attend(self, batch):
        return batch._replace(logits=2 * batch.items)

    def correct(self, batch, weights):
        return jnp.take_along_axis(weights, batch.target[:, None], 1)[:, 0] > 0.5
"""


def test_the_procedure_is_published_where_no_rule_by_likelihood_gains(here, monkeypatch):
    """The rules that are fitted by likelihood are missing in the scores, and nothing else."""
    (here / "calibrated_head.py").write_text(CALIBRATED_HEAD)
    monkeypatch.syspath_prepend(here)
    head = ["--head", "calibrated_head:Head", "--sizes", "16,64", "--sets", "256"]
    call("run", *head, "--name", "auto", code=3)
    for name, options in (
        ("paper", "--paper"),
        ("squares", "--kind polynomial --loss least-squares"),
    ):
        done = call("run", *head, "--name", name, *options.split(), "--json")
        assert json.loads(done.stdout)["reference"] == f"{name}@1"


def test_baselines_of_the_procedure_keep_the_trained_sizes_of_the_collection(monkeypatch):
    collection = calibrate.collect("max-retrieval", [16, 64], 300)
    assert collection.configuration["trained_up_to"] == 16
    asked = []
    monkeypatch.setattr(
        row_scoring, "fit_and_select", lambda rows, options: asked.append(options) or refuse()
    )
    solved = row_scoring.solved_head(collection, solve_collection(collection), "x")
    assert row_scoring.baselines_of(solved) == {}
    assert [options.trained_up_to for options in asked] == [16]


def refuse():
    raise QualityError("no rule gains")


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
