"""Downloads against real servers on this machine: what is fetched, kept, cut off, and never asked."""

from __future__ import annotations

import http.server
import json
import socket
import ssl
import subprocess
import threading
import time
from contextlib import contextmanager
from urllib.parse import unquote

import numpy as np
import pytest

from posttrain.core.transport import Link
from posttrain.data.images import downloads
from posttrain.data.images.limits import BadImage, ImageLimits
from posttrain.data.images.opening import open_image, reopen_image
from tests.data.picture_files import encoded, noise

PICTURE = noise(30, 40)
PNG = encoded(PICTURE)
HERE = "127.0.0.1"


class Handler(http.server.BaseHTTPRequestHandler):
    """Paths say what is answered; `asked` has every request with its headers."""

    asked: list[tuple[str, dict[str, str]]]

    def do_GET(self):
        self.server.asked.append((self.path, dict(self.headers)))
        answer = getattr(self, f"answer_{self.path.strip('/').split('/')[0].split('?')[0]}", None)
        if answer is None:
            return self.send_error(404)
        return answer()

    def answer_picture(self, *headers):
        self.send_response(200)
        for name, value in [("Content-Length", str(len(PNG))), ("Set-Cookie", "a=b"), *headers]:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(PNG)

    def answer_to(self):
        """/to/3: three redirects, then the picture; /to?URL: to that URL."""
        count, _, elsewhere = self.path.removeprefix("/to").lstrip("/").partition("?")
        self.send_response(302)
        self.send_header("Location", unquote(elsewhere) or ("/picture" if count == "1" else f"/to/{int(count) - 1}"))
        self.send_header("Set-Cookie", "session=1")
        self.end_headers()

    def answer_endless(self):
        self.send_response(200)
        self.end_headers()
        try:
            while True:
                self.wfile.write(bytes(1 << 16))
                self.server.sent += 1 << 16
        except OSError:
            self.server.ended.set()

    def answer_slow(self):
        self.send_response(200)
        self.end_headers()
        try:
            while not self.server.ended.wait(0.02):
                self.wfile.write(b"a")
        except OSError:
            pass

    def answer_cut(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(PNG)))
        self.end_headers()
        self.wfile.write(PNG[: len(PNG) // 2])

    def log_message(self, *args):
        pass


@contextmanager
def serving(tls=None):
    server = http.server.ThreadingHTTPServer((HERE, 0), Handler)
    server.asked, server.sent, server.ended = [], 0, threading.Event()
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server, f"{'https' if tls else 'http'}://{HERE}:{server.server_port}"
    finally:
        server.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def limits(tmp_path):
    return ImageLimits(allow_urls=True, download_folder=tmp_path / "downloads", max_bytes=1 << 20)


@pytest.fixture
def this_machine_is_public(monkeypatch):
    """The one thing that is not real in these tests."""
    real = downloads.is_public
    monkeypatch.setattr(downloads, "is_public", lambda address: address == HERE or real(address))


def kind_of(url, limits):
    with pytest.raises(BadImage) as caught:
        open_image(url, limits)
    return caught.value.kind, str(caught.value)


# ---------------------------------------------------------------------------------------------------------------- addresses


NOT_PUBLIC = """
    127.0.0.1 127.9.9.9 0.0.0.0 10.0.0.1 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 224.0.0.1 239.1.1.1 240.0.0.1
    255.255.255.255 192.0.2.1 198.18.0.1 :: ::1 fe80::1 fe80::1%1 fc00::1 fd12::1 fec0::1 ff02::1 ff0e::1 ::ffff:127.0.0.1
    ::ffff:10.0.0.1 2002:7f00:1:: 2002:a00:1:: 64:ff9b::7f00:1 64:ff9b::a00:1 64:ff9b:1::1 2001:db8::1
"""


@pytest.mark.parametrize("address", NOT_PUBLIC.split())
def test_addresses_that_are_not_public(address):
    assert not downloads.is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "93.184.215.14", "2606:4700:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"]
)
def test_public_addresses(address):
    assert downloads.is_public(address)


@pytest.mark.parametrize(
    "host", [HERE, "localhost", "127.1", "2130706433", "0x7f000001", "0", "[::1]", "[::ffff:127.0.0.1]"]
)
def test_this_machine_is_not_asked(host, limits):
    """However its address is written: it is checked after it is resolved."""
    with serving() as (server, base):
        kind, sentence = kind_of(f"http://{host}:{base.rpartition(':')[2]}/picture", limits)
        assert kind in ("image_url", "image_download")  # some resolvers do not know short forms
        assert "not public" in sentence or "not found" in sentence
        assert server.asked == []
    assert not limits.download_folder.exists()


def test_the_address_that_was_checked_is_the_one_connected_to(limits, monkeypatch):
    """A name that resolves to a public address first and to this machine later."""
    resolved, connected = [], []

    def getaddrinfo(host, port, *args, **kwargs):
        resolved.append(host)
        address = "93.184.215.14" if len(resolved) == 1 else HERE
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    def connect(self, host, port, timeout=None, **more):
        connected.append(host)
        raise OSError("no network here")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(Link, "connect_tcp", connect)
    kind, sentence = kind_of("https://rebinding.example/a.png", limits)
    assert kind == "image_download"
    assert "no network here" in sentence
    assert (resolved, connected) == (["rebinding.example"], ["93.184.215.14"])


def test_one_private_address_among_public_ones_is_enough(limits, monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in ("93.184.215.14", "10.0.0.7")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    kind, sentence = kind_of("http://mixed.example/a.png", limits)
    assert kind == "image_url"
    assert "10.0.0.7" in sentence


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.com/a.png",
        "http://",
        "http://user:password@example.com/a.png",
        "http://a:99999/",
        "http://[::1/",
        "gopher://x/",
    ],
)
def test_urls_that_are_not_downloaded(url, limits, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", None)
    kind, sentence = kind_of(url, limits)
    assert kind == "image_url"
    assert "password@" not in sentence


# --------------------------------------------------------------------------------------------------------------- downloads


@pytest.mark.usefixtures("this_machine_is_public")
class TestDownloads:
    def test_a_picture_is_asked_for_once(self, limits):
        with serving() as (server, base):
            url = f"{base}/picture?size=ünd 1#part"
            source = open_image(url, limits)
            assert np.array_equal(source.rgb(), PICTURE)
            assert open_image(url, limits).key == source.key
            ((path, headers),) = server.asked
        assert path == "/picture?size=%C3%BCnd%201"
        assert not {"Cookie", "Authorization", "Referer"} & set(headers)
        assert headers["Host"] == base.removeprefix("http://")
        assert np.array_equal(open_image(url, limits).rgb(), PICTURE)  # the server is gone
        assert reopen_image(url, limits, source.key).key == source.key == open_image(PNG, limits).key
        (record,) = limits.download_folder.glob("*.json")
        known = json.loads(record.read_text())
        assert known["url"] == url
        assert (limits.download_folder / known["key"]).read_bytes() == PNG

    def test_a_damaged_copy_is_downloaded_again_but_not_by_the_loader(self, limits):
        with serving() as (server, base):
            source = open_image(f"{base}/picture", limits)
            (kept,) = (path for path in limits.download_folder.iterdir() if path.suffix != ".json")
            (record,) = limits.download_folder.glob("*.json")
            kept.write_bytes(b"damaged")
            with pytest.raises(BadImage, match="prepare the dataset again") as caught:
                reopen_image(f"{base}/picture", limits, source.key)
            assert caught.value.kind == "image_changed"
            assert len(server.asked) == 1
            assert open_image(f"{base}/picture", limits).key == source.key
            assert len(server.asked) == 2
            record.write_text("{")
            assert open_image(f"{base}/picture", limits).key == source.key
            assert len(server.asked) == 3

    def test_three_redirects_and_no_more(self, limits):
        with serving() as (server, base):
            assert open_image(f"{base}/to/3", limits).size == (30, 40)
            assert [path for path, _ in server.asked] == ["/to/3", "/to/2", "/to/1", "/picture"]
            assert not any("Cookie" in headers for _, headers in server.asked)
            kind, sentence = kind_of(f"{base}/to/4", limits)
            assert kind == "image_download"
            assert "more than 3 times" in sentence

    @pytest.mark.parametrize(
        "elsewhere",
        [
            "http://10.0.0.1/a",
            "http://[::1]/a",
            "//169.254.169.254/latest/meta-data",
            "file:///etc/passwd",
            "http://a:b@8.8.8.8/",
            "http://[x",
        ],
    )
    def test_redirects_are_checked_as_the_first_address_is(self, elsewhere, limits):
        with serving() as (_server, base):
            assert kind_of(f"{base}/to?{elsewhere}", limits)[0] == "image_url"

    def test_a_body_that_is_too_large_is_cut_off(self, limits):
        with serving() as (server, base):
            kind, sentence = kind_of(f"{base}/endless", limits)
            assert kind == "image_too_large"
            assert "`max_image_bytes`" in sentence
            assert server.ended.wait(5)
            assert server.sent < 50 << 20  # what lies in buffers of the network

    def test_a_byte_at_a_time_is_not_waited_for(self, limits, monkeypatch):
        monkeypatch.setattr(downloads, "WHOLE_SECONDS", 0.3)
        with serving() as (_server, base):
            began = time.monotonic()
            kind, sentence = kind_of(f"{base}/slow", limits)
            assert kind == "image_download"
            assert "in time" in sentence
            assert time.monotonic() - began < 30  # it would never end

    def test_bad_answers(self, limits):
        with serving() as (_server, base):
            assert "status 404" in kind_of(f"{base}/unknown?secret=1", limits)[1]
            assert kind_of(f"{base}/cut", limits)[0] == "image_download"
        kind, sentence = kind_of(f"{base}/picture?secret=1", limits)
        assert kind == "image_download"
        assert "secret" not in sentence
        assert not limits.download_folder.exists()

    def test_certificates_are_checked_against_the_name(self, limits, tmp_path, monkeypatch):
        command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=a -keyout key.pem -out cert.pem"
        command += " -addext subjectAltName=DNS:pictures.example"
        subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
        with serving(tls) as (server, _):
            here = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (HERE, server.server_port))]
            monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: here)
            urls = [f"https://{name}.example:{server.server_port}/picture" for name in ("pictures", "others")]
            assert "certificate" in kind_of(urls[0], limits)[1]  # nobody vouches for it
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
            assert "certificate" in kind_of(urls[1], limits)[1]
            assert server.asked == []
            assert open_image(urls[0], limits).size == (30, 40)
