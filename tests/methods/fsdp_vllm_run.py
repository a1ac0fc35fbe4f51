"""One of two processes of a run under FSDP2 whose completions a server writes; `test_fsdp_vllm.py` starts both."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from posttrain.models.load.weight_export import exported_weights
from posttrain.rollout.engines.joint_export import JointExport
from posttrain.rollout.engines.weight_sync import send_weights
from tests.methods import vllm_runs
from tests.trainer import fsdp_on_cpu

SHARDED = {"fsdp": True, "fsdp_config": {"version": 2}}


class OwnEngine:
    """As much of a colocated engine as is sent weights; it may have had enough after some tensors."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, {}

    def load_weights(self, weights: Any, version: int) -> None:
        for name, tensor in weights:
            if len(self.held) == self.most:
                raise MemoryError(f"no room for {name}")
            self.held[name] = tensor.clone()


def said_by(action: Any) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def engines_of_their_own(made: Any, rank: int) -> dict[str, Any]:
    """Every process loads whole tensors; where the second one fails, both hear it."""
    joint = JointExport(made.model, None, by_adapter=False)
    engine = OwnEngine(1000)
    send_weights(engine, 7, rank, 2, joint)
    expected = dict(exported_weights(made.model))
    whole = engine.held.keys() == expected.keys() and all(torch.equal(engine.held[k], t) for k, t in expected.items())
    failed = said_by(lambda: send_weights(OwnEngine(1 if rank == 1 else 1000), 8, rank, 2, joint))
    return {"whole": whole, "own_failed": failed}


def faults(made: Any, rank: int) -> dict[str, str]:
    """What each process says when the first one cannot send, or finds that something else arrived."""
    engine, sync = made.engine, made.weight_sync
    kept, differing = engine._kept, engine.differing_tensors

    def half_way(weights: Any) -> Any:
        next(iter(weights if weights is not None else engine._exported()[1]))
        raise MemoryError("no room for a copy")

    if rank == 0:
        engine._kept = half_way
    unsent = said_by(lambda: sync.ready(1000))
    if rank == 0:
        engine._kept = kept
        engine.differing_tensors = lambda most: ["model.norm.weight", *differing(most)]
    differs = said_by(lambda: sync.ready(1001))
    return {"unsent": unsent, "differs": differs}


KINDS = ("adapter", "weights")  # in this order: an adapter goes over the server's first weights


def place() -> tuple[int, int]:
    """(rank of this process, number of processes)"""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def trainer(folder: Path, url: str, kind: str, method: str = "grpo", **options: Any) -> Any:
    return vllm_runs.trainer(
        method,
        folder,
        vllm_runs.lora() if kind == "adapter" else None,
        vllm_mode="server",
        vllm_server_base_url=[url],
        vllm_sync=kind,
        per_device_train_batch_size=8 // place()[1],
        beta=0.05,
        adam_epsilon=1e-3,  # a gradient of about 1e-8 would make a whole step of its rounding
        **options,
    )


def run(made: Any, folder: Path) -> None:
    """Train, save, say what was logged and, with several processes, what each said of faults."""
    rank, world = place()
    made.train()
    made.save_model(str(folder / "final"))
    told: dict[str, Any] = {"logs": [entry for entry in made.state.log_history if "reward" in entry]}
    if world > 1:
        told |= engines_of_their_own(made, rank) | faults(made, rank)
    (folder / f"told-{rank}.json").write_text(json.dumps(told))
    made.engine.close()


def main(folder: Path, url: str) -> None:
    fsdp_on_cpu.allow()
    for kind in KINDS:
        run(trainer(folder / kind, url, kind, **(SHARDED if place()[1] > 1 else {})), folder / kind)
    os._exit(0)  # the process group need not be taken apart
