"""The study of a Transformer with two kinds of query: its task, its shipped weights, its tables."""

import numpy as np
import pytest
import two_queries
import two_queries_task
from study import mean_and_error
from study_pages import page_of, record_of

RECORD = record_of("two-queries")


@pytest.fixture(scope="module")
def model():
    return two_queries.load_model(two_queries.Trial(2, 0).weights)


@pytest.mark.parametrize("kind", ["one", "many"])
def test_the_answer_is_in_the_items(kind):
    prompts = two_queries_task.draw(np.random.default_rng(0), 24, 64, kind)
    assert len(prompts.answer) > 40
    for tokens, answer, asked in zip(prompts.tokens.numpy(), prompts.answer, prompts.asked,
                                     strict=True):  # fmt: skip
        levels, classes = np.divmod(tokens[:-1], two_queries_task.CLASSES)
        query = tokens[-1] - two_queries_task.ONE
        assert (query == 0) == (kind == "one")
        if kind == "one":
            np.testing.assert_array_equal(asked, levels == levels.max())
            assert asked.sum() == 1
        else:
            np.testing.assert_array_equal(asked, abs(levels - (query - 1)) <= two_queries_task.NEAR)
        votes = np.bincount(classes[asked], minlength=two_queries_task.CLASSES)
        assert votes[answer] == votes.max() > np.sort(votes)[-2]


def test_shipped_weights_know_the_task_and_disperse(model):
    def accuracy(size, before=lambda prompts: None):
        pieces = two_queries_task.prompts_of("measure", 0, size, "one", 64)
        return two_queries_task.accuracy(model, pieces, before)

    assert accuracy(32) > 0.95
    plain = accuracy(512)
    assert plain < 0.85
    two_queries.apply(model, two_queries.one_constant(2.0))
    assert accuracy(512) > plain + 0.1
    assert accuracy(512, two_queries.with_oracle(model)) > 0.95


def test_the_page_has_the_paired_differences_of_the_record():
    def cost(arm, size):
        arms = two_queries.accuracies_by_arm(RECORD, 2)
        lost = arms["baseline"]["many"] - arms[arm]["many"]
        mean, error = mean_and_error(lost)
        place = RECORD["sizes"].index(size)
        return f"{mean[place]:.1f} ± {error[place]:.1f} points"

    page = " ".join(page_of("two-queries").split())
    assert f"a difference of {cost('oracle', 1_024)}" in page
    assert f"at 32 (two heads: {cost('own', 32).split()[0]} points)" in page
