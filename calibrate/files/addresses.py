"""Fits at an address: https://HOST/FILE#sha256:HEX, and hf:ORG/NAME@REVISION#sha256:HEX.

The pin is the digest of the file's bytes, so that it covers name, quality and verdict too. Bytes
that a pin names are kept in the user's cache folder, and load without a network from then on.
Servers are hostile: 1 MiB at most, in limited time, from https alone; nothing else is kept.
"""

import re
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from http.client import HTTPException
from pathlib import Path
from textwrap import shorten
from threading import Thread
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import calibrate
from calibrate.errors import CalibrateError, CoefficientsError
from calibrate.files.atomic_io import read_file, user_cache, write_atomically
from calibrate.files.coefficient_file import ADAPTER_FIT, MAX_BYTES, loads
from calibrate.files.coefficient_schema import DIGEST
from calibrate.files.coefficients import Coefficients
from calibrate.files.npz import digest_of

READ_SECONDS = 10.0  # to connect, and for each piece that a server sends
TOTAL_SECONDS = 30.0
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
# Short enough for a message that has the address twice.
_PLAIN = re.compile(r"[!-~]{1,600}")
_HUB = re.compile(r"hf:(\w[\w.-]*/\w[\w.-]*)((?:/\w[\w.-]*)*)@([\w./-]+)")
_TOO_LONG = "it is longer than 1 MiB, and no coefficient file is"


def load_address(address: str, allow_unpinned: bool = False) -> Coefficients:
    """Loads the fit at an address, from the cache if the pin's bytes are there.

    Args:
      allow_unpinned: load what is there now; the fit's `address` then has the pin.
    Raises:
      CoefficientsError: the address is not valid or has no pin, its file cannot be fetched, is
        another than the pin's, or breaks the format.
    """
    if not _PLAIN.fullmatch(address):
        raise CoefficientsError(
            f"{address!r} is not a valid address; give at most 600 printable characters of ASCII, "
            "others percent-encoded"
        )
    where, mark, pin = address.partition("#")
    if mark and not DIGEST.pattern.fullmatch(pin):
        raise CoefficientsError(f"the pin of {where} is {pin!r}; {DIGEST.remedy}, in lower case")
    data = (_kept(pin) if pin else None) or _fetch(where)
    digest = digest_of(data)
    if not pin and not allow_unpinned:
        raise CoefficientsError(
            f"{where} has no pin, and may change; if you trust what is there now, give "
            f"{where}#{digest}"
        )
    if pin not in ("", digest):
        raise CoefficientsError(
            f"{where} has {digest}, and its pin is {pin}: it changed, or the pin is of another "
            "file; ask who published it"
        )
    try:
        fit = loads(data)
    except CoefficientsError as refusal:
        raise CoefficientsError(f"{where}: {refusal}") from None
    return replace(fit, path=_keep(digest, data), address=f"{where}#{digest}")


def _cache_path(digest: str) -> Path:
    return user_cache() / "fits" / f"{digest.removeprefix('sha256:')}.json"


def _kept(digest: str) -> bytes | None:
    """The bytes with a digest, from the cache; None if they are absent or damaged."""
    with suppress(OSError, RuntimeError):  # RuntimeError: there is no home
        data = read_file(_cache_path(digest), MAX_BYTES)
        return data if digest_of(data) == digest else None
    return None


def _keep(digest: str, data: bytes) -> Path | None:
    """Keeps bytes in the cache; None if it cannot be written: the fit loads all the same."""
    with suppress(CalibrateError, OSError, RuntimeError):
        path = _cache_path(digest)
        if _kept(digest) is None:
            write_atomically(path, data)
        return path
    return None


def _fetch(where: str) -> bytes:
    """The bytes at an address, whatever they are.

    Raises:
      CoefficientsError: in one line, why they cannot be had.
    """
    read = _from_hub if where.startswith("hf:") else _from_web
    try:
        return _within(TOTAL_SECONDS, partial(read, where))
    except HTTPError as failure:
        failure.close()
        reason = f"the server answered {failure.code} {failure.msg}"
    except (OSError, HTTPException, ValueError) as failure:
        cause = failure.reason if isinstance(failure, URLError) else failure
        reason = str(cause) or type(cause).__name__
        if isinstance(cause, TimeoutError):
            reason = f"no answer in {READ_SECONDS:g} seconds, or not all in {TOTAL_SECONDS:g}"
    raise CoefficientsError(
        f"cannot fetch {where}: {reason}; check the address and the network, or load a copy of "
        "the file by its path"
    )


def _within(seconds: float, act: Callable[[], bytes]) -> bytes:
    """What `act` returns; TimeoutError if that takes longer, whatever it waits for.

    A thread, as looking up a host and reading headers have no limit of their own. It is left
    behind, and does not keep the process from ending.
    """
    found: Future[bytes] = Future()

    def run() -> None:
        try:
            found.set_result(act())
        except Exception as failure:
            found.set_exception(failure)

    Thread(target=run, daemon=True).start()
    return found.result(seconds)


def _from_web(url: str) -> bytes:
    _check(url, url)
    request = Request(url, headers={"User-Agent": f"calibrate/{calibrate.__version__}"})
    with build_opener(_Redirects).open(request, timeout=READ_SECONDS) as answer:
        data: bytes = answer.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise URLError(_TOO_LONG)
        if answer.length:
            raise URLError(f"the connection ended {answer.length:,} bytes early")
    return data


class _Redirects(HTTPRedirectHandler):
    """Follows redirects to https; urllib itself refuses loops and other schemes than HTTP's."""

    def redirect_request(self, req: Any, fp: Any, *of: Any) -> Request | None:
        url = of[-1]
        try:
            _check(url, req.full_url)
        except URLError:
            fp.close()
            raise
        return super().redirect_request(req, fp, *of)


def _check(url: str, source: str) -> None:
    """Raises URLError of a URL, to which `source` leads, that may not be read."""
    parts = urlsplit(url)
    is_local = {parts.hostname, urlsplit(source).hostname} <= _LOOPBACK
    it = "it" if url == source else f"it leads to {url}, which"
    if parts.scheme != "https" and not (parts.scheme == "http" and is_local):
        raise URLError(f"{it} is not https")
    if not parts.hostname or parts.username is not None:
        raise URLError(f"{it} has no host, or a user name beside it")


def _from_hub(where: str) -> bytes:
    """A file of a model's repository, with the user's endpoint, token and cache of the Hub."""
    match = _HUB.fullmatch(where)
    if not match:
        raise CoefficientsError(
            f"{where} is not a valid address; give hf:ORG/NAME@REVISION or "
            "hf:ORG/NAME/FILE@REVISION: a commit, a tag or a branch"
        )
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise CoefficientsError(
            f"{where} needs the package huggingface_hub: pip install huggingface_hub"
        ) from None
    repository, file, revision = match[1], match[2][1:] or ADAPTER_FIT, match[3]
    path = None
    try:
        found = hf_hub_download(repository, file, revision=revision, dry_run=True)
        if found.file_size <= MAX_BYTES:
            path = hf_hub_download(repository, file, revision=revision)
    except Exception as failure:  # also of its HTTP library, which differs by version
        raise URLError(shorten(str(failure), 200, placeholder=" ...")) from failure
    if path is None:
        raise URLError(_TOO_LONG)
    return read_file(Path(path), MAX_BYTES)
