"""Windows of plain text: their tokens, splits and groups."""

from pathlib import Path

import numpy as np
import pytest
from test_encoding import encoder

from calibrate.errors import CalibrateError
from calibrate.model.objective import compare_rules
from calibrate.model.splits import CALIBRATION, TEST, VALIDATION, assign_segments, assign_splits
from calibrate.prompts.encoding import Encoder
from calibrate.prompts.examples import Cell, Example, ExampleSet, Scores
from calibrate.prompts.retention_text import (
    BUILT_IN_FOLDER,
    TextFile,
    cut_built_in_text,
    read_texts,
)


class Words:
    """A tokenizer that numbers the words of a text, and begins it with `begin`."""

    is_fast, eos_token_id = True, None

    def __init__(self, begin=()):
        self.begin = begin

    def __call__(self, text, add_special_tokens=True, verbose=True):
        ids = [int(word) for word in text.split()]
        return {"input_ids": [*self.begin, *ids] if add_special_tokens else ids}


def cut(words, lengths, most, tokenizer=None):
    """The windows of a text of so many words, numbered from 1."""
    text = TextFile(Path("text.txt"), " ".join(map(str, range(1, words + 1))), "")
    encoder = Encoder(tokenizer or Words(), None, words + 1)
    return text.cut_windows(encoder, lengths, most)


def windows(words, lengths, most, begin=()):
    """(length, split, tokens) of each window of such a text."""
    return described(cut(words, lengths, most, Words(begin)), begin)


def described(examples, begin=()):
    return [
        (examples.cells[x.cell].length, split, set(x.tokens.tolist()) - set(begin))
        for x, split in zip(examples.examples, assign_splits(examples), strict=True)
    ]


@pytest.mark.parametrize("words", [70, 999, 2_000])
@pytest.mark.parametrize("begin", [(), (0,)])
@pytest.mark.parametrize("most", [3, 8, 30])
def test_no_token_is_in_two_splits_at_different_lengths(words, begin, most):
    cuts = windows(words, [8, 20, 64], most, begin)
    in_validation, in_test = (
        set().union(*(tokens for _, split, tokens in cuts if split == name))
        for name in (VALIDATION, TEST)
    )
    assert not in_validation & in_test
    for length in (8, 20, 64):
        splits = {split for n, split, _ in cuts if n == length}
        assert splits == ({VALIDATION} if words < 128 else {VALIDATION, TEST})


@pytest.mark.parametrize("n_domains", [5, 7])
def test_from_six_templates_on_some_are_held_out_as_a_whole(n_domains):
    """The last quarter is for test, the one before it for validation, and of the others a quarter.

    Half of many text domains are for test; of few domains, half of the windows of each.
    """
    tokens, names = np.zeros(4, np.int32), "abcdefgh"
    cells = [Cell(name, n, False) for name in names for n in (4, 8)]
    cells += [Cell(name, 4, True) for name in names[:n_domains]]
    examples = ExampleSet(
        tuple(cells), tuple(Example(tokens, 1, i) for i in range(len(cells)) for _ in range(8))
    )
    splits = assign_splits(examples).reshape(-1, 8)
    assert (splits[:8] == [CALIBRATION, TEST, CALIBRATION, CALIBRATION] * 2).all()
    assert (splits[8:12] == VALIDATION).all()
    assert (splits[12:16] == TEST).all()
    if n_domains == 5:
        assert (splits[16:] == [VALIDATION, TEST] * 4).all()
    else:
        assert (splits[16:] == np.repeat([VALIDATION, TEST], [4, 3])[:, None]).all()
    n = len(examples.examples)
    plain = Scores.baseline(np.full(n, -1.0), np.zeros(n, np.int32))
    for own in (True, False):
        evidence = compare_rules(examples, range(n), {"baseline": plain}, own=own)
        unseen = {x.template for x in evidence.strata if x.unseen and not x.protected}
        assert unseen == (set("efgh") if own else set())
        assert {
            evidence.strata[i].template for i in evidence.answers.held_out_templates.stratum
        } == (unseen or set(names))


def test_each_domain_has_its_own_segments(here):
    for name, first in (("a", 1), ("b", 501)):
        Path(f"{name}.txt").write_text(" ".join(map(str, range(first, first + 500))))
    texts = read_texts(here)
    assert [text.domain for text in texts] == ["a", "b"]
    encoder = Encoder(Words(()), None, 1001)
    windows = ExampleSet.joined([text.cut_windows(encoder, [8, 64], 7) for text in texts])
    segment = [
        (x.tokens[0] > 500, (x.tokens[0] - 1) % 500 // 64) for x in windows.examples
    ]  # seven segments of 64 in each
    segments = assign_segments(windows)
    pairs = set(zip(segments, segment, strict=True))
    assert len(pairs) == len(set(segments)) == len(set(segment)) == 14


class Letters:
    """A tokenizer of any text, four letters a token."""

    is_fast, eos_token_id = True, None

    def __call__(self, text, add_special_tokens=True, verbose=True):
        return {"input_ids": list(range(len(text) // 4))}


def test_the_built_in_text_has_nine_domains_in_windows_that_fit():
    windows = cut_built_in_text(Encoder(Letters(), 700, 1 << 20), (256, 1024, 4096), 8)
    domains = {cell.template for cell in windows.cells}
    assert len(domains) == 9
    assert domains == {path.stem for path in BUILT_IN_FOLDER.glob("*.txt")}
    assert {cell.length for cell in windows.cells} == {256, 700}
    assert all(cell.text for cell in windows.cells)
    assert all(len(x.tokens) == windows.cells[x.cell].length for x in windows.examples)
    texts = [text.text for text in read_texts(BUILT_IN_FOLDER)]
    assert all(text.isascii() and len(text) > 4 * 2900 for text in texts)
    assert sum(map(len, texts)) < 4 * 30_000


def test_windows_are_spread_over_the_text_and_short_ones_are_as_many():
    cuts = windows(1_000, [8, 64], 30)
    for length, count in ((8, 30), (64, 1_000 // 64)):
        tokens = [tokens for n, _, tokens in cuts if n == length]
        assert len(tokens) == count
        assert {len(x) for x in tokens} == {length}
        assert len(set().union(*tokens)) == count * length
        assert np.mean([min(x) for x in tokens]) == pytest.approx(450, abs=50)
        of_test = [min(x) for n, split, x in cuts if n == length and split == TEST]
        assert max(of_test) - min(of_test) > 500
    assert min(cuts[0][2]) == 1


@pytest.mark.parametrize("kind", ["llama-2", "metaspace", "bytes", "bytes-around", "words"])
def test_windows_are_pieces_of_the_text_behind_the_prefix(kind):
    """They have no token that ends texts."""
    words, text = encoder(kind), "<s>" * (kind == "bytes-around") + "a code 12 34" + " code 12" * 99
    begin = words.prefix
    windows = TextFile(Path("text.txt"), text, "").cut_windows(words, [6, 12], 9)
    for x in windows.examples:
        assert x.tokens[: len(begin)].tolist() == begin
        rest = x.tokens[len(begin) :].tolist()
        assert words.tokenizer.decode(rest).removeprefix(" ") in text
        assert not {0, 1, 2} & {*rest}
        length = windows.cells[x.cell].length
        assert (len(x.tokens), x.start) == (length, length // 2)


def test_a_text_that_is_too_short_is_refused():
    with pytest.raises(CalibrateError, match=r"text\.txt .*\b50 .*\b64\b"):
        windows(50, [8, 64], 3)
    with pytest.raises(CalibrateError, match=r"\b50\b.*\b1\b"):
        windows(50, [1], 3, begin=(0,))


@pytest.mark.parametrize(("words", "most"), [(1_000, 30), (2_000, 8), (130, 30), (70, 5)])
def test_windows_of_one_segment_are_a_group_at_every_length(words, most):
    windows = cut(words, [8, 64], most)
    answer = Example(windows.examples[0].tokens, 1, 2)
    grouped = [answer._replace(group=0)] * 2
    cells = (*windows.cells, Cell("a", 8, False))
    examples = ExampleSet(cells, (*windows.examples, answer, *grouped))
    indices = range(1, len(examples.examples))  # some of them
    scores = Scores.baseline(np.full(len(indices), -1.0), np.zeros(len(indices), np.int32))
    *group, of_answer, first, second = compare_rules(examples, indices, {"baseline": scores}).group
    segment = [(x.tokens[0] - 1) // 64 for x in windows.examples[1:]]
    assert len(set(zip(group, segment, strict=True))) == len(set(group)) == len(set(segment))
    assert of_answer == -1
    assert first == second not in group  # segments have other numbers
