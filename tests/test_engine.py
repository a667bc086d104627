"""The client of a server: forms of answers, servers of another kind, deadlines, the key."""

import time
import urllib.parse

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
        (lambda self: self.say(b"Not Found", 404), "HTTP 404 (Not Found)"),
        (lambda self: self.say({"error": "key"}, 401), 'HTTP 401 ({"error": "key"})'),
        (lambda self: self.say(b"<html>"), "not JSON"),
        (lambda self: self.say(b'{"choices": NaN}'), "not JSON"),
        (lambda self: self.say({"choices": [{"logprobs": None}]}), "no log-probabilities"),
        (lambda self: self.say(listing("token_id:512", -1)), " 512, and the model has 0 to 511"),
        (lambda self: self.say(listing("token_id:5", 0.4)), "no log-probabilities"),
        (lambda self: self.say(listing("token_id:5", -1) | {"usage": {"prompt_tokens": 7}}),
         "a prompt of 1 tokens is read as 7"),
        (without_end, " 1,048,576 bytes"),
        (slowly, "no answer within 0.3 s"),
        (lambda self: time.sleep(0.5), "no answer within 0.3 s"),
        (lambda self: None, "closed connection"),
    ],
)  # fmt: skip
def test_servers_of_another_kind(tokenizer, answer, reason):
    timeout = 0.3 if "within" in reason else 5.0
    with server(answer) as url, pytest.raises(CalibrateError) as refused:
        Engine(f"{url}/v1/", tokenizer, VOCABULARY, timeout=timeout).ask([5])
    assert str(refused.value).startswith(f"{url}: ")
    assert reason in str(refused.value)
    assert refused.value.parameters == ("prompts",)


def test_all_answers_of_a_server_have_one_deadline():
    """Though each of them comes in time."""
    asked = []

    def answer(self):
        asked.append(self.body)
        time.sleep(0.1)
        self.say(listing("token_id:5", -1))

    with server(answer) as url:
        engine = Engine(url, None, VOCABULARY, timeout=60.0, total=0.5)
        with pytest.raises(CalibrateError, match=r" 0\.5 s "):
            [engine.ask([5]) for _ in range(20)]
        n_asked = len(asked)
        assert 2 <= n_asked < 10
        with pytest.raises(CalibrateError, match=r" 0\.5 s "):
            engine.ask([5])
    assert len(asked) == n_asked


def test_nobody_there():
    with server(lambda self: None) as url:
        pass
    engine = Engine(url, None, VOCABULARY)
    assert engine.ask([5]) == []
    with pytest.raises(CalibrateError, match="connection refused"):
        engine.require_prompts([])


def test_a_server_with_a_short_context():
    """It has answered other prompts, so the address is right."""

    def answer(self):
        takes = len(self.body["prompt"]) < 3
        self.say(listing("token_id:5", -1) if takes else {}, 200 if takes else 400)

    with server(answer) as url:
        engine = Engine(url, None, VOCABULARY)
        assert engine.ask([5, 6]) == [{5: -1.0}]
        with pytest.raises(CalibrateError, match="longer context") as refused:
            engine.ask([5, 6, 7])
    assert refused.value.parameters == ("prompts",)


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
            with pytest.raises(CalibrateError, match="HTTP 307"):
                engine.require_prompts([])
    assert set(asked) == {"Bearer sk-secret"}
    assert elsewhere == []
    monkeypatch.setenv("OPENAI_API_KEY", "sk-\nsecret")
    with pytest.raises(CalibrateError, match="OPENAI_API_KEY") as refused:
        Engine(url, None, VOCABULARY)
    assert "secret" not in str(refused.value)


def with_slashes_escaped(text):
    """As PHP writes JSON."""
    return text.replace("/", "\\/")


@pytest.mark.parametrize("n_cut", [0, 9])
@pytest.mark.parametrize("write", [str, urllib.parse.quote_plus, with_slashes_escaped])
@pytest.mark.parametrize("key", ["a/b+c=d/e0f1g2h3", "a/b%41c=d/e0f1g2"])
def test_a_text_that_echoes_the_key_is_not_shown(monkeypatch, key, write, n_cut):
    """The server may cut it, and the client does after 200 letters."""
    monkeypatch.setenv("OPENAI_API_KEY", key)

    def answer(self):
        self.say(("x" * 190 + write(key[: len(key) - n_cut])).encode(), 400)

    with server(answer) as url:
        engine = Engine(url, None, VOCABULARY)
        assert engine.ask([1, 2]) == []
        with pytest.raises(CalibrateError, match="HTTP 400") as refused:
            engine.require_prompts([])
    shown = str(refused.value).replace("\\/", "/")
    assert key[:6] not in shown
    assert key[:6] not in urllib.parse.unquote(shown)


@pytest.mark.parametrize("before", [0, 960, 990])
def test_a_key_is_masked_in_what_an_answer_says_of_its_tokens(monkeypatch, before):
    """Long messages are cut in the middle, after 1,000 letters."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-proj-0123456789abcdefghijklmnopqrstuvwxyz")

    def answer(self):
        read_as = "x" * before + self.headers["Authorization"] + "y" * 2000
        self.say({"usage": {"prompt_tokens": read_as}, "choices": []})

    with server(answer) as url:
        engine = Engine(url, None, VOCABULARY)
        assert engine.ask([1, 2]) == []
        with pytest.raises(CalibrateError, match="is read as") as refused:
            engine.require_prompts([])
    assert "sk-pro" not in str(refused.value)


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
