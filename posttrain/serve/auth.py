"""The token that every route asks for (`app.Gate`): where it is from, and who may read it.

A server that was given no token draws one and leaves it in a file that only its user can read, under the number of its port:
trainers of the same user on the same machine find it there, and no other user can read it.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import stat
from pathlib import Path

TOKEN_VARIABLE = "POSTTRAIN_SERVE_TOKEN"
"""In the environment of the server, and of those who ask it."""
SHORTEST_TOKEN = 16


class TokenFileError(ValueError):
    """A file with a token that cannot be used, and why."""


def token_file_of(port: int) -> Path:
    """Where the server on this port of this machine leaves a token that it drew; homes may be shared by machines."""
    return Path.home() / ".cache" / "posttrain" / "serve" / f"{socket.gethostname()}-{port}.token"


def write_token(port: int) -> str:
    """Draw a token and write it where trainers of this user look for it. Every start has a new one."""
    path, token = token_file_of(port), secrets.token_urlsafe(24)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.unlink(missing_ok=True)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(token + "\n")
    part.replace(path)
    return token


def read_token_file(path: Path) -> str:
    """The token in a file of this user's (or root's) that no other user can read."""
    try:
        with open(path, encoding="ascii") as file:
            found = os.fstat(file.fileno())
            token = file.read(4096).strip()
    except (OSError, ValueError) as error:
        raise TokenFileError(f"The token file {path} cannot be read ({error}).") from error
    if found.st_uid not in (os.geteuid(), 0):
        raise TokenFileError(f"The token file {path} belongs to user {found.st_uid}, who is not you.")
    if found.st_mode & 0o077:
        raise TokenFileError(
            f"The token file {path} can be read by other users (mode {stat.S_IMODE(found.st_mode):04o}), who could then control "
            f"the server. Draw a new token, and `chmod 600 {path}`."
        )
    if len(token) < SHORTEST_TOKEN or not token.isprintable() or " " in token:
        raise TokenFileError(
            f"The token in {path} is not {SHORTEST_TOKEN} or more printable ASCII characters without blanks."
        )
    return token


def read_local_token(port: int) -> str | None:
    """The token of a server of this user's on this machine, if it drew one."""
    path = token_file_of(port)
    return read_token_file(path) if path.exists() else None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that address. A name other than localhost could mean anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
