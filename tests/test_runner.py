"""Passes in workers: the same bytes, another model, and threads."""

import gc
from pathlib import Path

import pytest
import torch
from commands import call
from test_model_examples import write_lines
from tiny_causal import causal_model, planted_examples, planted_model, prompt_lines, save

import calibrate
from calibrate.errors import CalibrateError
from calibrate.model.runner import ModelSource, Runner, load_model
from calibrate.parallel import Jobs
from calibrate.transformers.folders import ModelFolder


def source_of(folder, fingerprint=None):
    return ModelSource(folder, fingerprint or ModelFolder(folder).fingerprint(), "float32", "cpu")


def fit_of(path):
    """A fit without the time in its provenance."""
    fit = calibrate.load(path)
    return fit, fit.evidence, fit.source


def bytes_in(*folders):
    return {
        path: path.read_bytes()
        for folder in folders for path in Path(folder).rglob("*")
        if path.is_file() and path.name != ".lock"
    }  # fmt: skip


@pytest.fixture(params=["processes", "dask"])
def workers(request):
    """Options of two workers of either kind."""
    if request.param == "processes":
        yield "--jobs", 2
        return
    distributed = pytest.importorskip("distributed", reason="needs the extra dask")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0"
    ) as cluster:
        yield "--dask", cluster.scheduler_address


@pytest.mark.slow
def test_workers_give_the_same_bytes(tmp_path, monkeypatch, workers):
    save(tmp_path / "tiny", planted_model(), tokenizer=False)
    lines = prompt_lines(planted_examples(count=32))
    results = []
    for number, options in enumerate([(), workers]):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        write_lines("p.jsonl", lines)
        examples = ("--prompts", "p.jsonl", "--no-retention-text")
        call("model", "collect", "--model", "../tiny", *examples, "--out", "run", *options)
        fit = ("--name", "mine", "--kind", "constant", "--steps", 10)
        call("model", "fit", "run", *fit, "--store", "fits", *options)
        printed = call("model", "evaluate", "run", "fits/mine/1.json", "--json", *options)
        results.append((printed.stdout, bytes_in("run"), fit_of("fits/mine/1.json")))
    assert any(".passes" in path.parts for path in results[0][1])
    (printed, files, fit), (printed_again, others, other) = results
    assert (printed, fit) == (printed_again, other)
    assert [path for path in files | others if files.get(path) != others.get(path)] == []


@pytest.mark.slow
def test_a_worker_refuses_another_model(tmp_path):
    save(tmp_path / "tiny", causal_model())
    other = source_of(tmp_path / "tiny", "sha256:" + 64 * "0")
    with pytest.raises(CalibrateError, match="tiny .*worker"):
        Runner.of(other, Jobs(2)).heads()


def test_models_that_are_held_keep_their_betas(tmp_path):
    """Also if another model is loaded, and garbage is collected."""
    tokens, held = torch.arange(3, 12)[None], []
    for seed, folder in enumerate((tmp_path / "one", tmp_path / "two")):
        save(folder, causal_model(initializer_range=0.3 + 0.1 * seed))
        held.append(load_model(source_of(folder), False))
    gc.collect()
    for loaded in held:
        model, heads = loaded.model, loaded.heads
        plain = model(tokens).logits
        heads.betas = torch.full((1, 8), 3.0)
        assert (model(tokens).logits - plain).abs().max() > 1e-3
    load_model.cache_clear()


def test_a_small_model_computes_with_one_thread(tmp_path):
    save(tmp_path / "tiny", planted_model(), tokenizer=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runner = Runner.of(source_of(tmp_path / "tiny"))
        assert runner.run([lambda _: torch.get_num_threads()]) == [1]
    finally:
        torch.set_num_threads(before)
