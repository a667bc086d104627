"""What a server says: log p of its likeliest next tokens, by OpenAI's /v1/completions.

Most servers take token ids, MLX takes text. In OpenAI's older form of an answer tokens are text
(vLLM gives ids, if asked); in that of chats llama.cpp and MLX add ids. Asked for is what all give:
five tokens at each of two positions, the second of which has keys from the cache.
"""

import json
import os
import re
from collections import Counter
from functools import cached_property
from http.client import HTTPException
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from calibrate.errors import CalibrateError
from calibrate.files.strict_json import parse

PATIENCE = 120.0  # seconds for a whole answer
_MOST_BYTES = 1 << 20
_ADDRESS = re.compile(r"(https?://[^\s/?#@]+(?:/[^\s?#]*?)?)/?(?:/v1)?(?:/completions)?/?")
_TOKEN_ID = re.compile(r"token_id:(\d{1,9})")
_REMEDY = (
    "give the address of an OpenAI-compatible server with log-probabilities, such as "
    "http://localhost:8000, and its key, if it needs one, in OPENAI_API_KEY"
)
_ASKED = {"max_tokens": 2, "temperature": 0, "return_tokens_as_token_ids": True}
# Forms of a request, the likeliest first: whether the prompt is token ids, and what asks for log p.
_OLDER, _CHAT = {"logprobs": 5}, {"logprobs": True, "top_logprobs": 5}
_FORMS: tuple[tuple[bool, dict[str, Any]], ...] = ((True, _OLDER), (False, _OLDER), (False, _CHAT))


class _NoRedirect(HTTPRedirectHandler):
    """Leaves a redirect as an error: the key is for one host."""

    def redirect_request(self, *_: Any) -> None:
        pass


_OPENER = build_opener(_NoRedirect, ProxyHandler({}))


class Engine:
    """A server at an address, with or without /v1; `served` is the model's name there."""

    def __init__(self, address: str, tokenizer: Any, vocabulary: int, served: str | None = None):
        if not (found := _ADDRESS.fullmatch(address)):
            raise CalibrateError(f"--engine is not the address of a server; {_REMEDY}")
        self.url, self._tokenizer, self._vocabulary = found[1], tokenizer, vocabulary
        self._asked, self._forms = _ASKED | ({"model": served} if served else {}), _FORMS

    def ask(self, ids: list[int]) -> list[dict[int, float]]:
        """log p by token id at each position after a prompt; [] if it cannot be put as text.

        Raises:
          CalibrateError: no answer in time, or none with log p; the line says what it was.
        """
        first: Exception | None = None
        for form in self._forms:
            prompt = ids if form[0] else self._text(ids)
            if prompt is None:  # another prompt may tell
                return []
            try:
                answer = _post(
                    f"{self.url}/v1/completions", self._asked | form[1] | {"prompt": prompt}
                )
                found = self._read(answer, len(ids))
            except (OSError, HTTPException, CalibrateError) as failure:
                first = first or failure
                if isinstance(failure, TimeoutError):
                    break
            else:
                self._forms = (form,)
                return found
        what = str(getattr(first, "state", first)).replace(_key() or "\0", "***")
        raise CalibrateError(f"{self.url}: {what}; {_REMEDY}") from first

    def _read(self, answer: Any, n_tokens: int) -> list[dict[int, float]]:
        """What an answer lists, up to a position that follows a token unknown."""
        found = list[dict[int, float]]()
        try:
            said = answer["choices"][0]["logprobs"]
            tops = [
                {x["id"] if "id" in x else x["token"]: x["logprob"] for x in at["top_logprobs"]}
                for at in said["content"]
            ] if "content" in said else said["top_logprobs"]  # fmt: skip
            for top in tops[: _ASKED["max_tokens"]]:
                known = {self._id(key): float(p) for key, p in top.items() if -1e3 < p < 1e-3}
                found.append({i: p for i, p in known.items() if i is not None})
                if max(known, key=known.__getitem__) is None:
                    break
            n_read = answer.get("usage", {}).get("prompt_tokens", n_tokens)
        except (AttributeError, LookupError, TypeError, ValueError):
            found = []
        if not found or not found[0]:
            raise CalibrateError("no log-probabilities of known tokens")
        if n_read != n_tokens:  # it may add one that begins every text
            raise CalibrateError(f"a prompt of {n_tokens:,} tokens is read as {n_read}")
        return found

    def _text(self, ids: list[int]) -> str | None:
        """The text that a server makes these ids of; None if there is none."""
        if self._tokenizer is None:
            return None
        text: str = self._tokenizer.decode(ids[len(self._tokenizer("")["input_ids"]) :])
        return text if text and self._tokenizer(text)["input_ids"] == ids else None

    def _id(self, key: Any) -> int | None:
        """A token's id by what an answer calls it; None if that is not known, or means several."""
        if isinstance(key, str):
            told = _TOKEN_ID.fullmatch(key)
            key = int(told[1]) if told else self._ids.get(key)
        return key if type(key) is int and 0 <= key < self._vocabulary else None

    @cached_property
    def _ids(self) -> dict[str, int]:
        n = self._tokenizer and len(self._tokenizer)
        texts = self._tokenizer.batch_decode([[i] for i in range(n)]) if n else []
        count = Counter(texts)
        return {text: i for i, text in enumerate(texts) if count[text] == 1}


def _key() -> str | None:
    return os.environ.get("OPENAI_API_KEY")


def _post(url: str, body: dict[str, Any]) -> Any:
    headers = {"Authorization": f"Bearer {key}"} if (key := _key()) else {}
    headers |= {"Content-Type": "application/json"}
    request = Request(url, json.dumps(body).encode(), headers)
    answered = SimpleQueue[bytes | Exception]()

    def fetch() -> None:
        try:
            with _OPENER.open(request, timeout=PATIENCE) as answer:
                answered.put(answer.read(_MOST_BYTES + 1))
        except Exception as failure:
            if isinstance(failure, HTTPError):
                failure.close()
            answered.put(failure)

    Thread(target=fetch, daemon=True).start()  # the timeout of a socket is for each byte
    try:
        found = answered.get(timeout=PATIENCE)
    except Empty:
        raise TimeoutError(f"no answer within {PATIENCE:g} s") from None
    if isinstance(found, Exception):
        raise found
    if len(found) > _MOST_BYTES:
        raise CalibrateError(f"an answer of more than {_MOST_BYTES:,} bytes")
    return parse(found)
