"""A client of a server: log p of the likeliest next tokens, by OpenAI's /v1/completions.

Most servers take prompts of token ids; MLX takes text. Answers have one of two forms. In the older
one tokens are texts, or ids where vLLM is asked for them. In that of chats, llama.cpp and MLX add
ids. The request asks for what all servers give: five tokens at each of a few positions. At all but
the first of these, the keys of attention come from the server's cache.

llama.cpp leaves out positions whose token is a part of a character, and does not say which. Answers
that list fewer positions than they have tokens are not used.
"""

import json
import os
import re
import time
from collections import Counter
from contextlib import suppress
from functools import cached_property
from http import HTTPStatus
from http.client import HTTPException
from typing import Any
from urllib.error import URLError
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, Request

from calibrate.errors import CalibrateError, CoefficientsError
from calibrate.storage.strict_json import parse
from calibrate.store.addresses import read_answer

_ANSWER_SECONDS = 120.0
_MAX_ANSWER_BYTES = 1 << 20
_UNKNOWN_ID = -1
_MAX_LOG_P_ERROR = 1e-3  # nats, between two values that a server gives for one log p
_ADDRESS = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")
_TOKEN_ID = re.compile(r"token_id:(\d{1,9})")
_REMEDY = (
    "give the address of a server that lists log-probabilities at /v1/completions, as vLLM, "
    "SGLang, llama.cpp and MLX do, its key, if it needs one, in OPENAI_API_KEY, and prompts= that "
    "it reads"
)
_OLDER_FIELDS = {"logprobs": 5}
_CHAT_FIELDS = {"logprobs": True, "top_logprobs": 5}
# Forms of a request, the likeliest first: whether the prompt is token ids, and the fields that ask
# for log p. Strict servers refuse the field of vLLM.
_FORMS: tuple[tuple[bool, dict[str, Any]], ...] = (
    (True, _OLDER_FIELDS | {"return_tokens_as_token_ids": True}),
    (True, _OLDER_FIELDS),
    (False, _OLDER_FIELDS),
    (False, _CHAT_FIELDS),
)
_OPENER = OpenerDirector()  # follows no redirects and no proxies: the key is for one host
_OPENER.add_handler(HTTPHandler())
_OPENER.add_handler(HTTPSHandler())


class Engine:
    """A server that completes prompts of a model.

    Args:
      address: with or without /v1.
      tokenizer: of the model, for servers that take or list texts; None if there is none.
      vocabulary: number of tokens of the model.
      served: name of the model on the server, if that needs one.
      timeout: seconds for an answer; a clock is read between its parts.
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
        n_positions: int = 2,
    ):
        if not _ADDRESS.fullmatch(address):
            raise CalibrateError(
                "engine= is not an address such as http://localhost:8000", parameter="engine"
            )
        self.url = address.rstrip("/").removesuffix("/completions").removesuffix("/v1")
        self._key, self._tokenizer = os.environ.get("OPENAI_API_KEY", "").strip(), tokenizer
        if not (self._key.isascii() and self._key.isprintable()):  # http.client would show it
            raise CalibrateError("OPENAI_API_KEY is not a key; set it again")
        self._request: dict[str, Any] = {"temperature": 0, "max_tokens": n_positions}
        self._request |= {"model": served} if served else {}
        self._n_positions, self._vocabulary, self._timeout = n_positions, vocabulary, timeout
        self._forms = _FORMS
        self._refusal: str | None = None  # the answer to a prompt that no text has

    def ask(self, ids: list[int]) -> list[dict[int, float]]:
        """Returns log p by token id at each position after a prompt.

        The result is empty if no text has these ids and the server refuses ids, or if the answer
        leaves out positions.

        Raises:
          CalibrateError: no answer in time, or none with log p; the message has the reason.
        """
        first: str | None = None
        for form in self._forms:
            takes_ids, fields = form
            prompt = ids if takes_ids else self._find_text(ids)
            if prompt is None:
                self._refusal = first
                return []
            try:
                listings = self._read_listings(self._post(fields | {"prompt": prompt}), len(ids))
            except (OSError, HTTPException) as failure:
                raise self.failure(_reason(failure)) from failure
            except CalibrateError as refusal:
                first = first or str(refusal)
            else:
                self._forms = (form,)
                return listings
        raise self.failure(first)

    def failure(self, reason: str | None = None) -> CalibrateError:
        """Returns the error of a server without a usable answer, by default to prompts of ids."""
        reason = reason or self._refusal or "it answers no prompt as the tokens that it has"
        return CalibrateError(f"{self.url}: {reason}; {_REMEDY}", parameter="prompts")

    def _read_listings(self, answer: Any, n_tokens: int) -> list[dict[int, float]]:
        """Returns the listed tokens of an answer, up to a position after an unknown token.

        Args:
          n_tokens: length of the prompt.
        Raises:
          CalibrateError: there are none, or the server read another number of tokens.
        """
        listings = list[dict[int, float]]()
        with suppress(AttributeError, LookupError, TypeError, ValueError):
            usage = answer.get("usage") or {}
            if usage.get("prompt_tokens", n_tokens) != n_tokens:  # a server may add <s>, say
                raise CalibrateError(f"it reads {n_tokens:,} tokens as another number of tokens")
            log_probs = answer["choices"][0]["logprobs"]
            positions = _listed_positions(log_probs)
            if len(positions) < usage.get("completion_tokens", 0):
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
            raise CalibrateError("its answer has no log-probabilities of tokens of the model")
        return listings

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
        return key if type(key) is int and 0 <= key < self._vocabulary else _UNKNOWN_ID

    @cached_property
    def _ids_by_text(self) -> dict[str, int]:
        """The tokens whose text no other token has."""
        each = [[i] for i in range(len(self._tokenizer or ()))]
        texts = self._tokenizer.batch_decode(each) if each else []
        count = Counter(texts)
        return {text: i for i, text in enumerate(texts) if count[text] == 1}

    def _post(self, body: dict[str, Any]) -> Any:
        """Returns the answer to a request as JSON.

        Raises:
          CalibrateError: the server refuses the request. Its text is not shown, since it may
            contain the key.
        """
        data = json.dumps(self._request | body).encode()
        request = Request(f"{self.url}/v1/completions", data, {"Content-Type": "application/json"})
        if self._key:
            request.add_header("Authorization", f"Bearer {self._key}")
        end = time.monotonic() + self._timeout
        with _OPENER.open(request, timeout=self._timeout) as response:
            answer = read_answer(response, _MAX_ANSWER_BYTES, end)
        if response.status != HTTPStatus.OK:
            raise CalibrateError(f"HTTP {response.status}")
        if len(answer) > _MAX_ANSWER_BYTES:
            raise CalibrateError(f"an answer of more than {_MAX_ANSWER_BYTES:,} bytes")
        try:
            return parse(answer)
        except CoefficientsError:
            raise CalibrateError("its answer is not JSON") from None


def _reason(failure: Exception) -> str:
    """Returns why a server gave no answer."""
    cause: Any = failure.reason if isinstance(failure, URLError) else failure
    if isinstance(cause, TimeoutError):
        return "no answer in time"
    return getattr(cause, "strerror", None) or str(cause)


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
