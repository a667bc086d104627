"""Fits by address: what is loaded, what is kept, and servers that do not play fair."""

import json
import socket
import ssl
from functools import partial
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Event, Thread

import pytest
from commands import call, refusal

import calibrate
from calibrate.errors import without_login
from calibrate.storage.fingerprints import sha256_of
from calibrate.store.addresses import fetch
from calibrate.store.coefficient_file import MAX_FIT_BYTES, MAX_FIT_MIB
from calibrate.store.references import published_store

FIT = published_store() / "max-retrieval" / "1.json"
BODY = FIT.read_bytes()
PIN = sha256_of(BODY)
CERTIFICATE = Path(__file__).with_name("fits_example.pem")  # self-signed, of fits.example


def reply(body=b"", status="200 OK", length=None, **fields):
    fields |= {"Content-Length": len(body) if length is None else length, "Connection": "close"}
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode() + body


def redirect(url):
    return reply(status="302 Found", Location=url)


# Path: the reply, and what is told.
LATE = "no answer in 0.2 seconds, or not all in 0.4"
HOSTILE = {
    "/404": (reply(b"sorry", "404 Not Found"), "HTTP Error 404: Not Found"),
    "/500": (reply(status="500 Failed"), "HTTP Error 500: Failed"),
    "/truncated": (reply(BODY, length=len(BODY) + 7), "the connection ended 7 bytes early"),
    "/large": (reply(b" " * (MAX_FIT_BYTES + 1)), f"it is longer than {MAX_FIT_MIB} MiB"),
    "/page": (reply(b"<html>"), f"/page has {sha256_of(b'<html>')}, not {PIN}: it changed, or the"),
    "/loop": (redirect("/loop"), "HTTP Error 302: The HTTP server returned a redirect error that"),
    "/to-file": (redirect("file:///etc/passwd"), "url 'file:///etc/passwd' is not allowed; check"),
    "/to-http": (redirect("http://a.example/"), "to http://a.example/, which is not https; check"),
    "/to-user": (
        redirect("https://me:secret@a.example/"),
        "which has no host, or a user name beside",
    ),
    "/silent": (b"", LATE),
    "/dripping": (reply(b"{", length=1000), LATE),
}


class Handler(StreamRequestHandler):
    """Replies to a path, or to METHOD PATH; what drips goes on until the test ends."""

    def handle(self):
        method, path, _ = self.rfile.readline().decode().split(" ")
        while field := self.rfile.readline().strip():
            self.server.fields.append(field)
        asked = path if method == "GET" else f"{method} {path}"
        self.server.asked.append(asked)
        self.wfile.write(self.server.replies.get(asked, reply(BODY)))
        while "drip" in path and not self.server.ended.wait(0.02):
            self.wfile.write(b" ")
        if path == "/silent":
            self.server.ended.wait(5)


class Server(ThreadingTCPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.server_port, self.ended = self.server_address[1], Event()
        self.asked, self.fields = [], []
        self.replies = {path: told for path, (told, _) in HOSTILE.items()}

    def handle_error(self, *_):
        pass  # the other side has had enough


@pytest.fixture
def serve(monkeypatch):
    """Starts servers on loopback, of HTTP or HTTPS; they end with the test."""
    monkeypatch.setenv("no_proxy", "*")
    servers = []

    def start(tls=False):
        servers.append(server := Server())
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(CERTIFICATE)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
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


def refuses(address, message, load=calibrate.load, **options):
    with pytest.raises(calibrate.CoefficientsError) as caught:
        load(address, **options)
    assert message in str(caught.value)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_a_pinned_fit_loads_without_its_server_from_then_on(server, cache):
    address = at(server)
    fit = calibrate.load(address)
    assert (fit, fit.reference) == (calibrate.load("max-retrieval@1"), "max-retrieval@1")
    assert (fit.address, fit.path) == (address, cache / f"{PIN[7:]}.json")
    assert fit.path.read_bytes() == BODY
    server.server_close()
    assert calibrate.load(address) == calibrate.load(address.replace("fit", "elsewhere")) == fit
    assert server.asked == ["/fit.json"]
    refuses(address, "was made for head", fingerprint="sha256:" + "0" * 64)


def test_a_damaged_copy_is_fetched_again(server):
    path = calibrate.load(at(server)).path
    path.write_bytes(BODY[:-9])
    assert calibrate.load(at(server)).path.read_bytes() == BODY
    assert len(server.asked) == 2


def test_a_cache_that_cannot_be_written_is_done_without(server, here):
    (here / "cache").write_text("a file")
    fit = calibrate.load(at(server))
    assert (fit.path, fit.address) == (None, at(server))
    assert call("fits", "show", fit.address).stdout.count(fit.address) == 2  # file, load line


def test_without_a_pin_the_line_to_paste_is_told(server, cache):
    told = refuses(at(server, pin=""), "has no pin, and may change")
    assert told.endswith(f" {at(server)}")
    assert not cache.exists()


@pytest.mark.parametrize("path", HOSTILE)
def test_hostile_servers(server, cache, path):
    impatient = partial(fetch, read_seconds=0.2, total_seconds=0.4)
    refuses(at(server, path), HOSTILE[path][1], load=impatient)
    assert not cache.exists()


def test_redirects_are_followed(server):
    server.replies["/moved"] = redirect(at(server, "/again", pin="", host="localhost"))
    server.replies["/again"] = redirect("/fit.json")
    assert calibrate.load(at(server, "/moved")).reference == "max-retrieval@1"
    assert server.asked == ["/moved", "/again", "/fit.json"]


def test_the_body_of_a_redirect_is_not_read(server):
    """It drips until the test ends."""
    moved = redirect("/fit.json").replace(b"Content-Length: 0", b"Content-Length: 1000")
    server.replies["/dripping-redirect"] = moved
    assert calibrate.load(at(server, "/dripping-redirect")).reference == "max-retrieval@1"


def test_redirects_have_one_deadline_together(server):
    for i in range(5):
        server.replies[f"/{i}"] = redirect(f"/{i + 1}")
    patient = partial(fetch, read_seconds=5.0, total_seconds=0.0)
    refuses(at(server, "/0"), "not all in 0", load=patient)
    assert server.asked == ["/0"]


def test_the_certificate_decides(serve, cache, monkeypatch):
    server = serve(tls=True)
    refuses(at(serve(), scheme="https"), "SSL")  # speaks no TLS
    refuses(at(server, scheme="https"), "certificate verify failed")
    assert not cache.exists()
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    assert calibrate.load(at(server, scheme="https")).version == 1


def test_a_server_elsewhere_leads_to_none_on_this_machine(serve, server, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    lookup = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *of: lookup("127.0.0.1", *of[:5]))
    elsewhere = serve(tls=True)
    elsewhere.replies["/fit.json"] = redirect(at(server, pin=""))
    address = at(elsewhere, scheme="https", host="fits.example")
    refuses(address, "it leads to http://127.0.0.1")
    assert server.asked == []


def test_a_proxy_is_used_and_none_else_has_its_password(server, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("http_proxy", at(server, "", "").replace("//", "//me:secret@"))
    server.replies["http://localhost:9/moved"] = redirect(at(server, pin=""))
    assert calibrate.load(f"http://localhost:9/moved#{PIN}").version == 1
    assert server.asked == ["http://localhost:9/moved", "/fit.json"]
    secrets = [field for field in server.fields if b"uthorization" in field]
    assert len(secrets) == 1  # for the proxy alone


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("https://fits.example/3.json#sha256:00", "3.json#sha256:00' is not a valid address"),
        ("https://fits.example/3.json#", '"#sha256:", and 64 hexadecimal digits in lower case'),
        ("http://fits.example/3.json", "fetch http://fits.example/3.json: it is not https"),
        ("file:///etc/passwd", "it is not https"),
        ("https:///3.json", "it has no host, or a user name beside it"),
        ("https://[fits/3.json", "Invalid IPv6 URL; check the address"),
        ("http://localhost:port/", "nonnumeric port: 'port'; check the address"),
        ("https://fits.example/\x1b[2J", "is not a valid address; give at most 600 ASCII"),
        ("https://fits.example/" + "3" * 600, "is not a valid address; give at most 600"),
    ],
)  # fmt: skip
def test_addresses_that_are_none(address, message, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", None)  # nothing is looked up
    refuses(address, message)


@pytest.mark.parametrize(
    ("login", "shown"),
    [
        (f"http://me:secret@127.0.0.1/x#{PIN}", f"http://***@127.0.0.1/x#{PIN}"),
        ("https://secret@fits.example/3.json", "https://***@fits.example/3.json"),
        ("https://me:se/cr/secret@fits.example/", "https://***@fits.example/"),
        ("https://me:s@cret:secret@fits.example:80/a@b", "https://***@fits.example:80/a@b"),
        ("HTTPS://:9secret@fits.example/", "HTTPS://***@fits.example/"),
    ],
)
def test_a_login_in_an_address_is_refused_and_not_repeated(login, shown, cache, monkeypatch):
    """Before a copy is looked for, too: the address would be shown with the fit."""
    monkeypatch.setattr(socket, "getaddrinfo", None)  # nothing is looked up
    cache.mkdir(parents=True)
    (cache / f"{PIN[7:]}.json").write_bytes(BODY)
    assert "secret" not in refuses(login, f"{shown} has a user name")


def test_no_command_repeats_a_login():
    login = "https://me:secret@fits.example/3.json"
    for command in (
        ("fits", "show", login),
        ("fits", "verify", login),
        ("evaluate", login),
        ("report", login, "--out", "x.html"),
        ("export", login, "--model", ".", "--out", "x"),
        ("model", "collect", "--model", login, "--task", "retrieval"),
    ):
        assert "secret" not in call(*command, code=1).output, command


@pytest.mark.parametrize(
    "text",
    ["https://fits.example:8080/a@b", "C:/made@home/x",
     "see http://a.example, or write to me@a.example"],
)  # fmt: skip
def test_text_without_a_login_is_shown(text):
    assert without_login(text) == text


def test_a_login_that_a_server_leads_to_is_not_repeated(server):
    assert "secret" not in refuses(at(server, "/to-user"), "it leads to https://***@a.example/")


def test_commands_take_addresses(server):
    address = at(server)
    shown = call("fits", "show", address).stdout
    assert f'fit = calibrate.load("{address}")' in shown
    assert "by its new path" not in shown
    assert json.loads(call("fits", "show", address, "--json").stdout)["path"] == address
    assert call("fits", "verify", address, "--store", published_store()).stdout.split() == [
        "ok", address,
    ]  # fmt: skip
    bad = call("fits", "verify", at(server, "/page", "sha256:" + "0" * 64), code=1)
    assert bad.stdout.startswith("FAILED  http://127.0.0.1")
    assert "#sha256" in refusal("fits", "show", at(server, pin=""))


def test_a_loras_folder_loads_by_its_fit(here):
    (here / "mine").mkdir()
    assert "mine/fit.json" in refusal("fits", "show", "./mine")
    (here / "mine" / "fit.json").write_bytes(BODY)
    assert calibrate.load("mine/") == calibrate.load(here / "mine") == calibrate.load(FIT)
    assert call("fits", "verify", "./mine").stdout == "ok      ./mine\n"
