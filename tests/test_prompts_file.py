"""Files of prompts: their lines, all errors at once, and the groups of lines."""

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
from calibrate.transformers.folders import ModelFolder

TOWNS = ("Oslo", "Paris", "Rome", "Turin")
PEOPLE = [f"{a} {b}" for a in ("Ada", "Emma", "Karl", "Hugo") for b in ("Young", "Black", "Moore")]


def question(i, answer=" Oslo", **more):
    return {"prompt": f"Where does {PEOPLE[i]} live?", "answer": answer, **more}


def examples_of(model, lines, name="p.jsonl"):
    return plan(model, ExampleSpec(write_lines(name, lines))).examples


def test_a_file_may_have_a_byte_order_mark_and_windows_line_ends():
    path = write_lines("p.jsonl", [question(0, group=3), question(1), ""])
    lines, _ = read_prompts(path)
    assert lines[0] == ("line 1", "prompts", question(0)["prompt"], [" Oslo"], 3)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert read_prompts(path)[0] == lines


def test_all_bad_lines_are_named_before_the_model_is_opened():
    bad = [{"prompt": "a"}, "{", {"id": 3, **question(0)}, {"prompt": "", "answer": "b"}, "[]"]
    more = [{"id": i, **question(0)} for i in range(8)]
    write_lines("p.jsonl", [question(0), *bad, question(1), *more])
    Path("empty").mkdir()
    line = refusal("model", "collect", "--model", "empty", "--prompts", "p.jsonl")
    assert "p.jsonl has 13 bad lines" in line
    assert line.count("line ") >= 10
    assert line.count("id is not a known field") == 6
    assert line.count("write prompt (or messages") == 1  # a remedy once, behind its lines
    assert "line 1 " not in line


USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("{", "one JSON object a line"),
        ({"prompt": "a"}, "the line is not a prompt with its answer"),
        ({"prompt": "a", "answer": ""}, 'answer is ""'),
        ({"prompt": "a", "answer_ids": [1]}, "not a prompt with its answer"),
        ({"prompt": "a", "answer": "b", "more": 1}, "more is not a known field"),
        ({"prompt": "a", "answer": "b", "template": "a\nb"}, "template is"),
        ('{"prompt": "a", "answer": "\\ud800"}', "lone surrogates"),
        ({"prompt": "a " * 2**19, "answer": "b"}, "1,048,605 bytes"),
        ({"prompt_ids": [1], "answer_ids": []}, "a token each"),
        ({"prompt_ids": [1], "answer_ids": [-1]}, "answer_ids[0] is -1"),
        ({"prompt": "a", "answers": []}, "answers is empty"),
        ({"prompt": "a", "answers": ["b", "b"]}, "answers is empty, or has one twice"),
        ({"prompt": "a", "answers": "b"}, 'answers is "b"'),
        ({"prompt": "a", "answer": "b", "answers": ["b"]}, "not a prompt with its answer"),
        ({"prompt_ids": [1], "answers": ["b"]}, "not a prompt with its answer"),
        ({"prompt": "a", "answer": "b", "group": True}, "group is true"),
        ({"prompt": "a", "answer": "b", "group": ""}, "group is"),
        ({"messages": [USER]}, "messages without an answer"),
        ({"messages": [ASSISTANT]}, "messages without an answer"),
        ({"messages": [], "answer": "b"}, "messages[0] is absent"),
        ({"messages": [USER, ASSISTANT], "answer": "b"}, "messages[1] is the assistant's"),
        ({"messages": [{"role": "user", "content": ["a"]}], "answer": "b"}, "content is"),
        ({"messages": [{**USER, "name": "x"}], "answer": "b"}, "messages[0].name is not a known"),
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
        ({"messages": [USER], "answer": "b"}, "tokenizer.apply_chat_template"),
        ({"prompt": "Where does Ada", "answer": "Young"}, "tokenizer"),  # half a word each
    ],
)
def test_lines_that_do_not_suit_the_model_are_refused(model, line, value):
    with pytest.raises(CalibrateError) as refused:
        examples_of(model, [line])
    assert "line 1" in str(refused.value)
    assert value in str(refused.value)


def test_all_copies_are_named_at_once(model):
    """A copy would be one observation in two splits."""
    lines = [question(0), question(0), question(1), {**question(1), "template": "b"}, question(0)]
    with pytest.raises(CalibrateError) as refused:
        examples_of(model, lines)
    repeats = [f"line {n} repeats a prompt and its answer" for n in (2, 4, 5)]
    assert f"3 bad lines: {'; '.join(repeats)};" in str(refused.value)


def test_messages_and_their_rendered_text_are_one_prompt(model, tmp_path):
    folder = Path("chat")
    folder.mkdir()
    for path in Path(model).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tokenizer = ModelFolder(folder).tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} : {{ m.content }} . {% endfor %}"
        "{% if add_generation_prompt %}assistant :{% endif %}"
    )
    tokenizer.add_tokens(["user", "assistant"])
    tokenizer.save_pretrained(folder)
    question = [{"role": "user", "content": "Where does Ada Young live ?"}]
    lines = [
        {"messages": question, "answer": " Oslo"},
        {"messages": [*question, {"role": "assistant", "content": "Rome"}]},
        {"prompt": "user : Where does Ada Young live ? . assistant :", "answer": " Paris"},
    ]
    first, second, third = examples_of(folder, lines).examples
    n = first.start
    assert first.tokens[:n].tolist() == second.tokens[:n].tolist() == third.tokens[:n].tolist()
    assert second.start == third.start == n
    assert tokenizer.decode(second.tokens[n:]) == "Rome"
    assert first.group == second.group == third.group >= 0
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant :{%", "assistant : Ada{%")
    tokenizer.save_pretrained(folder)
    with pytest.raises(CalibrateError, match=r"line 1: .*assistant : Ada Oslo'"):
        examples_of(folder, lines[:1])


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
    lines = [PromptLine(f"line {i}", "a", "a code 12", [x]) for i, x in enumerate(answers)]
    examples = encode_lines(lines, encoder("bytes"), "p.jsonl").examples
    assert len({x.start for x in examples}) == 2
    assert {x.group for x in examples} == {0}


def test_groups_are_joined_by_prompts_and_lengths_do_not_divide_them(model):
    more = " Oslo" * 9  # another octave
    joined = [question(0, group="x"), question(1, group="x"), question(1, " Rome", group=7)]
    alone = [question(3), question(4), question(4, more), question(5, group="7")]
    lines = [*joined, question(2, group=7), *alone]
    examples = examples_of(model, lines)
    by_line = {x.tokens.tobytes(): x.group for x in examples.examples}
    by_file = [examples_of(model, [line], "one.jsonl").examples for line in lines]
    single = [examples[0].tokens.tobytes() for examples in by_file]
    group = [by_line[x] for x in single]
    assert len(set(group[:4])) == 1
    assert group[5] == group[6] >= 0
    assert group[4] == group[7] == -1
    assert len(examples.cells) == 2
    splits = assign_splits(examples)
    tokens = [x.tokens.tobytes() for x in examples.examples]
    assert splits[tokens.index(single[5])] == splits[tokens.index(single[6])]


def test_groups_of_several_templates_rule_whole_templates_out(model):
    names = "abcdef"
    lines = [question(i, f" {town}", template=name) for i in range(12)
             for name, town in zip(names, (*TOWNS, "Lima", "Riga"), strict=True)]  # fmt: skip
    with pytest.warns(UserWarning, match="template"):
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


def test_a_cell_is_of_the_longest_answer_up_to_a_power_of_two():
    lines = [PromptLine(f"line {n}", "a", [1] * (n - 2), [[2, n]]) for n in (4, 5, 8, 9)]
    examples = encode_lines(lines, Encoder(None, None, 99), "p.jsonl")
    assert [examples.cells[x.cell].length for x in examples.examples] == [4, 8, 8, 16]
    several = [PromptLine("line 1", "a", "a", [" b", " c" * 20])]
    examples = encode_lines(several, encoder("bytes"), "p.jsonl")
    (cell,), (short, long) = examples.cells, examples.examples
    assert len(short.tokens) <= cell.length / 2
    assert cell.length >= len(long.tokens)


def test_groups_and_questions_are_kept_and_left_out_where_there_are_none(model):
    lines = [
        question(0),
        question(0, " Rome"),
        {"prompt": "Ada", "answers": [" Oslo", " Rome", " Lima"]},
    ]
    collection = collected(model, prompts=write_lines("p.jsonl", lines), templates=())
    path = collection.folder / "examples.npz"
    again = open_collection(collection.folder, ExampleCollection).set
    assert [(x.group, x.question) for x in again.examples] == [(0, -1)] * 2 + [(1, 2)] * 3
    assert {len({x.cell for x in again.examples if x.group == i}) for i in (0, 1)} == {1}
    arrays = parse_arrays(path.read_bytes(), path)
    without = {k: x for k, x in arrays.items() if k not in ("group", "question")}
    read = parse_examples(pack_arrays(without), path, again.cells)
    assert {(x.group, x.question) for x in read.examples} == {(-1, -1)}
    assert read.pack() == pack_arrays(without)
    plain = examples_of(model, [question(0), question(1)])
    assert {*parse_arrays(plain.pack(), path)} == {"tokens", "end", "start", "cell"}
    for name, value in (("question", -2), ("group", 5)):
        changed = {k: x.copy() for k, x in arrays.items()}
        changed[name][-1] = value
        with pytest.raises(CalibrateError, match=f"{name}"):
            parse_examples(pack_arrays(changed), path, again.cells)


def test_without_groups_splits_go_by_the_place_in_the_cell():
    tokens = np.zeros(4, np.int32)
    examples = ExampleSet(
        tuple(Cell(name, 4, False) for name in "ab"),
        tuple(Example(tokens, 2, cell) for cell in (0, 1) for _ in range(6)),
    )
    expected = [CALIBRATION, TEST, CALIBRATION, VALIDATION, CALIBRATION, TEST] * 2
    assert assign_splits(examples).tolist() == expected
