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
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.forked import end_all, freeze

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


def pytest_collection_finish() -> None:
    """What was imported stays: no garbage collection, of which every run has some, looks through a million objects again."""
    gc.collect()
    freeze()


@pytest.fixture(autouse=True)
def _no_child_outlives_its_test() -> Iterator[None]:
    yield
    end_all()


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    import torch

    torch.manual_seed(0)
    # A bfloat16 product that oneDNN cannot do here turns oneDNN off for the rest of the process, and with it the last bit of
    # every float32 product after it.
    torch._C._set_mkldnn_enabled(True)
