"""One of two processes that ask the same servers; `test_weight_sync.py` starts both. Process 0 sends the weights."""

from __future__ import annotations

import json
import os

import torch

from posttrain.rollout.engines.protocol import Prompt, SamplingParams, generate
from posttrain.rollout.engines.vllm.client import ServerClient
from posttrain.rollout.engines.vllm.server_engine import ServedOptions, ServedVLLM
from posttrain.rollout.engines.weight_sync import send_weights
from tests.rollout.served import QUICK, numbered


def main(url: str, token: str) -> None:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    found = []
    version = 0
    engine = ServedVLLM(
        [ServerClient(url, token, QUICK)], export=lambda: numbered(100 + version), options=ServedOptions(QUICK)
    )
    for version in (1, 2, 3):
        send_weights(engine, version, rank, 2)
        written = generate(engine, [Prompt([1, 2], key=rank)], SamplingParams(max_tokens=4))[0]
        found.append((written.version, written.ids.tolist()))
        torch.distributed.barrier()
    refused = ""
    if rank == 0:
        engine.send(export=lambda: numbered(7, size=5))  # no tensors of this model
    try:
        send_weights(engine, 4, rank, 2)
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    print("FOUND" + json.dumps({"rank": rank, "found": found, "refused": refused}), flush=True)
    torch.distributed.barrier()
    engine.close()
    os._exit(0)  # the process group need not be taken apart
