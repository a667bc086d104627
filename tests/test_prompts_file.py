"""Files of prompts: what lines may say, all that is wrong with them, and which belong together."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import refusal
from test_encoding import encoder
from test_model_examples import collected, write_lines

from calibrate.datasets.collection import open_collection
from calibrate.datasets.examples import Cell, Example, ExampleSet, parse_examples
from calibrate.errors import CalibrateError
from calibrate.model.collect_examples import plan
from calibrate.model.splits import CALIBRATION, TEST, VALIDATION, splits_of, whole_templates
from calibrate.prompts.encoding import Encoder
from calibrate.prompts.make_examples import ExampleSpec
from calibrate.prompts.prompts_file import PromptLine, encode_lines, read_prompts
from calibrate.storage.npz import pack_arrays, parse_arrays
from calibrate.transformers.folders import ModelFolder

TOWNS = ("Oslo", "Paris", "Rome", "Turin")
PEOPLE = [f"{a} {b}" for a in ("Ada", "Emma", "Karl", "Hugo") for b in ("Young", "Black", "Moore")]


def fruit(i, answer=" Oslo", **more):
    return {"prompt": f"Where does {PEOPLE[i]} live?", "answer": answer, **more}


def made(model, lines, name="p.jsonl"):
    return plan(model, ExampleSpec(write_lines(name, lines))).examples


def test_a_file_with_a_byte_order_mark_is_read(model):
    path = write_lines("p.jsonl", [fruit(0), fruit(1)])
    plain, _ = read_prompts(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert read_prompts(path)[0] == plain


def test_all_bad_lines_are_told_before_a_model_is_looked_at(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # which a model needs
    bad = [{"prompt": "a"}, "{", {"id": 3, **fruit(0)}, {"prompt": "", "answer": "b"}, "[]"]
    write_lines("p.jsonl", [fruit(0), *bad, fruit(1), *[{"id": i, **fruit(0)} for i in range(8)]])
    Path("empty").mkdir()
    line = refusal("model", "collect", "--model", "empty", "--prompts", "p.jsonl")
    assert "p.jsonl has 13 bad lines, among them: line 2: " in line
    assert line.count("line ") >= 10
    assert line.count("id is not a known field") == 6
    assert line.count("write prompt (or messages") == 1  # a remedy once, behind its lines
    syntax = line.index("write one JSON object a line")
    assert line.index("line 10: id") < line.index("write prompt (or") < line.index("line 3: ")
    assert line.index("line 3: ") < syntax < line.index("line 5: prompt is") < line.index("line 6")
    assert "line 1 " not in line


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: the line is not JSON (Expecting property name enclosed in double quotes "
         "(char 1)); write one JSON object a line"),
        ({"prompt": "a", "answers": []}, "line 1: answers is empty, or has one twice; give each"),
        ({"prompt": "a", "answers": ["b", "b"]}, "answers is empty, or has one twice"),
        ({"prompt": "a", "answers": "b"}, 'line 1: answers is "b"; give a list'),
        ({"prompt": "a", "answer": "b", "answers": ["b"]}, "not a prompt with its answer"),
        ({"prompt_ids": [1], "answers": ["b"]}, "not a prompt with its answer"),
        (fruit(0, group=True), "line 1: group is true; give an integer"),
        (fruit(0, group=""), "line 1: group is"),
        ({"messages": [{"role": "user", "content": "a"}]}, "is messages without an answer"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "is messages without an answer"),
        ({"messages": [], "answer": "b"}, "line 1: messages[0] is absent; end with the user's"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
          "answer": "b"}, "messages[1] is the assistant's, beside an answer; end with the user's"),
        ({"messages": [{"role": "user", "content": ["a"]}], "answer": "b"}, "content is"),
        ({"messages": [{"role": "user", "content": "a", "name": "x"}], "answer": "b"},
         "messages[0].name is not a known field; remove it: the chat template is given role and"),
        ({"messages": [{"role": "user", "content": "a"}], "answer": "b"},
         "line 1: the model's tokenizer has no chat template for messages; give as prompt what "
         "tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)"),
        ({"prompt": "Where does Ada", "answer": "Young"}, "line 1: the tokenizer does not know"),
    ],
)  # fmt: skip
def test_lines_that_are_no_examples(model, line, message):
    with pytest.raises(CalibrateError) as failure:
        made(model, [line])
    assert message in str(failure.value)


def test_all_copies_are_told_at_once(model):
    lines = [fruit(0), fruit(0), fruit(1), {**fruit(1), "template": "b"}, fruit(0)]
    with pytest.raises(CalibrateError) as failure:
        made(model, lines)
    repeats = [f"line {n} repeats a prompt and its answer" for n in (2, 4, 5)]
    assert str(failure.value) == f"p.jsonl has 3 bad lines: {'; '.join(repeats)}; give each once"


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
    first, second, third = made(folder, lines).examples
    n = first.start
    assert first.tokens[:n].tolist() == second.tokens[:n].tolist() == third.tokens[:n].tolist()
    assert second.start == third.start == n
    assert tokenizer.decode(second.tokens[n:]) == "Rome"
    assert first.group == second.group == third.group >= 0
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant :{%", "assistant : Ada{%")
    tokenizer.save_pretrained(folder)
    with pytest.raises(CalibrateError, match=r"line 1: .*assistant : Ada Oslo'"):
        made(folder, lines[:1])


@pytest.mark.parametrize("in_lines", [False, True])
def test_lines_of_a_prompt_are_in_one_split(model, in_lines):
    """Whether as lines of one prompt, with a space at its end or not, or by their group."""
    lines = [
        {"prompt": f"Where does {name} live?" + " " * (i % 2), "answer": f" {town}"}
        for name in PEOPLE for i, town in enumerate(TOWNS)
    ]  # fmt: skip
    if in_lines:
        lines = [{**x, "prompt": f"Anna {i} : {x['prompt']}", "group": x["prompt"].strip()}
                 for i, x in enumerate(lines)]  # fmt: skip
    examples = made(model, lines)
    group = np.array([x.group for x in examples.examples])
    splits = splits_of(examples)
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
    joined = [fruit(0, group="x"), fruit(1, group="x"), fruit(1, " Rome", group=7)]
    alone = [fruit(3), fruit(4), fruit(4, more), fruit(5, group="7")]
    lines = [*joined, fruit(2, group=7), *alone]
    examples = made(model, lines)
    by_line = {x.tokens.tobytes(): x.group for x in examples.examples}
    single = [made(model, [line], "one.jsonl").examples[0].tokens.tobytes() for line in lines]
    group = [by_line[x] for x in single]
    assert len(set(group[:4])) == 1
    assert group[5] == group[6] >= 0
    assert group[4] == group[7] == -1
    assert len(examples.cells) == 2
    splits = splits_of(examples)
    tokens = [x.tokens.tobytes() for x in examples.examples]
    assert splits[tokens.index(single[5])] == splits[tokens.index(single[6])]


def test_groups_of_several_templates_rule_whole_templates_out(model):
    names = "abcdef"
    lines = [fruit(i, f" {town}", template=name) for i in range(12)
             for name, town in zip(names, (*TOWNS, "Lima", "Riga"), strict=True)]  # fmt: skip
    with pytest.warns(UserWarning, match="template"):
        examples = made(model, lines)
    assert whole_templates(examples) == [None] * 6
    splits = splits_of(examples).reshape(6, 12)  # by template
    assert (splits == splits[0]).all()
    own = [
        {**x, "prompt": f"{names.index(x['template'])} : {x['prompt']}"} for x in lines
    ]  # other prompts in each template
    assert whole_templates(made(model, own)) == [CALIBRATION] * 4 + [VALIDATION, TEST]


def test_one_group_of_two_templates_rules_whole_templates_out_too():
    tokens, cells = np.zeros(4, np.int32), tuple(Cell(name, 4, False) for name in "abcdef")
    for group, whole in ((0, False), (1, False), (-1, True)):
        examples = tuple(Example(tokens, 2, i, group if i < 2 else 5 + i) for i in range(6))
        assert (None not in whole_templates(ExampleSet(cells, examples))) is whole


def test_a_cell_is_of_the_longest_answer_up_to_a_power_of_two():
    lines = [PromptLine(f"line {n}", "a", [1] * (n - 2), [[2, n]]) for n in (4, 5, 8, 9)]
    examples = encode_lines(lines, Encoder(None, None, 99), "p.jsonl")
    assert [examples.cells[x.cell].length for x in examples.examples] == [4, 8, 8, 16]
    several = [PromptLine("line 1", "a", "a", [" b", " c" * 20])]
    examples = encode_lines(several, encoder("bytes"), "p.jsonl")
    (cell,), (short, long) = examples.cells, examples.examples
    assert len(short.tokens) <= cell.length / 2
    assert cell.length >= len(long.tokens)


def test_groups_and_questions_are_kept_and_older_collections_are_read(model):
    lines = [fruit(0), fruit(0, " Rome"), {"prompt": "Ada", "answers": [" Oslo", " Rome", " Lima"]}]
    collection = collected(model, prompts=write_lines("p.jsonl", lines), templates=())
    path = collection.folder / "examples.npz"
    again = open_collection(collection.folder).set
    assert [(x.group, x.question) for x in again.examples] == [(0, -1)] * 2 + [(1, 2)] * 3
    assert {len({x.cell for x in again.examples if x.group == i}) for i in (0, 1)} == {1}
    arrays = parse_arrays(path.read_bytes(), path)
    older = {k: x for k, x in arrays.items() if k not in ("group", "question")}
    read = parse_examples(pack_arrays(older), path, again.cells)
    assert {(x.group, x.question) for x in read.examples} == {(-1, -1)}
    assert read.pack() == pack_arrays(older)
    plain = made(model, [fruit(0), fruit(1)])
    assert {*parse_arrays(plain.pack(), path)} == {"tokens", "end", "start", "cell"}
    for name, value in (("question", -2), ("group", 5)):
        changed = {k: x.copy() for k, x in arrays.items()}
        changed[name][-1] = value
        with pytest.raises(CalibrateError, match=f"{name}"):
            parse_examples(pack_arrays(changed), path, again.cells)


def test_without_groups_examples_are_dealt_by_their_place():
    tokens = np.zeros(4, np.int32)
    examples = ExampleSet(
        tuple(Cell(name, 4, False) for name in "ab"),
        tuple(Example(tokens, 2, cell) for cell in (0, 1) for _ in range(6)),
    )
    expected = [CALIBRATION, TEST, CALIBRATION, VALIDATION, CALIBRATION, TEST] * 2
    assert splits_of(examples).tolist() == expected


def test_lines_as_json_say_what_they_are(model):
    path = write_lines("p.jsonl", [json.dumps(fruit(0, group=3)), ""])
    (line,), _ = read_prompts(path)
    assert (line.where, line.template, line.answers, line.group) == (
        "line 1",
        "prompts",
        [" Oslo"],
        3,
    )
