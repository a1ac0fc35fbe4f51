"""What the fork server of `tests/forked.py` imports: everything that a run or a command imports sooner or later."""

from __future__ import annotations

import contextlib
import gc
import importlib
import pkgutil

gc.disable()  # a fifth of the time that follows

import datasets  # noqa: F401
import peft  # noqa: F401
import PIL.Image
import pytest  # noqa: F401
import rich.live
import rich.progress
import rich.table  # noqa: F401
import torch  # noqa: F401
import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2
import transformers.trainer  # noqa: F401

import posttrain

NOT_OF_A_RUN = (
    "posttrain.integrations",
    "posttrain.serve.engine.worker",
    "posttrain.serve.engine.vllm",
    "posttrain.rollout.engines.vllm",
)

for _module in pkgutil.walk_packages(posttrain.__path__, "posttrain."):
    if not _module.name.startswith(NOT_OF_A_RUN) and not _module.name.endswith("__main__"):
        with contextlib.suppress(ImportError):  # of a package that is not installed here
            importlib.import_module(_module.name)

PIL.Image.init()  # its formats are modules too
gc.enable()
gc.freeze()
