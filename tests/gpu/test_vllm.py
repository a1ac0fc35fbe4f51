"""vLLM in this process on a CUDA device: weights arrive, and memory comes back while it sleeps. Needs vLLM beside posttrain."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM in this environment: not run"),
]


@pytest.mark.parametrize("level", [1, 2])
def test_memory_comes_back_while_it_sleeps_and_weights_after_it_wakes(level):
    command = [sys.executable, "-m", "tests.gpu.vllm_sleep", str(level)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("came back") == 2
