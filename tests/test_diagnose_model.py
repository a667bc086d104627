"""The script that draws the entropy of a checkpoint's first heads, on tiny random ones."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch")
transformers = pytest.importorskip("transformers", reason="needs the extra transformers")

SCRIPT = Path(__file__).parents[1] / "scripts" / "diagnose_model"
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
CONFIGS = {
    "decoder": lambda n: transformers.LlamaConfig(
        **SIZES, num_key_value_heads=2, intermediate_size=48, vocab_size=n),
    "encoder": lambda n: transformers.BertConfig(**SIZES, intermediate_size=48, vocab_size=n),
}  # fmt: skip


def save_tokenizer(folder):
    """A word or a number is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[UNK]", "What", "is", "the", "maximum", "in", "following", "sequence", ":", ",", "?",
             "The", *map(str, range(1_000))]  # fmt: skip
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    fast.save_pretrained(folder)
    return len(words)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_entropies_of_the_first_layer(kind, here):
    n_words = save_tokenizer(here / "model")
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(CONFIGS[kind](n_words))
    model.save_pretrained(here / "model")
    command = [sys.executable, SCRIPT, "model", "--sizes", "4,16", "--sets", "3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert Path(record["figure"]).read_bytes().startswith(b"\x89PNG")
    few, many = record["sizes"]
    assert (few["elements"], many["elements"]) == (4, 16)
    assert many["tokens"] - few["tokens"] == 24  # numbers and commas
    for size in (few, many):  # random weights are small, and attend to all tokens alike
        assert len(size["entropy"]) == 4
        np.testing.assert_allclose(size["entropy"], np.log(size["tokens"]), atol=0.05)
        assert max(size["spread"]) > 0
