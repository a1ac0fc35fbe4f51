"""Snapshot: all that a checkpoint will hold, put aside in host memory, so that training continues while it is written.

While `capturing(snapshot)` lasts, everything that this thread would write into a checkpoint goes into the snapshot instead: our
own states through `write_tensors` and `write_content`, the weights through the one function by which transformers and peft write
safetensors files. They keep the names, shards, ties and configs that `save_pretrained` gives them; only the writing is put off.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.core.faults import fault_point
from posttrain.trainer.checkpoints.tensor_file import FileRecord, HeldTensor, raw_bytes, write_bytes, write_tensor_file

CHUNK_BYTES = 256 * 2**20  # a power of two: torch rounds page-locked blocks up to one
WRITERS_OF_WEIGHTS = (("transformers.modeling_utils", "safe_save_file"), ("peft.peft_model", "safe_save_file"))
"""Where the two libraries hand tensors to safetensors. If a release of theirs does it elsewhere, weights are written at once."""


class HostArena:
    """Host memory that is allocated once and used by one snapshot after the other; page-locked for copies from CUDA.

    Copies are queued on the current stream, so whatever the training thread launches afterwards runs after them; only the
    thread that writes waits for them.
    """

    def __init__(self, page_locked: bool) -> None:
        self.page_locked = page_locked
        self._chunks: list[Tensor] = []
        self._chunk, self._offset = 0, 0
        self._copied: torch.cuda.Event | None = None

    @property
    def size(self) -> int:
        return sum(chunk.numel() for chunk in self._chunks)

    def reserve(self, wanted: int) -> None:
        """Have at least this many bytes in all."""
        while self.size < wanted:
            # Page-locked memory comes in chunks of one size; ordinary memory is taken as needed, a little more each time.
            size = CHUNK_BYTES if self.page_locked else min(max(wanted - self.size, 2**16), CHUNK_BYTES)
            self._chunks.append(torch.empty(size, dtype=torch.uint8, pin_memory=self.page_locked))

    def reset(self) -> None:
        """Forget what is held; the memory stays."""
        self._chunk, self._offset, self._copied = 0, 0, None

    def release(self) -> None:
        self.reset()
        self._chunks = []

    def hold(self, tensor: Tensor) -> HeldTensor:
        """Copy a tensor (or queue its copy) into the arena."""
        source = raw_bytes(tensor)
        pieces, done = [], 0
        while done < source.numel():
            room = self._room(source.numel() - done)
            room.copy_(source[done : done + room.numel()], non_blocking=True)
            pieces.append(room)
            done += room.numel()
        return HeldTensor(tensor.dtype, tuple(tensor.shape), pieces)

    def _room(self, wanted: int) -> Tensor:
        """The next free bytes, at most `wanted`."""
        if self._chunk < len(self._chunks) and self._offset == self._chunks[self._chunk].numel():
            self._chunk, self._offset = self._chunk + 1, 0
        if self._chunk == len(self._chunks):
            self.reserve(self.size + wanted)
        chunk = self._chunks[self._chunk]
        taken = chunk[self._offset : self._offset + wanted]
        self._offset += taken.numel()
        return taken

    def mark(self) -> None:
        """All copies have been queued."""
        if self.page_locked:
            self._copied = torch.cuda.Event(blocking=True)
            self._copied.record()

    def wait(self) -> None:
        """Until the copies have arrived. Releases the interpreter lock."""
        if self._copied is not None:
            self._copied.synchronize()


class Snapshot:
    """Files that are to be written into `folder`. With an arena tensors are copied; without, they are only pointed at."""

    def __init__(self, folder: Path, arena: HostArena | None = None) -> None:
        self.folder = folder
        self.arena = arena
        self._contents: dict[Path, bytes] = {}
        self._tensors: dict[Path, tuple[dict[str, HeldTensor | Tensor], dict[str, str] | None]] = {}

    @property
    def nbytes(self) -> int:
        """About what the files will take; headers are small."""
        held = sum(tensor.nbytes for tensors, _ in self._tensors.values() for tensor in tensors.values())
        return held + sum(len(content) for content in self._contents.values())

    def add_content(self, path: Path, content: bytes) -> None:
        self._contents[path] = content

    def add_tensors(self, path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None) -> None:
        keep: Callable[[Tensor], Any] = self.arena.hold if self.arena is not None else torch.Tensor.detach
        self._tensors[path] = ({name: keep(tensor) for name, tensor in tensors.items()}, metadata)
        fault_point("save.capture")

    def seal(self) -> None:
        if self.arena is not None:
            self.arena.mark()

    def write(self, should_continue: Callable[[], bool] = lambda: True) -> dict[Path, FileRecord]:
        """Write every file. Returns what a manifest says about each."""
        if self.arena is not None:
            self.arena.wait()
        records = {}
        for path, (tensors, metadata) in self._tensors.items():
            fault_point("save.file")
            held = {name: _held(tensor) for name, tensor in tensors.items()}
            records[path] = write_tensor_file(path, held, metadata, should_continue)
        for path, content in self._contents.items():
            fault_point("save.file")
            records[path] = write_bytes(path, content)
        return records


def _held(tensor: HeldTensor | Tensor) -> HeldTensor:
    if isinstance(tensor, HeldTensor):
        return tensor
    return HeldTensor(tensor.dtype, tuple(tensor.shape), [raw_bytes(tensor).cpu()])


_current: ContextVar[Snapshot | None] = ContextVar("snapshot", default=None)  # of this thread only


def is_capturing() -> bool:
    return _current.get() is not None


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Into the snapshot that is being taken, else to the disk at once."""
    snapshot = _current.get()
    if snapshot is not None:
        snapshot.add_tensors(Path(path), tensors, metadata)
    else:
        write_tensor_file(Path(path), {name: _held(tensor) for name, tensor in tensors.items()}, metadata)


def write_content(path: Path, content: bytes) -> None:
    """As `write_tensors`, for a small file."""
    snapshot = _current.get()
    if snapshot is not None:
        snapshot.add_content(Path(path), content)
    else:
        write_bytes(Path(path), content)


def json_text(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True)


def write_json(path: Path, value: Any) -> None:
    write_content(path, json_text(value).encode())


@contextmanager
def capturing(snapshot: Snapshot) -> Iterator[None]:
    """What this thread writes by `write_tensors` and `write_content`, and weights by `save_pretrained`, goes into the snapshot."""
    token = _current.set(snapshot)
    with ExitStack() as stack:
        stack.callback(_current.reset, token)
        for place, name in WRITERS_OF_WEIGHTS:
            module = sys.modules.get(place)  # what is not imported saves nothing
            if hasattr(module, name):
                stack.enter_context(_replaced(module, name))
        yield
        snapshot.seal()


@contextmanager
def _replaced(module: Any, name: str) -> Iterator[None]:
    """`module.name(tensors, path, metadata=...)` of this thread writes by `write_tensors`; other threads are left alone."""
    original = getattr(module, name)

    def save_file(tensors: dict[str, Tensor], path: Any, metadata: dict[str, str] | None = None) -> None:
        if _current.get() is None:
            original(tensors, path, metadata=metadata)
        else:
            write_tensors(Path(path), tensors, metadata)

    setattr(module, name, save_file)
    try:
        yield
    finally:
        setattr(module, name, original)
