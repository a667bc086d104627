"""Requests to a server: log p of its likeliest next tokens, by OpenAI's /v1/completions.

Most servers take token ids, MLX takes text. In OpenAI's older form of an answer tokens are text
(vLLM gives ids, if asked); in that of chats llama.cpp and MLX add ids. Asked for is what all give:
five tokens at each of two positions or more, whose keys are from the cache but for the first.

llama.cpp leaves out the positions whose token is a part of a character, and does not say which. An
answer that lists fewer positions than it has tokens is not used.
"""

import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from http import HTTPStatus
from http.client import HTTPException
from typing import Any
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, Request

from calibrate.errors import CalibrateError
from calibrate.storage.deadline import read_answer
from calibrate.storage.strict_json import parse

TIMEOUT = 120.0  # seconds for an answer
_TOTAL = 5  # timeouts, for all answers of a server together
_MAX_BYTES = 1 << 20
_RECOGNISED = 6  # letters of a key, the fewest by which a part of it is recognised
_UNKNOWN = -1
_SAME = 1e-3  # nats: the most that a server's two values of one log p differ
_ADDRESS = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")
_TOKEN_ID = re.compile(r"token_id:(\d{1,9})")
_REMEDY = (
    "give the address of a server that lists log-probabilities at /v1/completions, as vLLM, "
    "SGLang, llama.cpp and MLX do, and its key, if it needs one, in OPENAI_API_KEY"
)
_AFTER_ANSWERS = (  # to a prompt beyond the server's context, say
    "it has answered other prompts: give prompts= that it takes, or start it with a longer context"
)
_TOKENS_AS_IDS = "return_tokens_as_token_ids"  # of vLLM; strict servers refuse what is not OpenAI's
_REQUEST: dict[str, Any] = {"temperature": 0, _TOKENS_AS_IDS: True}
# Forms of a request, the likeliest first: whether the prompt is token ids, and what asks for log p.
_OLDER = {"logprobs": 5}
_CHAT = {"logprobs": True, "top_logprobs": 5}
_FORMS: tuple[tuple[bool, dict[str, Any]], ...] = ((True, _OLDER), (False, _OLDER), (False, _CHAT))
_OPENER = OpenerDirector()  # knows no redirects and no proxies: the key is for one host
_OPENER.add_handler(HTTPHandler())
_OPENER.add_handler(HTTPSHandler())


class _NotListedError(CalibrateError):
    """An answer without log-probabilities that can be used."""


class Engine:
    """A server at an address, with or without /v1.

    Args:
      served: the model's name there.
      timeout: seconds for an answer.
      total: seconds for all answers together; by default five timeouts.
      n_positions: the positions after a prompt that are asked for.
    """

    def __init__(
        self,
        address: str,
        tokenizer: Any,
        vocabulary: int,
        served: str | None = None,
        timeout: float = TIMEOUT,
        total: float | None = None,
        n_positions: int = 2,
    ):
        if not _ADDRESS.fullmatch(address):
            raise CalibrateError(
                f"engine= is not the address of a server; {_REMEDY}", parameter="engine"
            )
        self.url = address.rstrip("/").removesuffix("/completions").removesuffix("/v1")
        self._key, self._tokenizer = os.environ.get("OPENAI_API_KEY", "").strip(), tokenizer
        if not (self._key.isascii() and self._key.isprintable()):  # errors of HTTP would show it
            raise CalibrateError("OPENAI_API_KEY is not a key; set it again")
        self._request = _REQUEST | {"max_tokens": n_positions}
        self._request |= {"model": served} if served else {}
        self._n_positions = n_positions
        self._forms, self._vocabulary, self._timeout = _FORMS, vocabulary, timeout
        self._total = _TOTAL * timeout if total is None else total
        self._ends = time.monotonic() + self._total
        self._refused: Exception | None = None  # why it took no token ids
        self._foreign: int | None = None  # a token that it listed, and the model does not have
        self._left_out = False  # True if an answer lists fewer positions than it has tokens

    def ask(self, ids: list[int]) -> list[dict[int, float]]:
        """log p by token id at each position after a prompt.

        Returns:
          [] if no text has these ids, or if the answer leaves out positions.
        Raises:
          CalibrateError: no answer in time, or none with log p; the line says what it was.
        """
        first: Exception | None = None
        remedy = _REMEDY if len(self._forms) > 1 else _AFTER_ANSWERS
        for form in self._forms:
            prompt = ids if form[0] else self._text(ids)
            if prompt is None:
                self._refused = self._refused or first
                return []
            try:
                listings = self._read(self._post(form[1] | {"prompt": prompt}), len(ids))
            except (OSError, HTTPException, ValueError, CalibrateError) as failure:
                if isinstance(_cause(failure), TimeoutError):
                    raise self._late(remedy) from failure
                if first is None or _says_more(failure, first):
                    first = failure
            else:
                self._forms = (form,)
                return listings
        assert first is not None
        raise self._failed(first, remedy) from first

    def require_prompts(self, lengths: Iterable[int]) -> None:
        """Raises CalibrateError unless prompts of several tokens were answered.

        Args:
          lengths: of the prompts that were answered, in tokens. If there are none, the line says
            why the server took no token ids.
        """
        longest = max(lengths, default=0)
        if longest > 1:
            return
        if self._left_out:
            raise CalibrateError(
                f"{self.url} lists fewer positions than tokens, as llama.cpp does where a token is "
                "a part of a character; give prompts= whose answers are words",
                parameter="prompts",
            )
        if longest or self._refused is None:
            raise CalibrateError(
                f"{self.url} reads no prompt as the tokens that it has; give prompts=",
                parameter="prompts",
            )
        remedy = f"{_REMEDY}, or prompts that are text"
        raise self._failed(self._refused, remedy) from self._refused

    def _late(self, remedy: str) -> CalibrateError:
        """The error of a server that has no time left, for an answer or for all of them."""
        if time.monotonic() < self._ends:
            return self._failed(TimeoutError(f"no answer within {self._timeout:g} s"), remedy)
        late = TimeoutError(f"its answers take more than {self._total:g} s together")
        return self._failed(late, "give fewer or shorter prompts=")

    def _failed(self, failure: Exception, remedy: str) -> CalibrateError:
        text = f"{self.url}: {self._masked(_reason(failure))}; {remedy}"
        return CalibrateError(text, parameter="prompts")

    def _masked(self, text: str) -> str:
        """Text from the server with "***" for the key, and for its first letters if it is cut.

        To be called before a text is cut, by which a key would no longer be recognised.
        """
        text = text.replace("\\/", "/")  # as some servers write JSON
        for key in dict.fromkeys((self._key, quote(self._key, safe=""))):
            for length in range(len(key), min(len(key), _RECOGNISED) - 1, -1):
                text = text.replace(key[:length], "***") if length else text
        return text

    def _read(self, answer: Any, n_tokens: int) -> list[dict[int, float]]:
        """The tokens listed in an answer, up to a position that follows an unknown one."""
        listings = list[dict[int, float]]()
        with suppress(AttributeError, LookupError, TypeError, ValueError):
            usage = answer.get("usage") or {}
            n_read = usage.get("prompt_tokens", n_tokens)
            if n_read != n_tokens:  # a server may add <s>, say
                read_as = self._masked(str(n_read))
                raise _NotListedError(f"a prompt of {n_tokens:,} tokens is read as {read_as}")
            log_probs = answer["choices"][0]["logprobs"]
            tops = _top_tokens(log_probs)
            if len(tops) < usage.get("completion_tokens", 0):
                self._left_out = True
                return []
            for top in _up_to_hidden(tops, log_probs)[: self._n_positions]:
                known = {self._id(key): float(p) for key, p in top.items() if -1e3 < p < 1e-3}
                known.pop(_UNKNOWN, None)
                listings += [known] if known else []
                if self._id(max(top, key=top.__getitem__)) == _UNKNOWN:
                    break
        if not listings:
            raise _NotListedError(f"no log-probabilities of known tokens{self._others()}")
        return listings

    def _others(self) -> str:
        """A clause on a token that the model does not have; "" if none was listed."""
        if self._foreign is None:
            return ""
        return (
            f": it lists token {self._foreign:,}, and the model has 0 to {self._vocabulary - 1:,}; "
            "serve the same model"
        )

    def _text(self, ids: list[int]) -> str | None:
        """The text that a server makes these ids of; None if there is none."""
        if self._tokenizer is None:
            return None
        begin, encode = self._tokenizer("")["input_ids"], self._tokenizer
        text: str = encode.decode(ids[len(begin) :])
        return text if text and encode(text, verbose=False)["input_ids"] == ids else None

    def _id(self, key: Any) -> int:
        """A token's id by what an answer calls it; _UNKNOWN if none or several are called so."""
        if isinstance(key, str):
            match = _TOKEN_ID.fullmatch(key)
            key = int(match[1]) if match else self._ids.get(key)
        if type(key) is int and key >= self._vocabulary:
            self._foreign = key
        return key if type(key) is int and 0 <= key < self._vocabulary else _UNKNOWN

    @cached_property
    def _ids(self) -> dict[str, int]:
        each = [[i] for i in range(len(self._tokenizer or ()))]
        texts = self._tokenizer.batch_decode(each) if each else []
        count = Counter(texts)
        return {text: i for i, text in enumerate(texts) if count[text] == 1}

    def _post(self, body: dict[str, Any]) -> Any:
        data = json.dumps(self._request | body).encode()
        request = Request(f"{self.url}/v1/completions", data, {"Content-Type": "application/json"})
        if self._key:
            request.add_header("Authorization", f"Bearer {self._key}")

        now = time.monotonic()
        timeout = min(self._timeout, self._ends - now)
        if timeout <= 0:
            raise TimeoutError
        with _OPENER.open(request, timeout=timeout) as response:
            answer = read_answer(response, _MAX_BYTES, now + timeout)
        if response.status == HTTPStatus.UNPROCESSABLE_ENTITY and _TOKENS_AS_IDS in self._request:
            del self._request[_TOKENS_AS_IDS]
            return self._post(body)
        if response.status != HTTPStatus.OK:
            said = self._masked(answer.decode(errors="replace"))[:200]
            raise CalibrateError(f"HTTP {response.status} ({said})")
        if len(answer) > _MAX_BYTES:
            raise CalibrateError(f"an answer of more than {_MAX_BYTES:,} bytes")
        return parse(answer)


def _says_more(failure: Exception, than: Exception) -> bool:
    """True if a failure is of an answer, and the other of a request that was refused."""
    return isinstance(failure, _NotListedError) and not isinstance(than, _NotListedError)


def _cause(failure: Exception) -> Any:
    """The failure itself, or what urllib gives as its reason."""
    return failure.reason if isinstance(failure, URLError) else failure


def _reason(failure: Exception) -> str:
    """What went wrong, in words."""
    cause = _cause(failure)
    if isinstance(cause, ConnectionRefusedError):
        return "connection refused: no server listens at this address"
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return str(getattr(cause, "state", cause))


def _top_tokens(log_probs: Any) -> list[dict[Any, float]]:
    """The log-probabilities of an answer by token, for each position, in whichever form it has."""
    if "content" not in log_probs:
        tops: list[dict[Any, float]] = log_probs["top_logprobs"]
        return tops
    return [
        {x["id"] if "id" in x else x["token"]: x["logprob"] for x in position["top_logprobs"]}
        for position in log_probs["content"]
    ]


def _up_to_hidden(tops: list[dict[Any, float]], log_probs: Any) -> list[dict[Any, float]]:
    """The positions up to the first whose likeliest token is not listed.

    Of several tokens with one text a listing by text has one, which may be less likely than that
    which the server went on with.
    """
    chosen = log_probs.get("token_logprobs") or ()
    for i, (top, p) in enumerate(zip(tops, chosen, strict=False)):
        if top and p is not None and max(top.values()) < p - _SAME:
            return tops[: i + 1]
    return tops
