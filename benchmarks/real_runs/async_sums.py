"""Does GRPO learn as much from older tokens? Sums, as in grpo_sums.py, with rollouts beside training, at equal samples.

    python -m benchmarks.real_runs.async_sums MODEL [--settings sync "lead 1" ...] [--seeds 0 1 2] [--steps 40]
    python -m benchmarks.real_runs.async_sums --table

Each run trains `--steps` steps of `--samples` answers, whatever its lead, and answers the held-out sums with
`--answers` answers each. `lead N` begins groups N steps ahead, which is then how old most of its tokens are, in windows
whose bound is 4 (or N), with the correction that async has by default; `uncorrected` is
`vllm_importance_sampling_correction=False`. Each run is a line of JSON in `--out`, written as soon as it is known; the
table has all that are there. Seeds may run beside each other, in processes of their own (their seconds then tell less).

The error of a setting's mean is that of its seeds' spread, or of the held-out answers where that is larger; the
difference to `sync` is reported in standard errors of both together.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.given_options import options_of
from benchmarks.real_runs.grpo_sums import HELD_OUT, evaluate, sums_trainer

AHEAD: dict[str, Any] = {"async_rollouts": True}
AGE = "async/token_age/mean"
SETTINGS: dict[str, dict[str, Any]] = {
    "sync": {},
    "lead 1": AHEAD | {"async_lead": 1},
    "lead 2": AHEAD | {"async_lead": 2},
    "lead 4": AHEAD | {"async_lead": 4},
    "lead 8": AHEAD | {"async_lead": 8, "max_staleness": 8},
    "lead 8 uncorrected": AHEAD | {"async_lead": 8, "max_staleness": 8, "vllm_importance_sampling_correction": False},
}


def run(setting: str, seed: int, words: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {
        "output_dir": f"{words.out.parent}/sums-{setting.replace(' ', '-')}-{seed}",
        "seed": seed,
        "max_steps": words.steps,
        "per_device_train_batch_size": words.samples,
        "per_device_eval_batch_size": words.answers * HELD_OUT,
        "num_generations_eval": words.answers,
        "learning_rate": words.learning_rate,
        "verbosity": "quiet",
    }
    trainer = sums_trainer(words.model, **options | SETTINGS[setting] | options_of(words.option))
    name = f"{setting}, seed {seed}"
    before = evaluate(trainer, f"{name}, before")
    began = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - began
    after = evaluate(trainer, f"{name}, after {seconds:.0f} s")
    trainer.close()
    logs = [line for line in trainer.state.log_history if "reward" in line]
    found = {"setting": setting, "seed": seed, "steps": words.steps, "samples": words.samples, "seconds": seconds}
    found |= {"before": before, "after": after, "age": statistics.mean(line.get(AGE, 0.0) for line in logs)}
    curve = [(line["reward"], line.get(AGE, 0.0), line.get("sampling/effective_sample_size")) for line in logs]
    return found | {"curve": curve, "options": words.option, "learning_rate": words.learning_rate}


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- the table --------------------------------------------------------------------------------------------


def mean_and_error(runs: list[dict[str, Any]]) -> tuple[float, float]:
    """Over seeds."""
    finals, held_out = zip(*(run["after"] for run in runs))
    spread = statistics.stdev(finals) if len(finals) > 1 else 0.0
    return statistics.mean(finals), max(spread, statistics.mean(held_out)) / math.sqrt(len(runs))


def table(lines: list[dict[str, Any]]) -> str:
    """The newest run of each setting and seed."""
    newest = {(line["setting"], line["seed"]): line for line in lines}
    by_setting = {name: [run for (of, _), run in sorted(newest.items()) if of == name] for name in SETTINGS}
    shown = [f"{'setting':<20} {'steps':>9} {'age':>5} {'s':>6}  {'reward':<15} {'to sync':>8}  of each seed"]
    base = by_setting["sync"] and mean_and_error(by_setting["sync"])
    for name, runs in by_setting.items():
        if not runs:
            continue
        mean, error = mean_and_error(runs)
        apart = f"{(mean - base[0]) / math.hypot(error, base[1]):+.1f} se" if base and name != "sync" else ""
        size = ", ".join(sorted({f"{run['steps']}x{run['samples']}" for run in runs}))
        age, seconds = (statistics.mean(run[key] for run in runs) for key in ("age", "seconds"))
        each = ", ".join(f"{run['seed']}: {run['after'][0]:.3f} +- {run['after'][1]:.3f}" for run in runs)
        shown.append(f"{name:<20} {size:>9} {age:>5.1f} {seconds:>6.0f}  {mean:.3f} +- {error:.3f} {apart:>8}  {each}")
    return "\n".join(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--settings", nargs="+", default=[*SETTINGS], choices=SETTINGS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--samples", type=int, default=64, help="answers of a step, eight to a sum")
    parser.add_argument("--answers", type=int, default=16, help="to each held-out sum")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--option", nargs="*", default=[], metavar="NAME=VALUE", help="further options of GRPOConfig")
    parser.add_argument("--out", type=Path, default=Path("runs/async_sums.jsonl"))
    parser.add_argument("--table", action="store_true", help="show what is in --out, and run nothing")
    words = parser.parse_args()
    words.out.parent.mkdir(parents=True, exist_ok=True)
    for seed in [] if words.table else words.seeds:  # all settings of a seed first: half of a table compares them
        for setting in words.settings:
            try:
                found = run(setting, seed, words)
            except Exception:  # the others continue
                traceback.print_exc()
            else:
                with words.out.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(found) + "\n")
            free()
    if words.out.exists():
        print(table([json.loads(line) for line in words.out.read_text(encoding="utf-8").splitlines()]), flush=True)


if __name__ == "__main__":
    main()
