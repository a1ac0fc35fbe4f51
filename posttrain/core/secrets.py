"""Secrets: found by the names and by the looks of values at any depth, and kept out of everything that is written, shown or sent.

A name says it (`hub_token`, `openaiKey`, `slack-webhook`), or the value does (`hf_...`, `sk-...`, a URL with a password in it), or
the value is that of a variable of this process's environment whose name says it (`HF_TOKEN`, `WANDB_API_KEY`). Imports nothing
heavy: the command line and the page of runs read it.
"""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

HIDDEN = "(hidden)"
PRIVATE = 0o600
LEAST_LETTERS = 8
"""A shorter value is not searched for in other texts: `yes` as a password would hide half of them."""

SURE = ("token", "secret", "secrets", "password", "passwd", "passphrase", "pwd", "webhook", "webhooks", "authorization",
        "credential", "credentials", "creds", "dsn", "apikey", "bearer", "cookie", "cookies", "jwt")  # fmt: skip
"""Words of a name under which any text is a secret."""
MAYBE = ("key", "keys", "tokens", "auth", "pat", "pw", "pass", "hook", "sig", "signature", "sid", "pin", "otp")
"""Words under which a text is one unless it is plainly a word (`text_key: text`, `auth: none`)."""
KEYS_OF = ("api", "access", "private", "auth", "service", "account")
"""With one of these beside it, a key is one for sure."""
NUMBERS_TOO = ("secret", "password", "passwd", "passphrase", "pwd", "pin", "otp")
HARMLESS = frozenset(("pad", "eos", "bos", "unk", "sep", "cls", "mask", "eot", "eom", "image", "audio", "video", "special", "stop",
                      "file", "path", "dir", "sock", "type"))  # fmt: skip
"""Beside `token` or `key` they name a control token, or the place where a secret lies, not the secret."""
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
CONTROL_TOKEN = re.compile(r"<.*>|\[[A-Z_]+\]")
PLAIN = re.compile(r"[A-Za-z]+(?:[_ .-][A-Za-z]+)*")

_QUERY = "token|key|secret|password|sig|signature|auth|access_token|api_key|apikey"
LOOKS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), shown)
    for pattern, shown in (
        (r"\b(?:hf|api_org)_[A-Za-z0-9]{16,}", HIDDEN),
        (r"\b(?:sk|pk|rk)[-_](?:[A-Za-z0-9]+[-_])*[A-Za-z0-9_-]{16,}", HIDDEN),
        (r"\b(?:gh[pousr]|github_pat|glpat|npm|pypi|dop_v1|shpat)[_-][A-Za-z0-9_-]{16,}", HIDDEN),
        (r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b", HIDDEN),
        (r"\bAIza[A-Za-z0-9_-]{30,}", HIDDEN),
        (r"\bxox[a-z]-[A-Za-z0-9-]{8,}", HIDDEN),
        (r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*", HIDDEN),
        (r"(?i)\b(bearer|basic)\s+(?=\S*\d)[A-Za-z0-9._~+/=-]{8,}", rf"\1 {HIDDEN}"),
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", HIDDEN),
        (r"(\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^\s/@?#]+@", rf"\1{HIDDEN}@"),
        (r"(?i)(\bhttps?://(?:[^\s/?#]*\bhooks?\b[^\s/?#]*|[^\s?#]*(?:webhook|/hooks?/|/services/T)[^\s/?#]*))/[^\s\"']+",
         rf"\1/{HIDDEN}"),
        (rf"(?i)([?&](?:[\w-]*[_-])?(?:{_QUERY})=)[^\s&#\"']+", rf"\1{HIDDEN}"),
    )
)  # fmt: skip
"""What a secret looks like wherever it stands, and what is left of it."""
LOCAL_PATH = re.compile(r"(?<![\w/.~-])(?:~/|/(?=[^\s/'\",;:]+/))(?:[^\s/'\",;:]+/)*[^\s/'\",;:]*")
"""An absolute path of two parts or more, or one below the home; no URL."""


def named_secret(name: str, value: Any) -> bool:
    """Whether `value` is a secret because of what it is called."""
    if value is None or isinstance(value, bool) or value == "":
        return False
    words = [word.lower() for word in WORD.findall(name)]
    if HARMLESS & set(words):
        return False
    if not isinstance(value, (str, bytes)):
        return any(word in NUMBERS_TOO for word in words)
    if CONTROL_TOKEN.fullmatch(str(value)):
        return False
    if any(word in SURE or word.endswith(("token", "secret", "password", "apikey", "webhook")) for word in words):
        return True
    if any(word in ("key", "keys") for word in words) and any(word in KEYS_OF for word in words):
        return True
    maybe = any(word in MAYBE or word.endswith("key") for word in words)
    return maybe and len(value) >= LEAST_LETTERS and not PLAIN.fullmatch(str(value))


def of_environment() -> set[str]:
    """Values of this process's variables that are secrets, whatever they look like."""
    return {
        value
        for name, value in os.environ.items()
        if len(value) >= LEAST_LETTERS and named_secret(name, value) and not os.path.isabs(value)
    }


def known_secrets(value: Any, names: tuple[str, ...] = ()) -> set[str]:
    """Texts of a tree that are secrets by their names, to be looked for in other texts, such as a command line."""
    if isinstance(value, Mapping):
        return set().union(*(known_secrets(inner, _inherited(names, key)) for key, inner in value.items()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return set().union(*(known_secrets(inner, names) for inner in value))
    text = str(value)
    return {text} if len(text) >= LEAST_LETTERS and any(named_secret(name, value) for name in names) else set()


def _inherited(names: tuple[str, ...], key: Any) -> tuple[str, ...]:
    """What a value is called: by its key, and by names above it that make everything below them a secret (`credentials`)."""
    return (*(name for name in names if named_secret(name, "x-1" * LEAST_LETTERS)), str(key))


def hidden_text(text: str, known: Iterable[str] = ()) -> str:
    """A text without the secrets in it. `known`: values that are secrets for sure."""
    return _without(text, {*known, *of_environment()})


def _without(text: str, known: set[str]) -> str:
    for secret in sorted(known, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    for look, shown in LOOKS:
        text = look.sub(shown, text)
    return text


def without_secrets(value: Any) -> Any:
    """The same tree of mappings and lists with `(hidden)` in the place of secrets."""
    known = known_secrets(value) | of_environment()  # read once, not for each text
    return _mapped(value, cache(lambda text: _without(text, known)))


def _mapped(value: Any, change: Callable[[str], str], names: tuple[str, ...] = ()) -> Any:
    """What has a secret's name is hidden; every other text, and every key, is given to `change`."""
    if isinstance(value, Mapping):
        return {
            change(key) if isinstance(key, str) else key: _mapped(inner, change, _inherited(names, key))
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_mapped(inner, change, names) for inner in value]
    if any(named_secret(name, value) for name in names):
        return HIDDEN
    return change(os.fspath(value)) if isinstance(value, (str, os.PathLike)) else value


def published(value: Any) -> Any:
    """The same tree as it may be published: no secret, and of a local path its last part and a digest of the whole, so that another
    path is still another one."""
    known = known_secrets(value) | of_environment()
    return _mapped(value, cache(lambda text: last_parts(_without(text, known), digest=True)))


def last_parts(text: str, digest: bool = False) -> str:
    """A text with only the last parts of the local paths in it, each with a `digest` of the path if wanted."""

    def shortened(path: str) -> str:
        name = Path(path).name or "folder"
        return f"{name} (at {hashlib.sha256(path.encode()).hexdigest()[:8]})" if digest else name

    if text.startswith(("/", "~/")) and text.count("/") > 1 and "\n" not in text:
        return shortened(text)  # the whole is a path, spaces and all
    return LOCAL_PATH.sub(lambda found: shortened(found[0]), text)


def private_opener(path: str, flags: int) -> int:
    """`open(..., opener=private_opener)`: a file that only its owner may read, also where it was there before and others could."""
    descriptor = os.open(path, flags, PRIVATE)
    os.fchmod(descriptor, PRIVATE)
    return descriptor


def write_whole(path: Path, content: str | bytes | memoryview, private: bool = True, durable: bool = False) -> None:
    """Write a small file whole or not at all, also where others write the same, `private`ly or for all who may read its folder.

    `durable`: it is on the disk, and not only with the system, before this returns.
    """
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with open(part, "wb", opener=private_opener if private else None) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
