"""vLLM in this process on a CUDA device: weights arrive, memory comes back, images are seen. Needs vLLM beside posttrain."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM in this environment: not run"),
]


# Of another package, which what is packed for this machine leaves out.
SAMPLER = {} if importlib.util.find_spec("flashinfer") else {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
OTHER_PIXELS = "the engine shows its model other pixels"


def run_apart(module: str, argument: str) -> subprocess.CompletedProcess[str]:
    command, environment = [sys.executable, "-m", module, argument], os.environ | SAMPLER
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    print(ended.stdout)
    return ended


@pytest.mark.parametrize("level", [1, 2])
def test_memory_comes_back_while_it_sleeps_and_weights_after_it_wakes(level):
    ended = run_apart("tests.gpu.vllm_sleep", str(level))
    assert ended.stdout.count("came back") == 2, ended.stderr[-3000:]
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_images_are_seen_as_by_the_trainer_or_the_run_is_refused(family):
    """vLLM 0.24 makes other pixels of SmolVLM's images (transformers 5.19, torchvision 0.26): log-probs 0.26 apart; 0.32 on a CPU
    is 0.015 apart."""
    ended = run_apart("tests.gpu.vllm_images", family)
    if family == "smolvlm" and ended.returncode:
        assert OTHER_PIXELS in ended.stderr, ended.stderr[-3000:]
    else:
        assert ended.stdout.count("from the trainer's") == 2, ended.stderr[-3000:]
        assert ended.returncode == 0, ended.stderr[-3000:]
