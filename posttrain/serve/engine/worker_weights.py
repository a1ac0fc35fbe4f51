"""New weights for vLLM's worker processes: each gets the name of a block in shared memory and takes its share out of it.

Over vLLM's own channel to its workers go that name, the layout as text, and lists of names; no tensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import EngineFailed
from ..wire.shared_blocks import SharedFolder, default_folder

EXTENSION = f"{__package__}.worker_extension.WeightLoading"
BLOCK_BYTES = 256 << 20
ALIGNMENT = 8
STANDS_ALONE = "posttrain_serve"
"""How the server's folder is named as a package where posttrain is not installed (`__main__`)."""

Call = Callable[[str, tuple[Any, ...]], list[Any]]
"""(method, arguments) -> the answer of each worker."""


def blocks_of(tensors: Iterable[tuple[str, Tensor]], most: int = BLOCK_BYTES) -> Iterator[tuple[str, list[memoryview]]]:
    """(layout, data) of blocks of about `most` bytes; a tensor is never split."""
    entries: list[dict[str, Any]] = []
    chunks: list[memoryview] = []
    end = 0
    for name, tensor in tensors:
        flat = tensor.detach().contiguous().cpu().flatten().view(torch.uint8)
        if not flat.numel():
            continue  # nothing to load, and an empty block cannot be mapped
        if entries and end + flat.numel() > most:
            yield json.dumps(entries), chunks
            entries, chunks, end = [], [], 0
        padding = -end % ALIGNMENT  # of numbers of every dtype
        if padding:
            chunks.append(memoryview(bytes(padding)))
        begin = end + padding
        end = begin + flat.numel()
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "begin": begin, "end": end})
        chunks.append(memoryview(flat.numpy()))
    if entries:
        yield json.dumps(entries), chunks


class WorkerWeights:
    """The server's side: hands new weights to all workers of an engine."""

    def __init__(self, folder: Path | None = None) -> None:
        path = folder or default_folder() or Path(tempfile.gettempdir()) / f"posttrain-{os.geteuid()}"
        self._folder = SharedFolder(path)
        _make_importable(path)

    def load(self, call: Call, tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Into all workers. Returns the parameters that nothing was loaded into, as far as vLLM says."""
        loaded: list[set[str] | None] | None = None
        for layout, data in blocks_of(tensors):
            with self._folder.write(data) as block:
                answers = call("posttrain_load_block", (str(self._folder.path), block.name, layout))
            if errors := [answer["error"] for answer in answers if "error" in answer]:
                raise EngineFailed(f"{len(errors)} of vLLM's {len(answers)} workers refused the weights: {errors[0]}")
            new = [None if answer["loaded"] is None else set(answer["loaded"]) for answer in answers]
            loaded = new if loaded is None else [_union(a, b) for a, b in zip(loaded, new)]
        missing: set[str] = set()
        for names, known in zip(loaded or [], call("posttrain_parameters", ())):
            missing |= set(known) - names if names is not None else set()
        return sorted(missing)

    def close(self) -> None:
        self._folder.close()


def _union(one: set[str] | None, other: set[str] | None) -> set[str] | None:
    return None if one is None or other is None else one | other


def _make_importable(folder: Path) -> None:
    """Workers are new processes and import this package by its name, which exists only in the server's own process.

    The name is written down as a link in a folder of this user's alone, where no other user can put a package of that name.
    """
    if __package__.partition(".")[0] != STANDS_ALONE:
        return
    package = Path(__file__).resolve().parents[1]
    place = folder / f"package-{hashlib.blake2b(bytes(package), digest_size=8).hexdigest()}"
    place.mkdir(mode=0o700, exist_ok=True)
    link = place / STANDS_ALONE
    if not link.is_symlink():
        with contextlib.suppress(FileExistsError):  # another server made it an instant ago
            link.symlink_to(package)
    sys.path.append(str(place))  # multiprocessing hands it on to the processes that it starts
