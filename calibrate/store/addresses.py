"""Coefficient files at an address: https://HOST/FILE#sha256:HEX.

The pin is the digest of the file's bytes, so that it covers name, evidence and verdict too. A file
with that digest is kept in the user's cache folder, and loads without a network from then on.
Servers are hostile: at most MAX_FIT_MIB, in limited time, by https. The package pooch has pins, but
bounds neither size nor time, and follows redirects to http.
"""

import re
import time
from contextlib import suppress
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from calibrate.errors import CalibrateError, CoefficientsError, without_login
from calibrate.storage.atomic_io import read_bytes, user_cache, write_atomically
from calibrate.storage.fingerprints import sha256_of
from calibrate.store.coefficient_file import MAX_FIT_BYTES, MAX_FIT_MIB
from calibrate.version import __version__

READ_SECONDS = 10.0  # that a server has to connect, and for each piece that it sends
TOTAL_SECONDS = 30.0  # for the whole file, redirects included
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
# A place and its pin; short enough for a message that has the place twice.
_ADDRESS = re.compile(r'([!"$-~]{1,600})(?:#(sha256:[0-9a-f]{64}))?')


def fetch(
    address: str, read_seconds: float = READ_SECONDS, total_seconds: float = TOTAL_SECONDS
) -> tuple[bytes, Path | None]:
    """Fetches the file at an address, from the cache if it is there.

    Args:
      address: a place and its pin.
      read_seconds, total_seconds: that a server has.
    Returns:
      (the bytes, their copy in the cache; None if it cannot be written).
    Raises:
      CoefficientsError: the address is not valid or has no pin, the file cannot be fetched, or it
        has another digest.
    """
    if without_login(address) != address:
        raise CoefficientsError(
            f"{address} has a user name or a password, which would be printed and kept with the "
            "fit; give an address without, or load a copy of the file by its path"
        )
    match = _ADDRESS.fullmatch(address)
    if not match:
        raise CoefficientsError(
            f'{address!r} is not a valid address; give at most 600 ASCII characters, "#sha256:", '
            "and 64 hexadecimal digits in lower case"
        )
    place, pin = match.groups()
    data = (_read_copy(pin) if pin else None) or _download(place, read_seconds, total_seconds)
    digest = sha256_of(data)
    if not pin:
        raise CoefficientsError(
            f"{place} has no pin, and may change; if you trust what is there now, give "
            f"{place}#{digest}"
        )
    if pin != digest:
        raise CoefficientsError(
            f"{place} has {digest}, not {pin}: it changed, or the pin is of another file; ask who "
            "published it"
        )
    return data, _keep_copy(digest, data)


def _cache_path(digest: str) -> Path:
    return user_cache() / "fits" / f"{digest.removeprefix('sha256:')}.json"


def _read_copy(digest: str) -> bytes | None:
    """The bytes with a digest, from the cache; None if they are absent or damaged."""
    with suppress(CalibrateError, RuntimeError):  # RuntimeError: there is no home
        data = read_bytes(_cache_path(digest), MAX_FIT_BYTES)
        return data if sha256_of(data) == digest else None
    return None


def _keep_copy(digest: str, data: bytes) -> Path | None:
    """Writes bytes to the cache; None if it cannot be written, which stops nobody."""
    with suppress(CalibrateError, OSError, RuntimeError):
        path = _cache_path(digest)
        if _read_copy(digest) is None:
            write_atomically(path, data)
        return path
    return None


def _download(place: str, read_seconds: float, total_seconds: float) -> bytes:
    """The bytes at a place; CoefficientsError says why they cannot be had."""
    end = time.monotonic() + total_seconds
    try:
        if reason := _reason_to_refuse(place, place):
            raise URLError(f"it {reason}")
        request = Request(place, headers={"User-Agent": f"calibrate/{__version__}"})
        with build_opener(_Redirects(end)).open(request, timeout=read_seconds) as answer:
            data = read_answer(answer, MAX_FIT_BYTES, end)
            if len(data) > MAX_FIT_BYTES:
                raise URLError(f"it is longer than {MAX_FIT_MIB} MiB, and no coefficient file is")
            if answer.length:
                raise URLError(f"the connection ended {answer.length:,} bytes early")
            return data
    except (OSError, HTTPException, ValueError) as failure:
        if isinstance(failure, HTTPError):
            failure.close()
        cause = failure.reason if type(failure) is URLError else failure
        reason = str(cause)
        if isinstance(cause, TimeoutError):
            reason = f"no answer in {read_seconds:g} seconds, or not all in {total_seconds:g}"
    raise CoefficientsError(
        f"cannot fetch {place}: {reason}; check the address and the network, or load a copy of "
        "the file by its path"
    )


def read_answer(answer: HTTPResponse, max_bytes: int, end: float) -> bytes:
    """The body of an answer, up to one byte more than `max_bytes`.

    The clock is read after each piece, for which the server has the timeout of the socket. Neither
    bounds the look-up of a host's name, nor lines of a header or sizes of chunks that come byte by
    byte: http.client reads up to 65,536 bytes of each.

    Raises:
      TimeoutError: time.monotonic() is past `end`, and more may follow.
    """
    data = bytearray()
    while len(data) <= max_bytes and (piece := answer.read1(max_bytes + 1 - len(data))):
        data += piece
        if time.monotonic() > end:
            raise TimeoutError("the answer takes too long")
    return bytes(data)


class _Redirects(HTTPRedirectHandler):
    """Follows redirects by https; urllib itself refuses loops, and schemes such as file:.

    Args:
      end: of time.monotonic(), after which none is followed.
    """

    def __init__(self, end: float):
        self._end = end

    def redirect_request(
        self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        if reason := _reason_to_refuse(newurl, req.full_url):
            raise HTTPError(newurl, code, f"it leads to {newurl}, which {reason}", headers, fp)
        fp.close()  # urllib would read its body, which may have no end
        if time.monotonic() > self._end:
            raise TimeoutError
        req.remove_header("Proxy-authorization")  # the next request has it if it has the proxy
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _reason_to_refuse(url: str, source: str) -> str | None:
    """Why a URL to which `source` leads is not read; None if it is."""
    parts = urlsplit(url)
    is_local = {parts.hostname, urlsplit(source).hostname} <= _LOOPBACK
    if parts.scheme != "https" and not (parts.scheme == "http" and is_local):
        return "is not https"
    if not parts.hostname or parts.username is not None:
        return "has no host, or a user name beside it"  # of a redirect
    return None
