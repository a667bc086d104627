"""Fits through a model: gradients, what stays as it is, what is protected, resuming, refusals."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_cli import call
from test_model_examples import collected, write_lines
from tiny_causal import (
    causal_model,
    planted_examples,
    planted_model,
    prompt_lines,
    runner_of,
    save,
    some_examples,
)

import calibrate
from calibrate.cli import model as commands
from calibrate.core.rule import LOG_SIZE
from calibrate.datasets.examples import Cell, Example, ExampleSet, Scores
from calibrate.errors import QualityError
from calibrate.evidence.estimate import Estimate
from calibrate.evidence.metrics import LOG_P, RIGHT
from calibrate.export.plan import GLOBAL, PER_HEAD, PER_LAYER
from calibrate.export.proof import Exportable
from calibrate.model import cache as cache_module
from calibrate.model import candidate_rules, splits
from calibrate.model import model_scorer as passes_module
from calibrate.model.cache import ResultCache, result_cache
from calibrate.model.candidate_rules import ModelOptions, ModelProblem
from calibrate.model.fit import _options as options_of_file
from calibrate.model.fit import fit_through, require_worth
from calibrate.model.head_rule_optimizer import (
    HeadRuleOptimizer,
    Solution,
    natural_gradient_step,
    shrink_gradient,
)
from calibrate.model.model_scorer import ModelScorer, given_rules, score, score_fits
from calibrate.model.objective import Objective, Part, compare
from calibrate.model.parameters import CONSTANT, N_NUMBERS, SHARED_SLOPE, Form
from calibrate.model.splits import BatchSampler
from calibrate.report.sentences import sentences, with_verdict
from calibrate.transformers import register
from calibrate.transformers.folders import ModelFolder

FORMS = [Form(kind, of, 2.0, 4.0) for kind in N_NUMBERS for of in (GLOBAL, PER_HEAD)]
FORMS += [Form(kind, PER_LAYER, 2.0, 4.0) for kind in (CONSTANT, SHARED_SLOPE)]
HEADS = [(layer, head) for layer in range(2) for head in range(4)]


def numbers_of(form):
    rng = np.random.default_rng(5)
    numbers = 0.1 * rng.standard_normal(form.zeros(HEADS).shape)
    numbers[-1, -1] = abs(numbers[-1, -1])  # it may be the slope, which may not fall
    return form.clip_to_feasible(numbers)


@pytest.fixture(params=["llama", "gemma2", "gpt_oss"])
def passes(request):
    return ModelScorer(
        runner_of(causal_model(request.param)), HEADS, some_examples(), ResultCache(None)
    )


def scored(passes, form, numbers, which):
    return passes.score_fits({"": form.fit(numbers, HEADS)}, which)[""]


@pytest.mark.parametrize("form", FORMS, ids=repr)
def test_gradients_are_those_of_finite_differences(passes, form):
    numbers, which = numbers_of(form), [0, 1, 3]
    weights = np.array([1.0, -0.5, 2.0])
    gradient = passes.gradient(form, numbers, which, weights)
    direction = np.random.default_rng(6).standard_normal(numbers.shape)
    h = 0.003
    up, down = (
        weights @ scored(passes, form, numbers + sign * h * direction, which).log_p
        for sign in (1, -1)
    )
    assert (gradient * direction).sum() == pytest.approx((up - down) / 2 / h, rel=0.02, abs=4e-3)


@pytest.mark.parametrize(("kept", "n_parts"), [(5, 1), (2, 3), (0, 1)])
def test_a_batch_goes_in_parts_that_may_be_kept(passes, monkeypatch, kept, n_parts):
    example, form, asked = passes.examples.examples[0], FORMS[3], []
    passes = replace(passes, examples=ExampleSet(passes.examples.cells, (example,) * 5))
    given = form, numbers_of(form), range(5), np.arange(5.0)
    whole, real = passes.gradient(*given), passes_module.derivative
    config = passes.runner.load().model.config
    of_one = 20 * len(example.tokens) * config.hidden_size * config.num_hidden_layers * 4
    monkeypatch.setattr(passes_module, "MAX_KEPT_BYTES", kept * of_one)
    monkeypatch.setattr(
        passes_module, "derivative", lambda *of: asked.append(of[3].args[-2]) or real(*of)
    )
    np.testing.assert_allclose(passes.gradient(*given), whole, rtol=1e-4, atol=1e-6)
    assert len(asked) == n_parts
    assert [i for part in asked for i in range(5)[part]] == [0, 1, 2, 3, 4]


@pytest.fixture
def text_passes():
    return ModelScorer(
        runner_of(causal_model()), HEADS, some_examples(text=True), ResultCache(None)
    )


def test_what_text_loses_is_the_divergence_of_all_predictions(text_passes):
    """KL(plain || rule), summed over tokens."""
    form, tokens = FORMS[1], text_passes.examples.examples[3].tokens
    model = text_passes.runner.load().model
    numbers = numbers_of(form)
    fit = form.fit(numbers, HEADS)
    log_p = []
    for rule in (calibrate.identity(), fit):
        register("of-text", rule)
        model.set_attn_implementation("of-text")
        with torch.no_grad():
            logits = model(torch.tensor(tokens[None].astype(int))).logits[0, :-1]
        log_p.append(logits.double().log_softmax(-1))
    model.set_attn_implementation("sdpa")
    plain, ours = log_p
    expected = float((plain.exp() * (plain - ours)).sum())
    scored = score_fits(text_passes.runner, text_passes.examples, [0, 3], {"x": fit})["x"]
    np.testing.assert_allclose(scored.kl, [0, expected], rtol=1e-3)


def test_curvature_is_that_of_the_divergence_of_text(text_passes):
    """In the mean of many draws: 2 KL / h^2 at a small step h, for the numbers of one head."""
    form, h = FORMS[3], 0.02  # a line in log n, each head
    cells, window = text_passes.examples.cells, text_passes.examples.examples[3]
    passes = replace(text_passes, examples=ExampleSet(cells, (window,) * 400))
    direction = np.zeros(form.zeros(HEADS).shape)
    direction[:, 2] = 1.0, -0.4
    drawn = passes.fisher_scores(form, np.zeros_like(direction), range(400))
    assert drawn.shape == (400, 2, 8)
    kl = scored(passes, form, h * direction, [0]).kl[0] / passes.examples.n_answer([0])[0]
    assert ((drawn * direction).sum((1, 2)) ** 2).sum() == pytest.approx(2 * kl / h**2, rel=0.2)


@pytest.mark.parametrize("form", [f for f in FORMS if f.kind != SHARED_SLOPE], ids=repr)
def test_the_derivatives_of_a_form_are_within_those_of_a_wider_one(text_passes, form):
    weights = np.array([1.0, -0.5, 2.0])
    of_both = (
        (text_passes.gradient(x, x.zeros(HEADS), [0, 1, 2], weights),
         text_passes.fisher_scores(x, x.zeros(HEADS), [3]))
        for x in (form, form.full_basis)
    )  # fmt: skip
    for own, whole in zip(*of_both, strict=True):
        np.testing.assert_allclose(form.project_gradient(whole, HEADS), own, rtol=1e-3, atol=1e-6)


def test_all_forms_go_by_the_same_derivatives(text_passes, monkeypatch):
    made, examples, text = [], text_passes.examples, [1, 3]
    real = passes_module._derivative
    monkeypatch.setattr(
        passes_module, "_derivative", lambda *given: made.append(given[2]) or real(*given)
    )
    plain = score(text_passes.runner, examples, range(4))
    objective = Objective(examples, plain)
    sampler = BatchSampler(examples, np.array([0, 2]), 0)
    optimizer = HeadRuleOptimizer(text_passes, objective, sampler, list(range(4)), 10)
    n_told, n_made = [], []
    for form in (FORMS[0], FORMS[1], FORMS[3]):  # constants and lines
        n_told.append(optimizer.work([form]).count(text))
        optimizer.solve_by_natural_gradient([form])
        n_made.append(len(made))
    assert n_told[0] - 1 == n_told[1] == n_told[2]
    assert 0 < n_made[0] == n_made[1] == n_made[2]


def test_the_forms_of_a_round_share_passes_of_text(text_passes, monkeypatch):
    scored, real = [], passes_module._score_batch
    monkeypatch.setattr(
        passes_module, "_score_batch", lambda *given: scored.append(given[1:3]) or real(*given)
    )
    objective = Objective(
        text_passes.examples, score(text_passes.runner, text_passes.examples, range(4))
    )
    sampler = BatchSampler(text_passes.examples, np.array([0, 2]), 0)
    found, n_plain = [], []
    for rounds in ([FORMS[:1], FORMS[1:2]], [FORMS[:2]]):
        optimizer = HeadRuleOptimizer(text_passes, objective, sampler, list(range(4)), 10)
        scored.clear()
        found.append([x for forms in rounds for x in optimizer.solve_by_natural_gradient(forms)])
        n_plain.append(sum(is_text for is_text, _ in scored))
    alone, together = found
    assert [x.strength for x in alone] == [x.strength for x in together]
    assert [x.value.lost for x in alone] == [x.value.lost for x in together]
    assert 0 < n_plain[1] < n_plain[0]
    assert max(len(rules) for is_text, rules in scored if is_text) == 2


@pytest.mark.parametrize(("tokens", "n_plain"), [(1024, 1), (50, 2)])
def test_text_is_passed_once_under_plain_softmax(text_passes, monkeypatch, tokens, n_plain):
    """For as many rules as two whole batches take; answers have no such pass."""
    monkeypatch.setattr(passes_module, "TOKENS_AT_ONCE", tokens)
    asked, real = [], passes_module.answer_logits
    monkeypatch.setattr(
        passes_module, "answer_logits", lambda *given: asked.append(given[1]) or real(*given)
    )
    constants = (FORMS[0].fit(np.array([[a]]), HEADS) for a in (0.2, 0.4, 0.6))
    fits = dict(zip("abc", constants, strict=True))
    examples = text_passes.examples
    found = score_fits(text_passes.runner, examples, range(4), fits)
    window = examples.examples[3]
    assert 3 * len(window.tokens) <= 2 * 50 < 4 * len(window.tokens)  # room for two rules
    assert all(examples.cells[x.cell].text for chosen in asked for x in chosen)
    assert sum(x is window for (x,) in asked) == n_plain
    for label, fit in fits.items():
        alone = score_fits(text_passes.runner, examples, [3], {label: fit})[label]
        assert alone.kl[0] == found[label].kl[3] > 0


@pytest.mark.parametrize("form", FORMS, ids=repr)
def test_a_fit_scores_as_its_numbers_do(passes, form):
    numbers, which = numbers_of(form), list(range(4))
    n_entries = 1
    if form.sharing != GLOBAL:  # of two layers, or eight heads
        left = [1, 6] if form.sharing == PER_HEAD else [1]
        numbers[:, left] = 0  # stay as they are, and have no entry unless all heads have
        n_entries = (
            8
            if form.kind == SHARED_SLOPE
            else 8 - len(left) * (1 if form.sharing == PER_HEAD else 4)
        )
    loaded = passes.runner.load()
    with given_rules(loaded.heads, form, torch.from_numpy(numbers)):
        expected = score(passes.runner, passes.examples, which).log_p
    fit = form.fit(numbers, HEADS)
    assert len(fit.entries) == n_entries
    found = score_fits(passes.runner, passes.examples, which, {"fit": fit})["fit"].log_p
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert form.fit(np.zeros_like(numbers), HEADS) is None


def made_up(lengths, texts=(), count=8):
    cells = [Cell("a", n, False) for n in lengths] + [Cell("text", n, True) for n in texts]
    made = [
        Example(np.zeros(cell.length, np.int32), 1 if cell.text else cell.length - 2, i)
        for i, cell in enumerate(cells) for _ in range(count)
    ]  # fmt: skip
    return ExampleSet(tuple(cells), tuple(made))


def none_right(log_p):
    return Scores.of_plain(np.asarray(log_p), np.zeros(len(log_p), np.int32))


@pytest.fixture
def protected():
    """Answers at 10 and 20 tokens, those at 10 protected as text is."""
    examples = made_up([10, 20], [30])
    return Objective(examples, none_right(np.full(len(examples.examples), -1.0)), 10)


def test_gains_are_means_over_cells_and_losses_are_a_token(protected):
    log_p = np.array([-0.5] * 8 + [-1.5] * 8 + [-1.29] * 8)
    kl = np.repeat([0, 0.29], [16, 8])  # of windows with 29 tokens
    scores = none_right(log_p)._replace(kl=kl + 1e-4 * (np.arange(24) % 2))
    value = protected.value(range(24), scores)
    assert value.gain == 0
    np.testing.assert_allclose([loss.mean for loss in value.losses], [0.01, -0.25], atol=1e-5)
    assert value.lost == pytest.approx(value.losses[0].mean + 2 * value.losses[0].error)
    assert not value.is_allowed
    assert protected.value(range(24), scores._replace(kl=kl * 0)).is_allowed
    better = protected.value(range(24), none_right(log_p + np.arange(24) % 2))
    lead = better.over(value)
    assert lead.mean == pytest.approx(0.5)
    error = np.sqrt(2 * (2 / 7) / 8) / 2
    assert 1 < lead.error / error < 1.1  # as wide as Student's t
    (*_, none) = protected.value(range(8, 24), none_right(log_p[8:])).losses
    assert none.mean == 0


def test_trained_lengths_are_held_to_half_of_what_they_may_lose(protected):
    """As other examples judge: 0.01 nats a token counts as 0.02, and errors are not added."""
    log_p = np.full(24, -1.0)
    for lost in (0.0049, 0.0051, 0.01):
        log_p[:8] = -1 - 2 * lost - np.resize([-0.3, 0.3], 8)  # answers of two tokens
        value = protected.value(range(24), none_right(log_p))
        assert value.losses[1].mean == pytest.approx(lost)
        assert value.losses[1].error > 0.01
        assert value.lost == pytest.approx(2 * lost)
        assert value.is_allowed == (lost < protected.parts[1].bound / 2)


@pytest.mark.parametrize(
    ("max_kl", "tolerance", "binding"),
    [(0.01, 0.01, (0.02, 0.01)), (0.001, 0.1, (0.01, 0.001)), (0.1, 0.001, (0.02, 0.001)),
     (0.0, 0.01, (0.01, 0.0)), (0.01, 0.0, (0.02, 0.0)), (0.1, 0.1, (0.02, 0.1))],
)  # fmt: skip
def test_text_and_trained_lengths_have_bounds_of_their_own(max_kl, tolerance, binding):
    """The part that uses up most of its own bound limits the rule."""
    examples = made_up([10, 20], [30])
    plain = none_right(np.full(24, -1.0))
    objective = Objective(examples, plain, 10, max_kl=max_kl, tolerance=tolerance)
    scores = none_right(np.repeat([-1.02, -1.0], [8, 16]))
    value = objective.value(range(24), scores._replace(kl=np.repeat([0, 0.29], [16, 8])))
    assert (value.lost, value.bound) == pytest.approx(binding)
    assert value.is_allowed == (binding[0] <= binding[1])


def test_lengths_of_text_have_equal_weight_however_many_windows_they_have():
    examples = made_up([10], [20, 30])
    objective = Objective(examples, none_right(np.full(24, -1.0)))
    scores = none_right(np.full(18, -1.0))._replace(kl=np.repeat([0, 0.2, 0.6], [8, 8, 2]))
    (loss,) = objective.value(range(18), scores).losses
    assert loss.mean == pytest.approx((0.2 / 19 + 0.6 / 29) / 2)


def test_steps_are_of_answers_alone_as_many_of_each_cell_as_there_is_room_for(monkeypatch):
    examples = made_up([10, 20], [30])

    def cells_of_steps(tokens):
        monkeypatch.setattr(splits, "TOKENS_A_STEP", tokens)
        sampler = BatchSampler(examples, np.arange(24), 0)
        return sampler, [sorted(i // 8 for i in which) for which in islice(sampler, 4)]

    sampler, steps = cells_of_steps(60)
    assert (steps, sampler.n_answers, sampler.n_once) == ([[0, 0, 1, 1]] * 4, 4, 4)
    sampler, steps = cells_of_steps(20)
    assert (sorted(steps), sampler.n_answers, sampler.n_once) == ([[0], [0], [1], [1]], 1, 16)


def test_a_step_along_the_gradient_gains_most_of_those_that_cost_as_much():
    rng = np.random.default_rng(3)
    gradient, roots = rng.standard_normal((2, 5)), rng.standard_normal((5, 2, 2))
    curvature = roots @ roots.mT
    step = natural_gradient_step(gradient, curvature, 0.01)
    cost = np.einsum("rc,crs,sc->", step, curvature, step) / 2
    assert cost == pytest.approx(0.01)
    typical = np.median(curvature[:, [0, 1], [0, 1]], axis=0)  # is added to each

    def gain(x):
        held = np.einsum("rc,crs,sc->", x, curvature + np.diag(typical), x)
        return (gradient * x).sum() / np.sqrt(held)

    others = step + 0.1 * np.abs(step).max() * rng.standard_normal((100, 2, 5))
    assert max(map(gain, others)) < gain(step)
    assert natural_gradient_step(0 * gradient, curvature, 0.01) is None
    assert natural_gradient_step(gradient, 0 * curvature, 0.01) is None


def test_noise_is_taken_from_a_mean_gradient():
    signal = np.array([1.0, 0.0, -0.1, 0.0])
    spread = np.array([0.1, 2.0, 0.0, 0.0])
    found = shrink_gradient(signal + np.array([[1], [-1], [1], [-1]]) * spread)
    np.testing.assert_allclose(found, [1 - 0.01 / 3, 0, -0.1, 0])
    np.testing.assert_array_equal(shrink_gradient(signal[None]), signal)


class Quadratic:
    """Passes whose text loses KL as the square of the first number, or another power."""

    def __init__(self, examples, power=2):
        self.examples, self.power, self.asked, self.heads = examples, power, 0, [(0, 0)]

    def score_fits(self, fits, which):
        self.asked += 1
        examples = [self.examples.examples[i] for i in which]
        is_text = np.array([self.examples.cells[e.cell].text for e in examples])
        found = {}
        for name, fit in fits.items():
            a = fit.only.coefficients[-1] - 1
            kl = is_text * 0.16 * a**self.power * self.examples.n_answer(which)
            found[name] = Scores(-1 + a * ~is_text, np.zeros(len(which), np.int32), kl)
        return found

    def gradient(self, form, numbers, which, weights):
        return np.ones((2, 1))

    def fisher_scores(self, form, numbers, which):
        return np.full((1, 2, 1), 0.32**0.5)  # full strength, where text would lose 0.04, is 0.5


class Additive:
    """Passes whose answers gain what each head's constant gains, and each adds noise of mean 0."""

    heads = HEADS

    def __init__(self, examples, weights):
        self.examples, self.weights = examples, dict(zip(HEADS, weights, strict=True))

    def score_fits(self, fits, which):
        noise = np.resize([-0.01, 0.01], len(which))
        found = {}
        for name, fit in fits.items():
            raised = {(e.layer, e.head): e.coefficients[-1] - 1 for e in fit.entries}
            gain = sum(self.weights[head] * a for head, a in raised.items())
            found[name] = none_right(-1 + gain + noise * sum(raised.values()))
        return found


@pytest.mark.parametrize("useful", [(2,), (2, 5), (1, 2, 5, 6)])
def test_of_the_heads_that_changed_those_with_the_gain_stay(useful):
    """The fewest that are as good; where each gains as much, all of them."""
    examples, form = made_up([10]), Form(CONSTANT, PER_HEAD, 2.0, 4.0)
    objective = Objective(examples, none_right(np.full(8, -1.0)))
    sampler = BatchSampler(examples, np.arange(8), 0)
    weights = np.where(np.isin(range(8), useful), 1.0, 1e-4)
    optimizer = HeadRuleOptimizer(
        Additive(examples, weights), objective, sampler, list(range(8)), 1
    )
    changed = np.isin(range(8), (1, 2, 5, 6))
    best = optimizer.at(form, 0.5 * changed[None])
    assert best.value.gain == pytest.approx(0.5 * weights[changed].sum())
    fewest = optimizer._prune_heads(best, weights)
    assert form.changed(fewest.numbers).tolist() == list(useful)
    np.testing.assert_array_equal(fewest.numbers[0, list(useful)], 0.5)
    assert fewest.value.gain == pytest.approx(0.5 * weights[list(useful)].sum())


def test_a_cost_that_is_linear_in_the_strength_has_a_strength_too():
    examples, form = made_up([10], [30]), FORMS[0]
    objective = Objective(examples, none_right(np.full(16, -1.0)), max_kl=0.01)
    sampler = BatchSampler(examples, np.arange(16), 0)
    optimizer = HeadRuleOptimizer(
        Quadratic(examples, power=1), objective, sampler, list(range(16)), 1
    )
    (found,) = optimizer.solve_by_natural_gradient([form])
    assert 0.8 * 0.01 / 0.08 < found.strength <= 0.01 / 0.08


@pytest.mark.parametrize(
    ("wanted", "allowed", "strength"),
    [(None, 0.01, 32), (None, 0.0025, 16), (None, 1e-9, 0), (None, 0.2, 64), (0.5, 0.01, 32)],
)
def test_the_strength_is_the_largest_that_protected_text_allows(wanted, allowed, strength):
    """KL is 0.04 nats a token at full strength, so that half of it loses 0.01."""
    examples, form = made_up([10], [30]), FORMS[0]
    passes, which = Quadratic(examples), range(16)
    objective = Objective(examples, none_right(np.full(16, -1.0)), max_kl=allowed)
    sampler = BatchSampler(examples, np.arange(16), 0)
    optimizer = HeadRuleOptimizer(passes, objective, sampler, list(which), 1, wanted)
    (found,) = optimizer.solve_by_natural_gradient([form])
    assert found.strength * 64 == pytest.approx(strength, abs=0.07 * strength)
    assert found.strength * 64 <= strength
    assert found.value.gain == pytest.approx(found.strength / 2)
    assert passes.asked <= 10
    if (wanted, allowed) == (None, 0.01):  # what the curvature foretells is the first trial
        assert passes.asked == 2  # text, then answers at that strength
    lost = found.value.losses[0].mean
    assert lost == pytest.approx(0.16 * (found.strength / 2) ** 2 if wanted is None else 0.0)
    fit = found.fit(HEADS)
    assert fit is None if strength == 0 else fit.only.coefficients[1] == 1 + found.strength / 2


# --- the choice ----------------------------------------------------------------------------------


def solved(monkeypatch, log_p_of, by_text=(), **options):
    """The problem where descents come by log p = log_p_of(form, start)."""
    examples, which, fulls = made_up([10, 20], [], count=40), list(range(80)), {}

    class Known:
        def __init__(self, passes, objective, *_):
            self.passes, self.objective = passes, objective

        def work(self, form):
            return []

        def uses_natural_gradient(self, form):
            return form.kind in by_text

        def solve_by_natural_gradient(self, forms):
            return [self.run(self.plain(form)) for form in forms]

        def full(self, solution):
            return fulls[id(solution.value)]

        def plain(self, form):
            value = self.objective.value(which, self.objective.plain.at(which))
            return Solution(form, form.zeros(HEADS), value)

        def run(self, start):
            log_p = log_p_of(start.form, start) + 0.01 * (np.arange(80) % 2)
            value = self.objective.value(which, none_right(log_p))
            fulls[id(value)] = self.objective.value(which, none_right(log_p + 0.25))
            return start._replace(numbers=start.numbers + 0.1, value=value)

    monkeypatch.setattr(candidate_rules, "HeadRuleOptimizer", Known)
    passes, asked = SimpleNamespace(heads=HEADS), ModelOptions(**options)
    plain = none_right(np.full(80, -1.0))
    objective = Objective(examples, plain, asked.trained_up_to, asked.max_kl)
    found = ModelProblem(passes, objective, asked, lambda *_: None)
    for forms in found.rounds():
        found.solve(forms)
        if found.should_stop_early():
            break
    return found


@pytest.mark.parametrize("what", ["version", "processor"])
def test_what_rounds_otherwise_has_results_of_its_own(monkeypatch, here, what):
    """Passes of another version of PyTorch, or on another processor, are made again."""

    def kept(made):
        memo = result_cache(SimpleNamespace(folder=here, digest="of examples"), "cpu")
        if (found := memo.find(b"key", lambda data, _: data)) is None:
            memo.keep(b"key", found := made)
        return found

    assert (kept(b"first"), kept(b"second")) == (b"first", b"first")
    monkeypatch.setattr(cache_module, what, lambda _: "another")
    assert kept(b"third") == b"third"


@pytest.mark.parametrize(
    ("gain_of_each", "noise", "chosen"),
    [(0.3, 0.1, PER_HEAD), (0.205, 0.0, GLOBAL), (0.3, 3.0, GLOBAL), (None, 0.0, None)],
)
def test_the_simplest_that_no_other_leads_is_chosen(monkeypatch, gain_of_each, noise, chosen):
    error = noise * np.random.default_rng(2).standard_normal(80)

    def log_p_of(form, start):
        if gain_of_each is None:
            return -1.0
        return -0.8 if form.sharing == GLOBAL else gain_of_each - 1 + error - error.mean()

    found = solved(monkeypatch, log_p_of)
    best = found.choose()
    assert (best and best.form.sharing) == chosen
    assert best is None or best.form.kind == CONSTANT


def test_what_begins_anew_is_compared_at_full_strength(monkeypatch):
    starts = []

    def log_p_of(form, start):
        starts.append(start)
        return -0.5 if form.sharing == GLOBAL else -0.9

    solved(monkeypatch, log_p_of, kind="constant")
    again = starts[-1]
    assert again.form.sharing == PER_HEAD
    assert again.value.gain == pytest.approx(0.5 + 0.005 + 0.25)


def test_what_is_solved_together_stays_in_the_order_of_the_forms(monkeypatch):
    """The simplest first, whatever goes along the gradient before the others are searched for."""
    engines = {"engines": Exportable(PER_HEAD)}
    found = solved(monkeypatch, lambda *_: -0.5, (CONSTANT, LOG_SIZE), **engines)
    assert [solution.form for solution in found.solved] == found.forms()
    assert [form.kind for form in found.forms()][2:4] == [SHARED_SLOPE, CONSTANT]


def test_a_search_without_hope_ends_early(monkeypatch):
    assert len(solved(monkeypatch, lambda *_: -1.0).solved) == 3
    for options, n_solved in (({"trained_up_to": 10}, 6), ({"kind": LOG_SIZE}, 4)):
        found = solved(monkeypatch, lambda *_: -1.0, **options)
        assert len(found.solved) == n_solved
    assert found.choose().form.kind == LOG_SIZE


def judged(gain=0.5, trained=0.5, text=0.0):
    """Answers at 20 tokens and at 10, where the model was trained, and text: gains of whole ones.

    Gains of single ones differ by 0.4 nats a token. Text loses KL, per window of 29 tokens.
    """
    examples, spread = made_up([10, 20], [30]), np.tile([0.4, -0.4], 4)
    gains = [trained + 2 * spread, np.full(8, gain), 29 * spread]
    own = none_right(np.minimum(-20 + np.concatenate(gains), 0))
    own = own._replace(kl=np.repeat([0, text], [16, 8]) * (1 + np.arange(24) % 2))
    options = {"through": "model", "allowed_loss": 0.005, "trained_up_to": 10}
    fit = replace(calibrate.load("max-retrieval"), source={"options": options})
    scores = {"plain": none_right(np.full(24, -20.0)), "own": own}
    return replace(compare(examples, range(24), scores), fits={"own": fit})


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"text": 0.01 * 29}, "retention text moves by a KL of 0.0150 ± 0.0"),
        ({"trained": -0.02, "gain": 1.0}, "answers of trained lengths lose 0.0100 ± 0.1"),
        ({"text": 0.003 * 29, "trained": -0.008, "gain": 1.0}, None),
    ],
)
def test_a_mean_loss_of_what_is_protected_is_refused_though_errors_are_wide(changes, lost):
    evidence = judged(**changes)
    message = f"{lost}.* nats per token, and 0.005 is allowed"
    with pytest.raises(QualityError, match=message) if lost else nullcontext():
        require_worth(evidence, [])
    text, trained = sentences(evidence, "own")[1:3]
    assert text.startswith("Retention text (NLL ")
    assert trained.startswith("In distribution (tokens <= 10): ")
    limits = [
        words.endswith((" (limit 0.005).", " (tolerance 0.005).")) for words in (text, trained)
    ]
    assert limits == ["text" not in changes or lost is None, "trained" not in changes or not lost]
    assert "nats per token of KL divergence from the baseline (" in text
    assert "nats of log-likelihood per token (" in trained


@pytest.mark.parametrize(
    ("losses", "message"),
    [([Estimate(0.05, 0.03), Estimate(0.004, 0.001)], None),
     ([Estimate(0.05, 0.03), Estimate(0.02, 0.005)], "lose 0.0200 ± 0.0050 nats .*--tolerance"),
     ([Estimate(0.01, np.nan)], "lose 0.0100 ± nan nats per token, and 0.005 is allowed"),
     ([Estimate(0.001, np.nan)], None), ([], None)],
)  # fmt: skip
def test_no_cell_may_lose_evidently_more(losses, message):
    raises = pytest.raises(QualityError, match=message) if message else nullcontext()
    with raises:
        require_worth(judged(), [(Part([1], False, 0.005), loss) for loss in losses])


def test_a_file_keeps_the_tolerance_where_it_is_not_the_bound_of_kl():
    """`allowed_loss` is the key of files for the bound of KL, and of both if they are equal."""
    for options, recorded in (
        ({}, {"allowed_loss": 0.01}),
        ({"max_kl": 0.05}, {"allowed_loss": 0.05}),  # no length was trained
        ({"trained_up_to": 8}, {"allowed_loss": 0.01}),
        ({"trained_up_to": 8, "max_kl": 0.05}, {"allowed_loss": 0.05, "tolerance": 0.01}),
        ({"trained_up_to": 8, "interpolation": 0.5}, {}),  # published whatever it costs
    ):
        written = options_of_file(ModelOptions(**options), 1.0)["options"]
        assert {k: written[k] for k in ("allowed_loss", "tolerance") if k in written} == recorded


@pytest.mark.parametrize("gain", [0.0, 0.005, -0.5])
def test_a_fit_without_gain_says_what_may_help(gain):
    message = rf"changes by .{abs(gain):.3f} .*16 held-out answers; collect more examples"
    with pytest.raises(QualityError, match=message):
        require_worth(judged(gain, gain), [])


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


def through(collection, **options):
    return fit_through(runner_of(planted_model), collection, "x", ModelOptions(**options))


def test_the_heads_are_found_and_the_others_left_alone(here, monkeypatch):
    score_fits = ModelScorer.score_fits

    def begin_with_what_is_known(passes, fits, which):
        assert all(entry.coefficients != (0, 1) for fit in fits.values() for entry in fit.entries)
        return score_fits(passes, fits, which)  # scores of plain softmax are in the collection

    monkeypatch.setattr(ModelScorer, "score_fits", begin_with_what_is_known)
    found = through(planted("tiny-run"), most_steps=40, kind="constant")
    fit, quality = found.coefficients, found.coefficients.quality
    betas = {(e.layer, e.head): e.coefficients[-1] for e in fit.entries}
    assert betas.keys() == {(0, 0), (0, 2)}
    assert betas[0, 0] > 2
    assert betas[0, 2] < 0.8
    assert fit.rule.min_beta < 1
    assert fit.source["head"] == "tiny"
    assert fit.source["options"] == {
        "through": "model", "kind": "constant", "allowed_loss": 0.01, "steps": 40,
        "strength": 1.0,
    }  # fmt: skip
    assert {"torch", "transformers"} <= fit.provenance["versions"].keys()
    assert [row["size"] for row in quality["held_out"]] == [16, 32]
    before, after = ([size[k] for size in quality["held_out"]] for k in ("before", "after"))
    assert np.mean(after) > np.mean(before) + 1
    assert (
        with_verdict(fit, found.evidence)
        .quality["verdict"]
        .startswith("Use x: NLL 1.302 -> 0.085 nats (-1.2")
    )
    tried = [candidate["kind"] for candidate in quality["candidates"]]
    assert tried == ["constant, all heads alike", "constant, each head"]
    answers = found.evidence.answers
    assert answers.rules == ("plain", "own", "paper", "constant")
    assert answers.gain("own", LOG_P).mean == pytest.approx(np.mean(after) - np.mean(before))
    assert answers.gain("own", RIGHT).mean > 0.5


def test_an_interrupted_fit_carries_on_with_the_same_numbers(here, monkeypatch):
    collection, calls = planted("tiny-run"), []
    real = passes_module._derivative

    def counted(*arguments):
        calls.append(1)
        if len(calls) == 25:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(passes_module, "_derivative", counted)
    options = {"most_steps": 10, "kind": "constant"}
    with pytest.raises(KeyboardInterrupt):
        through(collection, **options)
    resumed = through(collection, **options)
    n_calls = len(calls)
    kept = next(Path("tiny-run/.passes").iterdir())
    kept.write_bytes(kept.read_bytes()[:-9])  # is made again
    whole = through(replace(collection, folder=planted("other-run", "other").folder), **options)
    assert len(calls) - n_calls == n_calls - 1  # what was interrupted is done twice
    with pytest.warns(UserWarning, match=f"{kept.name} is damaged"):
        again = through(collection, **options)
    assert resumed.coefficients == whole.coefficients == again.coefficients


@pytest.mark.slow
def test_protected_text_does_not_get_worse(here):
    """Text that asks the same questions and wants wrong answers: hardly any sharpening is left."""
    collection = planted("tiny-run", text=True)
    free = through(collection, most_steps=20, max_kl=10.0)
    assert free.published.strength == 1
    assert free.losses["own"][0].mean > 0.05
    try:
        held = through(collection, most_steps=20, max_kl=0.05)
    except QualityError:
        return  # nothing is allowed that is worth it
    assert held.published.value.lost <= 0.05
    assert held.published.strength < 1
    strengths = [record["strength"] for record in held.coefficients.quality["trade"]]
    assert held.published.strength in strengths
    assert all(later - earlier > 0.125 for earlier, later in pairwise(strengths))
    assert all(np.abs(np.subtract(strengths, x)).min() <= 0.125 for x in (0.25, 0.5, 1.0))
    assert held.losses["own"][0].mean <= 0.05
    assert held.published.value.gain < free.published.value.gain


def test_what_bars_a_rule_that_gains_is_named(here, protected):
    collection, solved = planted("tiny-run", text=True, count=8), []
    barred = (
        r"; a rule that gains \+(1.*) nats moves retention text \(--retention-text\) by a KL of "
        r"(0.*) nats per token, and 1e-06 is allowed \(--max-kl\)$"
    )
    options = ModelOptions(most_steps=10, kind=CONSTANT, max_kl=1e-6)
    with pytest.raises(QualityError, match=barred) as refused:
        fit_through(runner_of(planted_model), collection, "x", options, ended=solved.append)
    gain, kl = map(float, re.search(barred, str(refused.value)).groups())
    examples, objective = collection.set, Objective(collection.set, collection.scores)
    fits = {s.form.label: s.fit([*s.form.heads_changed(s.numbers, HEADS)], 1.0) for s in solved}
    which = splits.split(examples, splits.VALIDATION)
    scores = score_fits(runner_of(planted_model()), examples, which, fits)
    values = [objective.value(which, its) for its in scores.values()]
    best = max(values, key=lambda value: value.gain)
    assert gain == pytest.approx(best.gain, abs=1e-3)
    assert kl == pytest.approx(best.losses[0].mean, rel=0.1)
    of_answers = protected.value(range(24), none_right(np.repeat([-1.5, -0.3, -1.0], 8)))
    part = "gains +0.100 nats costs answers of 10 tokens (--trained-up-to) 0.2500 nats per token"
    assert part in protected.limiting_constraint(of_answers)
    assert protected.limiting_constraint(of_answers).endswith("and 0.01 is allowed (--tolerance)")


def test_too_few_examples_are_refused(here):
    folder = save(Path("random"), causal_model())
    Path("text.txt").write_text("The apple is on the table. " * 60)  # 420 tokens
    text = {"text": Path("text.txt")}
    for options, message in (
        ({"templates": ("numbers",), "lengths": (64,)}, "at 64 tokens has 4 examples; collect 8"),
        ({"templates": (), "lengths": (64,), **text}, "has no answers; give --prompts or --task"),
        ({"templates": ("numbers",), "lengths": (240,), "count": 8, **text},
         "1 window of plain text is too few for validation and test; collect a longer text"),
    ):  # fmt: skip
        collection = collected(folder, "-".join(map(str, options.values())), **options)
        with pytest.raises(QualityError, match=message):
            fit_through(runner_of(pytest.fail), collection, "x", ModelOptions())


@pytest.mark.slow
def test_a_random_model_gets_no_fit(here):
    folder = save(Path("random"), causal_model())
    collection = collected(folder, "run", templates=("numbers",), lengths=(40, 64), count=16)
    with pytest.raises(QualityError, match="not for this model"):
        fit_through(runner_of(causal_model), collection, "x", ModelOptions(CONSTANT, most_steps=10))


# --- the command ---------------------------------------------------------------------------------


def test_the_options_of_a_run_reach_its_fit(monkeypatch, here):
    def refused(request):
        found.append((request.name, request.seed, request.device, request.store))
        raise QualityError("")

    found = []
    monkeypatch.setattr(commands, "collect", lambda request: None)
    monkeypatch.setattr(commands, "fit", refused)
    options = {"name": "x", "seed": 3, "device": "cuda", "store": here / "store"}
    with pytest.raises(QualityError):
        commands.run(commands.RunRequest(here, task="retrieval", **options))
    assert found == [tuple(options.values())]


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
    assert "Use tiny: NLL" in out.stdout
    assert 'transformers.register("tiny", fit)' in out.stdout
    source = calibrate.load("tiny@1").source
    assert (source["head"], source["options"]["strength"]) == ("tiny", 0.5)
    assert "allowed_loss" not in source["options"]  # a strength that is given is published
    again = call(*command, "--json")
    assert "tiny@1 is unchanged; no new version is written" in again.stderr
    assert json.loads(again.stdout)
    Path("tiny").rename("moved")
    assert "tiny-run does not know where its model is" in call(*command, code=1).stderr
