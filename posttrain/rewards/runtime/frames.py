"""Messages over a pipe: eight bytes of length, then the bytes. The trainer's side pickles, the worker's side answers in JSON.

A worker runs code that the user wrote, on text that a model wrote; what it sends back is read as numbers and text only.
"""

from __future__ import annotations

import json
import os
import struct
from typing import Any

HEADER = struct.Struct(">Q")
LARGEST_ANSWER = 64 * 2**20  # bytes; more than this from a worker is a mistake, not an answer


def frame(payload: bytes) -> bytes:
    return HEADER.pack(len(payload)) + payload


def answer_frame(answer: dict[str, Any]) -> bytes:
    return frame(json.dumps(answer, default=str).encode("utf-8", "surrogatepass"))


def read_answer(payload: bytes) -> dict[str, Any]:
    return json.loads(payload.decode("utf-8", "surrogatepass"))


def read_exactly(descriptor: int, count: int) -> bytes | None:
    """`count` bytes of a blocking pipe, or None where it ended before."""
    parts = []
    while count:
        part = os.read(descriptor, min(count, 2**20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def read_frame(descriptor: int, largest: int | None = None) -> bytes | None:
    """The next message, or None at the end of the pipe. One that announces more than `largest` bytes is an error."""
    header = read_exactly(descriptor, HEADER.size)
    if header is None:
        return None
    (length,) = HEADER.unpack(header)
    if largest is not None and length > largest:
        raise ValueError(f"A message of {length:,} bytes was announced; at most {largest:,} are read.")
    return read_exactly(descriptor, length)


def write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
