"""Bytes on a GPU that a process of this machine shares with another, which names the same GPU its own.

torch gives a shared piece of GPU memory away as numbers and short byte strings; these travel as JSON. Nothing is pickled.
"""

from __future__ import annotations

import base64
import re
import threading
from typing import Any

import torch
from torch import Tensor

from ..errors import FieldError, TransportFailed

_COUNTER = re.compile(rb"/torch_[0-9]+_[0-9]+_[0-9]+")
"""The file in which torch counts who still uses the memory. The receiver writes to it, so no other name is taken."""
_table = threading.Lock()
"""Held to open memory and to close it: torch's table of what is open takes one that is being closed for a fault of its own."""


def gpu_ids() -> list[str]:
    """Of the GPUs that this process sees, in its own order; none unless CUDA is at work here already."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return []
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]


def share(buffer: Tensor) -> dict[str, Any]:
    """The place of a buffer, as JSON fields. Once for each buffer: torch keeps a count for every call."""
    _, handle, size, offset, counter, counter_offset, event, event_sync = buffer.untyped_storage()._share_cuda_()
    return {
        "gpu": gpu_ids()[buffer.device.index],
        "handle": _text(handle),
        "size": size,
        "offset": offset,
        "counter": _text(counter),
        "counter_offset": counter_offset,
        "event": _text(event),
        "event_sync": bool(event_sync),
    }


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def copied(place: dict[str, Any], nbytes: int) -> Tensor:
    """So many bytes of what lies there, in memory of this process's own on the same GPU. The shared memory is closed before
    this returns.

    `place`: the fields of `bodies.GpuPlace`."""
    if place["size"] < nbytes:
        raise TransportFailed(f"The shared memory has {place['size']} bytes, and the header describes {nbytes}.")
    if not _COUNTER.fullmatch(place["counter"]):
        raise FieldError("`counter` of `place` is not the name of a counter of torch.")
    ids = gpu_ids()
    if place["gpu"] not in ids:
        raise TransportFailed("The bytes lie on a GPU that this server does not use.")
    index = ids.index(place["gpu"])
    try:
        with torch.cuda.device(index):
            with _table:
                shared = _opened(index, place)
            try:
                found = shared[:nbytes].clone()
                torch.cuda.current_stream().synchronize()
                return found
            finally:
                with _table:
                    del shared
    except Exception as error:  # torch raises several kinds for made-up numbers: an empty handle is an IndexError
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise TransportFailed(f"The shared GPU memory cannot be read ({reason[:300]}).") from error


def _opened(index: int, place: dict[str, Any]) -> Tensor:
    storage = torch.UntypedStorage._new_shared_cuda(
        index,
        place["handle"],
        place["size"],
        place["offset"],
        place["counter"],
        place["counter_offset"],
        place["event"],
        place["event_sync"],
    )
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
