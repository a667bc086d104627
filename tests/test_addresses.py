"""Fits by address: what is loaded, what is kept, and servers that do not play fair."""

import json
import socket
import ssl
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from test_cli import call, refusal

import calibrate
from calibrate.files import addresses
from calibrate.files.npz import digest_of
from calibrate.files.store import published_store

FIT = published_store() / "max-retrieval" / "2.json"
BODY = FIT.read_bytes()
PIN = digest_of(BODY)
CERTIFICATE = Path(__file__).with_name("fits_example.pem")  # self-signed, of fits.example
REDIRECTS = {
    "/moved": "/fit.json", "/loop": "/loop", "/to-file": "file:///etc/passwd",
    "/to-http": "http://fits.example/fit.json", "/to-user": "https://me:secret@fits.example/",
}  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    """What a path says."""

    def do_GET(self):
        self.server.asked.append(self.path)
        if self.path in REDIRECTS or self.path.startswith("/to?"):
            self.send_response(302)
            self.send_header("Location", REDIRECTS.get(self.path) or self.path[4:])
            self.end_headers()
        elif self.path in ("/404", "/500"):
            self.send_error(int(self.path[1:]))
        elif self.path == "/silent":
            self.server.ended.wait(5)
        elif self.path == "/dripping-head":
            self.drip(b"HTTP/1.1 200 OK\r\nX-Long: ")
        else:
            self.send(*self.server.files.get(self.path, (BODY, len(BODY))))

    def send(self, body, length):
        self.send_response(200)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.path == "/dripping":
            self.drip(b"{")
        self.wfile.write(body)

    def drip(self, head):
        self.wfile.write(head)
        while not self.server.ended.wait(0.02):
            self.wfile.write(b" ")

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.ended = [], threading.Event()
        self.files = {
            "/truncated": (BODY, len(BODY) + 7), "/large": (b" " * (2 << 20), 2 << 20),
            "/page": (b"<html>", 6),
        }  # fmt: skip

    def handle_error(self, *_):
        pass  # the other side has had enough


@pytest.fixture
def serve(monkeypatch):
    """Starts servers on loopback, of HTTP or HTTPS; they end with the test."""
    monkeypatch.setenv("no_proxy", "*")
    servers = []

    def start(tls=False):
        server = Server()
        servers.append(server)
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(CERTIFICATE)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server

    yield start
    for server in servers:
        server.ended.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def server(serve):
    return serve()


@pytest.fixture(autouse=True)
def cache(here, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    return here / "cache" / "calibrate" / "fits"


def at(server, path="/fit.json", pin=PIN, scheme="http", host="127.0.0.1"):
    return f"{scheme}://{host}:{server.server_port}{path}" + (f"#{pin}" if pin else "")


def refuses(address, message, **options):
    with pytest.raises(calibrate.CoefficientsError) as caught:
        calibrate.load(address, **options)
    assert message in str(caught.value)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_a_pinned_fit_loads_without_its_server_from_then_on(server, cache):
    address = at(server)
    fit = calibrate.load(address)
    assert (fit, fit.reference) == (calibrate.load("max-retrieval@2"), "max-retrieval@2")
    assert (fit.address, fit.path) == (address, cache / f"{PIN[7:]}.json")
    assert fit.path.read_bytes() == BODY
    server.server_close()
    assert calibrate.load(address) == calibrate.load(address.replace("fit", "elsewhere")) == fit
    assert server.asked == ["/fit.json"]
    refuses(address, "was made for head", fingerprint="sha256:" + "0" * 64)


@pytest.mark.parametrize("damage", [
    lambda path: path.write_bytes(BODY[:-9]),
    lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    lambda path: (path.unlink(), path.symlink_to("nowhere")),
])  # fmt: skip
def test_a_damaged_copy_is_fetched_anew(server, damage):
    path = calibrate.load(at(server)).path
    damage(path)
    assert calibrate.load(at(server)).path.read_bytes() == BODY
    assert len(server.asked) == 2
    assert not path.is_symlink()


def test_many_at_once_leave_one_whole_copy(server, cache):
    with ThreadPoolExecutor(8) as pool:
        fits = list(pool.map(calibrate.load, [at(server)] * 8))
    assert len(set(fits)) == 1
    assert [path.read_bytes() for path in cache.iterdir()] == [BODY]


def test_a_cache_that_cannot_be_written_is_done_without(server, here):
    (here / "cache").write_text("a file")
    fit = calibrate.load(at(server))
    assert (fit.path, fit.address) == (None, at(server))
    assert call("fits", "show", fit.address).stdout.count(fit.address) == 2  # file, load line


def test_without_a_pin_the_line_to_paste_is_told(server, cache):
    told = refuses(at(server, pin=""), "has no pin, and may change")
    assert told.endswith(f" {at(server)}")
    assert not cache.exists()
    assert calibrate.load(at(server, pin=""), allow_unpinned=True).address == at(server)
    server.files["/fit.json"] = (b"{}", 2)  # it changed, and the copy is not asked
    refuses(at(server, pin=""), "the file is not a fit file", allow_unpinned=True)
    assert calibrate.load(at(server)).reference == "max-retrieval@2"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/404", "the server answered 404 Not Found"),
        ("/500", "the server answered 500 Internal Server Error"),
        ("/truncated", "the connection ended 7 bytes early"),
        ("/large", "it is longer than 1 MiB"),
        ("/silent", "no answer in 0.2 seconds, or not all in 0.4"),
        ("/dripping", "no answer in 0.2 seconds, or not all in 0.4"),
        ("/dripping-head", "no answer in 0.2 seconds, or not all in 0.4"),
        ("/loop", "302: The HTTP server returned a redirect error that would lead to an infinite"),
        ("/to-file", "302: Found - Redirection to url 'file:///etc/passwd' is not allowed"),
        ("/to-http", "it leads to http://fits.example/fit.json, which is not https"),
        ("/to-user", "it leads to https://me:secret@fits.example/, which has no host, or a user"),
        ("/page", f"/page has {digest_of(b'<html>')}, and its pin is {PIN}: it changed, or"),
    ],
)  # fmt: skip
def test_hostile_servers(server, cache, monkeypatch, path, message):
    monkeypatch.setattr(addresses, "READ_SECONDS", 0.2)
    monkeypatch.setattr(addresses, "TOTAL_SECONDS", 0.4)
    refuses(at(server, path), message.replace("302: ", "the server answered 302 "))
    assert not cache.exists()


def test_a_redirect_is_followed(server):
    other = at(server, host="localhost", pin="")
    assert calibrate.load(at(server, "/moved")) == calibrate.load("max-retrieval@2")
    assert calibrate.load(at(server, f"/to?{other}", ""), allow_unpinned=True).version == 2


def test_the_certificate_decides(serve, cache, monkeypatch):
    server = serve(tls=True)
    refuses(at(serve(), scheme="https"), "SSL")  # speaks no TLS
    refuses(at(server, scheme="https"), "certificate verify failed")
    assert not cache.exists()
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    assert calibrate.load(at(server, scheme="https")).version == 2


def test_a_server_elsewhere_leads_to_none_on_this_machine(serve, server, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    lookup = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *of: lookup("127.0.0.1", *of[:5]))
    path = f"/to?{at(server, pin='')}"
    elsewhere = at(serve(tls=True), path, scheme="https", host="fits.example")
    refuses(elsewhere, "it leads to http://127.0.0.1")
    assert server.asked == []


def test_the_proxy_of_the_environment_is_used(server, monkeypatch):
    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv("http_proxy", at(server, "", ""))
    assert calibrate.load(f"http://localhost:9/fit.json#{PIN}").version == 2
    assert server.asked == ["http://localhost:9/fit.json"]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("https://fits.example/3.json#sha256:00", "the pin of https://fits.example/3.json is 'sha"),
        ("https://fits.example/3.json#", 'give "sha256:" and 64 hexadecimal digits, in lower case'),
        ("http://fits.example/3.json", "fetch http://fits.example/3.json: it is not https"),
        ("file:///etc/passwd", "it is not https"),
        ("https:///3.json", "it has no host, or a user name beside it"),
        ("https://me:secret@fits.example/3.json", "it has no host, or a user name beside it"),
        ("https://[fits/3.json", "Invalid IPv6 URL; check the address"),
        ("http://localhost:port/", "nonnumeric port: 'port'; check the address"),
        ("https://fits.example/\x1b[2J", "is not a valid address; give at most 600 printable"),
        ("https://fits.example/" + "3" * 600, "is not a valid address; give at most 600"),
        ("hf:fits", "give hf:ORG/NAME@REVISION or hf:ORG/NAME/FILE@REVISION"),
        ("hf:made/../../x@main", "hf:made/../../x@main is not a valid address"),
    ],
)  # fmt: skip
def test_addresses_that_are_none(address, message, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", None)  # nothing is looked up
    refuses(address, message)


def test_the_hub_needs_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refuses("hf:made/fit@main", "huggingface_hub: pip install huggingface_hub")


def test_commands_take_addresses(server):
    address = at(server)
    shown = call("fits", "show", address).stdout
    assert f'fit = calibrate.load("{address}")' in shown
    assert "by its new path" not in shown
    assert json.loads(call("fits", "show", address, "--json").stdout)["path"] == address
    assert call("fits", "verify", address, "--store", published_store()).stdout.split() == [
        "ok", address,
    ]  # fmt: skip
    same = call("fits", "diff", "max-retrieval@2", address).stdout
    assert f"+ max-retrieval@2  {address}" in same
    assert "beta is the same" in same
    assert "is not a valid reference; use NAME" in refusal("fits", "yank", address)
    bad = call("fits", "verify", at(server, "/page", "sha256:" + "0" * 64), code=1)
    assert bad.stdout.startswith("FAILED  http://127.0.0.1")
    assert "has no pin" in refusal("fits", "show", at(server, pin=""))


def test_an_adapters_folder_loads_by_its_fit(here):
    (here / "mine").mkdir()
    assert "mine/fit.json does not exist" in refusal("fits", "show", "./mine")
    (here / "mine" / "fit.json").write_bytes(BODY)
    assert calibrate.load("mine/") == calibrate.load(here / "mine") == calibrate.load(FIT)
    assert call("fits", "verify", "./mine").stdout == "ok      ./mine\n"
    assert refusal("fits", "show", "mine").endswith("; ./mine is its folder's path")
