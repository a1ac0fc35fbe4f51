"""A vLLM that lives in a trainer's process: what it must not change there, and where it stands among the ranks.

vLLM seeds the global generators of the process it starts in and forbids changes of the number of threads.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core in this process, where the weights are
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
"""What is set for a colocated engine where the user has not set it."""


@contextmanager
def preserved_torch_rng() -> Iterator[None]:
    """Afterwards torch's global generators continue as if nothing had been drawn: vLLM draws even for requests with seeds."""
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
        yield


@contextmanager
def preserved_process_state() -> Iterator[None]:
    """Inside, vLLM may start or wake; afterwards random numbers and threads are as before."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    python, numpy = random.getstate(), np.random.get_state()
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    dtype = torch.get_default_dtype()
    try:
        with preserved_torch_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)


def distributed_engine_args(tensor_parallel: int) -> dict[str, Any]:
    """Fields of vLLM's EngineArgs by which an engine takes its place among the trainer's ranks: its own device, its group."""
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if tensor_parallel < 1 or world % tensor_parallel:
        raise ValueError(
            f"A model over {tensor_parallel} ranks (tensor parallel) does not fit a run of {world} ranks: {world} must be a "
            "multiple of it."
        )
    if world == 1:
        return {}
    os.environ.setdefault("RANK", str(dist.get_rank()))
    os.environ.setdefault(
        "LOCAL_RANK", str(torch.cuda.current_device() if torch.cuda.is_available() else dist.get_rank())
    )
    return {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": tensor_parallel}


def tensor_parallel_group() -> Any:
    """vLLM's own group of the ranks that share a model, for messages from host to host."""
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().cpu_group
