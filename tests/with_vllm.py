"""Tests that need a real vLLM: the interpreter that has it, and what its processes are started with."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest
from filelock import FileLock

PYTHON = os.environ.get("POSTTRAIN_VLLM_PYTHON")
where_vllm_is = pytest.mark.skipif(
    not PYTHON, reason="POSTTRAIN_VLLM_PYTHON names no interpreter with vLLM (`make vllm-env`): not run"
)
needs_vllm = [pytest.mark.slow, where_vllm_is]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
SERVED = ("--dtype", "float32", "--context-length", "384", "--engine-args", '{"max_num_seqs": 16}')
"""Arguments of a server for the tiny models of these tests."""
ROOT = Path(__file__).parents[1]
ONE_AT_A_TIME = Path(tempfile.gettempdir()) / "posttrain-vllm-on-two-ranks.lock"
"""vLLM on the CPU names the memory that ranks share by their numbers alone where a launcher started them: two runs would meet."""


def run_pytest(file: Path, seconds: float, marks: str = "not trust", **environment: str) -> None:
    """A file of tests in a process that has vLLM: it leaves its mark on a process, so that of the caller is kept out of it."""
    command = [PYTHON, "-m", "pytest", str(file), "-q", "--show-capture=no", "-m", marks]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, env=os.environ | environment
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def run_on_two_ranks(module: str, *words: str, seconds: float = 400) -> None:
    """A module as two processes of one run; each must say that it "is content"."""
    command = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", module, *words]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    with FileLock(ONE_AT_A_TIME):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=seconds)
        finally:  # the ranks too: they outlive a launcher that is killed
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-6000:]
    assert output.count("is content") == 2, output[-6000:]
