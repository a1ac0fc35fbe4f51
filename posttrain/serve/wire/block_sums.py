"""sum64: a checksum that a GPU computes about as fast as it reads, so that weights never leave it to be checked.

Of a block with the 32-bit words x_i (little endian, zeros after the last byte):

    sum over i of x_i * w_i  mod 2**64,    w_i = (i + 1) * 0x9E3779B97F4A7C15 | 1

Every w_i is odd, so one changed word always changes the sum. Against an attacker it is no protection: the token is. The
digits are those of the sum and of the number of bytes. Host bytes are summed by numpy, tensors on a device by torch, with the
same result.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

KIND = "sum64"
BLOCK_BYTES = 4 << 20
BLOCKS_AT_ONCE = 8
"""On a device; each takes five times its size for an instant."""
GOLDEN, ODD = 0x9E3779B97F4A7C15, 1


@cache
def _weights(device: torch.device) -> Tensor:
    numbers = (np.arange(1, BLOCK_BYTES // 4 + 1, dtype=np.uint64) * np.uint64(GOLDEN)) | np.uint64(ODD)
    return torch.from_numpy(numbers.view(np.int64)).to(device)


def of_bytes(data: bytes | bytearray | memoryview) -> str:
    """The digits of one block."""
    raw = np.frombuffer(data, np.uint8)
    words = np.pad(raw, (0, -len(raw) % 4)).view("<i4").astype(np.int64)
    total = int((words * _weights(torch.device("cpu")).numpy()[: len(words)]).sum()) if len(words) else 0
    return _digits(total, len(raw))


def of_tensor(data: Tensor) -> tuple[str, ...]:
    """The digits of each block of these bytes (uint8, one dimension, at least one block), summed where they are."""
    if not data.is_cuda:
        host = memoryview(data.numpy())
        return tuple(of_bytes(host[at : at + BLOCK_BYTES]) for at in range(0, max(len(host), 1), BLOCK_BYTES))
    weights, whole = _weights(data.device), data.numel() // BLOCK_BYTES * BLOCK_BYTES
    sums = []
    for at in range(0, whole, BLOCKS_AT_ONCE * BLOCK_BYTES):
        blocks = data[at : min(at + BLOCKS_AT_ONCE * BLOCK_BYTES, whole)].view(torch.int32).view(-1, len(weights))
        sums.append((blocks.to(torch.int64) * weights).sum(1))
    if whole < data.numel() or not sums:
        rest = torch.nn.functional.pad(data[whole:], (0, -data.numel() % 4)).view(torch.int32).to(torch.int64)
        sums.append((rest * weights[: len(rest)]).sum()[None])
    lengths = [BLOCK_BYTES] * (whole // BLOCK_BYTES) + [data.numel() - whole]
    return tuple(_digits(total, length) for total, length in zip(torch.cat(sums).tolist(), lengths))


def _digits(total: int, nbytes: int) -> str:
    return f"{total & (1 << 64) - 1:016x}{nbytes:016x}"
