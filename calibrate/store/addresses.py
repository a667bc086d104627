"""Fits at an address: https://HOST/FILE#sha256:HEX, and hf:ORG/NAME@REVISION#sha256:HEX.

The pin is the digest of the file's bytes, so that it covers name, evidence and verdict too. A file
with that digest is kept in the user's cache folder, and loads without a network from then on.
Servers are hostile: at most MAX_MIB, in limited time, by https.
"""

import re
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from textwrap import shorten
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from calibrate.errors import CalibrateError, CoefficientsError, without_login
from calibrate.storage.atomic_io import read_file, user_cache, write_atomically
from calibrate.storage.deadline import read_answer
from calibrate.storage.npz import sha256_of
from calibrate.store.coefficient_document import MAX_BYTES, MAX_MIB
from calibrate.store.coefficient_file import ADAPTER_FIT, loads
from calibrate.store.fit import Fit
from calibrate.version import __version__


@dataclass(frozen=True)
class Timeouts:
    """The seconds that a server has; those of the Hub's package are its own."""

    read: float = 10.0  # to connect, and for each piece that it sends
    total: float = 30.0  # for the whole file, redirects included


TIMEOUTS = Timeouts()
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
# A place and its pin; short enough for a message that has the place twice.
_ADDRESS = re.compile(r'([!"$-~]{1,600})(?:#(sha256:[0-9a-f]{64}))?')
_HUB = re.compile(r"hf:(\w[\w.-]*/\w[\w.-]*)((?:/\w[\w.-]*)*)@([\w./-]+)")
_TOO_LONG = f"it is longer than {MAX_MIB} MiB, and no coefficient file is"


def load_address(address: str, allow_unpinned: bool = False, timeouts: Timeouts = TIMEOUTS) -> Fit:
    """Loads the fit at an address, from the cache if it is there; errors are `store.load`'s."""
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
    where, pin = match.groups()
    data = (_kept(pin) if pin else None) or _fetch(where, timeouts)
    digest = sha256_of(data)
    pinned = f"{where}#{digest}"
    if not pin and not allow_unpinned:
        raise CoefficientsError(
            f"{where} has no pin, and may change; if you trust what is there now, give {pinned}"
        )
    if pin and pin != digest:
        raise CoefficientsError(
            f"{where} has {digest}, not {pin}: it changed, or the pin is of another file; ask who "
            "published it"
        )
    try:
        fit = loads(data)
    except CoefficientsError as refusal:
        raise CoefficientsError(f"{where}: {refusal}") from None
    return replace(fit, path=_keep(digest, data), address=pinned)


def _cache_path(digest: str) -> Path:
    return user_cache() / "fits" / f"{digest.removeprefix('sha256:')}.json"


def _kept(digest: str) -> bytes | None:
    """The bytes with a digest, from the cache; None if they are absent or damaged."""
    with suppress(OSError, RuntimeError):  # RuntimeError: there is no home
        data = read_file(_cache_path(digest), MAX_BYTES)
        return data if sha256_of(data) == digest else None
    return None


def _keep(digest: str, data: bytes) -> Path | None:
    """Keeps bytes in the cache; None if it cannot be written: the fit loads all the same."""
    with suppress(CalibrateError, OSError, RuntimeError):
        path = _cache_path(digest)
        if _kept(digest) is None:
            write_atomically(path, data)
        return path
    return None


def _fetch(where: str, timeouts: Timeouts) -> bytes:
    """The bytes at an address; CoefficientsError says why they cannot be had."""
    try:
        return _from_hub(where) if where.startswith("hf:") else _from_web(where, timeouts)
    except (OSError, HTTPException, ValueError) as failure:
        if isinstance(failure, HTTPError):
            failure.close()
        cause = failure.reason if type(failure) is URLError else failure
        reason = str(cause)
        if isinstance(cause, TimeoutError):
            reason = f"no answer in {timeouts.read:g} seconds, or not all in {timeouts.total:g}"
    raise CoefficientsError(
        f"cannot fetch {where}: {reason}; check the address and the network, or load a copy of "
        "the file by its path"
    )


def _from_web(url: str, timeouts: Timeouts) -> bytes:
    if refused := _refused(url, url):
        raise URLError(f"it {refused}")
    ends = time.monotonic() + timeouts.total
    request = Request(url, headers={"User-Agent": f"calibrate/{__version__}"})
    with build_opener(_Redirects(ends)).open(request, timeout=timeouts.read) as answer:
        data = read_answer(answer, MAX_BYTES, ends)
        if len(data) > MAX_BYTES:
            raise URLError(_TOO_LONG)
        if answer.length:
            raise URLError(f"the connection ended {answer.length:,} bytes early")
    return data


class _Redirects(HTTPRedirectHandler):
    """Follows redirects by https; urllib itself refuses loops, and schemes such as file:.

    Args:
      ends: of time.monotonic(), after which none is followed.
    """

    def __init__(self, ends: float):
        self._ends = ends

    def redirect_request(
        self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        if refused := _refused(newurl, req.full_url):
            raise HTTPError(newurl, code, f"it leads to {newurl}, which {refused}", headers, fp)
        fp.close()  # urllib would read its body, which may have no end
        if time.monotonic() > self._ends:
            raise TimeoutError
        req.remove_header("Proxy-authorization")  # the next request has it if it has the proxy
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _refused(url: str, source: str) -> str | None:
    """Why a URL is not read, to which `source` leads."""
    parts = urlsplit(url)
    is_local = {parts.hostname, urlsplit(source).hostname} <= _LOOPBACK
    if parts.scheme != "https" and not (parts.scheme == "http" and is_local):
        return "is not https"
    if not parts.hostname or parts.username is not None:
        return "has no host, or a user name beside it"  # where a server leads
    return None


def _from_hub(where: str) -> bytes:
    """A file of a model's repository, with the user's endpoint, token and cache of the Hub."""
    match = _HUB.fullmatch(where)
    if not match:
        raise CoefficientsError(
            f"{where} is not a valid address; give hf:ORG/NAME@REVISION or, with a file, "
            "hf:ORG/NAME/FILE@REVISION"
        )
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise CoefficientsError(
            f"{where} needs the package huggingface_hub: pip install huggingface_hub"
        ) from None
    file = match[2][1:] or ADAPTER_FIT
    try:
        metadata = hf_hub_download(match[1], file, revision=match[3], dry_run=True)
        if (metadata.file_size or 0) > MAX_BYTES:
            raise OSError(_TOO_LONG)
        path = hf_hub_download(match[1], file, revision=match[3])
    except Exception as failure:  # also of its HTTP library, which differs by version
        raise URLError(shorten(str(failure), 200, placeholder=" ...")) from failure
    return read_file(Path(path), MAX_BYTES)
