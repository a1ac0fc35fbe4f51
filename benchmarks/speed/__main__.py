"""posttrain against TRL, row by row.

    python -m benchmarks.speed [ROW ...] --device cuda|cpu [--tiny] [--profile] [--trl-python PATH] [--trl-path FOLDER]
    python -m benchmarks.speed --render RESULTS.json

Each library runs in a process of its own, in the order posttrain, TRL tuned, posttrain, TRL as it comes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.given_options import options_of
from benchmarks.speed import report
from benchmarks.speed.rollout_row import ORDER as WAYS
from benchmarks.speed.rows import GUARDS, ROWS
from benchmarks.speed.runner import Order, run_training
from benchmarks.speed.settings import LIBRARY
from benchmarks.speed.special_rows import SPECIAL_ROWS

DEMO_MODEL = str(Path.home() / ".cache" / "posttrain" / "smollm2-135m-instruct")  # where `posttrain demo` keeps it
PACKAGES = (
    "torch", "transformers", "accelerate", "datasets", "peft", "liger-kernel", "flash-attn-4", "xformers", "tokenizers", "triton",
)  # fmt: skip


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__.split("\n")[0])
    parser.add_argument("rows", nargs="*", help="names; by default all training rows of the device")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument(
        "--settings", nargs="+", choices=sorted(LIBRARY), default=["ours", "default", "tuned", "matched"]
    )
    parser.add_argument("--trl-python", default=sys.executable, help="Python of an environment with TRL 1.16.0")
    parser.add_argument(
        "--trl-path", help="folder with an unpacked TRL 1.16.0, put before everything for TRL's process"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="every row in miniature, float32: shows that both train the same"
    )
    parser.add_argument("--profile", action="store_true", help="say where the time goes (only the ratios suffer)")
    parser.add_argument("--steps", nargs=2, type=int, metavar=("LOSSES", "TIMED"), help="for all settings")
    parser.add_argument("--layers", type=int, help="a model of fewer layers, for machines that take minutes for a step")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of each library; 0: torch decides")
    parser.add_argument("--once", action="store_true", help="posttrain before TRL only, not after it once more")
    parser.add_argument(
        "--limit", type=float, default=3600, help="seconds for everything; what is left is reported as such"
    )
    parser.add_argument("--ours", nargs="*", default=[], metavar="OPTION=VALUE", help="further options of posttrain")
    parser.add_argument("--trl", nargs="*", default=[], metavar="OPTION=VALUE", help="further options of TRL")
    parser.add_argument(
        "--tokenizer", default=DEMO_MODEL, help="folder of a real tokenizer with a chat template, for the row data"
    )
    parser.add_argument("--data-rows", type=int, default=4000, help="rows of each file of the row data")
    parser.add_argument(
        "--data-procs", type=int, nargs="+", default=[0, 1], help="processes that prepare them; 0: as it comes"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="of the rows of rollouts; by default all")
    parser.add_argument("--out", type=Path, default=Path("runs/speed/results.json"), help="results are added to it")
    parser.add_argument("--work", type=Path, help="folder for logs, plans and profiles; by default that of --out")
    parser.add_argument("--render", type=Path, nargs="+", help="print the table of these results and stop")
    return parser.parse_args(given)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def device_name(device: str) -> str:
    if device == "cpu":
        return f"{platform.machine()} CPU"
    import torch

    return torch.cuda.get_device_name()


def add_to(path: Path, run: dict[str, Any]) -> None:
    """One file holds the runs of several calls, since a GPU may be lent for minutes only."""
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"runs": [*runs, run]}, indent=1), encoding="utf-8")


def render(paths: list[Path]) -> str:
    texts = []
    for run in (run for path in paths for run in json.loads(path.read_text(encoding="utf-8"))["runs"]):
        stated = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        texts += [
            f"`{run['command']}`\n",
            f"{run['device']}; {stated}; TRL 1.16.0\n",
            rendered(run["part"], run["results"]),
            "",
        ]
    return "\n".join(texts)


def main(given: list[str]) -> None:
    asked = arguments(given)
    if asked.render:
        print(render(asked.render))
        return
    names = asked.rows or [row.name for row in ROWS if row.device == asked.device]
    known = {row.name for row in (*ROWS, *GUARDS)} | SPECIAL_ROWS.keys()
    if unknown := set(names) - known:
        raise SystemExit(f"There is no row {', '.join(sorted(unknown))}; the rows are {', '.join(sorted(known))}.")
    elsewhere = [f"{row.name} ({row.device})" for row in ROWS if row.name in names and row.device != asked.device]
    if elsewhere and not asked.tiny:
        raise SystemExit(
            f"These rows are for another device than --device {asked.device}: {', '.join(elsewhere)}. Pass theirs, or --tiny."
        )
    order = Order(
        rows=[],
        settings=asked.settings,
        device=asked.device,
        work=(asked.work or asked.out.parent).resolve(),
        trl_python=asked.trl_python,
        trl_path=asked.trl_path and str(Path(asked.trl_path).resolve()),
        tiny=asked.tiny,
        profile=asked.profile,
        steps=asked.steps,
        layers=asked.layers,
        threads=asked.threads,
        once=asked.once,
        limit_seconds=asked.limit,
        tokenizer=asked.tokenizer,
        data_rows=asked.data_rows,
        ways=asked.ways,
        data_procs=asked.data_procs,
        overrides={"posttrain": options_of(asked.ours), "trl": options_of(asked.trl)},
    )
    for part, results in parts(order, names):
        command = f"python -m benchmarks.speed {shlex.join(given)}"
        run = {"part": part, "command": command, "device": device_name(asked.device), "versions": versions()}
        add_to(asked.out, {**run, "results": results})
        print(rendered(part, results), flush=True)


def parts(order: Order, names: list[str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Results as they come, so that what is known is written before the next part begins. Training rows in a row are one part."""
    for is_special, part in itertools.groupby(names, key=SPECIAL_ROWS.__contains__):
        if is_special:
            yield from ((name, SPECIAL_ROWS[name].run(order)) for name in part)
        else:
            yield "training", run_training(replace(order, rows=list(part)))


def rendered(part: str, results: list[dict[str, Any]]) -> str:
    if part in SPECIAL_ROWS:
        return SPECIAL_ROWS[part].table(results)
    return "\n".join([report.table(results), "", *(f"- {line}" for line in report.goals(results))])


if __name__ == "__main__":
    main(sys.argv[1:])
