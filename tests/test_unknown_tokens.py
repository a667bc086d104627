"""Tokens that a tokenizer does not know, in prompts and in text."""

import shutil
import warnings
from pathlib import Path

import pytest
import transformers
from test_model_examples import PROMPTS, collected, write_lines

from calibrate.errors import CalibrateError, QualityError
from calibrate.model.collect_examples import plan
from calibrate.prompts.encoding import Encoder
from calibrate.prompts.make_examples import ExampleSpec
from calibrate.transformers.folders import ModelFolder


def test_many_unknown_tokens_are_refused(model):
    def plan_with(**words):
        lines = [PROMPTS[0], {"prompt": "Where does Ada Young live?", "answer": " Rome", **words}]
        return plan(model, ExampleSpec(write_lines("p.jsonl", lines)))

    assert plan_with(prompt="Where does Ada Xyz live?").examples.examples
    for words in ({"prompt": "Xyz " * 6}, {"answer": " Xyz"}):
        with pytest.raises(QualityError, match=r"50\.0 % .*p\.jsonl"):
            plan_with(**words)
    write_lines("text.txt", ["The apple is on Xyz. " * 40])
    with pytest.raises(QualityError, match="16.* % .*text.txt"):
        collected(model, templates=(), text=Path("text.txt"))


def test_a_tokenizer_without_english_is_a_warning_and_gives_no_retention_text(model):
    spec = ExampleSpec(write_lines("p.jsonl", PROMPTS), lengths=(64,), built_in_text=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job = plan(model, spec)
    (warning,) = caught
    assert str(warning.message).startswith("no retention text: ")
    assert not any(cell.text for cell in job.examples.cells)


def test_tokenizers_without_an_unknown_token(model):
    """That of bytes names its end as the unknown token; a list of words may have none."""
    end = "<|endoftext|>"
    letters = {end: 0, **{c: i for i, c in enumerate("abcdefgh", 1)}}
    of_bytes = transformers.GPT2Tokenizer(vocab=letters, merges=[], unk_token=end, eos_token=end)
    assert Encoder(of_bytes, None, 9).unknown is None
    assert Encoder(ModelFolder(model).tokenizer(), None, 9).unknown == "[UNK]"
    path = model / "tokenizer.json"
    folder = Path(shutil.copytree(model, "none"))
    bare = path.read_text().replace('"unk_token": "[UNK]"', '"unk_token": "[NONE]"')
    (folder / "tokenizer.json").write_text(bare)
    prompts = write_lines("p.jsonl", [{"prompt": "Xyz", "answer": "Ada"}])
    with pytest.raises(CalibrateError, match="tokenizer"):
        plan(folder, ExampleSpec(prompts))
