"""Memory that is used again: never while anybody holds it, and no more of it than two versions need."""

import gc
import random
import threading

import numpy as np
import pytest
import torch

from posttrain.serve.wire import host_memory
from posttrain.serve.wire.host_memory import SMALL_BYTES, HostMemory, copy_bytes

SIZE = SMALL_BYTES


def address(view) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


@pytest.mark.parametrize(
    "hold",
    [
        lambda view: view,
        lambda view: view[5:6],
        lambda view: view.toreadonly()[9:].cast("B"),
        lambda view: np.frombuffer(view, np.uint8)[3:][1:],
        lambda view: torch.frombuffer(view, dtype=torch.uint8).view(torch.float32).view(-1, 2)[1:],
    ],
)
def test_memory_comes_back_when_its_last_view_is_gone_and_not_before(hold):
    memory = HostMemory()
    view = memory.take(SIZE)
    first, held = address(view), hold(view)
    del view
    gc.collect()
    assert memory.idle_bytes == 0
    other = memory.take(SIZE)
    assert address(other) != first
    del held
    assert memory.idle_bytes == SIZE
    assert address(memory.take(SIZE)) == first
    assert address(memory.take(SIZE + 1)) not in (first, address(other))  # another size is other memory


def test_what_two_versions_did_not_need_is_let_go_of():
    memory = HostMemory()
    views = [memory.take(SIZE) for _ in range(3)]
    del views
    assert memory.idle_bytes == 3 * SIZE
    memory.renew()
    assert memory.idle_bytes == 3 * SIZE
    views = [memory.take(SIZE)]
    memory.renew()
    assert memory.idle_bytes == 0
    del views
    assert memory.idle_bytes == SIZE
    none = HostMemory(keeps=False)
    none.take(SIZE)
    assert none.idle_bytes == 0


def test_threads_never_share_a_block(monkeypatch):
    monkeypatch.setattr(host_memory, "SMALL_BYTES", 1)
    memory, wrong = HostMemory(), []

    def work(number: int) -> None:
        rng = random.Random(number)
        for _ in range(2000):
            views = [memory.take(64) for _ in range(rng.randint(1, 3))]
            for view in views:
                copy_bytes(memoryview(bytes([number]) * 64), view)
            wrong.extend(view for view in views if view != bytes([number]) * 64)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert memory.idle_bytes <= 4 * 6 * 64  # those of one turn and of the next


def test_copies_are_exact_and_of_one_length():
    target = bytearray(10)
    copy_bytes(memoryview(b"abc"), memoryview(target)[2:5])
    copy_bytes(memoryview(b""), memoryview(target)[5:5])
    assert target == b"\0\0abc\0\0\0\0\0"
    for source in (b"abcd", b"a", b""):
        with pytest.raises(ValueError, match=f"{len(source)} bytes were to be copied to a place of 3"):
            copy_bytes(memoryview(source), memoryview(target)[2:5])
