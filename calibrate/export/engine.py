"""A client of a server: log p of the likeliest next tokens, by OpenAI's /v1/completions.

Most servers take prompts of token ids; MLX takes text. Answers have one of two forms. In the older
one tokens are texts, or ids where vLLM is asked for them. In that of chats, llama.cpp and MLX add
ids. The request asks for what all servers give: five tokens at each of two or more positions. At
all but the first of these, the keys of attention come from the server's cache.

llama.cpp leaves out positions whose token is a part of a character, and does not say which. Answers
that list fewer positions than they have tokens are not used.
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
from urllib.parse import unquote
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, Request

from calibrate.errors import CalibrateError
from calibrate.storage.strict_json import parse
from calibrate.store.addresses import read_answer

_ANSWER_SECONDS = 120.0
_MAX_FULL_ANSWERS = 5  # answers of full length that all answers together may take
_MAX_ANSWER_BYTES = 1 << 20
_KEY_PREFIX = 6  # letters of a key by which an echo of it is recognised
_UNKNOWN_ID = -1
_MAX_LOG_P_ERROR = 1e-3  # nats, between two values that a server gives for one log p
_ADDRESS = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")
_TOKEN_ID = re.compile(r"token_id:(\d{1,9})")
_REMEDY = (
    "give the address of a server that lists log-probabilities at /v1/completions, as vLLM, "
    "SGLang, llama.cpp and MLX do, and its key, if it needs one, in OPENAI_API_KEY"
)
_AFTER_ANSWERS = (  # to a prompt beyond the server's context, say
    "it has answered other prompts: give prompts= that it takes, or start it with a longer context"
)
_TOKENS_AS_IDS = "return_tokens_as_token_ids"  # of vLLM; strict servers refuse unknown fields
_REQUEST: dict[str, Any] = {"temperature": 0, _TOKENS_AS_IDS: True}
# Forms of a request, the likeliest first: whether the prompt is token ids, and the fields that ask
# for log p.
_OLDER_FIELDS = {"logprobs": 5}
_CHAT_FIELDS = {"logprobs": True, "top_logprobs": 5}
_FORMS: tuple[tuple[bool, dict[str, Any]], ...] = (
    (True, _OLDER_FIELDS),
    (False, _OLDER_FIELDS),
    (False, _CHAT_FIELDS),
)
_OPENER = OpenerDirector()  # follows no redirects and no proxies: the key is for one host
_OPENER.add_handler(HTTPHandler())
_OPENER.add_handler(HTTPSHandler())


class _NotListedError(CalibrateError):
    """An answer without usable log-probabilities."""


class Engine:
    """A server that completes prompts of a model.

    Each answer has a time limit, and all answers together have one: sockets have a timeout, and a
    clock is read between the parts of an answer.

    Args:
      address: with or without /v1.
      tokenizer: of the model, for servers that take or list texts; None if there is none.
      vocabulary: number of tokens of the model.
      served: name of the model on the server, if that needs one.
      timeout: seconds for an answer.
      total: seconds for all answers; by default five timeouts.
      n_positions: number of next positions to ask for.
    Raises:
      CalibrateError: the address, or the key in OPENAI_API_KEY, is malformed.
    """

    def __init__(
        self,
        address: str,
        tokenizer: Any,
        vocabulary: int,
        served: str | None = None,
        timeout: float = _ANSWER_SECONDS,
        total: float | None = None,
        n_positions: int = 2,
    ):
        if not _ADDRESS.fullmatch(address):
            raise CalibrateError(
                f"engine= is not the address of a server; {_REMEDY}", parameter="engine"
            )
        self.url = address.rstrip("/").removesuffix("/completions").removesuffix("/v1")
        self._key, self._tokenizer = os.environ.get("OPENAI_API_KEY", "").strip(), tokenizer
        if not (self._key.isascii() and self._key.isprintable()):  # http.client would show it
            raise CalibrateError("OPENAI_API_KEY is not a key; set it again")
        self._request = _REQUEST | {"max_tokens": n_positions}
        self._request |= {"model": served} if served else {}
        self._n_positions = n_positions
        self._forms, self._vocabulary, self._timeout = _FORMS, vocabulary, timeout
        self._total = _MAX_FULL_ANSWERS * timeout if total is None else total
        self._deadline = time.monotonic() + self._total
        self._refusal: Exception | None = None  # the answer to token ids, if they were refused
        self._foreign: int | None = None  # a listed token that the model does not have
        self._left_out = False  # True if an answer listed fewer positions than it has tokens

    def ask(self, ids: list[int]) -> list[dict[int, float]]:
        """Returns log p by token id at each position after a prompt.

        The result is empty if no text has these ids, or if the answer leaves out positions.

        Raises:
          CalibrateError: no answer in time, or none with log p; the message has the reason.
        """
        first: Exception | None = None
        remedy = _REMEDY if len(self._forms) > 1 else _AFTER_ANSWERS
        for form in self._forms:
            takes_ids, fields = form
            prompt = ids if takes_ids else self._find_text(ids)
            if prompt is None:
                self._refusal = self._refusal or first
                return []
            try:
                listings = self._read_listings(self._post(fields | {"prompt": prompt}), len(ids))
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
        """Raises CalibrateError unless a prompt of several tokens was answered.

        Args:
          lengths: tokens of the prompts that were answered.
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
        if longest or self._refusal is None:
            raise CalibrateError(
                f"{self.url} reads no prompt as the tokens that it has; give prompts=",
                parameter="prompts",
            )
        remedy = f"{_REMEDY}, or prompts that are text"
        raise self._failed(self._refusal, remedy) from self._refusal

    def _late(self, remedy: str) -> CalibrateError:
        """Returns the error of one answer, or of all answers together, that took too long."""
        if time.monotonic() < self._deadline:
            return self._failed(TimeoutError(f"no answer within {self._timeout:g} s"), remedy)
        late = TimeoutError(f"its answers take more than {self._total:g} s together")
        return self._failed(late, "give fewer or shorter prompts=")

    def _failed(self, failure: Exception, remedy: str) -> CalibrateError:
        text = f"{self.url}: {self._without_key(_reason(failure))}; {remedy}"
        return CalibrateError(text, parameter="prompts")

    def _without_key(self, text: str) -> str:
        """Returns a text from the server, or "***" if it has the first letters of the key.

        Must be called before the text is cut, since a key that was cut short is not recognised.
        """
        plain = text.replace("\\/", "/")  # some servers escape slashes in JSON
        prefix, forms = self._key[:_KEY_PREFIX], (plain, unquote(plain))  # a key may have a %
        return "***" if prefix and any(prefix in form for form in forms) else text

    def _read_listings(self, answer: Any, n_tokens: int) -> list[dict[int, float]]:
        """Returns the listed tokens of an answer, up to a position after an unknown token.

        Args:
          n_tokens: length of the prompt.
        Raises:
          _NotListedError: there are none, or the server read another number of tokens.
        """
        listings = list[dict[int, float]]()
        with suppress(AttributeError, LookupError, TypeError, ValueError):
            usage = answer.get("usage") or {}
            n_read = usage.get("prompt_tokens", n_tokens)
            if n_read != n_tokens:  # a server may add <s>, say
                read_as = self._without_key(str(n_read))
                raise _NotListedError(f"a prompt of {n_tokens:,} tokens is read as {read_as}")
            log_probs = answer["choices"][0]["logprobs"]
            positions = _listed_positions(log_probs)
            if len(positions) < usage.get("completion_tokens", 0):
                self._left_out = True
                return []
            for listed in _until_hidden(positions, log_probs)[: self._n_positions]:
                known = {
                    self._find_id(key): float(p) for key, p in listed.items() if -1e3 < p < 1e-3
                }
                known.pop(_UNKNOWN_ID, None)
                listings += [known] if known else []
                if self._find_id(max(listed, key=listed.__getitem__)) == _UNKNOWN_ID:
                    break
        if not listings:
            raise _NotListedError(f"no log-probabilities of known tokens{self._foreign_clause()}")
        return listings

    def _foreign_clause(self) -> str:
        """Returns a clause on a listed token that the model does not have; "" if none was."""
        if self._foreign is None:
            return ""
        return (
            f": it lists token {self._foreign:,}, and the model has 0 to {self._vocabulary - 1:,}; "
            "serve the same model"
        )

    def _find_text(self, ids: list[int]) -> str | None:
        """Returns a text that the tokenizer turns into these ids; None if there is none."""
        if self._tokenizer is None:
            return None
        begin, encode = self._tokenizer("")["input_ids"], self._tokenizer
        text: str = encode.decode(ids[len(begin) :])
        return text if text and encode(text, verbose=False)["input_ids"] == ids else None

    def _find_id(self, key: Any) -> int:
        """Returns the id of a token as an answer calls it; _UNKNOWN_ID if not exactly one fits."""
        if isinstance(key, str):
            match = _TOKEN_ID.fullmatch(key)
            key = int(match[1]) if match else self._ids_by_text.get(key)
        if type(key) is int and key >= self._vocabulary:
            self._foreign = key
        return key if type(key) is int and 0 <= key < self._vocabulary else _UNKNOWN_ID

    @cached_property
    def _ids_by_text(self) -> dict[str, int]:
        """The tokens whose text no other token has."""
        each = [[i] for i in range(len(self._tokenizer or ()))]
        texts = self._tokenizer.batch_decode(each) if each else []
        count = Counter(texts)
        return {text: i for i, text in enumerate(texts) if count[text] == 1}

    def _post(self, body: dict[str, Any]) -> Any:
        """Returns the answer to a request as JSON; once more without vLLM's field if refused."""
        data = json.dumps(self._request | body).encode()
        request = Request(f"{self.url}/v1/completions", data, {"Content-Type": "application/json"})
        if self._key:
            request.add_header("Authorization", f"Bearer {self._key}")
        now = time.monotonic()
        timeout = min(self._timeout, self._deadline - now)
        if timeout <= 0:
            raise TimeoutError
        with _OPENER.open(request, timeout=timeout) as response:
            answer = read_answer(response, _MAX_ANSWER_BYTES, now + timeout)
        if response.status == HTTPStatus.UNPROCESSABLE_ENTITY and _TOKENS_AS_IDS in self._request:
            del self._request[_TOKENS_AS_IDS]
            return self._post(body)
        if response.status != HTTPStatus.OK:
            text = self._without_key(answer.decode(errors="replace"))[:200]
            raise CalibrateError(f"HTTP {response.status} ({text})")
        if len(answer) > _MAX_ANSWER_BYTES:
            raise CalibrateError(f"an answer of more than {_MAX_ANSWER_BYTES:,} bytes")
        return parse(answer)


def _says_more(failure: Exception, other: Exception) -> bool:
    """Returns True if a failure concerns an answer, and the other a request that was refused."""
    return isinstance(failure, _NotListedError) and not isinstance(other, _NotListedError)


def _cause(failure: Exception) -> Any:
    """Returns the reason that urllib wraps, or the failure itself."""
    return failure.reason if isinstance(failure, URLError) else failure


def _reason(failure: Exception) -> str:
    """Returns what went wrong, in words."""
    cause = _cause(failure)
    if isinstance(cause, ConnectionRefusedError):
        return "connection refused: no server listens at this address"
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return str(getattr(cause, "state", cause))


def _listed_positions(log_probs: Any) -> list[dict[Any, float]]:
    """Returns log p by token at each position of an answer, in whichever form it is."""
    if "content" not in log_probs:
        positions: list[dict[Any, float]] = log_probs["top_logprobs"]
        return positions
    return [
        {x["id"] if "id" in x else x["token"]: x["logprob"] for x in position["top_logprobs"]}
        for position in log_probs["content"]
    ]


def _until_hidden(positions: list[dict[Any, float]], log_probs: Any) -> list[dict[Any, float]]:
    """Returns the positions up to the first whose likeliest token is not listed.

    A listing by text has one of several tokens with the same text. It may be less likely than the
    token that the server chose, so later positions follow an unknown token.
    """
    chosen = log_probs.get("token_logprobs") or ()
    for i, (listed, p) in enumerate(zip(positions, chosen, strict=False)):
        if listed and p is not None and max(listed.values()) < p - _MAX_LOG_P_ERROR:
            return positions[: i + 1]
    return positions
