"""vLLM in this process on a CUDA device: weights arrive, memory comes back, images are seen. Needs vLLM beside posttrain."""

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


def run_apart(module: str, argument: str) -> str:
    command = [sys.executable, "-m", module, argument]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.parametrize("level", [1, 2])
def test_memory_comes_back_while_it_sleeps_and_weights_after_it_wakes(level):
    assert run_apart("tests.gpu.vllm_sleep", str(level)).count("came back") == 2


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_images_are_seen_as_by_the_trainer(family):
    assert run_apart("tests.gpu.vllm_images", family).count("from the trainer's") == 2
