"""The server of the page: on loopback, for callers with the token, and nothing but what is listed.

Other pages in the same browser can send requests to this address too. Four things keep them out: the name that they reached it by
must be loopback (a name of theirs that resolves to 127.0.0.1 is not), every question about a run needs the token, which no other
page knows and which travels in a header that needs our permission across origins (we give none), nothing may be framed, and the
policy of the page lets it load and ask nothing but this address.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from posttrain.view import api
from posttrain.view.errors import NotFound, Refused, TooLarge, Unauthorized, ViewError, WrongMethod
from posttrain.view.json_lines import plain
from posttrain.view.questions import Question
from posttrain.view.rollout_detail import PICTURE_TYPE

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
TOKEN_HEADER = "X-Posttrain-Token"
STATIC = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/app.css": ("app.css", "text/css; charset=utf-8"),
    "/favicon.svg": ("favicon.svg", "image/svg+xml"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
MAX_BODY, MAX_WORDS = 16 << 20, 64
SECONDS = 30.0
"""For a caller to send what it wants to send."""


class ViewServer(ThreadingHTTPServer):
    """`url` opens the page; the token stands behind `#`, where browsers keep it to themselves."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, viewed: api.Viewed, port: int = 0) -> None:
        self.viewed = viewed
        self.token = secrets.token_urlsafe(24)
        super().__init__((HOST, port), Handler)

    @property
    def port(self) -> int:
        return self.server_address[1]

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/#token={self.token}"


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: ViewServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "posttrain-view", ""
    timeout = SECONDS

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _wrong_method(self) -> None:
        self.close_connection = True

        def refuse() -> tuple[bytes, str]:
            raise WrongMethod(f"{self.command} is not understood here.")

        self._answer(refuse)

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_HEAD = do_TRACE = do_CONNECT = _wrong_method

    # ---- what is answered --------------------------------------------------------------------------------------------

    def _get(self) -> tuple[bytes, str]:
        path, query = self._asked()
        if path in STATIC:
            name, kind = STATIC[path]
            return files("posttrain.view").joinpath("static", name).read_bytes(), kind
        if path not in (*api.GET, *api.PICTURES):
            raise WrongMethod("Use POST for this path.") if path in api.POST else NotFound("There is no such page.")
        self._check_token()
        try:
            words = dict(parse_qsl(query, max_num_fields=MAX_WORDS))
        except ValueError as error:
            raise ViewError(f"A question has at most {MAX_WORDS} parameters.") from error
        if path in api.PICTURES:
            return api.PICTURES[path](self.server.viewed, Question(words)), PICTURE_TYPE
        return _as_json(api.GET[path](self.server.viewed, Question(words)))

    def _post(self) -> tuple[bytes, str]:
        path, _ = self._asked()
        self.close_connection = True  # whatever is left of a body that is refused must not be read as a request
        if path not in api.POST:
            is_read = path in (*api.GET, *api.PICTURES, *STATIC)
            raise WrongMethod("Use GET for this path.") if is_read else NotFound("There is no such page.")
        self._check_token()
        return _as_json(api.POST[path](self.server.viewed, self._body()))

    def _asked(self) -> tuple[str, str]:
        """(path, query)"""
        try:
            parts = urlsplit(self.path)
        except ValueError as error:
            raise ViewError("This is not an address.") from error
        return parts.path, parts.query

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()):
            raise ViewError("The body has no Content-Length.")
        if int(length) > MAX_BODY:
            raise TooLarge(f"The body has {int(length):,} bytes; {MAX_BODY:,} are the most.")
        try:
            content = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise ViewError("The body is not JSON.") from error
        if not isinstance(content, dict):
            raise ViewError("The body is not a JSON object.")
        return content

    # ---- who may ask -------------------------------------------------------------------------------------------------

    def _check_host(self) -> None:
        names = [f"{name}:{self.server.port}" for name in LOOPBACK]
        if self.headers.get("Host", "") not in names:
            raise Refused("This page is only for this machine, and has to be reached by the address that was printed.")
        if self.headers.get("Origin", f"http://{names[0]}") not in [f"http://{name}" for name in names]:
            raise Refused("Another page asked this; it may not.")
        # A link on another page may open this one: it shows nothing without the token.
        is_foreign = self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
        if is_foreign and self._asked()[0] != "/":
            raise Refused("Another page asked this; it may not.")

    def _check_token(self) -> None:
        given = self.headers.get(TOKEN_HEADER, "")
        if not hmac.compare_digest(given.encode("utf-8", "replace"), self.server.token.encode()):
            raise Unauthorized("The token is missing or wrong: open the address that `posttrain view` has printed.")

    # ---- sending -----------------------------------------------------------------------------------------------------

    def _answer(self, make: Any) -> None:
        try:
            self._check_host()
            body, kind = make()
            status = 200
        except ViewError as error:
            (body, kind), status = _as_json({"error": str(error)}), error.status
        except Exception:  # a fault of ours must not end the server, and its text is not for callers
            logger.exception("The question %r could not be answered.", self.path[:200])
            (body, kind), status = _as_json({"error": "The viewer failed at this; its terminal says how."}), 500
        try:
            self._send(status, body, kind)
        except (BrokenPipeError, ConnectionResetError):  # the page was closed
            self.close_connection = True

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *values: Any) -> None:
        """Requests are not printed in the terminal."""
        logger.debug(format, *values)


def _as_json(value: Any) -> tuple[bytes, str]:
    strict = {"allow_nan": False, "ensure_ascii": False, "separators": (",", ":")}
    try:
        text = json.dumps(value, **strict)
    except (ValueError, RecursionError):  # infinity or a nest somewhere in a file of rollouts
        text = json.dumps(plain(value), **strict)
    return text.encode("utf-8", "replace"), "application/json"
