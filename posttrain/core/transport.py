"""HTTP with a deadline for every whole call, whatever the other side does: nothing, garbage, or a byte a second.

HTTP clients have a time limit for each read; a server that sends one byte a second never passes it. httpcore (the lower half of
httpx) lets us be its network: here every read and write gets what is left of the call's own time, and a call can be ended.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpcore

MAX_ANSWER_BYTES = 256 << 20
IDLE_SECONDS = 3.0
"""How long an open connection may lie idle and be used again; uvicorn closes its end after 5 s."""


class ServerError(RuntimeError):
    """Something about a server; the message is a sentence that names it."""


class ServerGone(ServerError):
    """Nothing listens there, or the connection ended before the answer did."""


class ServerSlow(ServerError):
    """A deadline passed."""


class ServerAnswer(ServerError):
    """An answer came that is not what was asked for."""


class ServerRefused(ServerError):
    """The server refused the request, with a status and a sentence of its own."""

    def __init__(self, message: str, status: int, kind: str = "") -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


@dataclass(frozen=True)
class Address:
    scheme: str
    host: str
    port: int
    prefix: str  # of every path, without a slash at its end

    @classmethod
    def of(cls, base_url: str) -> Address:
        parts = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise ValueError(f"`{base_url}` is not the address of a server; give one such as http://127.0.0.1:8000.")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return cls(parts.scheme, parts.hostname, port, parts.path.rstrip("/"))

    @property
    def netloc(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.netloc}{self.prefix}"


class Link:
    """One connection: what httpcore uses as its network, and the deadline of the call that uses it."""

    def __init__(self, address: Address, connect_seconds: float, tls: ssl.SSLContext | None) -> None:
        self.deadline = 0.0
        self.received = 0  # bytes of the answer that is being read
        self.used = self.ended = False  # by an earlier call; by the other side
        self.cancelled: str | None = None
        self._connect_seconds, self._stream = connect_seconds, None
        origin = httpcore.Origin(address.scheme.encode(), address.host.encode(), address.port)
        self.http = httpcore.HTTPConnection(origin, tls, IDLE_SECONDS, network_backend=self)

    def left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:  # also where bytes keep coming
            raise httpcore.ReadTimeout
        return left

    def begin(self, deadline: float) -> Link:
        self.used, self.deadline, self.received = self._stream is not None, deadline, 0
        return self

    @property
    def is_connected(self) -> bool:
        return self._stream is not None

    # what httpcore asks of a network, and of a stream; its own time limits, of single reads, are left unset

    def connect_tcp(self, host: str, port: int, timeout: Any = None, **more: Any) -> Link:
        self._stream = httpcore.SyncBackend().connect_tcp(host, port, min(self._connect_seconds, self.left()), **more)
        return self

    def start_tls(self, ssl_context: Any, server_hostname: str | None = None, timeout: Any = None) -> Link:
        self._stream = self._stream.start_tls(ssl_context, server_hostname, self.left())
        return self

    def read(self, max_bytes: int, timeout: Any = None) -> bytes:
        data = self._stream.read(max_bytes, self.left())
        self.received, self.ended = self.received + len(data), not data
        return data

    def write(self, buffer: bytes, timeout: Any = None) -> None:
        """`sendall`, with one limit for all of it; httpcore's own copies what is left of a large body again and again."""
        sock = self._stream.get_extra_info("socket")
        try:
            sock.settimeout(self.left())
            sock.sendall(buffer)
        except TimeoutError as error:
            raise httpcore.WriteTimeout(str(error)) from error
        except OSError as error:  # httpcore then reads the answer, which may say why
            self.ended = True
            raise httpcore.WriteError(str(error)) from error

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def cancel(self, why: str) -> None:
        """End the call that uses this connection, from another thread; one that still connects ends with its first byte."""
        self.cancelled, self.deadline = why, 0.0
        if self._stream is not None:
            with contextlib.suppress(OSError):  # it was not connected any more
                self._stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


Token = str | Callable[[], str | None] | None
"""A token, or how to find the present one: a server that draws its own draws another at its next start."""


class Transport:
    """Calls of one server. Any number of threads; connections are kept open and used again."""

    def __init__(self, base_url: str, token: Token, connect_seconds: float = 5.0) -> None:
        self.address, self._connect_seconds = Address.of(base_url), connect_seconds
        self._tls = ssl.create_default_context() if self.address.scheme == "https" else None
        self.use_token(token)
        self._lock = threading.Lock()  # of the two that follow
        self._idle: list[Link] = []
        self._busy: set[Link] = set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address}, token {'set' if self._token() else 'none'})"

    def use_token(self, token: Token) -> None:
        """Sent with every call that begins from now on."""
        if callable(token):
            self._token = token
            return
        if token is not None and (not token.isascii() or not token.isprintable() or " " in token or not token):
            raise ValueError(f"The token of {self.address} is not made of printable ASCII characters without blanks.")
        self._token = lambda: token

    def ask(self, method: str, path: str, body: Any = None, seconds: float = 60.0, reads: bool = True) -> Any:
        """The JSON of the answer; None without `reads`, where only its status counts.

        Every call of this package may be made twice without harm, so one whose kept-open connection turns out to be closed is
        made again on a new one.
        """
        deadline = time.monotonic() + seconds
        what = f"{method} {path} of {self.address}"
        data = body if isinstance(body, bytes | bytearray | memoryview) else _encoded(body)
        try:
            headers = self._headers(len(data))
        except (OSError, ValueError) as error:  # a server that draws its token may be writing the next one
            raise ServerAnswer(f"{what}: there is no token for it ({error}).") from error
        while True:
            link = self._take(deadline)
            try:
                status, kind, text = self._exchange(link, method, path, headers, data)
            except httpcore.TimeoutException as error:
                raise self._slow(what, seconds, link) from error
            except (httpcore.NetworkError, httpcore.ProtocolError, ValueError, OSError) as error:
                if link.cancelled or not link.used or link.received:
                    raise self._typed(what, link, error) from error
            else:
                return _read(what, status, kind, text, reads)
            finally:
                self._put_back(link)

    def _exchange(
        self, link: Link, method: str, path: str, headers: list[tuple[str, str]], data: bytes | bytearray | memoryview
    ) -> tuple[int, str, bytes]:
        url, text = f"{self.address}{path}", bytearray()
        with link.http.stream(method, url, headers=headers, content=[data] if len(data) else None) as reply:
            for piece in reply.iter_stream():
                text += piece
                if len(text) > MAX_ANSWER_BYTES:
                    raise ValueError(f"it is larger than {MAX_ANSWER_BYTES} bytes")
            kind = next((value for name, value in reply.headers if name.lower() == b"content-type"), b"")
            return reply.status, kind.decode("latin-1"), bytes(text)

    def _headers(self, length: int) -> list[tuple[str, str]]:
        headers = [("Host", self.address.netloc), ("Content-Length", str(length)), ("Accept-Encoding", "identity")]
        headers.append(("Content-Type", "application/json"))
        if (token := self._token()) is not None:
            headers.append(("Authorization", f"Bearer {token}"))
        return headers

    def _slow(self, what: str, seconds: float, link: Link) -> ServerError:
        if link.cancelled:
            return ServerGone(f"{what} was cancelled: {link.cancelled}")
        if not link.is_connected:
            return ServerSlow(
                f"{what}: the connection was not accepted within {min(self._connect_seconds, seconds):g} s."
            )
        came = f"{link.received} bytes of an answer came" if link.received else "no answer came"
        return ServerSlow(f"{what}: {came} within {seconds:g} s.")

    def _typed(self, what: str, link: Link, error: Exception) -> ServerError:
        if link.cancelled:
            return ServerGone(f"{what} was cancelled: {link.cancelled}")
        if not link.is_connected:
            return ServerGone(f"{what}: no connection ({error}).")
        if link.ended:
            return ServerGone(f"{what}: the connection ended before the answer did ({error}).")
        if isinstance(error, httpcore.NetworkError | OSError):
            return ServerGone(f"{what}: the connection failed ({error}).")
        return ServerAnswer(f"{what}: the reply is not HTTP ({type(error).__name__}: {str(error)[:200]}).")

    # connections ----------------------------------------------------------------------------------------------------

    def _take(self, deadline: float) -> Link:
        with self._lock:
            link = None
            while self._idle and link is None:
                link = self._idle.pop()
                if link.http.has_expired():
                    link.http.close()
                    link = None
            link = (link or Link(self.address, self._connect_seconds, self._tls)).begin(deadline)
            self._busy.add(link)
            return link

    def _put_back(self, link: Link) -> None:
        with self._lock:
            self._busy.discard(link)
            if link.http.is_available() and not link.cancelled:
                self._idle.append(link)
                return
        link.http.close()
        link.close()

    def cancel_calls(self, why: str) -> None:
        """End every call that is under way, with ServerGone."""
        with self._lock:
            busy, idle, self._idle = list(self._busy), self._idle, []
        for link in busy:
            link.cancel(why)
        for link in idle:
            link.http.close()


def _encoded(body: Any) -> bytes:
    return b"" if body is None else json.dumps(body, allow_nan=False).encode()


def _read(what: str, status: int, kind: str, text: bytes, reads: bool = True) -> Any:
    """The value in an answer; ServerRefused for any status but a success."""
    if not reads and 200 <= status < 300:
        return None
    try:
        value = json.loads(text) if text or 200 <= status < 300 else None
    except (ValueError, RecursionError) as error:
        if 200 <= status < 300:
            raise ServerAnswer(
                f"{what}: the answer is not JSON (status {status}, {kind or 'no type'}: {_sample(text)})."
            ) from error
        value = None
    if 200 <= status < 300:
        return value
    message = value.get("error") if isinstance(value, dict) else None
    if isinstance(message, dict):  # as OpenAI's interface writes errors
        message = message.get("message")
    sentence = message if isinstance(message, str) and message else _sample(text)
    name = value.get("kind", "") if isinstance(value, dict) else ""
    raise ServerRefused(f"{what} was refused with status {status}: {sentence[:2000]}", status, str(name))


def _sample(text: bytes) -> str:
    return repr(text[:80].decode("latin-1")) if text else "an empty body"


def checked(what: str, read: Callable[[Any], Any], value: Any) -> Any:
    """`read(value)`, where an answer that lacks something or has it in another type is a ServerAnswer."""
    try:
        return read(value)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise ServerAnswer(
            f"{what}: the answer is not what this client understands ({type(error).__name__}: {str(error)[:200]})."
        ) from error
