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


def test_few_unknown_tokens_are_a_warning_and_many_are_refused(model):
    def warnings_of(**words):
        lines = [PROMPTS[0], {"prompt": "Where does Ada Young live?", "answer": " Rome", **words}]
        spec = ExampleSpec(write_lines("p.jsonl", lines))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plan(model, spec)
        return [str(warning.message) for warning in caught]

    assert warnings_of() == []
    (line,) = warnings_of(prompt="Where does Ada Xyz live?")
    assert "8.3 %" in line
    assert "prompts of p.jsonl" in line
    for words, share in (({"prompt": "Xyz " * 6}, r"50\.0 % .*prompts"),
                         ({"answer": " Xyz"}, r"50\.0 % .*answers")):  # fmt: skip
        with pytest.raises(QualityError, match=rf"{share} .*p\.jsonl"):
            warnings_of(**words)
    write_lines("text.txt", ["The apple is on Xyz. " * 40])
    with pytest.raises(QualityError, match="16.2 % .*text.txt"):
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
