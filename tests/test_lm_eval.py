"""EleutherAI's harness applies a fit: by a LoRA, and in an exported folder."""

import importlib.util
import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from commands import call
from test_export import constants
from tiny_causal import VOCABULARY, causal_model, save

from calibrate.store.saving import save_to_store
from calibrate.transformers import apply

TASK = """
task: pick
dataset_path: json
dataset_kwargs:
  data_files:
    test: questions.jsonl
test_split: test
output_type: multiple_choice
doc_to_text: context
doc_to_choice: choices
doc_to_target: answer
"""


def write_questions(count=4):
    rng = np.random.default_rng(0)
    words = [word for word in VOCABULARY if word.isalpha()]

    def text(n):
        return " ".join(rng.choice(words, n))

    questions = [
        {"context": text(40), "choices": [text(5) for _ in range(3)], "answer": 0}
        for _ in range(count)
    ]
    Path("questions.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in questions))
    Path("tasks").mkdir()
    Path("tasks/pick.yaml").write_text(TASK)
    return questions


def log_p_by_harness(out, **model_args):
    """(questions, choices) log-likelihoods that a run of the harness has measured."""
    given = ",".join(f"{key}={value}" for key, value in model_args.items())
    options = {
        "--model": "hf",
        "--model_args": f"{given},prefix_token_id=0",
        "--tasks": "pick",
        "--include_path": "tasks",
        "--device": "cpu",
        "--batch_size": "1",
        "--output_path": out,
    }
    subprocess.run(
        [sys.executable, "-m", "lm_eval", *chain(*options.items()), "--log_samples"],
        env=os.environ | {"HF_DATASETS_OFFLINE": "1", "HF_HOME": str(Path("hf").absolute())},
        check=True,
        capture_output=True,
    )
    (samples,) = Path(out).rglob("samples_*.jsonl")
    records = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda x: x["doc_id"])
    return np.array([[float(choice[0][0]) for choice in record["resps"]] for record in records])


def log_p_by_runtime(questions, fit=None):
    """The same by our runtime."""
    model = transformers.AutoModelForCausalLM.from_pretrained("model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    if fit is not None:
        apply(model, fit)
    log_p = []
    for question in questions:
        start = len(tokenizer(question["context"])["input_ids"])
        for choice in question["choices"]:
            text = f"{question['context']} {choice}"
            ids = torch.tensor(tokenizer(text)["input_ids"])
            with torch.no_grad():
                predicted = model(ids[None]).logits[0, :-1].log_softmax(-1)
            each = predicted.gather(-1, ids[1:, None])[:, 0]
            log_p.append(float(each[start - 1 :].sum()))
    return np.reshape(log_p, (len(questions), -1))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm-eval")
def test_the_harness_applies_a_fit(here):
    # With `peft=` the harness cuts the vocabulary to that of the tokenizer.
    model = causal_model("llama", vocab_size=len(VOCABULARY))
    save(here / "model", model)
    fit, _ = save_to_store(constants(model.config, range(2)), here / "fits")
    questions = write_questions()
    call("export", fit.name, "--model", "model", "--as", "lora", "--out", "mine-lora")
    call("export", fit.name, "--model", "model", "--out", "model-mine")
    baseline = log_p_by_harness("out", pretrained="model")
    np.testing.assert_allclose(baseline, log_p_by_runtime(questions), atol=1e-3)
    ours = log_p_by_runtime(questions, fit)
    assert np.abs(ours - baseline).max() > 0.05
    by_lora = log_p_by_harness("out-lora", pretrained="model", peft="mine-lora")
    np.testing.assert_allclose(by_lora, ours, atol=1e-3)
    exported = log_p_by_harness("out-folder", pretrained="model-mine")
    np.testing.assert_allclose(exported, ours, atol=1e-3)
