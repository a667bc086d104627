"""Files of prompts: their lines and the groups of lines."""

from pathlib import Path

import numpy as np
import pytest
from commands import refusal
from test_encoding import encoder
from test_model_examples import collected, write_lines

from calibrate.errors import CalibrateError
from calibrate.model.collect_examples import plan
from calibrate.model.splits import (
    CALIBRATION,
    TEST,
    VALIDATION,
    assign_splits,
    whole_template_splits,
)
from calibrate.prompts.encoding import Encoder
from calibrate.prompts.examples import Cell, Example, ExampleCollection, ExampleSet, parse_examples
from calibrate.prompts.make_examples import ExampleSpec
from calibrate.prompts.prompts_file import PromptLine, encode_lines, read_prompts
from calibrate.rows.collection import open_collection
from calibrate.storage.npz import pack_arrays, parse_arrays

TOWNS = ("Oslo", "Paris", "Rome", "Turin")
PEOPLE = [f"{a} {b}" for a in ("Ada", "Emma", "Karl", "Hugo") for b in ("Young", "Black", "Moore")]


def question(i, answer=" Oslo", **more):
    return {"prompt": f"Where does {PEOPLE[i]} live?", "answer": answer, **more}


def examples_of(model, lines, name="p.jsonl"):
    return plan(model, ExampleSpec(write_lines(name, lines))).examples


def test_a_file_may_have_a_byte_order_mark_and_windows_line_ends():
    path = write_lines("p.jsonl", [question(0, group=3), question(1), ""])
    lines, _ = read_prompts(path)
    assert lines[0] == ("p.jsonl, line 1", "prompts", question(0)["prompt"], " Oslo", 3)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert read_prompts(path)[0] == lines


def test_a_bad_line_is_named_before_the_model_is_opened():
    write_lines("p.jsonl", [question(0), {"id": 3, **question(0)}, question(1)])
    Path("empty").mkdir()
    line = refusal("model", "collect", "--model", "empty", "--prompts", "p.jsonl")
    assert "p.jsonl, line 2: the line: Object contains unknown field `id`" in line


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("{", "one JSON object a line"),
        ({"prompt": "a"}, "the line is not a prompt with its answer"),
        ({"prompt": "a", "answer": ""}, "$.answer"),
        ({"prompt": "a", "answer_ids": [1]}, "not a prompt with its answer"),
        ({"prompt": "a", "answer": "b", "more": 1}, "unknown field `more`"),
        ({"prompt": "a", "answer": "b", "template": "a\nb"}, "$.template"),
        ('{"prompt": "a", "answer": "\\ud800"}', "$.answer"),
        ({"prompt_ids": [1], "answer_ids": []}, "$.answer_ids"),
        ({"prompt_ids": [1], "answer_ids": [-1]}, "$.answer_ids[0]"),
        ({"prompt": "a", "answer": "b", "group": True}, "$.group"),
        ({"prompt": "a", "answer": "b", "group": ""}, "$.group"),
    ],
)
def test_lines_that_are_no_prompts_are_refused(line, value):
    with pytest.raises(CalibrateError) as refused:
        read_prompts(write_lines("p.jsonl", [line]))
    assert str(refused.value).startswith("p.jsonl, line 1")
    assert value in str(refused.value)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ({"prompt_ids": [1], "answer_ids": [512]}, "token 512"),
        ({"prompt_ids": [1] * 256, "answer_ids": [1]}, "256 + 1 tokens"),
    ],
)
def test_lines_that_do_not_suit_the_model_are_refused(model, line, value):
    with pytest.raises(CalibrateError) as refused:
        examples_of(model, [line])
    assert "line 1" in str(refused.value)
    assert value in str(refused.value)


def test_a_copy_is_refused(model):
    """A copy would be one observation in two splits."""
    with pytest.raises(CalibrateError, match="line 3 repeats a prompt and its answer"):
        examples_of(model, [question(0), question(1), {**question(0), "template": "b"}])


@pytest.mark.parametrize("in_lines", [False, True])
def test_lines_of_a_prompt_are_in_one_split(model, in_lines):
    """As lines of one prompt, with a space at its end or not, or by their group."""
    lines = [
        {"prompt": f"Where does {name} live?" + " " * (i % 2), "answer": f" {town}"}
        for name in PEOPLE for i, town in enumerate(TOWNS)
    ]  # fmt: skip
    if in_lines:
        lines = [{**x, "prompt": f"Anna {i} : {x['prompt']}", "group": x["prompt"].strip()}
                 for i, x in enumerate(lines)]  # fmt: skip
    examples = examples_of(model, lines)
    group = np.array([x.group for x in examples.examples])
    splits = assign_splits(examples)
    assert len(set(group)) == len(PEOPLE)
    assert [len({*splits[group == i]}) for i in set(group)] == [1] * len(PEOPLE)
    by_group = [splits[group == i][0] for i in dict.fromkeys(group.tolist())]
    assert by_group == [CALIBRATION, TEST, CALIBRATION, VALIDATION] * 3


def test_a_prompt_is_one_where_its_answers_share_tokens_with_it():
    answers = ("34", " 34", "\n")
    lines = [PromptLine(f"line {i}", "a", "a code 12", x) for i, x in enumerate(answers)]
    examples = encode_lines(lines, encoder("bytes")).examples
    assert len({x.start for x in examples}) == 2
    assert {x.group for x in examples} == {0}


def test_lengths_do_not_divide_groups(model):
    longer = " Oslo" * 9  # another octave
    lines = [question(0, group=7), question(0, longer, group=7), question(1), question(1, longer),
             question(2), question(3, group="7")]  # fmt: skip
    examples = examples_of(model, lines)
    assert len(examples.cells) == 2
    assert [x.group for x in examples.examples] == [0, 1, -1, -1, 0, 1]  # by cell
    splits = assign_splits(examples)
    assert (splits[:2] == splits[4:]).all()


def test_groups_of_several_templates_rule_whole_templates_out(model):
    names = "abcdef"
    lines = [question(i, f" {town}", template=name) for i in range(12)
             for name, town in zip(names, (*TOWNS, "Lima", "Riga"), strict=True)]  # fmt: skip
    examples = examples_of(model, lines)
    assert whole_template_splits(examples) == [None] * 6
    splits = assign_splits(examples).reshape(6, 12)  # by template
    assert (splits == splits[0]).all()
    own = [
        {**x, "prompt": f"{names.index(x['template'])} : {x['prompt']}"} for x in lines
    ]  # other prompts in each template
    assert whole_template_splits(examples_of(model, own)) == [CALIBRATION] * 4 + [VALIDATION, TEST]


def test_one_group_of_two_templates_rules_whole_templates_out_too():
    tokens, cells = np.zeros(4, np.int32), tuple(Cell(name, 4, False) for name in "abcdef")
    for group, whole in ((0, False), (1, False), (-1, True)):
        examples = tuple(Example(tokens, 2, i, group if i < 2 else 5 + i) for i in range(6))
        assert (None not in whole_template_splits(ExampleSet(cells, examples))) is whole


def test_the_length_of_a_cell_is_a_power_of_two():
    lines = [PromptLine(f"line {n}", "a", [1] * (n - 2), [2, n]) for n in (4, 5, 8, 9)]
    examples = encode_lines(lines, Encoder(None, None, 99))
    assert [examples.cells[x.cell].length for x in examples.examples] == [4, 8, 8, 16]


def test_groups_are_kept_and_left_out_where_there_are_none(model):
    lines = [question(0), question(0, " Rome"), question(1)]
    collection = collected(model, prompts=write_lines("p.jsonl", lines), templates=())
    path = collection.folder / "examples.npz"
    again = open_collection(collection.folder, ExampleCollection).set
    assert [x.group for x in again.examples] == [0, 0, -1]
    arrays = parse_arrays(path.read_bytes(), path)
    without = {k: x for k, x in arrays.items() if k != "group"}
    read = parse_examples(pack_arrays(without), path, again.cells)
    assert {x.group for x in read.examples} == {-1}
    assert read.pack() == pack_arrays(without)
    plain = examples_of(model, [question(0), question(1)])
    assert {*parse_arrays(plain.pack(), path)} == {"tokens", "end", "start", "cell"}


def test_without_groups_splits_go_by_the_place_in_the_cell():
    tokens = np.zeros(4, np.int32)
    examples = ExampleSet(
        tuple(Cell(name, 4, False) for name in "ab"),
        tuple(Example(tokens, 2, cell) for cell in (0, 1) for _ in range(6)),
    )
    expected = [CALIBRATION, TEST, CALIBRATION, VALIDATION, CALIBRATION, TEST] * 2
    assert assign_splits(examples).tolist() == expected
