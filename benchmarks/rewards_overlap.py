"""What rewards cost beside a generation that takes longer than they do.

    python benchmarks/rewards_overlap.py                  # 512 rewards of 1 second on 8 workers, beside 72 seconds of generation
    python benchmarks/rewards_overlap.py --scale 0.1      # everything ten times as fast

Generation is a loop of small matrix products on this process's main thread, which hands over a group of completions now and
then. Steps without and with rewards take turns, with workers that have been started before, as in every step of a run but the
first; the medians are compared. Printed besides: the wait at the end of the step, and the processor time of the thread that
serves the workers. On a machine whose cores are all busy the workers compete with generation, and the difference is mostly that.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import torch

from posttrain.rewards.reward_set import Judged, RewardOptions, RewardRound, RewardSet


class Sleeping:
    """A reward that waits for so many seconds for each completion, as one that asks a server does."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self, completions, **kwargs):
        time.sleep(self.seconds * len(completions))
        return [float(len(completion)) for completion in completions]


def generation(products: int, groups: int, size: int, round: RewardRound | None) -> None:
    """So many products; groups are finished at even distances."""
    weights, state = torch.randn(256, 256) / 16, torch.randn(64, 256)
    done = 0
    for product in range(products):
        state = torch.tanh(state @ weights)
        while done < groups and (product + 1) * groups >= (done + 1) * products:
            if round is not None:
                round.add([Judged("prompt", "x" * i, list(range(512)), {"row": done}) for i in range(size)])
            done += 1


def products_per_second() -> float:
    started, products = time.perf_counter(), 2000
    generation(products, 1, 1, None)
    return products / (time.perf_counter() - started)


@dataclass
class Step:
    """Seconds of a step."""

    whole: float
    waited: float = 0.0  # at its end
    serving: float = 0.0  # processor time of other threads of this process

    def __str__(self) -> str:
        return f"{self.whole:.2f} s, of which waiting at its end {self.waited:.2f} s; {self.serving:.2f} s of serving"


def timed(products: int, args: argparse.Namespace, made: RewardSet | None) -> Step:
    groups = args.rewards // args.group
    started = time.perf_counter()
    if made is None:
        generation(products, groups, args.group, None)
        return Step(time.perf_counter() - started)
    others = time.process_time() - time.thread_time()
    with made.open() as round:
        generation(products, groups, args.group, round)
        waited = time.perf_counter()
        results = round.finish()
    ended = time.perf_counter()
    assert results.values[:, 0].tolist() == [float(i) for i in range(args.group)] * groups
    return Step(ended - started, ended - waited, time.process_time() - time.thread_time() - others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rewards", type=int, default=512)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--generation", type=float, default=72.0, help="seconds, at scale 1")
    parser.add_argument("--scale", type=float, default=1.0, help="of all times")
    parser.add_argument("--batching", choices=["sample", "group"], default="sample")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    products_per_second()
    products = int(products_per_second() * args.generation * args.scale)
    work = args.rewards * args.scale / args.workers
    print(f"{args.rewards} rewards of {args.scale:g} s on {args.workers} workers: {work:.1f} s of work")
    options = RewardOptions(workers=args.workers, reward_batching=args.batching)
    alone, beside = [], []
    with RewardSet([Sleeping(args.scale)], options=options) as made:
        with made.open() as round:  # starts the workers
            round.add([Judged("prompt", "", []) for _ in range(args.workers)])
            round.finish()
        for _ in range(args.repeats):
            alone.append(timed(products, args, None))
            beside.append(timed(products, args, made))
            print(f"  alone {alone[-1].whole:.2f} s; with rewards {beside[-1]}", flush=True)
    without, step = (statistics.median(one.whole for one in steps) for steps in (alone, beside))
    print(
        f"called by {args.batching}: {without:.2f} s without, {step:.2f} s with rewards: {(step - without) / step:.1%}"
    )


if __name__ == "__main__":
    main()
