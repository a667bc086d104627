"""Fits in repositories of the Hub: a local server answers as the Hub does."""

import pytest
from huggingface_hub import constants
from test_addresses import BODY, PIN, cache, refuses, reply, serve  # noqa: F401

import calibrate
from calibrate.store.coefficient_file import MAX_FIT_BYTES, MAX_FIT_MIB

REPOSITORY = "/made/fit/resolve/v1/fit.json"


@pytest.fixture
def hub(serve, here, monkeypatch):  # noqa: F811
    server = serve()
    template = (
        f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(here / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return server


def holds(hub, file, body, length=None):
    fields = {"ETag": '"of-its-content"', "X-Repo-Commit": "c" * 40}
    hub.replies[f"HEAD {file}"] = reply(length=length or len(body), **fields)
    hub.replies[file] = reply(body, **fields)


def test_a_repository_holds_a_fit(hub, cache):  # noqa: F811
    holds(hub, REPOSITORY, BODY)
    told = refuses("hf:made/fit@v1", "hf:made/fit@v1 has no pin, and may change")
    address = f"hf:made/fit@v1#{PIN}"
    assert told.endswith(f" {address}")
    assert not cache.exists()
    fit = calibrate.load(address)
    assert (fit.reference, fit.address) == ("max-retrieval@1", address)
    assert fit.path.parent == cache
    hub.server_close()
    assert calibrate.load(address) == fit


def test_another_file_of_a_repository(hub):
    holds(hub, "/made/fit/resolve/refs%2Fpr%2F1/old/1.json", BODY)
    assert calibrate.load(f"hf:made/fit/old/1.json@refs/pr/1#{PIN}").version == 1


def test_what_the_hub_lacks_is_told_in_one_line(hub, cache):  # noqa: F811
    missing = reply(status="404 Not Found", **{"X-Error-Code": "RepoNotFound"})
    hub.replies["HEAD /made/none/resolve/v1/fit.json"] = missing
    refuses(f"hf:made/none@v1#{PIN}", "cannot fetch hf:made/none@v1: 404 Client Error")
    holds(hub, REPOSITORY, BODY, MAX_FIT_BYTES + 1)
    too_long = f"cannot fetch hf:made/fit@v1: it is longer than {MAX_FIT_MIB} MiB"
    refuses(f"hf:made/fit@v1#{PIN}", too_long)
    assert REPOSITORY not in hub.asked
    assert not cache.exists()
