"""The built-in retrieval task: facts, templates, and examples as long as fits."""

import numpy as np
import pytest

from calibrate.errors import CalibrateError
from calibrate.prompts.encoding import Encoder
from calibrate.prompts.retrieval_task import (
    PROMPT_TEMPLATES,
    draw_facts,
    longest_example,
    make_retrieval_examples,
    write_prompt,
)
from calibrate.transformers.folders import ModelFolder


@pytest.fixture(scope="module")
def encoder(model):
    folder = ModelFolder(model)
    return Encoder(folder.tokenizer(), folder.context, folder.vocabulary)


@pytest.mark.parametrize("name", PROMPT_TEMPLATES)
def test_the_asked_fact_is_anywhere_among_similar_ones(name, encoder):
    positions, template = [], PROMPT_TEMPLATES[name]
    for seed in range(200):
        prompt, answer = write_prompt(template, seed, 8)
        facts = draw_facts(template, np.random.default_rng(seed), 8)
        asked, *others = facts
        lines = [template.fact.format(**fact._asdict()) for fact in facts]
        positions.append(np.argsort([prompt.index(line) for line in lines]).tolist().index(0))
        question = prompt[max(prompt.index(line) + len(line) for line in lines) :]
        assert answer == template.answer.format(value=asked.value)
        assert asked.value not in question
        assert asked.a in [fact.a for fact in others]  # each half of the key is in another one
        assert asked.b in [fact.b for fact in others]
    counts = np.bincount(np.array(positions), minlength=8)
    assert len(counts) == 8
    assert counts.min() > 10  # of 25 in the mean
    assert 0 not in encoder.ids(prompt + answer)  # the tests' tokenizer knows all words


def test_templates_differ_and_four_are_for_test():
    assert list(PROMPT_TEMPLATES)[-4:] == ["json", "list", "questions", "phones"]
    templates = PROMPT_TEMPLATES.values()
    assert len({(t.fact, t.separator) for t in templates}) == len(PROMPT_TEMPLATES) >= 16


def test_an_example_is_as_long_as_fits_and_each_asks_for_another_fact(encoder):
    for length, guess in ((40, 30), (100, 9), (250, 1)):
        example, n_facts = longest_example(encoder, "numbers", 5, length, guess)
        assert len(example.tokens) <= length
        more = encoder.pair(*write_prompt(PROMPT_TEMPLATES["numbers"], 5, n_facts + 1))
        assert sum(map(len, more)) > length
    with pytest.raises(CalibrateError, match="template json .* 10"):
        longest_example(encoder, "json", 5, 10, 1)
    examples = make_retrieval_examples(encoder, ["numbers"], [64, 96], 8, 0).examples
    assert len({tuple(x.tokens[x.start - 4 : x.start]) for x in examples}) == 16
