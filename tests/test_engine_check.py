"""Whether an engine applies an exported fit, asked by `calibrate export --check --engine`."""

import json
import re
import shlex
import shutil
import threading
import time
import urllib.parse
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import call, refusal
from test_export import by_size, constants, under
from test_model_examples import write_lines
from tiny_causal import SIZES, VOCABULARY, causal_model, save
from transformers import AutoModelForCausalLM, AutoTokenizer

from calibrate.errors import CalibrateError
from calibrate.export.engine import Engine
from calibrate.export.engine_check import BASELINE, FIT, OTHER, UNKNOWN, judged
from calibrate.store.publishing import publish


def scaled(fit, factor):
    """The rule with every beta times a factor."""
    entries = tuple(
        replace(e, coefficients=tuple(factor * c for c in e.coefficients), check=())
        for e in fit.entries
    )
    return replace(fit, entries=entries)


FITS = {"constants": constants(causal_model().config), "by-size": by_size()}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model, and the folder that each fit is exported to."""
    root = tmp_path_factory.mktemp("engines")
    save(root / "model", causal_model())
    for name, fit in FITS.items():
        reference = publish(replace(fit, name=name), root / "fits")[0].reference
        call("export", reference, "--store", root / "fits", "--model", root / "model",
             "--out", root / name)  # fmt: skip
    return root


@contextmanager
def server(answer):
    """A server whose handler of POST is given; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer(self)

        def log_message(self, *_):
            pass

        def say(self, data, status=200, **headers):
            data = data if isinstance(data, bytes) else json.dumps(data).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads, httpd.handle_error = True, lambda *_: None
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}"
    finally:
        httpd.shutdown()
        httpd.server_close()


def top(model, ids, noise):
    """The five likeliest tokens after some, with log p."""
    with torch.no_grad():
        log_p = model(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)
    p, i = torch.topk(log_p, 5)
    jitter = np.random.default_rng(ids).normal(0, noise, 5)
    return {int(i): min(float(p) + x, 0.0) for i, p, x in zip(i, p, jitter, strict=True)}


def older(tops, tokenizer):
    return {"top_logprobs": [{f"token_id:{i}": p for i, p in x.items()} for x in tops]}


def spelled(tops, tokenizer):
    """By text, where of several tokens with one text the last is listed."""
    listed = [{tokenizer.decode([i]): p for i, p in x.items()} for x in tops]
    return {"top_logprobs": listed, "token_logprobs": [max(x.values()) for x in tops]}


def without_last(tops, tokenizer):
    """As servers do that have no log-probabilities for the token that ends an answer."""
    answer = older(tops, tokenizer)
    answer["top_logprobs"][-1] = None if len(tops) > 1 else answer["top_logprobs"][-1]
    last = [None] if len(tops) > 1 else [max(tops[-1].values())]
    return answer | {"token_logprobs": [max(x.values()) for x in tops[:-1]] + last}


def chats(tops, tokenizer):
    return {"content": [{"top_logprobs": [{"id": i, "token": "?", "logprob": p}
                                          for i, p in x.items()]} for x in tops]}  # fmt: skip


def without_parts_of_characters(divisor):
    """As llama.cpp answers: it leaves out positions of some tokens, here of multiples."""

    def form(tops, tokenizer):
        whole = [x for x in tops if max(x, key=x.get) % divisor]
        return chats(whole, tokenizer)

    return form


def completions(model, form=older, noise=0.0, takes=lambda body: True, tokenizer=None):
    """What a server of a model answers."""

    def answer(self):
        prompt = self.body["prompt"]
        if not takes(self.body):
            return self.say({"error": "not in this form"}, 400)
        ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
        n, tops = len(ids), []
        for _ in range(self.body["max_tokens"]):
            tops.append(top(model, ids, noise))
            ids.append(max(tops[-1], key=tops[-1].get))
        logprobs = form(tops, tokenizer) if form else None
        usage = {"prompt_tokens": n, "completion_tokens": len(tops)}
        return self.say({"choices": [{"logprobs": logprobs}], "usage": usage})

    return answer


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def check(folder, answer, *options, code=0):
    """What the command finds, and its line on stderr."""
    with server(answer) as url:
        result = call("export", "--check", folder, "--engine", url, "--json", *options, code=code)
    return json.loads(result.stdout), result.stderr.strip().splitlines()[-1]


def of(exported, name):
    """What a server of a model of that name answers."""
    if name == "beta times 1.2":
        model = load(exported / "model")
        under(scaled(FITS["constants"], 1.2), model)
        return completions(model)
    return completions(load(exported / name))


@pytest.mark.parametrize(
    ("name", "applies", "code", "said"),
    [
        ("constants", FIT, 0, "asking the engine, and the model"),
        ("model", BASELINE, 3, "applies plain softmax: it goes 0.00 ± 0.00 of the way from plain"),
        ("beta times 1.2", OTHER, 3, "applies something else from 110 tokens on: it goes 1.0"),
    ],
)
def test_what_is_applied(exported, name, applies, code, said):
    record, line = check(exported / "constants", of(exported, name), code=code)
    assert (record["applies"], record["fit"]) == (applies, "constants@1")
    assert said in line
    assert record["share"] == pytest.approx({FIT: 1, BASELINE: 0, OTHER: 1.1}[applies], abs=0.1)
    assert [n for n, _ in record["prompts"]] == [110, 121, 245, 247]
    assert record["noise"] < 1e-5 < 1e-2 < record["effect"]


def test_a_lora_is_checked_with_its_model(exported):
    model = exported / "model"
    call("export", "constants", "--store", exported / "fits", "--model", model, "--as", "lora",
         "--out", "lora")  # fmt: skip
    record, _ = check("lora", of(exported, "constants"), "--model", model)
    assert (record["applies"], record["fit"]) == (FIT, "constants@1")
    record, _ = check("lora", of(exported, "model"), "--model", model, code=3)
    assert record["applies"] == BASELINE


def test_a_lost_part_of_log_n(exported):
    model = load(exported / "model")
    entries = (replace(e, coefficients=(0.0, e.coefficients[1]), check=())
               for e in FITS["by-size"].entries)  # fmt: skip
    under(replace(FITS["by-size"], entries=tuple(entries)), model)
    _, line = check(exported / "by-size", completions(model), code=3)
    assert "most like the fit without its part of log n: it goes" in line
    record, _ = check(exported / "by-size", completions(load(exported / "by-size")))
    assert record["applies"] == FIT
    # The original model under the fit predicts the same.
    again, _ = check(exported / "by-size", completions(load(exported / "by-size")),
                     "--model", exported / "model")  # fmt: skip
    assert again["off"] == {name: pytest.approx(x, abs=1e-4) for name, x in record["off"].items()}


@pytest.mark.parametrize(
    ("form", "takes"),
    [
        (chats, lambda body: True),
        (spelled, lambda body: isinstance(body["prompt"], str)),
        (without_last, lambda body: True),
        (chats, lambda body: isinstance(body["prompt"], str) and body["logprobs"] is True),
    ],
)
def test_forms_of_requests_and_answers(exported, form, takes):
    tokenizer = AutoTokenizer.from_pretrained(exported / "model")
    model = load(exported / "constants")
    answer = completions(model, form, takes=takes, tokenizer=tokenizer)
    assert check(exported / "constants", answer)[0]["applies"] == FIT


def test_a_prompt_is_left_out_where_positions_of_the_answer_are(exported):
    form = without_parts_of_characters(4)
    record, _ = check(exported / "constants", completions(load(exported / "constants"), form))
    assert record["applies"] == FIT
    assert record["off"][FIT] < 1e-5
    assert 2 <= len(record["prompts"]) < 4


def test_a_server_that_leaves_out_positions_of_every_answer(exported):
    answer = completions(load(exported / "constants"), without_parts_of_characters(1))
    with server(answer) as url:
        line = refusal("export", "--check", exported / "constants", "--engine", url)
    assert "fewer positions than tokens" in line
    assert "--prompts" in line


def test_a_server_that_takes_no_field_of_its_own(exported):
    """`transformers serve` answers HTTP 422, and vLLM's ids are not asked for a second time."""
    asked = []

    def takes(body):
        asked.append(body)
        return True

    answer = completions(load(exported / "constants"), chats, takes=takes)

    def strict(self):
        if "return_tokens_as_token_ids" in self.body:
            return self.say({"error": "unexpected fields"}, 422)
        return answer(self)

    assert check(exported / "constants", strict)[0]["applies"] == FIT
    assert len(asked) == 8


def test_a_server_without_log_probabilities_is_named_as_such(exported):
    """Though it refuses token ids first."""
    tokenizer = AutoTokenizer.from_pretrained(exported / "model")
    answer = completions(
        load(exported / "constants"),
        form=None,
        takes=lambda body: isinstance(body["prompt"], str),
        tokenizer=tokenizer,
    )
    with server(answer) as url:
        line = refusal("export", "--check", exported / "constants", "--engine", url)
    assert "no log-probabilities" in line
    assert all(name in line for name in ("vLLM", "SGLang", "llama.cpp", "MLX"))


def test_noise(exported):
    """An engine of little noise still tells; one of much does not."""
    model = load(exported / "constants")
    record, _ = check(exported / "constants", completions(model, noise=0.01))
    assert record["applies"] == FIT
    record, line = check(exported / "constants", completions(model, noise=3.0), code=1)
    assert record["applies"] == UNKNOWN
    assert "may apply it or not: it goes" in line
    assert line.endswith("give more or longer --prompts")


def slowly(self):
    """A byte of the body now and then."""
    self.say(b"")
    for _ in range(200):
        self.wfile.write(b" ")
        time.sleep(0.02)


def without_end(self):
    self.say(b"")
    for _ in range(64):
        self.wfile.write(bytes(1 << 20))


def listing(token, log_p):
    return {"choices": [{"logprobs": {"top_logprobs": [{token: log_p}]}}]}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda self: self.say(b"Not Found", 404), "HTTP 404 (Not Found)"),
        (lambda self: self.say({"error": "key"}, 401), "HTTP 401 ({\"error\": \"key\"})"),
        (lambda self: self.say(b"<html>"), "not JSON (Expecting value"),
        (lambda self: self.say(b'{"choices": NaN}'), "not JSON (NaN is not a finite number)"),
        (lambda self: self.say({"choices": [{"logprobs": None}]}), "no log-probabilities of known"),
        (lambda self: self.say(listing("token_id:512", -1)), "no log-probabilities of known"),
        (lambda self: self.say(listing("token_id:5", 0.4)), "no log-probabilities of known tokens"),
        (lambda self: self.say(listing("token_id:5", -1) | {"usage": {"prompt_tokens": 7}}),
         "a prompt of 1 tokens is read as 7"),
        (without_end, "an answer of more than 1,048,576 bytes"),
        (slowly, "no answer within 0.3 s"),
        (lambda self: time.sleep(0.5), "no answer within 0.3 s"),
        (lambda self: None, "Remote end closed connection without response"),
    ],
)  # fmt: skip
def test_servers_of_another_kind(exported, answer, said):
    tokenizer = AutoTokenizer.from_pretrained(exported / "model")
    timeout = 0.3 if "within" in said else 5.0
    with server(answer) as url, pytest.raises(CalibrateError) as refused:
        Engine(f"{url}/v1/", tokenizer, SIZES["vocab_size"], timeout=timeout).ask([5])
    line = str(refused.value)
    assert line.startswith(f"{url}: {said}")
    assert "; give the address of a server that lists log-probabilities" in line


def test_all_answers_of_a_server_have_one_deadline():
    """Each of them comes in time."""
    asked = []

    def answer(self):
        asked.append(self.body)
        time.sleep(0.1)
        self.say(listing("token_id:5", -1))

    with server(answer) as url:
        engine = Engine(url, None, SIZES["vocab_size"], timeout=60.0, total=0.5)
        with pytest.raises(CalibrateError, match=r" 0\.5 s together") as refused:
            [engine.ask([5]) for _ in range(20)]
        assert refused.value.parameters == ("prompts",)
        n_asked = len(asked)
        assert 2 <= n_asked < 10
        with pytest.raises(CalibrateError, match="together"):
            engine.ask([5])
    assert len(asked) == n_asked


NO_WORD = SIZES["vocab_size"] - 1  # a token of the model that its tokenizer does not know
PROMPT_IDS = [{"prompt_ids": [NO_WORD] * n, "answer_ids": [7]} for n in (1, 20, 60)]


@pytest.mark.parametrize("tokenizer", [True, False], ids=["no text has the ids", "no tokenizer"])
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "connection refused: no server listens"),
        (lambda self: self.say({"error": "key"}, 401), 'HTTP 401 ({"error": "key"})'),
        (lambda self: self.say(b"Not Found", 404), "HTTP 404 (Not Found)"),
        (lambda self: self.say(b"", 500), "HTTP 500 ()"),
        (lambda self: self.say({"choices": [{"logprobs": None}]}), "no log-probabilities of known"),
    ],
)
def test_a_server_that_fails_is_named_as_such_for_prompts_of_token_ids(
    exported, answer, said, tokenizer
):
    assert len(VOCABULARY) <= NO_WORD
    folder = exported / "constants"
    if not tokenizer:
        shutil.copytree(exported / "model", "m", ignore=shutil.ignore_patterns("tokenizer*"))
        call("export", exported / "fits/constants/1.json", "--model", "m", "--out", "out")
        folder = "out"
    write_lines("p.jsonl", PROMPT_IDS)
    with server(answer) as url:
        arguments = ("export", "--check", folder, "--engine", url, "--prompts", "p.jsonl")
        line = refusal(*arguments) if answer else ""
    line = line or refusal(*arguments)
    assert line.startswith(f"calibrate: {url}: ")
    assert said in line
    assert line.endswith("in OPENAI_API_KEY, or prompts that are text")


def test_prompts_that_no_text_has_for_a_server_of_text(exported):
    """It answers the prompts that a text has; none of them is longer than a token."""
    tokenizer = AutoTokenizer.from_pretrained(exported / "model")
    answer = completions(
        load(exported / "constants"),
        takes=lambda body: isinstance(body["prompt"], str),
        form=spelled,
        tokenizer=tokenizer,
    )
    prompt = [*tokenizer("bell")["input_ids"], NO_WORD, NO_WORD]
    write_lines("p.jsonl", [{"prompt_ids": prompt, "answer_ids": [7]}])
    arguments = ("--check", exported / "constants", "--prompts", "p.jsonl")
    with server(answer) as url:
        line = refusal("export", *arguments, "--engine", url)
    assert line == f"calibrate: {url} reads no prompt as the tokens that it has; give --prompts"


def test_the_key_stays_with_its_host(exported, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    asked, elsewhere = [], []
    with server(lambda self: elsewhere.append(1)) as other_url:

        def answer(self):
            asked.append(self.headers["Authorization"])
            self.say(b"", 307, Location=f"{other_url}/v1/completions")

        with server(answer) as url:
            line = refusal("export", "--check", exported / "constants", "--engine", url)
    assert f"{url}: HTTP 307 ()" in line
    assert set(asked) == {"Bearer sk-secret"}
    assert elsewhere == []


def test_a_key_is_never_printed(exported, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-\nsecret")
    line = refusal("export", "--check", exported / "constants", "--engine", "http://localhost:1")
    assert line == "calibrate: OPENAI_API_KEY is not a key; set it again"
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\n")

    def answer(self):
        self.say(f"no {self.headers['Authorization']}".encode(), 400)

    with server(answer) as url:
        line = refusal("export", "--check", exported / "constants", "--engine", url)
    assert "HTTP 400 (no Bearer ***)" in line


def with_slashes_escaped(text):
    """As PHP writes JSON."""
    return text.replace("/", "\\/")


@pytest.mark.parametrize("n_cut", [0, 9])
@pytest.mark.parametrize("before", [150, 170, 185])
@pytest.mark.parametrize(
    "key", ["sk-proj-0123456789abcdefghijklmnopqrstuvwxyz", "a/b+c=d/e0f1g2h3"]
)
@pytest.mark.parametrize("write", [str, urllib.parse.quote_plus, with_slashes_escaped])
def test_a_key_is_masked_wherever_an_echo_of_the_request_is_cut(
    monkeypatch, before, key, write, n_cut
):
    """By us, and by the server."""
    monkeypatch.setenv("OPENAI_API_KEY", key)

    def answer(self):
        echo = write(key[: len(key) - n_cut])
        self.say(("x" * before + echo).encode(), 400)

    with server(answer) as url:
        engine = Engine(url, tokenizer=None, vocabulary=10)
        assert engine.ask([1, 2]) == []
        with pytest.raises(CalibrateError, match="HTTP 400") as refused:
            engine.require_prompts([])
    assert key[:6] not in urllib.parse.unquote(str(refused.value)).replace("\\/", "/")


@pytest.mark.parametrize("before", [0, 960, 990])
def test_a_key_is_masked_in_what_an_answer_says_of_its_tokens(monkeypatch, before):
    """Long messages are cut in the middle, after 1,000 letters."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-proj-0123456789abcdefghijklmnopqrstuvwxyz")

    def answer(self):
        read_as = "x" * before + self.headers["Authorization"] + "y" * 2000
        self.say({"usage": {"prompt_tokens": read_as}, "choices": []})

    with server(answer) as url:
        engine = Engine(url, tokenizer=None, vocabulary=10)
        assert engine.ask([1, 2]) == []
        with pytest.raises(CalibrateError, match="is read as") as refused:
            engine.require_prompts([])
    assert "sk-pro" not in str(refused.value)


@pytest.mark.parametrize(
    "address", ["localhost:8000", "file:///etc/passwd", "http://me:pw@h", "http://"]
)
def test_what_is_no_address(exported, address):
    line = refusal("export", "--check", exported / "constants", "--engine", address)
    assert "--engine is not the address of a server; give the address of" in line
    assert "pw" not in line


def test_nobody_there(exported):
    with server(lambda self: None) as url:
        pass
    line = refusal("export", "--check", exported / "constants", "--engine", url)
    assert "connection refused" in line


def test_what_goes_with_an_engine(exported):
    folder = exported / "constants"
    line = refusal("export", "made", "--model", "m", "--out", "o", "--engine", "http://h", code=2)
    assert "--engine needs --check" in line
    assert "need --engine" in refusal(
        "export", "--check", folder, "--served-model-name", "x", code=2
    )
    assert "has weights of its own, and takes no --model" in refusal(
        "export", "--check", folder, "--model", folder
    )


def test_other_prompts_and_the_models_name(exported):
    prompts = [{"prompt_ids": [5 + i, *range(3, 3 + n)], "answer_ids": [1]}
               for i, n in enumerate((9, 9, 30, 30, 90, 90))]  # fmt: skip
    Path("p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
    answer = completions(load(exported / "constants"), takes=lambda body: body["model"] == "mine")
    options = ("--prompts", "p.jsonl", "--served-model-name", "mine")
    record, _ = check(exported / "constants", answer, *options)
    assert [n for n, _ in record["prompts"]] == [10, 10, 31, 31, 91, 91]
    assert record["applies"] == FIT


def test_the_rule_of_the_verdict():
    """By answers with known noise, at one token and at more."""
    rng = np.random.default_rng(0)

    def verdict(share, noise, long_noise=None, n=6, single=1):
        effect = rng.normal(size=(n, 10))
        spread = noise if long_noise is None else long_noise
        answers = [(1, np.array([noise * rng.normal(size=5), np.zeros(5), np.zeros(5)]))] * single
        answers += [(10 * i + 10, np.array([
            share * effect[i] + spread * rng.normal(size=10), effect[i], np.zeros(10),
        ])) for i in range(n)]  # fmt: skip
        return judged("http://h", answers).applies

    for noise in (1e-6, 0.01, 0.05):
        assert verdict(1, noise) == FIT
        assert verdict(0, noise) == BASELINE
        assert verdict(0.5, noise) == OTHER
        assert verdict(1.5, noise) == OTHER
    assert verdict(1, 0.01, long_noise=0.04) == FIT
    assert verdict(1, 0.01, long_noise=2.0) == OTHER  # a model with other weights
    assert verdict(1, 0.4) == FIT
    assert verdict(1, 2.0) == UNKNOWN
    assert verdict(1, 0.0, n=1) == UNKNOWN
    assert verdict(1, 0.3, single=0) == FIT
    assert verdict(0.5, 0.05, single=0) == OTHER
    assert judged("http://h", [(9, np.zeros((3, 5)))] * 3).applies == UNKNOWN


def test_the_page_that_documents_it(exported):
    page = (Path(__file__).parents[1] / "fits" / "serving.md").read_text(encoding="utf-8")
    page = page.split("\n## Does the engine apply it?\n")[1].split("\n## ")[0]
    (line,) = re.search(r"```sh\n(.*?)```", page, re.DOTALL)[1].splitlines()
    Path("model-mine").symlink_to(exported / "constants")
    with server(completions(load(exported / "constants"))) as url:
        command = line.replace("http://localhost:8000", url)
        shown = call(*shlex.split(command, comments=True)[1:]).stdout
    assert f"{url} applies the fit: it goes 1.00 ± 0.00 of the way from plain softmax" in shown
    assert "off fit  off plain" in shown


class Alike:
    """Of its three tokens two have one text."""

    def __len__(self):
        return 3

    def batch_decode(self, ids):
        return ["a", "a", "b"]


def test_a_text_that_two_tokens_have_is_neither_of_them():
    tops = [{"a": -0.1, "b": -3.0}, {"b": -0.2}]
    answer = {"choices": [{"logprobs": {"top_logprobs": tops}}]}
    assert Engine("http://127.0.0.1:1", Alike(), 3)._read(answer, 1) == [{2: -3.0}]
