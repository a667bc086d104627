"""Whether a server applies an exported fit: `calibrate export --check --engine`."""

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import call, refusal
from fake_server import (
    chats,
    completions,
    server,
    spelled,
    takes_text,
    without_last,
    without_parts_of_characters,
)
from guides import lines_of, section
from test_export import by_size, constants, under
from tiny_causal import SIZES, VOCABULARY, causal_model, save
from transformers import AutoModelForCausalLM, AutoTokenizer

from calibrate.export.engine_check import (
    APPLIES_BASELINE,
    APPLIES_FIT,
    APPLIES_OTHER,
    CANNOT_TELL,
    judge_engine,
)
from calibrate.store.saving import save_to_store

FITS = {"constants": constants(causal_model().config), "by-size": by_size()}
NO_WORD = SIZES["vocab_size"] - 1  # a token of the model that its tokenizer does not know
assert len(VOCABULARY) <= NO_WORD


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model, and the folder that each fit is exported to."""
    root = tmp_path_factory.mktemp("engines")
    save(root / "model", causal_model())
    for name, fit in FITS.items():
        reference = save_to_store(replace(fit, name=name), root / "fits")[0].reference
        call("export", reference, "--store", root / "fits", "--model", root / "model",
             "--out", root / name)  # fmt: skip
    return root


@pytest.fixture
def tokenizer(exported):
    return AutoTokenizer.from_pretrained(exported / "model")


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def write_prompts(*prompts):
    """The option for prompts of token ids."""
    lines = [{"prompt_ids": list(map(int, ids)), "answer_ids": [7]} for ids in prompts]
    Path("p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return "--prompts", "p.jsonl"


def short_prompts():
    rng = np.random.default_rng(0)
    return write_prompts(*(rng.integers(3, len(VOCABULARY), n) for n in (8, 8, 20, 20, 40, 40)))


def check(folder, answer, *options, code=0):
    """The record of the command, and its line on stderr."""
    with server(answer) as url:
        result = call("export", "--check", folder, "--engine", url, "--json", *options, code=code)
    return json.loads(result.stdout), result.stderr.strip().splitlines()[-1]


def changed(fit, change):
    """The rule with other coefficients."""
    entries = (replace(e, coefficients=change(*e.coefficients), check=()) for e in fit.entries)
    return replace(fit, entries=tuple(entries))


@pytest.mark.parametrize(
    ("name", "applies", "share", "code"),
    [
        ("constants", APPLIES_FIT, 1, 0),
        ("model", APPLIES_BASELINE, 0, 3),
        ("betas times 1.2", APPLIES_OTHER, 1.1, 3),
    ],
)
def test_what_is_applied_at_the_prompts_of_the_built_in_task(exported, name, applies, share, code):
    model = load(exported / ("model" if name.startswith("betas") else name))
    if name.startswith("betas"):
        under(changed(FITS["constants"], lambda b: (1.2 * b,)), model)
    record, line = check(exported / "constants", completions(model), code=code)
    assert (record["applies"], record["fit"]) == (applies, "constants@1")
    assert record["share"] == pytest.approx(share, abs=0.1)
    assert record["lengths"][-1] > 200
    assert record["noise"] == 0.004 < 1e-2 < record["effect"]
    assert code == 0 or "0.00 of the way" in line or "something else" in line


def test_a_lora_is_checked_with_its_model(exported):
    model, options = exported / "model", short_prompts()
    call("export", "constants", "--store", exported / "fits", "--model", model, "--as", "lora",
         "--out", "lora")  # fmt: skip
    for name, applies, code in (("constants", APPLIES_FIT, 0), ("model", APPLIES_BASELINE, 3)):
        answer = completions(load(exported / name))
        record, _ = check("lora", answer, "--model", model, *options, code=code)
        assert record["applies"] == applies


def test_a_lost_part_of_log_n(exported):
    options, model = short_prompts(), load(exported / "model")
    under(changed(FITS["by-size"], lambda kappa, b: (0.0, b)), model)
    _, line = check(exported / "by-size", completions(model), *options, code=3)
    assert "without its part of log n" in line
    served = completions(load(exported / "by-size"))
    record, _ = check(exported / "by-size", served, *options)
    assert record["applies"] == APPLIES_FIT
    # The original model under the fit predicts the same.
    again, _ = check(exported / "by-size", served, *options, "--model", exported / "model")
    assert again["off"] == {name: pytest.approx(x, abs=1e-4) for name, x in record["off"].items()}


@pytest.mark.parametrize(
    ("form", "takes"),
    [
        (chats, lambda body: True),
        (spelled, takes_text),
        (without_last, lambda body: True),
        (chats, lambda body: takes_text(body) and body["logprobs"] is True),
        (chats, lambda body: body.get("model") == "mine"),
    ],
)
def test_forms_of_requests_and_answers(exported, tokenizer, form, takes):
    model = load(exported / "constants")
    answer = completions(model, form, takes=takes, tokenizer=tokenizer)
    words = [word for word in VOCABULARY if word.isalpha()]
    prompts = [tokenizer(" ".join(words[n : 2 * n]))["input_ids"] for n in (8, 20, 40)]
    options = (*write_prompts(*prompts), "--served-model-name", "mine")
    record, _ = check(exported / "constants", answer, *options)
    assert record["applies"] == APPLIES_FIT


def test_a_prompt_is_left_out_where_positions_of_the_answer_are(exported):
    served = load(exported / "constants")
    record, _ = check(exported / "constants", completions(served, without_parts_of_characters(4)))
    assert record["applies"] == APPLIES_FIT
    assert record["off"][APPLIES_FIT] < 1e-5
    assert 2 <= len(record["lengths"]) < 5
    with server(completions(served, without_parts_of_characters(1))) as url:
        line = refusal("export", "--check", exported / "constants", "--engine", url)
    assert "--prompts" in line


def test_a_server_that_takes_no_field_of_its_own(exported):
    """`transformers serve` answers HTTP 422; the field is not sent with later prompts."""
    n_refused, answer = [0], completions(load(exported / "constants"), chats)

    def strict(self):
        if "return_tokens_as_token_ids" in self.body:
            n_refused[0] += 1
            return self.say({"error": "unexpected fields"}, 422)
        return answer(self)

    options = short_prompts()
    assert check(exported / "constants", strict, *options)[0]["applies"] == APPLIES_FIT
    assert n_refused == [1]


def test_noise(exported):
    """An engine of little noise still tells; one of much does not."""
    model = load(exported / "constants")
    record, _ = check(exported / "constants", completions(model, noise=0.01))
    assert record["applies"] == APPLIES_FIT
    record, line = check(exported / "constants", completions(model, noise=3.0), code=1)
    assert record["applies"] == CANNOT_TELL
    assert "--prompts" in line


def unusable(self):
    self.say({"choices": [{"logprobs": None}]})


@pytest.mark.parametrize("has_tokenizer", [True, False])
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "refused"),
        (lambda self: self.say(b"", 500), "HTTP 500"),
        (unusable, "no log-probabilities"),
    ],
)
def test_a_server_that_fails_is_named_as_such_for_prompts_of_token_ids(
    exported, answer, reason, has_tokenizer
):
    folder = exported / "constants"
    if not has_tokenizer:
        shutil.copytree(exported / "model", "m", ignore=shutil.ignore_patterns("tokenizer*"))
        call("export", exported / "fits/constants/1.json", "--model", "m", "--out", "out")
        folder = "out"
    options = write_prompts(*([NO_WORD] * n for n in (1, 20, 60)))
    with server(answer) as url:
        arguments = ("export", "--check", folder, "--engine", url, *options)
        line = refusal(*arguments) if answer else ""
    line = line or refusal(*arguments)
    assert line.startswith(f"calibrate: {url}: ")
    assert reason in line
    assert "--prompts" in line


def test_prompts_that_no_text_has_for_a_server_of_text(exported, tokenizer):
    """It answers the prompts that a text has; none of them is longer than a token."""
    answer = completions(
        load(exported / "constants"), spelled, takes=takes_text, tokenizer=tokenizer
    )
    options = write_prompts([*tokenizer("bell")["input_ids"], NO_WORD, NO_WORD])
    with server(answer) as url:
        line = refusal("export", "--check", exported / "constants", "--engine", url, *options)
    assert line.startswith(f"calibrate: {url}: ")
    assert "--prompts" in line


def test_options_of_a_check(exported):
    folder = exported / "constants"
    line = refusal("export", "made", "--model", "m", "--out", "o", "--engine", "http://h", code=2)
    assert "--check" in line
    line = refusal("export", "--check", folder, "--served-model-name", "x", code=2)
    assert "--engine" in line
    line = refusal("export", "--check", folder, "--engine", "localhost:8000")
    assert "--engine" in line


def test_the_rule_of_the_verdict():
    """By answers with known noise, at one token and at more."""
    rng = np.random.default_rng(0)

    def verdict(share, noise, long_noise=None, n=6, single=1):
        effect = rng.normal(size=(n, 10))
        spread = noise if long_noise is None else long_noise
        e = [noise * rng.normal(size=5)] * single
        e += [share * x + spread * rng.normal(size=10) for x in effect]
        f = [*[np.zeros(5)] * single, *effect]
        lengths = [1] * single + [10 * i + 10 for i in range(n)]
        predicted = {APPLIES_FIT: f, APPLIES_BASELINE: [0 * x for x in f]}
        return judge_engine("http://h", lengths, e, predicted, [APPLIES_BASELINE]).applies

    for noise in (1e-6, 0.01, 0.05):
        assert verdict(1, noise) == APPLIES_FIT
        assert verdict(0, noise) == APPLIES_BASELINE
        assert verdict(0.5, noise) == APPLIES_OTHER
        assert verdict(1.5, noise) == APPLIES_OTHER
    assert verdict(1, 0.01, long_noise=0.04) == APPLIES_FIT
    assert verdict(1, 0.01, long_noise=2.0) == APPLIES_OTHER  # a model with other weights
    assert verdict(1, 0.4) == APPLIES_FIT
    assert verdict(1, 2.0) == CANNOT_TELL
    assert verdict(0.6, 0.25) == CANNOT_TELL
    assert verdict(1, 0.3, single=0) == APPLIES_FIT
    assert verdict(0.5, 0.05, single=0) == APPLIES_OTHER


def test_models_that_do_not_differ_cannot_be_told():
    zeros = [np.zeros(5)] * 3
    predicted = {APPLIES_FIT: zeros, APPLIES_BASELINE: zeros}
    check = judge_engine("http://h", [9] * 3, zeros, predicted, [APPLIES_BASELINE])
    assert check.applies == CANNOT_TELL


def test_the_page_that_documents_it(exported):
    (line,) = lines_of(section("serving.md", "Does the engine apply it?"))
    Path("model-mine").symlink_to(exported / "constants")
    with server(completions(load(exported / "constants"))) as url:
        command = line.replace("http://localhost:8000", url)
        shown = call(*shlex.split(command, comments=True)[1:]).stdout
    assert f"{url} applies the fit" in shown
