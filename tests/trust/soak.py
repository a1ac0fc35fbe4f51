"""A run under fire: a seeded fault every few seconds for as long as asked, and at the end the weights of the quiet run.

    python -m tests.trust.soak --minutes 60 --method sft

The run is restarted after every fault, from whatever is on the disk. The learning rate is constant, so that the number of steps
decides nothing but the end: when the time is over, the run is finished at the next multiple of its save interval, and a quiet run
of the same length is made and compared bit by bit. Non-finite gradients are a function of the step, hence the same in both.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from posttrain.core import faults
from posttrain.trainer.checkpoints import checkpoint as files
from posttrain.trainer.checkpoints.background_save import EXIT_CODE
from tests.forked import Child
from tests.trainer import resumable_run
from tests.trust import runs
from tests.trust.test_damage import DAMAGES

SAVE_STEPS = 10
SECONDS_PER_STEP = 0.03  # of sleep, so that the quiet run is made in a fraction of the time
NEVER_ENDS = 10**7
OPTIONS = {
    "save_steps": SAVE_STEPS, "logging_steps": 7, "eval_strategy": "no", "save_total_limit": 3, "lr_scheduler_type": "constant",
    "learning_rate": 1e-4, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 2, "disable_tqdm": True,
}  # fmt: skip
ENDED_BY = {"kill": -signal.SIGKILL, "term": 128 + signal.SIGTERM, "int": 1}


class NanAtSomeSteps(TrainerCallback):
    """A gradient that is not finite, at steps that depend on nothing but their number."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.handle = None
        if (state.global_step + 1) % 97 == 5:
            self.handle = next(p for p in model.parameters() if p.requires_grad).register_hook(
                lambda g: g * float("nan")
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.handle is not None:
            self.handle.remove()


@dataclass
class Tally:
    """What a soak did and found."""

    method: str
    injected: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    restarts: int = 0
    seconds: float = 0.0
    differences: list[str] = field(default_factory=list)


def restart(method: str, folder: Path, log: Path, fault: str, max_steps: int, slowly: bool) -> Child:
    callbacks: list[Any] = [NanAtSomeSteps()]
    if slowly:
        callbacks.append(resumable_run.Slow(SECONDS_PER_STEP))
    return runs.start(method, folder, fault=fault, log=log, callbacks=callbacks, max_steps=max_steps, **OPTIONS)


# ---- faults --------------------------------------------------------------------------------------------------------------


def at_a_point(rng: random.Random) -> tuple[str, str, str]:
    point = rng.choice([name for name in faults.POINTS if name not in ("save.rotate", "generate", "score", "journal")])
    often = 40 if point.startswith("save.file") else 4 if point.startswith("save.") else 100
    return f"kill at {point.split('.')[0]}", f"kill:{point}:{rng.randint(1, often)}", "kill"


def in_a_slow_save(rng: random.Random) -> tuple[str, str, str]:
    return "kill, slow saves", runs.SLOW_SAVE, "kill"


def full_disk(rng: random.Random) -> tuple[str, str, str]:
    return "disk error in a save", f"oserror:save.write:{rng.randint(1, 6)}", "kill"


def from_outside(rng: random.Random) -> tuple[str, str, str]:
    return "kill", "", "kill"


def terminate(rng: random.Random) -> tuple[str, str, str]:
    return "SIGTERM", "", "term"


def interrupt(rng: random.Random) -> tuple[str, str, str]:
    return "SIGINT", "", "int"


FAULTS = (at_a_point, at_a_point, in_a_slow_save, full_disk, from_outside, terminate, interrupt)
"""rng -> (name, what is armed in the process, what ends it from outside if nothing else does)."""


def one_life(method: str, folder: Path, log: Path, rng: random.Random, tally: Tally, most: float) -> None:
    """Start, meet a fault, end; sometimes the newest checkpoint is damaged as well."""
    name, armed, end = rng.choice(FAULTS)(rng)
    child = restart(method, folder, log, armed, NEVER_ENDS, slowly=True)
    code = wait_or_end(child, min(rng.uniform(1.0, 6.0), most), end)
    # A fault that was armed may come first; a stopped run whose last save met the injected disk error says so.
    if code not in (ENDED_BY[end], -signal.SIGKILL, EXIT_CODE):
        raise AssertionError(f"{method}: a life with {name} ended with {code}:\n{child.output()[-4000:]}")
    tally.injected[name] += 1
    tally.restarts += 1
    log.unlink()
    good = [path for path in files.checkpoints(folder) if files.is_whole(path)]
    if len(good) > 1 and rng.random() < 0.15:
        kind = rng.choice(list(DAMAGES))
        DAMAGES[kind](rng.choice(sorted(path for path in good[0].iterdir() if path.is_file())), rng)
        tally.injected["damaged checkpoint"] += 1


def wait_or_end(child: Child, seconds: float, end: str) -> int:
    try:
        return child.wait(seconds, end=False)
    except TimeoutError:
        child.signal({"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}[end])
        return child.wait(60)


# ---- the whole -----------------------------------------------------------------------------------------------------------


def soak(method: str, minutes: float, root: Path, seed: int = 0) -> Tally:
    rng = random.Random(f"{method}-{seed}")
    tally = Tally(method)
    began = time.monotonic()
    deadline = began + 60 * minutes
    folder, log = root / "fire", root / "log"
    while (left := deadline - time.monotonic()) > 0:
        one_life(method, folder, log, rng, tally, left)
    good = next((path for path in files.checkpoints(folder) if files.is_whole(path)), None)
    reached = 0 if good is None else int(good.name.removeprefix(files.PREFIX))
    tally.steps = (reached // SAVE_STEPS + 1) * SAVE_STEPS
    for place in (folder, root / "quiet"):
        child = restart(method, place, log, "", tally.steps, slowly=False)
        code = child.wait(3600)
        assert code == 0, child.output()[-4000:]
    tally.differences = runs.differences(root / "quiet", folder)
    tally.seconds = time.monotonic() - began
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--method", default="sft")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="soak-"))
    tally = soak(options.method, options.minutes, root, options.seed)
    print(json.dumps(tally.__dict__ | {"faults": sum(tally.injected.values())}))
    if tally.differences:
        raise SystemExit(f"The run under fire differs from the quiet one; both are in {root}.")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
