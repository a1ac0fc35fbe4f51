"""What every test shares: one thread, no network, caches in a temporary folder."""

from __future__ import annotations

import os
import tempfile

_CACHE = tempfile.mkdtemp(prefix="posttrain-tests-")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")  # see tests/forked.py
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_CACHE", _CACHE)
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import gc
import signal
import time
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.forked import end_all, freeze
from tests.long_cells import mark_long

gc.disable()  # until all tests are collected: nothing that is imported is garbage
settings.register_profile("posttrain", deadline=None)  # a busy machine may need a second for any example
settings.load_profile("posttrain")
# Ignored as under nohup, children would inherit it, and tests send it to them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """The process that hands tests out to workers runs none: it starts them at once instead of after an import of torch."""
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        return
    import torch

    from tests.torchvision_on_cpu import make_importable

    make_importable()
    torch.set_num_threads(1)
    # Where there is none, torch would keep each seed for later, with the stack of whoever gave it.
    for absent in (torch.cuda, torch.xpu, torch.mtia):
        if not absent.is_available():
            absent.manual_seed_all = lambda seed: None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_long(items)


def pytest_collection_finish() -> None:
    """What was imported stays: no garbage collection, of which every run has some, looks through a million objects again."""
    gc.enable()
    gc.collect()
    freeze()


class SlowCollections:
    """Remembers whether a collection of everything was slow: trainers ask for one at the end of every run, and after a test has
    compiled something it would look through ten times as many objects, which stay, in every run of every later test."""

    LIMIT_S = 0.02

    def __init__(self) -> None:
        self.started_s = 0.0
        self.seen = False

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.started_s = time.thread_time()
        elif info["generation"] == 2 and time.thread_time() - self.started_s > self.LIMIT_S:
            self.seen = True


SLOW_COLLECTIONS = SlowCollections()
gc.callbacks.append(SLOW_COLLECTIONS)


@pytest.fixture(autouse=True)
def _no_child_outlives_its_test() -> Iterator[None]:
    yield
    end_all()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    """After a test with slow collections: what has outlived its fixtures stays too."""
    if SLOW_COLLECTIONS.seen:
        gc.collect()
        freeze()
        SLOW_COLLECTIONS.seen = False


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    import torch

    torch.manual_seed(0)
    # A bfloat16 product that oneDNN cannot do here turns oneDNN off for the rest of the process, and with it the last bit of
    # every float32 product after it.
    torch._C._set_mkldnn_enabled(True)
