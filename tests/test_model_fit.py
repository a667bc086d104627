"""Fits through a model: heads that are found, refusals, resumption, and the command."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from commands import call
from fake_progress import Told, stopping_after
from fakes import even_examples, scores_of
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
from calibrate.errors import QualityError
from calibrate.evidence.estimate import Estimate
from calibrate.evidence.harm_limits import NonInferiority, NonInferiorityResult
from calibrate.evidence.metrics import LOG_P, LOG_P_PER_TOKEN, RIGHT
from calibrate.model.acceptance import require_improvement
from calibrate.model.fit import fit_examples
from calibrate.model.objective import compare_rules
from calibrate.model.options import ModelOptions
from calibrate.model.scoring import score_unit
from calibrate.parallel import SILENT
from calibrate.prompts.examples import Cell, Example, ExampleSet
from calibrate.report.sentences import with_verdict

# --- acceptance -----------------------------------------------------------------------------------


def judged(gain=0.5, trained=0.5, text=0.0):
    """Evidence of answers at 20 tokens and at the trained length of 10, and of text.

    Gains are of whole answers, and differ by 0.4 nats per token. Text has a KL, per window of 29
    tokens.
    """
    examples, spread = even_examples([10, 20], [30]), np.tile([0.4, -0.4], 4)
    gains = [trained + 2 * spread, np.full(8, gain), 29 * spread]
    kl = np.repeat([0, text], [16, 8]) * (1 + np.arange(24) % 2)
    own = scores_of(np.minimum(-20 + np.concatenate(gains), 0), kl)
    options = {"through": "model", "max_kl": 0.005, "tolerance": 0.005, "trained_up_to": 10}
    fit = replace(calibrate.identity(), source={"options": options})
    scores = {"baseline": scores_of(np.full(24, -20.0)), "own": own}
    return replace(compare_rules(examples, range(24), scores), fits={"own": fit})


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"text": 0.01 * 29}, r"0\.0150 ± 0\.0.* max_kl="),
        ({"trained": -0.02, "gain": 1.0}, r"0\.0100 ± 0\.1.* tolerance="),
        ({"text": 0.003 * 29, "trained": -0.008, "gain": 1.0}, None),
        ({"gain": 0.0, "trained": 0.0}, r"\+0\.000 ± .*\b16 "),
        ({"gain": 0.005, "trained": 0.005}, r"\+0\.005 ± .*\b16 "),
        ({"gain": -0.5, "trained": -0.5}, r"-0\.500 ± .*\b16 "),
    ],
)
def test_a_mean_loss_beyond_its_margin_or_no_gain_is_refused(changes, lost):
    with pytest.raises(QualityError, match=lost) if lost else nullcontext():
        require_improvement(judged(**changes), [])


TRAINED = NonInferiority("answers of 20 tokens", lambda _: True, LOG_P_PER_TOKEN, 0.005)


@pytest.mark.parametrize(
    ("losses", "lost"),
    [
        ([(0.05, 0.03, 50), (0.004, 0.001, 50)], None),
        ([(0.05, 0.03, 50), (0.02, 0.005, 50)], r"0\.0200 ± 0\.0050 nats"),
        ([(0.01, np.nan)], r"0\.0100 ± nan nats"),
        ([(0.001, np.nan)], None),
    ],
)
def test_no_cell_may_lose_significantly_more_than_its_margin(losses, lost):
    results = [NonInferiorityResult(TRAINED, Estimate(*loss), 1) for loss in losses]
    with pytest.raises(QualityError, match=lost) if lost else nullcontext():
        require_improvement(judged(), results)


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"templates": ("numbers",), "lengths": (64,)}, r"\b64 tokens .*\b4 examples.*\b8 "),
        ({"templates": (), "lengths": (64,), "text": Path("text.txt")}, r"text\.txt .*answers"),
        ({"templates": ("numbers",), "lengths": (240,), "count": 8, "text": Path("text.txt")},
         r"\b1 window "),
    ],
)  # fmt: skip
def test_too_few_examples_are_refused_before_the_model_is_loaded(model, here, options, value):
    Path("text.txt").write_text("The apple is on the table. " * 60)  # 420 tokens
    collection = collected(model, "run-text.txt", **options)
    with pytest.raises(QualityError, match=value):
        fit_examples(runner_of(pytest.fail), collection, "x", ModelOptions())


def test_groups_count_and_not_lines():
    alone = planted_examples(count=32)
    members = tuple(x._replace(group=i // 8) for i, x in enumerate(alone.examples))
    collection = SimpleNamespace(set=ExampleSet(alone.cells, members), folder="r")
    with pytest.raises(QualityError, match="4 prompts .* 8"):
        fit_examples(None, collection, "few", ModelOptions())


# --- the planted model ----------------------------------------------------------------------------


def planted(run, model="tiny", text=False, count=32):
    """Planted examples on disk; `text` adds retention text that loses what the answers gain."""
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
    (baseline,) = score_unit(both, [None], runner_of(planted_model).load())
    return replace(collection, in_memory=(both, baseline))


def through(collection, progress=SILENT, **options):
    given = runner_of(planted_model), collection, "x", ModelOptions(**options)
    return fit_examples(*given, progress)


def test_the_planted_heads_are_found_and_the_others_left_alone(here):
    result = through(planted("tiny-run"), max_steps=30)
    fit, held_out = result.coefficients, result.coefficients.evidence["held_out"]
    betas = {(e.layer, e.head): e.coefficients[-1] for e in fit.entries}
    assert betas.keys() == {(0, 0), (0, 2)}
    assert betas[0, 0] > 2
    assert betas[0, 2] < 0.8
    assert fit.rule.min_beta < 1
    assert fit.source["head"] == "tiny"
    assert fit.source["options"] == {
        "through": "model", "kind": "constant", "max_kl": 0.01, "steps": 30,
        "interpolation": 1.0, "sharing": "per_head", "seed": 0,
    }  # fmt: skip
    assert {"torch", "transformers"} <= fit.provenance["versions"].keys()
    assert [record["n"] for record in held_out] == [16, 32]
    before, after = (np.mean([x[key] for x in held_out]) for key in ("nll_before", "nll_after"))
    assert before == pytest.approx(1.302, abs=5e-4)
    assert after < 0.1
    assert f"NLL {before:.3f} -> {after:.3f}" in with_verdict(fit, result.evidence).verdict
    answers = result.evidence.answers
    assert answers.rules == ("baseline", "own", "paper", "constant")
    assert answers.gain("own", LOG_P).mean == pytest.approx(before - after)
    assert answers.gain("own", RIGHT).mean > 0.5


@pytest.mark.parametrize(("text", "kind"), [(False, "constant"), (True, "polynomial")])
@pytest.mark.slow
def test_each_stage_has_as_many_steps_as_it_announced(here, text, kind):
    told = Told()
    collection = planted("tiny-run", text=text)
    through(collection, told, max_steps=12, kind=kind, max_kl=1.0)
    assert len(told.stages) > 2
    assert told.n_steps == [0] + [total for _, total, _ in told.stages]
    assert sum(work for work, _ in told.steps) == sum(work for *_, work in told.stages)


def test_an_interrupted_fit_carries_on_with_the_same_numbers(here):
    collection, options, n_stopped = planted("tiny-run", count=16), {"max_steps": 4}, 6
    with pytest.raises(KeyboardInterrupt):
        through(collection, stopping_after(n_stopped), **options)
    progress = [Told() for _ in range(3)]
    resumed = through(collection, progress[0], **options)
    next(Path("tiny-run/.passes").iterdir()).unlink()
    other = replace(collection, folder=planted("other-run", "other", count=16).folder)
    whole = through(other, progress[1], **options)
    again = through(collection, progress[2], **options)
    assert len({len(each.resumed) for each in progress}) == 1
    assert all(len(each.steps) == sum(n for _, n, _ in each.stages) for each in progress)
    n_computed = [each.resumed.count(False) for each in progress]
    assert n_computed[0] == n_computed[1] - n_stopped
    assert n_computed[2] == 1
    assert resumed.coefficients == whole.coefficients == again.coefficients


@pytest.mark.slow
def test_retention_text_limits_the_weight(here):
    """The text asks the same questions and expects wrong answers: hardly any change is left."""
    collection = planted("tiny-run", text=True)
    free = through(collection, max_steps=20, max_kl=10.0)
    assert free.solution.weight == 1
    assert free.losses["own"][0].mean > 0.05
    limited = through(collection, max_steps=20, max_kl=0.05)
    assert limited.solution.value.limiting[0] <= 0.05
    assert limited.solution.weight < 1
    assert limited.coefficients.source["options"]["interpolation"] == limited.solution.weight
    assert limited.losses["own"][0].mean <= 0.05
    assert limited.solution.value.gain < free.solution.value.gain


def test_limits_that_prevent_a_gain_are_named(here):
    collection = planted("tiny-run", text=True, count=8)
    with pytest.raises(QualityError, match=r"max_kl=.* weight is 0$"):
        through(collection, max_kl=1e-6, max_steps=5)


@pytest.mark.slow
def test_a_random_model_gets_no_fit(model):
    collection = collected(model, "run", templates=("numbers",), lengths=(40, 64), count=16)
    with pytest.raises(QualityError, match=r"[+-]0\.\d{3} ± "):
        fit_examples(runner_of(causal_model), collection, "x", ModelOptions(max_steps=10))


# --- the command ----------------------------------------------------------------------------------


def test_the_command_saves_once_and_reports_the_gain(here):
    planted("tiny-run", count=16)
    command = ("model", "fit", "tiny-run", "--name", "tiny", "--steps", "4",
               "--max-kl", "0.01", "--heads-per-layer", "1")  # fmt: skip
    out = call(*command).stdout
    fit = calibrate.load("tiny@1")
    assert [(e.layer, e.head) for e in fit.entries] == [(0, 0)]
    (gain,) = fit.evidence["kinds"]
    assert f"{gain['gain']:+.3f} ± {gain['se']:.3f} nats" in out
    assert fit.source["options"]["heads_per_layer"] == 1
    again = call(*command, "--json")
    assert "tiny@1 " in again.stderr
    assert json.loads(again.stdout)["fit"]["evidence"]["kinds"] == [gain]
    Path("tiny").rename("moved")
    assert "--model" in call(*command, code=1).stderr
