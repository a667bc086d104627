"""Prompts that share text with others outside of their group."""

import warnings

import numpy as np
import pytest

from calibrate.datasets.examples import Cell, Example, ExampleSet
from calibrate.model.shared_text import sharing_prompts, warn_of_shared_text

N_DOCUMENTS = 30
N_QUESTIONS = 4
FRAME = np.arange(1000, 1200)  # what a template repeats


def questions(group=False, length=120, templates=("reading",)):
    """Several questions on each document, in turn of all templates; each within a frame."""
    rng = np.random.default_rng(0)
    examples = []
    for document in range(N_DOCUMENTS):
        text = rng.integers(0, 900, length)
        for number in range(N_QUESTIONS):
            question = rng.integers(0, 900, 20)
            tokens = np.concatenate([FRAME, text, question, [1, 2]]).astype(np.int32)
            cell = (document + number) % len(templates)
            known = document if group else -1
            examples.append(Example(tokens, len(tokens) - 2, cell, known))
    return ExampleSet(tuple(Cell(name, 512, False) for name in templates), tuple(examples))


@pytest.mark.parametrize("templates", [("reading",), ("reading", "asking", "telling")])
def test_questions_on_one_document_need_a_group(templates):
    examples = questions(templates=templates)
    assert sharing_prompts(examples).all()
    with pytest.warns(UserWarning, match=r"^120 .*\b120 .*\b13 tokens"):
        warn_of_shared_text(examples)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_shared_text(questions(group=True, templates=templates))


def test_the_frame_of_a_template_is_not_shared_text():
    """Nor is what is shorter than the rest of a prompt."""
    assert not sharing_prompts(questions(length=0)).any()
    assert not sharing_prompts(questions(length=10)).any()
    assert sharing_prompts(questions(length=60)).all()


def test_a_sample_of_the_sequences_tells_the_same():
    assert sharing_prompts(questions(), max_sequences=4000).mean() > 0.95
    assert sharing_prompts(questions(group=True), max_sequences=4000).sum() == 0


def test_short_prompts_and_text_are_not_looked_at():
    examples = questions()
    short = [x._replace(tokens=x.tokens[-8:], start=6) for x in examples.examples]
    assert not sharing_prompts(ExampleSet(examples.cells, tuple(short))).any()
    text = (Cell("domain", 512, True),)
    assert not sharing_prompts(ExampleSet(text, examples.examples)).any()
