"""Rollouts beside training on two loads: episodes whose tools sleep, and completions of one turn.

    python -m benchmarks.speed.sleeping_tools [--load tools|single] [--settings sync "window 2+2" ...] [--limit 30]
    python -m benchmarks.speed.sleeping_tools --table

`tools`: each episode has 2 to 6 turns of up to `--turn` tokens; after each but the last a tool sleeps a log-normal time
(mean `--sleep` seconds, sigma 1), which is a function of (prompt, sample, turn): every setting meets the same sleeps.
Sleep costs no processor, so a synchronous step takes as long as its slowest episode. 64 prompts x 8 episodes a step.
`--limit` is what `episode_timeout` is in a real run: an episode that has taken longer gets no further turn, its tool is
not waited for, and what it has written is trained on. `single`: prompts of 256 tokens, 32 x 8 completions of 512, as
the row grpo-0.5b; `--ragged`: 64 to 512. GRPO on random weights; `--tiny`: 8 x 4 of a tiny model. Each setting runs in
a process of its own, with half of the micro-batch (`--micro`) where that does not fit. Results are lines of JSON in
`--out`, each written as soon as it is known; the table shows all that are there, each beside the synchronous run of the
same load, and of the same load without a limit.

Counted are episodes trained a second after `--warm-up` steps, and in the second half of these steps, where a lead that
adapts has settled. `any_kernel` is the share of the time in which a kernel runs: of one or more whole steps after the
timed ones, by torch's profiler (a line of its own); `utilisation` is the driver's figure of the timed steps.
`held_..._ms`: for how long the trainer was held after a step to publish weights. *Full batch* in the table is what of
the time the GPU's work would have taken, had nobody waited: episodes a second as a share of those of `awake`, a
synchronous run whose tools take no time. It flatters a little (7 % by the model of the load): the batches of `awake`,
too, shrink while its longest episodes end.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import TrainerCallback

from benchmarks.given_options import options_of
from benchmarks.speed import materials
from benchmarks.speed.measure import peak_memory, reset_peak_memory
from benchmarks.speed.rows import QWEN_05B, QWEN_15B, Lengths, Row, tiny
from benchmarks.speed.sleeping_table import table
from benchmarks.speed.watches import HeldClock, KernelWindow, Utilisation
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
    "window 1": {**AHEAD, "async_order": "window", "async_lead": 1},
    "window 2+2": {**AHEAD, "async_order": "window", "async_lead": 2, "max_staleness": 4},
    "window auto": {**AHEAD, "async_order": "window", "max_staleness": 4},
    "first finished 2": {**AHEAD, "async_order": "first_finished", "async_lead": 2, "on_stale": "mask"},
    "first finished auto": {**AHEAD, "async_order": "first_finished", "on_stale": "mask"},
}
AWAKE = "awake"
SHAPES = {"0.5b": QWEN_05B, "1.5b": QWEN_15B}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WARM_UP = 2
RESULT_TOKENS = 8


@dataclass
class Load:
    """What an episode is made of."""

    turn: int  # tokens
    sleep: float  # mean seconds of a tool
    sigma: float
    limit: float  # seconds of an episode, after which it gets no further turn
    turns_between: tuple[int, int] = (2, 6)
    shortest: int | None = None  # tokens of a turn, where their number is drawn
    prompt: int = 24  # tokens
    prompts: int = 64  # of a step on a GPU, each with eight episodes

    def rng(self, *of: int) -> np.random.Generator:
        return np.random.default_rng([7, *of])

    def turns(self, number: int, sample: int) -> int:
        least, most = self.turns_between
        return int(self.rng(number, sample).integers(least, most + 1))

    def tokens(self, number: int, sample: int, turn: int) -> int:
        if self.shortest is None:
            return self.turn
        return int(self.rng(number, sample, turn, 1).integers(self.shortest, self.turn + 1))

    def nap(self, number: int, sample: int, turn: int) -> float:
        if not self.sleep:
            return 0.0
        return float(self.rng(number, sample, turn).lognormal(math.log(self.sleep) - self.sigma**2 / 2, self.sigma))


LOADS = {
    "tools": Load(120, 2.0, 1.0, 30.0),
    "single": Load(512, 0.0, 0.0, math.inf, turns_between=(1, 1), prompt=256, prompts=32),
}


class SleepingEpisode(SingleTurn):
    """Turns of the model with naps between them, after each of which a few tokens of a result follow."""

    ended: Counter[str] = Counter()

    def __init__(self, row: Any, request: Any, decode: Any, load: Load) -> None:
        super().__init__(row, request, decode)
        self.load, self.turns, self.turn = load, load.turns(request.number, request.sample), 0
        self.sample, self.written = row.sample(request.number), 0
        self.ready = self.began = None
        self.is_cut = False

    def prompt(self) -> Prompt | None:
        now, request = time.monotonic(), self.request
        self.is_cut = self.is_cut or (self.began is not None and now - self.began > self.load.limit)
        if self.is_cut or (self.ready is not None and now < self.ready):
            return None
        if self.ready is not None:
            self.sample, self.ready = self.sample.append(np.arange(5, 5 + RESULT_TOKENS), trained=False), None
        most = self.load.tokens(request.number, request.sample, self.turn)
        return Prompt(self.sample.input_ids, request.number, request.sample, self.written, max_tokens=most)

    def on_completion(self, completion: Completion) -> None:
        if self.began is None:  # as in ToolEpisode: the time that the first turn waited for the engine does not count
            own = completion.seconds.get("prefill", 0.0) + completion.seconds.get("decode", 0.0)
            self.began = time.monotonic() - own
        self.turn, self.written = self.turn + 1, self.written + len(completion.ids)
        version = completion.version if self.turn == 1 else min(self.sample.policy_version, completion.version)
        self.sample = self.sample.append(completion.ids, trained=True, **columns_of(completion))
        self.sample.policy_version = version
        if self.turn < self.turns:
            self.ready = time.monotonic() + self.load.nap(self.request.number, self.request.sample, self.turn)

    @property
    def is_over(self) -> bool:
        return self.turn >= self.turns or self.is_cut

    def rollout(self) -> Rollout:
        self.ended["cut" if self.is_cut else "whole"] += 1
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


class Watch(TrainerCallback):
    """When each step ended. After so many seconds of those that count it tells what was measured; then, on a GPU, whole
    steps are profiled, and training stops."""

    def __init__(self, told: dict[str, Any], asked: argparse.Namespace) -> None:
        self.told, self.asked, self.ends = told, asked, []
        self.held, self.utilisation = HeldClock(), Utilisation()
        self.kernels = KernelWindow() if DEVICE == "cuda" and asked.profile else None
        self.is_timed, self.is_profiling = True, False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends.append(time.perf_counter())
        if len(self.ends) == self.asked.warm_up:
            self.utilisation.start()
            reset_peak_memory(DEVICE)

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After the end of each step, when its numbers are there."""
        if self.is_timed and len(self.ends) > self.asked.warm_up and self._timed > self.asked.seconds:
            self.is_timed = False
            self._tell(self._figures(state.log_history))
            if self.kernels is not None:
                self.is_profiling = True
                return self.kernels.start()
        if self.is_profiling and self.kernels.seconds > self.asked.profile:
            self.is_profiling = False
            self._tell(self.kernels.stop())
        control.should_training_stop = not (self.is_timed or self.is_profiling)

    @property
    def _timed(self) -> float:
        return self.ends[-1] - self.ends[self.asked.warm_up - 1]

    def _tell(self, figures: dict[str, Any]) -> None:
        print(json.dumps(self.told | figures), flush=True)

    def _figures(self, history: list[dict[str, float]]) -> dict[str, Any]:
        logs = [line for line in history if "reward" in line][self.asked.warm_up :]
        steps, episodes = len(self.ends) - self.asked.warm_up, self.told["episodes"]
        mean = lambda name: float(np.mean([line.get(name, 0.0) for line in logs]))  # noqa: E731
        waits = "async/wait_s" if "async/wait_s" in logs[0] else "rollouts/generate_s"
        half = self.ends[-1 - math.ceil(steps / 2) :]
        return {
            "steps": steps,
            "episodes_a_second": steps * episodes / self._timed,
            "episodes_a_second_at_end": (len(half) - 1) * episodes / (half[-1] - half[0]),
            "seconds_a_step": self._timed / steps,
            "tokens_a_second": mean("completions/mean_length") * episodes * steps / self._timed,
            "waits": mean(waits) / (self._timed / steps),
            "utilisation": self.utilisation.stop(),
            "token_age_mean": mean("async/token_age/mean"),
            "token_age_max": max(line.get("async/token_age/max", 0.0) for line in logs),
            "masked_old_tokens": mean("async/masked_old_tokens"),
            "masked_share": mean("async/masked_share"),
            "cut_share": SleepingEpisode.ended["cut"] / max(sum(SleepingEpisode.ended.values()), 1),
            **self.held.figures(self.asked.warm_up),
            "lead": logs[-1].get("async/lead", 0.0),
            "reward": mean("reward"),
            "peak_gib": peak_memory(DEVICE) / 2**30,
        }


def sums(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def config_of(
    setting: str, load: Load, asked: argparse.Namespace, size: tuple[int, int], folder: str
) -> dict[str, Any]:
    """`size`: prompts of a step, and episodes of each."""
    prompts, group = size
    micro = min(asked.micro, prompts * group)
    options: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": prompts * group // micro,
        "num_generations": group,
        "max_completion_length": load.turns_between[1] * (load.turn + RESULT_TOKENS),
        "learning_rate": 1e-6,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "max_steps": 10**6,
        "reward_workers": 0,
        "disable_tqdm": True,
        "use_cpu": DEVICE == "cpu",
    }
    return options | SETTINGS.get(setting, {}) | options_of(asked.option)


def measure(setting: str, load: Load, asked: argparse.Namespace) -> None:
    """Prints a line as soon as the timed steps are over, and one about kernels where some were profiled."""
    prompts, group = (8, 4) if asked.tiny else (load.prompts, 8)
    lengths = Lengths(0, 0, 64, 64, prompt=64, seed=4)
    row = Row("b", "grpo", SHAPES[asked.shape], prompts, lengths, 1e-6, (), group=1, writes=True)
    row = tiny(row) if asked.tiny else row
    model = materials.build_model(row, DEVICE, torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    rng = np.random.default_rng(0)
    texts = [{"prompt": materials.text_of(rng.integers(8, 900, load.prompt).tolist())} for _ in range(prompts * 64)]
    told = {"setting": setting, **workload(load, asked), "episodes": prompts * group}
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(**config_of(setting, load, asked, (prompts, group), folder))
        SleepyTrainer.load = replace(load, sleep=0.0) if setting == AWAKE else load
        data, watch = Dataset.from_list(texts), Watch(told | {"micro": args.per_device_train_batch_size}, asked)
        SleepyTrainer(model, sums, args, data, processing_class=materials.tokenizer(row), callbacks=[watch]).train()


def workload(load: Load, asked: argparse.Namespace) -> dict[str, Any]:
    """What runs must have in common to be compared. JSON knows no infinity."""
    limit = None if math.isinf(load.limit) else load.limit
    return {"load": asdict(load) | {"limit": limit}, "shape": "tiny" if asked.tiny else asked.shape}


# ---- all settings ------------------------------------------------------------------------------------------


def lines_of(setting: str, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What a process of its own tells, as it tells it; with smaller micro-batches where it runs out of memory."""
    for micro in (asked.micro, asked.micro // 2, asked.micro // 4):
        command = [sys.executable, "-m", "benchmarks.speed.sleeping_tools", *sys.argv[1:]]
        log = asked.out.with_suffix(f".{setting.replace(' ', '-')}.log")
        with log.open("w", encoding="utf-8") as errors:
            one = subprocess.Popen(
                [*command, "--micro", str(micro), "--one", setting], stdout=subprocess.PIPE, stderr=errors, text=True
            )
            yield from (json.loads(line) for line in one.stdout if line.startswith("{"))
        text = log.read_text(encoding="utf-8")
        if one.wait() == 0:
            return
        print(f"{setting}, micro-batches of {micro}: failed, see {log}\n{text[-1500:]}", flush=True)
        if "OutOfMemoryError" not in text:
            return


def load_of(asked: argparse.Namespace) -> Load:
    given = {name: getattr(asked, name) for name in ("turn", "sleep", "sigma", "limit")}
    load = replace(LOADS[asked.load], **{name: value for name, value in given.items() if value is not None})
    return replace(load, shortest=load.turn // 8) if asked.ragged else load


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", choices=LOADS, default="tools")
    parser.add_argument(
        "--settings", nargs="+", default=["sync", "window 2+2", "first finished auto"], choices=[*SETTINGS, AWAKE]
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--seconds", type=float, default=150.0, help="of each setting, after warm-up")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps that do not count, at least 1")
    parser.add_argument("--profile", type=float, default=4.0, help="seconds at least, in whole steps; 0: none")
    parser.add_argument("--turn", type=int)
    parser.add_argument("--sleep", type=float)
    parser.add_argument("--sigma", type=float)
    parser.add_argument("--limit", type=float, help="seconds of an episode; inf: none")
    parser.add_argument("--ragged", action="store_true", help="turns of an eighth of --turn to --turn tokens, uniform")
    parser.add_argument("--micro", type=int, default=128, help="episodes of a micro-batch")
    parser.add_argument("--option", nargs="*", default=[], metavar="NAME=VALUE", help="further options of GRPOConfig")
    parser.add_argument("--out", type=Path, default=Path("runs/speed/sleeping_tools.jsonl"))
    parser.add_argument("--table", action="store_true", help="show what is in --out, and run nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    if asked.one:
        return measure(asked.one, load_of(asked), asked)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    for setting in [] if asked.table else asked.settings:
        for found in lines_of(setting, asked):
            with asked.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(found) + "\n")
            print(json.dumps(found), flush=True)
    if asked.out.exists():
        print(table([json.loads(line) for line in asked.out.read_text(encoding="utf-8").splitlines()]), flush=True)


if __name__ == "__main__":
    main()
