"""HTTP with a deadline for every whole call, whatever the other side does: nothing, garbage, or a byte a second.

`http.client` has a time limit for each read; a server that sends one byte a second never passes it. Here every read and
write gets what is left of the call's own time.
"""

from __future__ import annotations

import http.client
import io
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

log = logging.getLogger(__name__)

MOST_ANSWER_BYTES = 256 << 20
IDLE_SECONDS = 3.0
"""How long an open connection may lie idle and be used again; uvicorn closes its end after 5 s."""


class ServerError(RuntimeError):
    """Something about a server; the message is a sentence that names it."""


class ServerGone(ServerError):
    """Nobody listens there, or the connection ended before the answer did."""


class ServerSlow(ServerError):
    """A deadline passed."""


class ServerAnswer(ServerError):
    """An answer came that is not what was asked for."""


class ServerRefused(ServerError):
    """The server says no, with a status and a sentence of its own."""

    def __init__(self, message: str, status: int, kind: str = "") -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


@dataclass(frozen=True)
class Deadlines:
    """Seconds. No wait of the trainer for a server is longer than these say."""

    connect: float = 5.0
    health: float = 5.0  # for one question; two unanswered ones and the server counts as down
    control: float = 60.0  # info, cache reset, sleep, wake, the beginning of an update
    completion: float = 1800.0  # one completion, from when it was sent until it is here
    part: float = 120.0  # one bucket of weights
    commit: float = 600.0  # until running requests ended and the weights are loaded
    start: float = 1800.0  # a server process, until it answers
    back: float = 1800.0  # how long a run goes on hoping while no server is up

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < 1e6:
                raise ValueError(f"Deadlines: `{name}` is {value!r}; it must be a number of seconds above 0.")


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


class _Reader(io.RawIOBase):
    """Reads of a socket, each limited by what is left of the call's time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.socket.settimeout(self._connection.left())
        count = self._connection.socket.recv_into(buffer)
        self._connection.received += count
        return count


class Connection:
    """One open socket and the deadline of the call that uses it."""

    def __init__(self, address: Address, deadline: float, connect_seconds: float) -> None:
        self.deadline = deadline
        self.received = 0  # bytes of the answer that is being read
        self.idle_since = 0.0
        self.used = False
        self.broken_off: str | None = None
        self.socket = socket.create_connection((address.host, address.port), min(connect_seconds, self.left()))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if address.scheme == "https":
            plain = self.socket
            try:
                plain.settimeout(self.left())
                self.socket = ssl.create_default_context().wrap_socket(plain, server_hostname=address.host)
            except OSError:
                plain.close()
                raise

    def left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def makefile(self, mode: str) -> io.BufferedReader:  # what http.client.HTTPResponse asks of a socket
        return io.BufferedReader(_Reader(self), 1 << 16)

    def send(self, head: bytes, body: bytes | bytearray | memoryview) -> None:
        self.socket.settimeout(self.left())  # of `sendall` as a whole
        if len(body) < 1 << 16:
            self.socket.sendall(head + bytes(body))
            return
        self.socket.sendall(head)
        self.socket.settimeout(self.left())
        self.socket.sendall(body)

    def break_off(self, why: str) -> None:
        """End the call that uses this connection, from another thread."""
        self.broken_off = why
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            self.socket.close()  # it was not connected any more

    def close(self) -> None:
        self.socket.close()


Token = str | Callable[[], str | None] | None
"""A token, or how to find the present one: a server that draws its own draws another at its next start."""


class Transport:
    """Calls of one server. Any number of threads; connections are kept open and used again."""

    def __init__(self, base_url: str, token: Token, connect_seconds: float = 5.0) -> None:
        self.address, self._connect_seconds = Address.of(base_url), connect_seconds
        self.use_token(token)
        self._lock = threading.Lock()  # of the two that follow
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()

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
        while True:
            connection = None
            try:
                connection = self._take(deadline)
                reply, text = self._exchange(connection, method, path, data)
            except TimeoutError as error:
                self._discard(connection)
                raise self._slow(what, seconds, connection) from error
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._discard(connection)
                stale = connection is not None and connection.used and not connection.received
                if not stale or connection.broken_off:
                    raise self._typed(what, connection, error) from error
            except BaseException:
                self._discard(connection)
                raise
            else:
                self._put_back(connection, reply)
                return _read(what, reply.status, reply.getheader("Content-Type", ""), text, reads)

    def _exchange(
        self, connection: Connection, method: str, path: str, data: bytes | bytearray | memoryview
    ) -> tuple[http.client.HTTPResponse, bytes]:
        connection.received = 0
        connection.send(self._head(method, path, len(data)), data)
        reply = http.client.HTTPResponse(connection, method=method)
        reply.begin()
        text = reply.read(MOST_ANSWER_BYTES + 1)
        if len(text) > MOST_ANSWER_BYTES:
            raise ValueError(f"it is larger than {MOST_ANSWER_BYTES} bytes")
        announced = reply.getheader("Content-Length")
        if announced is not None and announced.isdigit() and len(text) < int(announced):
            raise ConnectionResetError(f"it ended after {len(text)} of {announced} bytes")
        return reply, text

    def _head(self, method: str, path: str, length: int) -> bytes:
        lines = [f"{method} {self.address.prefix}{path} HTTP/1.1", f"Host: {self.address.netloc}"]
        lines += [f"Content-Length: {length}", "Accept-Encoding: identity", "Content-Type: application/json"]
        if (token := self._token()) is not None:
            lines.append(f"Authorization: Bearer {token}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def _slow(self, what: str, seconds: float, connection: Connection | None) -> ServerError:
        if connection is not None and connection.broken_off:
            return ServerGone(f"{what} was broken off: {connection.broken_off}")
        if connection is None:
            return ServerSlow(f"{what}: nobody took the connection within {min(self._connect_seconds, seconds):g} s.")
        came = f"{connection.received} bytes of an answer came" if connection.received else "no answer came"
        return ServerSlow(f"{what}: {came} within {seconds:g} s.")

    def _typed(self, what: str, connection: Connection | None, error: Exception) -> ServerError:
        if connection is not None and connection.broken_off:
            return ServerGone(f"{what} was broken off: {connection.broken_off}")
        if connection is None:
            return ServerGone(f"{what}: no connection ({error}).")
        gone = isinstance(
            error, ConnectionError | http.client.IncompleteRead
        )  # RemoteDisconnected is a ConnectionError
        if gone:
            return ServerGone(f"{what}: the connection ended before the answer did ({error}).")
        if isinstance(error, OSError):
            return ServerGone(f"{what}: the connection failed ({error}).")
        return ServerAnswer(f"{what}: what came back is no HTTP answer ({type(error).__name__}: {str(error)[:200]}).")

    # connections ----------------------------------------------------------------------------------------------------

    def _take(self, deadline: float) -> Connection:
        now = time.monotonic()
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                if now - connection.idle_since > IDLE_SECONDS:
                    connection.close()
                    continue
                connection.deadline, connection.used = deadline, True
                self._busy.add(connection)
                return connection
        connection = Connection(self.address, deadline, self._connect_seconds)
        with self._lock:
            self._busy.add(connection)
        return connection

    def _discard(self, connection: Connection | None) -> None:
        if connection is not None:
            with self._lock:
                self._busy.discard(connection)
            connection.close()

    def _put_back(self, connection: Connection, reply: http.client.HTTPResponse) -> None:
        connection.idle_since = time.monotonic()
        with self._lock:
            self._busy.discard(connection)
            if not reply.will_close and not connection.broken_off:
                self._idle.append(connection)
                return
        connection.close()

    def break_off(self, why: str) -> None:
        """End every call that is under way, with ServerGone."""
        with self._lock:
            busy, idle, self._idle = list(self._busy), self._idle, []
        for connection in busy:
            connection.break_off(why)
        for connection in idle:
            connection.close()


def _encoded(body: Any) -> bytes:
    return b"" if body is None else json.dumps(body, allow_nan=False).encode()


def _read(what: str, status: int, kind: str, text: bytes, reads: bool = True) -> Any:
    """The value in an answer; ServerRefused for a status that is no success."""
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
    said = value.get("error") if isinstance(value, dict) else None
    if isinstance(said, dict):  # as OpenAI's interface writes errors
        said = said.get("message")
    sentence = said if isinstance(said, str) and said else _sample(text)
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
