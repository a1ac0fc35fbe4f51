"""Runs that are killed, resumed and compared bit by bit."""

from __future__ import annotations

import json
import logging
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from posttrain.core import faults
from posttrain.trainer.checkpoints import checkpoint as files
from tests.forked import Child
from tests.trainer import resumable_run

METHODS = tuple("sft dpo reward grpo kto bco-udm prm orpo ppo online_dpo xpo nash_md a2po sdft sdpo".split())  # noqa: SIM905
ALIKE = tuple("orpo online_dpo xpo nash_md sdft sdpo".split())  # noqa: SIM905
"""Those whose state is of kinds that the others have, too: their short forms are with the slow tests."""
SAVE_STEPS = 2
OPTIONS: dict[str, Any] = {"save_steps": SAVE_STEPS}
TIMINGS = ("_runtime", "_per_second", "_per_call", "_s", "_time", "run_id")
OF_THIS_FOLDER = ("manifest.json", "training_args.json")  # paths
SLOW_SAVE = "slow:save.file:*"
SLOW_FILE_SECONDS = 0.02


def start(
    method: str,
    folder: Path,
    *,
    fault: str = "",
    resume: bool = True,
    log: Path | None = None,
    room_to_spare: int = files.HEADROOM,
    **options: Any,
) -> Child:
    """A child that trains in `folder`, from the newest good checkpoint if there is one, with the faults asked for."""

    def train() -> None:
        logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
        files.HEADROOM = room_to_spare
        faults.SLOW_SECONDS = SLOW_FILE_SECONDS
        faults.arm(fault)
        resumable_run.main(method, folder, resume=resume, **(OPTIONS | options))

    return Child(train, log or folder.with_name(f"{folder.name}.log"))


def finish(method: str, folder: Path, **options: Any) -> None:
    child = start(method, folder, **options)
    assert child.wait() == 0, child.output()


@dataclass(frozen=True)
class Instant:
    """When a run is killed: by itself at a fault point, or from outside after so many seconds."""

    fault: str = ""
    seconds: float | None = None

    def __str__(self) -> str:
        return self.fault if self.seconds is None else f"{self.seconds:.3f} s {self.fault}"


def random_instant(rng: random.Random, passed: dict[str, int], duration: float, real_time: bool) -> Instant:
    """Half of the instants are places in the code, half are moments in time; half of those meet slow saves."""
    if real_time:
        slow = rng.random() < 0.5
        return Instant(SLOW_SAVE if slow else "", rng.uniform(0, duration * (1.5 if slow else 1)))
    point = rng.choice(sorted(point for point in passed if passed[point]))
    return Instant(f"kill:{point}:{rng.randint(1, passed[point])}")


def killed_at(method: str, folder: Path, instant: Instant, **options: Any) -> bool:
    """Run until the instant. False where the run came to its end before."""
    child = start(method, folder, fault=instant.fault, **options)
    if instant.seconds is not None:
        child.process.join(instant.seconds)  # a run that has ended before is not waited for
        child.signal(signal.SIGKILL)
    code = child.wait()
    assert code in (0, -signal.SIGKILL), child.output()
    return code != 0


def quiet_run(method: str, folder: Path, **options: Any) -> tuple[dict[str, int], float]:
    """The run that nothing happens to: how often it passes each fault point, and how long it takes."""
    counts = folder.with_name(f"{folder.name}.points")

    def train() -> None:
        faults.arm("slow:data:1000000")  # counts what is passed, and does nothing
        resumable_run.main(method, folder, **(OPTIONS | options))
        counts.write_text(json.dumps(faults.passed))

    child = Child(train, folder.with_name(f"{folder.name}.log"))
    began = time.monotonic()  # the start of the fork server, seconds before the first child, is no part of the run
    assert child.wait() == 0, child.output()
    return json.loads(counts.read_text()), time.monotonic() - began


# ---- comparing -----------------------------------------------------------------------------------------------------------


def without_timings(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: without_timings(item) for name, item in value.items() if not name.endswith(TIMINGS) and name != "eps"
        }
    return [without_timings(item) for item in value] if isinstance(value, list) else value


def differences(one: Path, other: Path) -> list[str]:
    """What two finished runs do not have in common, bit for bit: last checkpoint, metrics, order of the data."""
    first, second = files.checkpoints(one)[0], files.checkpoints(other)[0]
    found = [] if first.name == second.name else [f"the last checkpoints are {first.name} and {second.name}"]
    every = {str(p.relative_to(folder)) for folder in (first, second) for p in folder.rglob("*") if p.is_file()}
    names = every - set(OF_THIS_FOLDER)
    for name in sorted(names):
        found += _difference(first / name, second / name, name)
    for name in ("metrics.jsonl", "row_order.jsonl"):
        lines = [
            [without_timings(json.loads(line)) for line in (f / name).read_text().splitlines()] for f in (one, other)
        ]
        found += [f"{name} differs"] if lines[0] != lines[1] else []
    return found


def _bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they are the same, a NaN (a log-prob that nobody knows) included."""
    return one.shape == other.shape and torch.equal(*(t.flatten().view(torch.uint8) for t in (one, other)))


def _difference(one: Path, other: Path, name: str) -> list[str]:
    if not (one.exists() and other.exists()):
        return [f"{name} is in one of them only"]
    if one.suffix == ".safetensors":
        tensors, others = load_file(one), load_file(other)
        same_names = tensors.keys() == others.keys()
        same = same_names and all(t.dtype == others[n].dtype and _bits(t, others[n]) for n, t in tensors.items())
        return [] if same else [f"{name} differs"]
    if one.name.startswith("sums_") or one.name == "run_state.json":
        sums = [without_timings(json.loads(path.read_text())) for path in (one, other)]
        return [] if sums[0] == sums[1] else [f"{name} differs"]
    if one.name == "trainer_state.json":
        states = [without_timings(json.loads(path.read_text())) for path in (one, other)]
        for state in states:
            state["best_model_checkpoint"] = Path(state["best_model_checkpoint"] or "").name
        return [] if states[0] == states[1] else [f"{name} differs"]
    return [] if one.read_bytes() == other.read_bytes() else [f"{name} differs"]
