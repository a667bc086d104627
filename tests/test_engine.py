"""The client of a server: forms of answers, servers of another kind, deadlines, the key."""

import time

import pytest
from fake_server import server
from tiny_causal import SIZES, causal_model, save
from transformers import AutoTokenizer

from calibrate.errors import CalibrateError
from calibrate.export.engine import Engine

VOCABULARY = SIZES["vocab_size"]


def listing(token, log_p):
    return {"choices": [{"logprobs": {"top_logprobs": [{token: log_p}]}}]}


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


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("tokenizer"), causal_model())
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda self: self.say(b"Not Found", 404), "HTTP 404"),
        (lambda self: self.say(b"<html>"), "not JSON"),
        (lambda self: self.say(b'{"choices": NaN}'), "not JSON"),
        (lambda self: self.say({"choices": [{"logprobs": None}]}), "no log-probabilities"),
        (lambda self: self.say(listing("token_id:512", -1)), "tokens of the model"),
        (lambda self: self.say(listing("token_id:5", 0.4)), "no log-probabilities"),
        (lambda self: self.say(listing("token_id:5", -1) | {"usage": {"prompt_tokens": 7}}),
         "another number of tokens"),
        (without_end, " 1,048,576 bytes"),
        (slowly, "no answer in time"),
        (lambda self: time.sleep(0.5), "no answer in time"),
        (lambda self: None, "closed connection"),
    ],
)  # fmt: skip
def test_servers_of_another_kind(tokenizer, answer, reason):
    timeout, ids = 0.3 if "in time" in reason else 5.0, tokenizer("bell")["input_ids"]
    with server(answer) as url, pytest.raises(CalibrateError) as refused:
        Engine(f"{url}/v1/", tokenizer, VOCABULARY, timeout=timeout).ask(ids)
    assert str(refused.value).startswith(f"{url}: ")
    assert reason in str(refused.value)
    assert refused.value.parameters == ("prompts",)


def test_nobody_there():
    with server(lambda self: None) as url:
        pass
    with pytest.raises(CalibrateError, match="refused"):
        Engine(url, None, VOCABULARY).ask([5])


@pytest.mark.parametrize(
    "address", ["localhost:8000", "file:///etc/passwd", "http://me:pw@h", "http://"]
)
def test_what_is_no_address(address):
    with pytest.raises(CalibrateError) as refused:
        Engine(address, None, VOCABULARY)
    assert refused.value.parameters == ("engine",)
    assert "pw" not in str(refused.value)


def test_the_key_stays_with_its_host(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\n")
    asked, elsewhere = [], []
    with server(lambda self: elsewhere.append(1)) as other_url:

        def answer(self):
            asked.append(self.headers["Authorization"])
            self.say(b"", 307, Location=f"{other_url}/v1/completions")

        with server(answer) as url:
            engine = Engine(url, None, VOCABULARY)
            assert engine.ask([5]) == []
            assert "HTTP 307" in str(engine.failure())
    assert set(asked) == {"Bearer sk-secret"}
    assert elsewhere == []
    monkeypatch.setenv("OPENAI_API_KEY", "sk-\nsecret")
    with pytest.raises(CalibrateError, match="OPENAI_API_KEY") as refused:
        Engine(url, None, VOCABULARY)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("status", [200, 400])
def test_a_text_that_echoes_the_key_is_not_shown(monkeypatch, status):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")

    def answer(self):
        echo = self.headers["Authorization"]
        self.say(f'{{"{echo}": 1, "{echo}": 1}}'.encode(), status)

    with server(answer) as url:
        engine = Engine(url, None, VOCABULARY)
        assert engine.ask([1, 2]) == []
        assert "secret" not in str(engine.failure())


class Alike:
    """A tokenizer; two of its three tokens have one text."""

    def __len__(self):
        return 3

    def batch_decode(self, ids):
        return ["a", "a", "b"]


def test_a_text_that_two_tokens_have_is_neither_of_them():
    tops = [{"a": -0.1, "b": -3.0}, {"b": -0.2}]
    with server(lambda self: self.say({"choices": [{"logprobs": {"top_logprobs": tops}}]})) as url:
        assert Engine(url, Alike(), 3).ask([1]) == [{2: -3.0}]
