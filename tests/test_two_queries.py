"""The study of a Transformer with two kinds of query: its task, its shipped weights, its tables."""

import runpy

import numpy as np
import pytest
import two_queries_task
from study import mean_and_error
from study_pages import STUDIES, page_of, record_of

RECORD = record_of("two-queries")


@pytest.fixture(scope="module")
def study():
    return runpy.run_path(str(STUDIES / "two_queries.py")) | vars(two_queries_task)


@pytest.fixture(scope="module")
def model(study):
    return study["load_model"](study["Trial"](2, 0).weights)


@pytest.mark.parametrize("kind", ["one", "many"])
def test_the_answer_is_in_the_items(study, kind):
    prompts = study["draw"](np.random.default_rng(0), 24, 64, kind)
    assert len(prompts.answer) > 40
    for tokens, answer, asked in zip(prompts.tokens.numpy(), prompts.answer, prompts.asked,
                                     strict=True):  # fmt: skip
        levels, classes = tokens[:-1] // study["CLASSES"], tokens[:-1] % study["CLASSES"]
        query = tokens[-1] - study["ONE"]
        assert (query == 0) == (kind == "one")
        if kind == "one":
            np.testing.assert_array_equal(asked, levels == levels.max())
            assert asked.sum() == 1
        else:
            np.testing.assert_array_equal(asked, abs(levels - (query - 1)) <= study["NEAR"])
        votes = np.bincount(classes[asked], minlength=study["CLASSES"])
        assert votes[answer] == votes.max() > np.sort(votes)[-2]


def test_shipped_weights_know_the_task_and_disperse(study, model):
    def accuracy(size, before=lambda prompts: None):
        pieces = study["prompts_of"]("measure", 0, size, "one", 64)
        return study["accuracy"](model, pieces, before)

    assert accuracy(32) > 0.95
    plain = accuracy(512)
    assert plain < 0.85
    study["apply"](model, study["one_constant"](2.0))
    assert accuracy(512) > plain + 0.1
    assert accuracy(512, study["with_oracle"](model)) > 0.95


def test_the_page_has_the_paired_differences_of_the_record(study):
    def cost(arm, size):
        arms = study["accuracies_by_arm"](RECORD, 2)
        lost = arms["baseline"]["many"] - arms[arm]["many"]
        mean, error = mean_and_error(lost)
        place = RECORD["sizes"].index(size)
        return f"{mean[place]:.1f} ± {error[place]:.1f} points"

    page = " ".join(page_of("two-queries").split())
    assert f"costs the other queries {cost('log-n', 1_024)} at 1,024" in page
    assert f"a difference of {cost('oracle', 1_024)}" in page
    assert f"at 32 (two heads: {cost('own', 32).split()[0]} points)" in page
