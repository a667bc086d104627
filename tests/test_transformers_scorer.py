"""Scores of a model under rules of its heads, their gradients, curvature and memory."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from rule_families import CONSTANTS, FAMILIES, GLOBAL, HEADS, PER_HEAD, family, some_parameters
from rule_families import family as rule_family
from tiny_causal import causal_model, runner_of, some_examples

import calibrate
from calibrate.core.rule import ENTROPY_AND_SIZE, LOG_SIZE
from calibrate.errors import CalibrateError
from calibrate.model.parameters import Parameters
from calibrate.model.runner import divide_batch
from calibrate.model.scoring import ResultCache, score_fits, score_unit
from calibrate.model.transformers_scorer import TransformersScorer, given_rules
from calibrate.prompts.examples import PASSES_FOLDER, ExampleSet, Scores, parse_scores
from calibrate.storage.npz import pack_arrays
from calibrate.transformers import apply
from calibrate.transformers.betas import checkpointed, head_betas

# All families in a Llama, and some where logits have a soft-cap or a sink.
CASES = [("llama", x) for x in FAMILIES]
CASES += [(kind, x) for kind in ("gemma2", "gpt_oss") for x in FAMILIES[1::4]]


def case_id(value):
    return value if isinstance(value, str) else f"{value.kind}-{value.sharing.name}"


of_models = pytest.mark.parametrize(("scorer", "family"), CASES, ids=case_id, indirect=["scorer"])


@pytest.fixture
def scorer(request):
    model = causal_model(getattr(request, "param", "llama"))
    return TransformersScorer(runner_of(model), HEADS, some_examples(), ResultCache(None))


@pytest.fixture
def text_scorer():
    examples = some_examples(text=True)
    return TransformersScorer(runner_of(causal_model()), HEADS, examples, ResultCache(None))


def log_p(scorer, parameters, indices):
    (scores,) = scorer.score([parameters.rules(HEADS)], indices)
    return scores.log_p


@pytest.mark.parametrize("family", FAMILIES, ids=case_id)
def test_gradients_at_the_baseline_are_finite_differences(scorer, family):
    assert_gradients_are_finite_differences(scorer, family, scale=0.0)


@of_models
def test_gradients_are_finite_differences(scorer, family):
    assert_gradients_are_finite_differences(scorer, family, scale=1.0)


def assert_gradients_are_finite_differences(scorer, family, scale):
    parameters, indices = some_parameters(family, scale), [0, 1, 3]
    weights = np.array([1.0, -0.5, 2.0])
    gradient = scorer.gradient(parameters, indices, weights)
    direction = np.random.default_rng(6).standard_normal(gradient.shape)
    h = 0.003
    up, down = (
        weights @ log_p(scorer, Parameters(family, parameters.numbers + step), indices)
        for step in (h * direction, -h * direction)
    )
    assert (gradient * direction).sum() == pytest.approx((up - down) / 2 / h, rel=0.02, abs=4e-3)


@pytest.mark.parametrize(("kept", "sizes"), [(5, [5]), (2, [2, 2, 1]), (0, [5])])
def test_a_batch_is_divided_to_fit_into_memory(scorer, kept, sizes):
    example = scorer.examples.examples[0]
    scorer = replace(scorer, examples=ExampleSet(scorer.examples.cells, (example,) * 5))
    given = some_parameters(family(LOG_SIZE, PER_HEAD)), range(5), np.arange(5.0)
    whole, model = scorer.gradient(*given), scorer.runner.load().model
    numbers_of_a_token = 20 * model.config.hidden_size * model.config.num_hidden_layers
    of_one = 4 * numbers_of_a_token * len(example.tokens)
    scorer = replace(scorer, runner=runner_of(model, kept_bytes=kept * of_one))
    np.testing.assert_allclose(scorer.gradient(*given), whole, rtol=1e-4, atol=1e-6)
    of_parts = [np.arange(5)[part] for part in divide_batch(scorer.runner.load(), [example] * 5)]
    assert [len(part) for part in of_parts] == sizes
    assert np.concatenate(of_parts).tolist() == [0, 1, 2, 3, 4]


def test_checkpoints_take_less_memory_and_are_removed():
    model, kept = causal_model(), []
    layer = model.model.layers[0]
    forward = type(layer).forward
    for context in (torch.enable_grad(), checkpointed(model)):
        sizes = []
        pack = torch.autograd.graph.saved_tensors_hooks(
            lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x
        )
        with head_betas(model) as heads, pack, context:
            heads.betas = torch.ones(1, 8, requires_grad=True)
            model.model(torch.zeros(1, 64, dtype=torch.long), use_cache=False)
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 3
    assert type(layer).forward is forward
    assert "forward" not in vars(layer)


def gradient_of(runner, examples):
    """The gradient of log p of all examples by constants, at the baseline."""
    scorer = TransformersScorer(runner, HEADS, examples, ResultCache(None))
    n = len(examples.examples)
    return scorer.gradient(CONSTANTS.baseline(HEADS), range(n), np.ones(n))


def test_memory_that_runs_out_and_numbers_that_overflow_are_errors():
    def exhausted(*_):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:119] ... can't allocate memory: you")

    examples, runner = some_examples(), runner_of(causal_model())
    runner.load().model.lm_head.register_forward_pre_hook(exhausted)
    with pytest.raises(CalibrateError, match="3 x 20 tokens"):
        gradient_of(runner, examples)
    broken = causal_model()
    broken.model.layers[1].self_attn.q_proj.weight[0, 0] = float("inf")
    with pytest.raises(CalibrateError, match=r"\b20 tokens .*\bnan\b"):
        gradient_of(runner_of(broken), examples)
    largest = max(int(example.tokens.max()) for example in examples.examples)
    with pytest.raises(CalibrateError, match=rf"\b{largest}\b.* {largest - 1};"):
        gradient_of(runner_of(causal_model(vocab_size=largest)), examples)


def test_the_kl_of_text_is_that_of_all_predictions(text_scorer):
    """KL(baseline || rule), summed over tokens."""
    tokens = text_scorer.examples.examples[3].tokens
    model = text_scorer.runner.load().model
    fit = some_parameters(CONSTANTS).rules(HEADS)
    predictions = []
    for rule in (calibrate.identity(), fit):
        apply(model, rule)
        with torch.no_grad():
            logits = model(torch.tensor(tokens[None].astype(int))).logits[0, :-1]
        predictions.append(logits.double().log_softmax(-1))
    model.set_attn_implementation("sdpa")
    plain, ours = predictions
    each = (plain.exp() * (plain - ours)).sum(-1)
    (scores,) = text_scorer.score([fit], [0, 3])
    np.testing.assert_allclose(scores.kl, [0, each.sum()], rtol=1e-3)


@pytest.mark.slow
def test_fisher_scores_give_the_curvature_of_the_kl_of_text(text_scorer):
    """In the mean of many draws: 2 KL / h^2 at a small step h, for the numbers of one head."""
    lines, h = family(LOG_SIZE, PER_HEAD), 0.02
    cells, window = text_scorer.examples.cells, text_scorer.examples.examples[3]
    scorer = replace(text_scorer, examples=ExampleSet(cells, (window,) * 400))
    direction = lines.zeros(HEADS)
    direction[:, 2] = 1.0, -0.4
    drawn = scorer.fisher_scores(lines.baseline(HEADS), range(400))
    assert drawn.shape == (400, 2, 8)
    (scores,) = scorer.score([Parameters(lines, h * direction).rules(HEADS)], [0])
    kl = scores.kl[0] / scorer.examples.n_answer([0])[0]
    assert ((drawn * direction).sum((1, 2)) ** 2).sum() == pytest.approx(2 * kl / h**2, rel=0.2)


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_derivatives_of_the_full_family_contain_those_of_each(text_scorer, family):
    full_family = rule_family(ENTROPY_AND_SIZE, PER_HEAD)
    weights = np.array([1.0, -0.5, 2.0])
    of_both = (
        (
            text_scorer.gradient(x.baseline(HEADS), [0, 1, 2], weights),
            text_scorer.fisher_scores(x.baseline(HEADS), [3]),
        )
        for x in (family, full_family)
    )
    for own, full in zip(*of_both, strict=True):
        np.testing.assert_allclose(
            family.project_gradient(full, HEADS, full_family), own, rtol=1e-3, atol=1e-6
        )


def test_text_is_passed_once_under_the_baseline(text_scorer):
    examples, model = text_scorer.examples, text_scorer.runner.load().model
    window, passed = examples.examples[3].tokens, []
    constants = [Parameters(CONSTANTS, np.array([[a]])).rules(HEADS) for a in (0.2, 0.4, 0.6)]
    fits = dict(zip("abc", constants, strict=True))
    embeddings = model.get_input_embeddings()
    counted = embeddings.register_forward_pre_hook(lambda _, given: passed.append(given[0]))
    of_all = score_fits(text_scorer.runner, examples, range(4), fits)
    counted.remove()
    of_window = [ids for ids in passed if ids[0].tolist() == window[:-1].tolist()]
    assert len(of_window) == len(fits) + 1
    for label, fit in fits.items():
        alone = score_fits(text_scorer.runner, examples, [3], {label: fit})[label]
        assert alone.kl[0] == of_all[label].kl[3] > 0


@of_models
def test_a_fit_has_the_scores_of_its_numbers(scorer, family):
    parameters, indices = some_parameters(family), list(range(4))
    n_entries = 1
    if family.sharing is not GLOBAL:  # of two layers, or eight heads
        left = [1, 6] if family.sharing is PER_HEAD else [1]
        parameters.numbers[:, left] = 0  # stay as they are, and have no entry
        n_entries = 8 - (len(left) if family.sharing is PER_HEAD else 4)
    loaded = scorer.runner.load()
    with given_rules(loaded.heads, family, torch.from_numpy(parameters.numbers)):
        expected = score_unit(scorer.examples, [None], loaded)[0].log_p
    fit = parameters.rules(HEADS)
    assert len(fit.entries) == n_entries
    np.testing.assert_allclose(log_p(scorer, parameters, indices), expected, atol=1e-5)
    assert family.baseline(HEADS).rules(HEADS) is None


@pytest.mark.parametrize("spoilt", [b"", b"x", pack_arrays({"log_p": np.zeros(3)})])
def test_a_damaged_result_of_the_cache_is_absent(tmp_path, spoilt):
    cache, scores = ResultCache(tmp_path, "model"), Scores.empty(3)
    (tmp_path / PASSES_FOLDER).mkdir()
    cache.keep(b"key", scores.pack())
    found = cache.find(b"key", parse_scores)
    np.testing.assert_array_equal(found.log_p, scores.log_p)
    (path,) = (tmp_path / PASSES_FOLDER).iterdir()
    path.write_bytes(spoilt)
    assert cache.find(b"key", parse_scores) is None
