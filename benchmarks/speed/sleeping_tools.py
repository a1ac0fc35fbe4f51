"""Episodes with slow tools: how many are trained a second when they are written beside the training, and when they are not.

    python -m benchmarks.speed.sleeping_tools [--settings sync "window 2+2" ...] [--tiny] [--seconds 150]

Each episode has 2 to 6 turns of up to `--turn` tokens; after each but the last a tool sleeps a log-normal time (mean `--sleep`
seconds, sigma 1), which is a function of (prompt, sample, turn): every setting meets the same sleeps. Sleep costs no processor, so
a synchronous step takes as long as its slowest episode. GRPO on random weights, 64 prompts x 8 episodes a step on a GPU; `--tiny`:
8 x 4 of a tiny model. Counted are episodes trained a second after two steps of warm-up.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import TrainerCallback

from benchmarks.speed import materials
from benchmarks.speed.rows import QWEN_05B, Lengths, Row, tiny
from posttrain import GRPOConfig, GRPOTrainer
from posttrain.rollout.engines.protocol import LENGTH, Completion, Prompt
from posttrain.rollout.episodes.episode import SingleTurn, columns_of
from posttrain.rollout.rollout import Rollout

AHEAD = {"async_rollouts": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "sync": {},
    "in order 1": {**AHEAD, "async_order": "in_order", "async_lead": 1},
    "in order 2": {**AHEAD, "async_order": "in_order", "async_lead": 2},
    "in order 4": {**AHEAD, "async_order": "in_order", "async_lead": 4},
    "window 2+2": {**AHEAD, "async_order": "window", "async_lead": 2, "max_staleness": 4},
    "window auto": {**AHEAD, "async_order": "window", "max_staleness": 4},
    "first finished 2": {**AHEAD, "async_order": "first_finished", "async_lead": 2, "on_stale": "mask"},
    "first finished auto": {**AHEAD, "async_order": "first_finished", "on_stale": "mask"},
}
WARM_UP = 2
RESULT_TOKENS = 8


@dataclass
class Load:
    """What an episode is made of."""

    turn: int  # tokens
    sleep: float  # mean seconds of a tool
    sigma: float
    limit: float  # seconds of an episode, after which it gets no further turn

    def rng(self, *of: int) -> np.random.Generator:
        return np.random.default_rng([7, *of])

    def turns(self, number: int, sample: int) -> int:
        return int(self.rng(number, sample).integers(2, 7))

    def nap(self, number: int, sample: int, turn: int) -> float:
        return float(self.rng(number, sample, turn).lognormal(math.log(self.sleep) - self.sigma**2 / 2, self.sigma))


class SleepingEpisode(SingleTurn):
    """Turns of the model with naps between them, after each of which a few tokens of a result follow."""

    def __init__(self, row: Any, request: Any, decode: Any, load: Load) -> None:
        super().__init__(row, request, decode)
        self.load, self.turns, self.turn = load, load.turns(request.number, request.sample), 0
        self.sample, self.written = row.sample(request.number), 0
        self.ready = self.began = None
        self.is_cut = False

    def prompt(self) -> Prompt | None:
        now = time.monotonic()
        self.began = self.began or now
        self.is_cut = self.is_cut or (self.turn > 0 and now - self.began > self.load.limit)
        if self.is_cut or (self.ready is not None and now < self.ready):
            return None
        request = self.request
        return Prompt(self.sample.input_ids, request.number, request.sample, self.written, max_tokens=self.load.turn)

    def on_completion(self, completion: Completion) -> None:
        self.turn, self.written = self.turn + 1, self.written + len(completion.ids)
        version = completion.version if self.turn == 1 else min(self.sample.policy_version, completion.version)
        self.sample = self.sample.append(completion.ids, trained=True, **columns_of(completion))
        self.sample.policy_version = version
        if self.turn < self.turns:
            self.sample = self.sample.append(np.arange(5, 5 + RESULT_TOKENS), trained=False)
            self.ready = time.monotonic() + self.load.nap(self.request.number, self.request.sample, self.turn)

    @property
    def is_over(self) -> bool:
        return self.turn >= self.turns or self.is_cut

    def rollout(self) -> Rollout:
        start = len(self.row.ids)
        text = self.decode(self.sample.input_ids[start:])
        return Rollout(self.request, self.row.prompt, text, self.sample, start, finish_reason=LENGTH)


class SleepyTrainer(GRPOTrainer):
    load: Load

    def make_episodes(self) -> Any:
        from posttrain.data.render.byte_decoding import text_decoder

        decode = text_decoder(self.renderer.tokenizer)
        return lambda rows, requests, params: [
            SleepingEpisode(row, request, decode, self.load) for row, request in zip(rows, requests)
        ]


class Marks(TrainerCallback):
    """When each step ended; training stops after so many seconds of those that count."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.ends = seconds, []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends.append(time.perf_counter())
        if len(self.ends) > WARM_UP and self.ends[-1] - self.ends[WARM_UP - 1] > self.seconds:
            control.should_training_stop = True


def sums(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def measure(setting: str, load: Load, seconds: float, is_tiny: bool) -> dict[str, Any]:
    prompts, group = (8, 4) if is_tiny else (64, 8)
    row = Row("b", "grpo", QWEN_05B, prompts, Lengths(0, 0, 64, 64, prompt=64, seed=4), 1e-6, (), group=1, writes=True)
    row = tiny(row) if is_tiny else row
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    model, tokenizer = materials.build_model(row, device, dtype), materials.tokenizer(row)
    rng = np.random.default_rng(0)
    texts = [{"prompt": materials.text_of(rng.integers(8, 900, 24).tolist())} for _ in range(prompts * 64)]
    marks = Marks(seconds)
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=prompts * group,
            num_generations=group,
            max_completion_length=6 * (load.turn + RESULT_TOKENS),
            learning_rate=1e-6,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            max_steps=10**6,
            reward_workers=0,
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            **SETTINGS[setting],
        )
        SleepyTrainer.load = load
        trainer = SleepyTrainer(
            model, sums, args, Dataset.from_list(texts), processing_class=tokenizer, callbacks=[marks]
        )
        trainer.train()
        logs = [line for line in trainer.state.log_history if "reward" in line][WARM_UP:]
    took, steps = marks.ends[-1] - marks.ends[WARM_UP - 1], len(marks.ends) - WARM_UP
    mean = lambda name: float(np.mean([line.get(name, 0.0) for line in logs]))  # noqa: E731
    return {
        "setting": setting,
        "steps": steps,
        "episodes_a_second": steps * prompts * group / took,
        "seconds_a_step": took / steps,
        "waits": mean("async/wait_s") / (took / steps)
        if "async/wait_s" in logs[0]
        else mean("rollouts/generate_s") / (took / steps),
        "token_age_mean": mean("async/token_age/mean"),
        "token_age_max": max(line.get("async/token_age/max", 0.0) for line in logs),
        "masked_old_tokens": mean("async/masked_old_tokens"),
        "lead": logs[-1].get("async/lead", 0.0),
        "reward": mean("reward"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--settings", nargs="+", default=["sync", "window 2+2", "first finished auto"], choices=SETTINGS
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=150.0, help="of each setting, after warm-up")
    parser.add_argument("--turn", type=int, default=120)
    parser.add_argument("--sleep", type=float, default=2.0)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--limit", type=float, default=30.0, help="seconds of an episode")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    load = Load(args.turn, args.sleep, args.sigma, args.limit)
    if args.one:
        print(json.dumps(measure(args.one, load, args.seconds, args.tiny)))
        return
    first = None
    for setting in args.settings:  # each in a process of its own
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.speed.sleeping_tools", *sys.argv[1:], "--one", setting],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            print(f"{setting}: failed\n{done.stderr[-2000:]}")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        first = first or found["episodes_a_second"]
        print(f"{found['episodes_a_second'] / first:5.2f}x  {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
