"""Questions with several right answers: any of them is right."""

from types import SimpleNamespace

import numpy as np
import pytest
from rule_families import FAMILIES, HEADS, some_parameters
from tiny_causal import causal_model, planted_examples, planted_model, runner_of, some_examples

from calibrate.datasets.examples import Cell, Example, ExampleSet, Scores
from calibrate.errors import QualityError
from calibrate.evidence.evidence import BASELINE, OWN
from calibrate.evidence.metrics import LOG_P, RIGHT
from calibrate.model.calibration_and_validation import BatchSampler, validation_indices
from calibrate.model.fit import fit_examples, fit_head_rules
from calibrate.model.objective import ModelObjective, compare
from calibrate.model.options import ModelOptions
from calibrate.model.questions import answers_of, log_p_of_any, question_of
from calibrate.model.scoring import ResultCache, score
from calibrate.model.splits import TEST, VALIDATION, splits_of
from calibrate.model.transformers_scorer import TransformersScorer


def several(lengths=(20, 20, 33, 20, 26)):
    """Three questions: the first, with two answers; one with one; and one with two."""
    questions = (4, 4, -1, 9, 9)
    pairs = zip(some_examples(lengths).examples, questions, strict=True)
    made = [
        x._replace(start=len(x.tokens) - 2 - i, question=q, group=q)
        for i, (x, q) in enumerate(pairs)
    ]  # answers of 2 to 6 tokens
    return ExampleSet((Cell("some", 32, False),), tuple(made))


def test_the_score_is_the_log_of_the_summed_probability():
    log_p = np.log([0.2, 0.3, 0.4, 0.06, 0.04])
    examples = several()
    n_answer = examples.n_answer(range(5))
    right = np.array([n_answer[0], 0, 0, 1, n_answer[4]], np.int32)
    plain = Scores.of_plain(log_p, right)
    evidence = compare(examples, range(5), {BASELINE: plain, OWN: plain._replace(log_p=log_p - 1)})
    np.testing.assert_allclose(evidence.scores(BASELINE, LOG_P), np.log([0.5, 0.4, 0.1]))
    np.testing.assert_allclose(evidence.scores(OWN, LOG_P), np.log([0.5, 0.4, 0.1]) - 1)
    assert evidence.scores(BASELINE, RIGHT).tolist() == [1, 0, 1]
    assert evidence.tokens.tolist() == [n_answer[1], n_answer[2], n_answer[3]]  # of the likeliest
    some = compare(examples, [3, 4, 2], {BASELINE: plain.at([3, 4, 2])})
    np.testing.assert_allclose(some.scores(BASELINE, LOG_P), np.log([0.1, 0.4]))
    with pytest.raises(ValueError, match="some answers"):
        compare(examples, [0, 2], {BASELINE: plain.at([0, 2])})


@pytest.mark.parametrize("family", FAMILIES[:4], ids=repr)
def test_gradients_are_those_of_the_summed_probability(family):
    examples = several()
    scorer = TransformersScorer(runner_of(causal_model()), HEADS, examples, ResultCache(None))
    parameters, indices = some_parameters(family), [0, 1, 2, 3, 4]
    weight = np.array([1.0, -0.5, 2.0])
    question = question_of(examples, indices)
    gradient = scorer.gradient(parameters, indices, weight[question])
    direction, h = np.random.default_rng(6).standard_normal(gradient.shape), 0.003

    def log_p(step):
        moved = parameters._replace(numbers=parameters.numbers + step)
        (scores,) = scorer.score([moved.rules(HEADS)], indices)
        return scores.log_p

    up, down = (
        weight @ log_p_of_any(log_p(step), question) for step in (h * direction, -h * direction)
    )
    assert (gradient * direction).sum() == pytest.approx((up - down) / 2 / h, rel=0.02, abs=4e-3)
    first, second, *_ = log_p(0.0)
    assert abs(first - second) > 0.5  # their shares are unlike


def test_answers_to_a_question_come_in_one_step_and_count_as_one():
    """A step has as many questions as without further answers, and as their tokens allow."""
    tokens = np.zeros(200, np.int32)
    examples = ExampleSet(
        (Cell("a", 256, False),),
        tuple(Example(tokens, 198, 0, q, q) for q in range(20) for _ in range(3)),
    )
    sampler = BatchSampler(examples, np.arange(60), 0)
    first, second = (step for step, _ in zip(sampler, range(2), strict=False))
    assert sampler.n_answers == 6  # of 600 tokens each, in 4,096
    assert len(first) == len(second) == 18
    for step in (first, second):
        assert [i // 3 for i in step[::3]] == [i // 3 for i in step[2::3]]
        assert len({*step}) == 18


def test_errors_are_by_group():
    examples = some_examples((20,) * 12)
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(4), 3)
    log_p = -1 + 0.5 * rng.standard_normal(4)[group] + 0.01 * rng.standard_normal(12)
    pairs = zip(examples.examples, group.tolist(), strict=True)
    grouped = ExampleSet(examples.cells, tuple(x._replace(group=g) for x, g in pairs))
    plain = {BASELINE: Scores.of_plain(log_p, np.zeros(12, np.int32))}
    found = compare(grouped, range(12), plain).mean(BASELINE, LOG_P)
    means = log_p.reshape(4, 3).mean(axis=1)  # of the groups, which are as large as each other
    assert found.error == pytest.approx(np.std(means, ddof=1) / np.sqrt(4))
    assert found.error > 1.5 * compare(examples, range(12), plain).mean(BASELINE, LOG_P).error
    assert compare(grouped, range(12), plain).n_groups == 4
    mixed = ExampleSet(examples.cells, (*grouped.examples[:6], *examples.examples[6:]))
    assert compare(mixed, range(12), plain).n_groups == 8


def planted(n_answers):
    """The marked item's class is one right answer; others are classes that none of them has."""
    made = []
    for q, x in enumerate(planted_examples((12,), count=32).examples):
        shown = {int(t) % 10 for t in x.tokens[:-2]}
        others = [c for c in range(8) if c not in shown][: n_answers - 1]
        for answer in (int(x.tokens[-1]) - 10, *others):
            tokens = np.array([*x.tokens[:-1], 10 + answer], np.int32)
            made.append(Example(tokens, x.start, x.cell, q, q if others else -1))
    return ExampleSet(planted_examples((12,), count=1).cells, tuple(made))


def test_checks_and_losses_take_whole_questions():
    examples = planted(2)
    n = len(examples.examples)
    rng = np.random.default_rng(0)
    plain = Scores.of_plain(-1 - rng.random(n), np.zeros(n, np.int32))
    objective = ModelObjective(examples, plain, trained_up_to=12)
    assert len(set(objective.cell)) == 1
    n_validation = (splits_of(examples) == VALIDATION).sum()
    assert len(validation_indices(objective, 3)) == n_validation  # a constraint applies to all
    chosen = validation_indices(ModelObjective(examples, plain), 3)
    firsts = [x[0] for x in answers_of(examples, np.flatnonzero(splits_of(examples) == VALIDATION))]
    assert [x[0] for x in answers_of(examples, chosen)] == firsts[:3]
    value = objective.value(range(n), plain._replace(log_p=plain.log_p - 0.2))
    assert [loss.mean for loss in value.losses] == pytest.approx([0.2])  # answers have a token
    assert value.gain == pytest.approx(-0.2)


@pytest.mark.slow
def test_a_fit_takes_several_answers():
    examples, runner = planted(2), runner_of(planted_model())
    n_questions = len({x.group for x in examples.examples})
    assert len(examples.examples) > n_questions == 32
    objective = ModelObjective(examples, score(runner, examples, range(len(examples.examples))))
    scorer = TransformersScorer(runner, runner.heads(), examples, ResultCache(None))
    options = ModelOptions(kind="constant", max_steps=10)
    found = fit_head_rules(scorer, objective, "several", {}, options)
    judged = splits_of(examples) == TEST
    groups = np.array([x.group for x in examples.examples])
    assert found.evidence.n == len(np.unique(groups[judged]))
    assert found.evidence.gain(OWN, LOG_P).mean > 0.2


def test_a_fit_counts_groups_and_not_lines():
    alone = planted(1)
    members = tuple(x._replace(group=x.group // 8) for x in alone.examples)
    collection = SimpleNamespace(set=ExampleSet(alone.cells, members), folder="r")
    with pytest.raises(QualityError, match="4 prompts .* 8"):
        fit_examples(None, collection, "few", ModelOptions())
