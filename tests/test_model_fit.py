"""Fits through a model: what is found, published, refused and resumed; sampling and caches."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from commands import call
from fake_progress import Told, stopping_after
from fakes import even_examples, scores_of
from rule_families import HEADS
from test_model_examples import collected, write_lines
from tiny_causal import (
    causal_model,
    planted_examples,
    planted_model,
    prompt_lines,
    runner_of,
    save,
)

import calibrate
from calibrate.core.rule import CONSTANT
from calibrate.datasets.examples import Cell, Example, ExampleSet
from calibrate.errors import QualityError
from calibrate.evidence.estimate import Estimate
from calibrate.evidence.metrics import LOG_P, LOG_P_PER_TOKEN, RIGHT
from calibrate.evidence.non_inferiority import NonInferiority, NonInferiorityResult
from calibrate.model import splits
from calibrate.model.acceptance import require_improvement
from calibrate.model.calibration_and_validation import BatchSampler, Validation, validation_indices
from calibrate.model.fit import fit_examples
from calibrate.model.objective import ModelObjective, compare
from calibrate.model.options import ModelOptions
from calibrate.model.records import source_record
from calibrate.model.scoring import NO_CACHE, result_cache, score
from calibrate.model.transformers_scorer import TransformersScorer
from calibrate.parallel import SILENT
from calibrate.report.sentences import sentences, with_verdict
from calibrate.transformers.folders import ModelFolder


def test_steps_are_of_answers_alone_as_many_of_each_cell_as_there_is_room_for():
    examples = even_examples([10, 20], [30])

    def cells_of_steps(tokens):
        sampler = BatchSampler(examples, np.arange(24), 0, tokens)
        return sampler, [sorted(i // 8 for i in which) for which in islice(sampler, 4)]

    sampler, steps = cells_of_steps(60)
    assert (steps, sampler.n_answers, sampler.n_once) == ([[0, 0, 1, 1]] * 4, 4, 4)
    sampler, steps = cells_of_steps(20)
    assert (sorted(steps), sampler.n_answers, sampler.n_once) == ([[0], [0], [1], [1]], 1, 16)


@pytest.mark.parametrize(
    "what", ["importlib.metadata.version", "torch.backends.cpu.get_cpu_capability"]
)
def test_what_rounds_otherwise_has_results_of_its_own(monkeypatch, here, what):
    """Passes of another version of PyTorch, or on another processor, are made again."""

    def kept(new):
        cache = result_cache(SimpleNamespace(folder=here, digest="of examples"), "cpu")
        if (result := cache.find(b"key", lambda data, _: data)) is None:
            cache.keep(b"key", result := new)
        return result

    assert (kept(b"first"), kept(b"second")) == (b"first", b"first")
    monkeypatch.setattr(what, lambda *_: "another")
    assert kept(b"third") == b"third"


def judged(gain=0.5, trained=0.5, text=0.0):
    """Answers at 20 tokens and at 10, where the model was trained, and text: gains of whole ones.

    Gains of single ones differ by 0.4 nats a token. Text loses KL, per window of 29 tokens.
    """
    examples, spread = even_examples([10, 20], [30]), np.tile([0.4, -0.4], 4)
    gains = [trained + 2 * spread, np.full(8, gain), 29 * spread]
    kl = np.repeat([0, text], [16, 8]) * (1 + np.arange(24) % 2)
    own = scores_of(np.minimum(-20 + np.concatenate(gains), 0), kl)
    options = {"through": "model", "max_kl": 0.005, "tolerance": 0.005, "trained_up_to": 10}
    fit = replace(calibrate.identity(), source={"options": options})
    scores = {"baseline": scores_of(np.full(24, -20.0)), "own": own}
    return replace(compare(examples, range(24), scores), fits={"own": fit})


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"text": 0.01 * 29}, r"retention text .*0\.0150 ± 0\.0"),
        ({"trained": -0.02, "gain": 1.0}, r"trained lengths .*0\.0100 ± 0\.1"),
        ({"text": 0.003 * 29, "trained": -0.008, "gain": 1.0}, None),
    ],
)
def test_a_mean_loss_of_what_is_protected_is_refused_though_errors_are_wide(changes, lost):
    evidence = judged(**changes)
    message = rf"{lost}.* nats .*\b0\.005\b"
    with pytest.raises(QualityError, match=message) if lost else nullcontext():
        require_improvement(evidence, [])
    text, trained = sentences(evidence, "own")[2:4]  # behind the caution
    assert text.startswith("Retention text (NLL ")
    assert trained.startswith("In distribution (tokens <= 10): ")
    limits = [
        words.endswith((" (limit 0.005).", " (tolerance 0.005).")) for words in (text, trained)
    ]
    assert limits == ["text" not in changes or lost is None, "trained" not in changes or not lost]
    assert "nats per token of KL divergence from the baseline (" in text
    assert "nats of log-likelihood per token (" in trained


TRAINED = NonInferiority("answers of 20 tokens", lambda _: True, LOG_P_PER_TOKEN, 0.005)


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ([Estimate(0.05, 0.03, 50), Estimate(0.004, 0.001, 50)], None),
        (
            [Estimate(0.05, 0.03, 50), Estimate(0.02, 0.005, 50)],
            r"0\.0200 ± 0\.0050 nats .*tolerance=",
        ),
        ([Estimate(0.01, np.nan)], r"0\.0100 ± nan nats .*\b0\.005\b"),
        ([Estimate(0.001, np.nan)], None),
        ([], None),
    ],
)
def test_no_cell_may_lose_significantly_more(losses, message):
    raises = pytest.raises(QualityError, match=message) if message else nullcontext()
    with raises:
        results = [NonInferiorityResult(TRAINED, loss, 1) for loss in losses]
        require_improvement(judged(), results)


@pytest.mark.parametrize(
    ("options", "recorded"),
    [
        ({}, {"max_kl": 0.01}),
        ({"max_kl": 0.05}, {"max_kl": 0.05}),  # no tolerance without trained lengths
        ({"trained_up_to": 8}, {"max_kl": 0.01, "tolerance": 0.01}),
        ({"trained_up_to": 8, "max_kl": 0.05}, {"max_kl": 0.05, "tolerance": 0.01}),
        ({"trained_up_to": 8, "interpolation": 0.5}, {}),  # saved whatever it costs
    ],
)
def test_a_file_has_the_limits_that_had_an_effect(options, recorded):
    written = source_record(ModelOptions(**options), 1.0)["options"]
    assert {k: written[k] for k in ("max_kl", "tolerance") if k in written} == recorded


@pytest.mark.parametrize("gain", [0.0, 0.005, -0.5])
def test_a_fit_without_gain_says_what_may_help(gain):
    message = rf"log p .*[+-]{abs(gain):.3f} ± .*\b16 "
    with pytest.raises(QualityError, match=message):
        require_improvement(judged(gain, gain), [])


def planted(run, model="tiny", text=False, count=32):
    """Examples on disk; text, if wanted, that loses by what the answers gain by."""
    save(Path(model), planted_model(), tokenizer=False)
    examples = planted_examples(count=count)
    prompts = write_lines("p.jsonl", prompt_lines(examples))
    collection = collected(model, run, prompts=prompts, templates=())
    if not text:
        return collection
    wrong = [
        Example(np.array([*e.tokens[:-1], 10 + (e.tokens[-1] - 10 + 3) % 8], np.int32), e.start, 2)
        for e in examples.examples
    ]
    cells = (*collection.set.cells, Cell("text", 16, True))
    both = ExampleSet(cells, collection.set.examples + tuple(wrong))
    plain = score(runner_of(planted_model), both, range(len(both.examples)))
    return replace(collection, in_memory=(both, plain))


def through(collection, progress=SILENT, **options):
    given = runner_of(planted_model), collection, "x", ModelOptions(**options)
    return fit_examples(*given, progress)


@pytest.mark.parametrize(("text", "kind"), [(False, "constant"), (True, "polynomial")])
def test_each_stage_has_as_many_steps_as_it_said(here, text, kind):
    told = Told()
    through(planted("tiny-run", text=text), told, max_steps=12, kind=kind, max_kl=1.0)
    assert len(told.stages) > 2
    assert told.n_steps == [0] + [total for _, total, _ in told.stages]
    assert sum(work for work, _ in told.steps) == sum(work for *_, work in told.stages)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["constant", "polynomial"])
def test_the_verdict_on_a_polynomial_says_that_longer_text_was_not_measured(here, kind):
    found = through(planted("tiny-run", text=True), max_steps=10, kind=kind, max_kl=1.0)
    verdict = with_verdict(found.coefficients, found.evidence).verdict
    is_said = "Text of more than 16 tokens was not measured" in verdict
    assert is_said is (kind == "polynomial")


@pytest.mark.slow
def test_one_head_of_each_layer_is_found(here):
    fit = through(
        planted("tiny-run"), max_steps=10, kind="constant", heads_per_layer=1
    ).coefficients
    assert [(e.layer, e.head) for e in fit.entries] == [(0, 0)]
    assert fit.source["options"]["heads_per_layer"] == 1


def test_the_heads_are_found_and_the_others_left_alone(here):
    found = through(planted("tiny-run"), max_steps=40, kind="constant")
    fit, held_out = found.coefficients, found.coefficients.evidence["held_out"]
    betas = {(e.layer, e.head): e.coefficients[-1] for e in fit.entries}
    assert betas.keys() == {(0, 0), (0, 2)}
    assert betas[0, 0] > 2
    assert betas[0, 2] < 0.8
    assert fit.rule.min_beta < 1
    assert fit.source["head"] == "tiny"
    assert fit.source["options"] == {
        "through": "model", "kind": "constant", "max_kl": 0.01, "steps": 40,
        "interpolation": 1.0, "sharing": "per_head", "seed": 0,
    }  # fmt: skip
    assert {"torch", "transformers"} <= fit.provenance["versions"].keys()
    assert [record["n"] for record in held_out] == [16, 32]
    before, after = ([x[key] for x in held_out] for key in ("nll_before", "nll_after"))
    assert np.mean(before) == pytest.approx(1.302, abs=5e-4)
    assert np.mean(after) == pytest.approx(0.085, abs=5e-4)
    assert with_verdict(fit, found.evidence).verdict.startswith(
        "x is significantly better than the baseline: NLL 1.302 -> 0.085 nats (-1.2"
    )
    answers = found.evidence.answers
    assert answers.rules == ("baseline", "own", "paper", "constant")
    assert answers.gain("own", LOG_P).mean == pytest.approx(np.mean(before) - np.mean(after))
    assert answers.gain("own", RIGHT).mean > 0.5


def test_an_interrupted_fit_carries_on_with_the_same_numbers(here):
    collection, options = planted("tiny-run"), {"max_steps": 10, "kind": "constant"}
    with pytest.raises(KeyboardInterrupt):
        through(collection, stopping_after(25), **options)
    progress = [Told() for _ in range(3)]
    resumed = through(collection, progress[0], **options)
    kept = next(Path("tiny-run/.passes").iterdir())
    kept.write_bytes(kept.read_bytes()[:-9])  # is made again
    whole = through(
        replace(collection, folder=planted("other-run", "other").folder), progress[1], **options
    )
    with pytest.warns(UserWarning, match=kept.name):
        again = through(collection, progress[2], **options)
    n_batches = {len(each.resumed) for each in progress}
    assert len(n_batches) == 1
    assert all(len(each.steps) == sum(n for _, n, _ in each.stages) for each in progress)
    assert [each.stages[-1][0] for each in progress] == ["test split"] * 3
    n_made = [each.resumed.count(False) for each in progress]
    assert n_made[1] - 25 <= n_made[0] < n_made[1]  # what was interrupted is done twice
    assert 0 < n_made[2] <= 4  # those of one result
    assert resumed.coefficients == whole.coefficients == again.coefficients


@pytest.mark.slow
def test_protected_text_does_not_get_worse(here):
    """Text that asks the same questions and wants wrong answers: hardly any sharpening is left."""
    collection = planted("tiny-run", text=True)
    free = through(collection, max_steps=20, max_kl=10.0)
    assert free.solution.weight == 1
    assert free.losses["own"][0].mean > 0.05
    try:
        held = through(collection, max_steps=20, max_kl=0.05)
    except QualityError:
        return  # nothing is allowed that is worth it
    assert held.solution.value.limiting.loss <= 0.05
    assert held.solution.weight < 1
    weights = [record["weight"] for record in held.coefficients.evidence["interpolation"]]
    assert held.solution.weight in weights
    assert all(later - earlier > 0.125 for earlier, later in pairwise(weights))
    assert all(np.abs(np.subtract(weights, x)).min() <= 0.125 for x in (0.25, 0.5, 1.0))
    assert held.losses["own"][0].mean <= 0.05
    assert held.solution.value.gain < free.solution.value.gain


def test_the_constraint_that_limits_a_rule_that_gains_is_named(here):
    collection = planted("tiny-run", text=True, count=8)
    limited = (
        r"; .*\+(1\.\d+) nats .*retention text .* (0\.\d+) nats .*\b1e-06 .*"
        r"\(max_kl=\)$"
    )
    options = {"max_steps": 10, "kind": CONSTANT}
    with pytest.raises(QualityError, match=limited) as refused:
        through(collection, max_kl=1e-6, **options)
    gain, kl = map(float, re.search(limited, str(refused.value)).groups())
    free = through(collection, interpolation=1.0, **options)
    objective, runner = (
        ModelObjective(collection.set, collection.scores),
        runner_of(planted_model()),
    )
    scorer = TransformersScorer(runner, HEADS, collection.set, NO_CACHE)
    validation = Validation(scorer, objective, validation_indices(objective))
    in_split = splits.split(collection.set, splits.VALIDATION)
    (best,) = validation.values([free.solution.parameters], in_split)
    assert gain == pytest.approx(best.gain, abs=1e-3)
    assert kl == pytest.approx(best.losses[0].mean, rel=0.1)


def test_too_few_examples_are_refused(here):
    folder = save(Path("random"), causal_model())
    Path("text.txt").write_text("The apple is on the table. " * 60)  # 420 tokens
    text = {"text": Path("text.txt")}
    for options, message in (
        ({"templates": ("numbers",), "lengths": (64,)}, r"\b64 tokens .*\b4 examples.*\b8 "),
        ({"templates": (), "lengths": (64,), **text}, r"text\.txt .*answers"),
        ({"templates": ("numbers",), "lengths": (240,), "count": 8, **text},
         r"\b1 window "),
    ):  # fmt: skip
        collection = collected(folder, "-".join(map(str, options.values())), **options)
        with pytest.raises(QualityError, match=message):
            fit_examples(runner_of(pytest.fail), collection, "x", ModelOptions())


@pytest.mark.slow
def test_a_random_model_gets_no_fit(here):
    folder = save(Path("random"), causal_model())
    collection = collected(folder, "run", templates=("numbers",), lengths=(40, 64), count=16)
    with pytest.raises(QualityError, match=r"[+-]0\.\d{3} ± "):
        fit_examples(runner_of(causal_model), collection, "x", ModelOptions(CONSTANT, max_steps=10))


# --- the command ---------------------------------------------------------------------------------


def test_the_command_publishes_once_and_says_what_it_found(here, monkeypatch):
    planted("tiny-run")
    load, devices = ModelFolder.load, []
    monkeypatch.setattr(
        ModelFolder, "load",
        lambda folder, dtype, device, *more: devices.append(device) or load(folder, dtype),
    )  # fmt: skip
    command = ("model", "fit", "tiny-run", "--name", "tiny", "--steps", "10", "--kind", "constant",
               "--max-kl", "0.01", "--interpolation", "0.5")  # fmt: skip
    out = call(*command)
    assert set(devices) == {"cpu"}
    assert "tiny is significantly better" in out.stdout
    (gain,) = calibrate.load("tiny@1").evidence["kinds"]
    assert gain["kind"] == "constant"
    shown = f"{gain['gain']:+.3f} ± {gain['se']:.3f} nats"
    assert re.search(rf"over one constant for all heads +{re.escape(shown)}", out.stdout)
    assert "transformers.apply(model, fit)" in out.stdout
    source = calibrate.load("tiny@1").source
    assert (source["head"], source["options"]["interpolation"]) == ("tiny", 0.5)
    assert "max_kl" not in source["options"]  # a weight that is given is saved whatever it costs
    again = call(*command, "--json")
    assert "tiny@1 " in again.stderr
    assert json.loads(again.stdout)["fit"]["evidence"]["kinds"] == [gain]
    Path("tiny").rename("moved")
    assert "--model" in call(*command, code=1).stderr
