"""Rows that are not a training run: the language head alone, data preparation, imports, the stall of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.speed import data_files, head_side, import_row, rollout_row
from benchmarks.speed.kernel_report import head_table
from benchmarks.speed.runner import Order, run_module


@dataclass(frozen=True)
class SpecialRow:
    run: Callable[[Order], list[dict[str, Any]]]
    table: Callable[[list[dict[str, Any]]], str]


def run_sides(order: Order, module: str, sides: list[tuple[str, str]], plan: dict[str, Any]) -> list[dict[str, Any]]:
    """One process for each (name, library), with a plan that differs in these only."""
    order.work.mkdir(parents=True, exist_ok=True)
    found = []
    for process, library in sides:
        paths = [order.work / f"{process}.{suffix}" for suffix in ("plan.json", "jsonl")]
        paths[1].unlink(missing_ok=True)
        shared = {"process": process, "library": library, "device": order.device, "tiny": order.tiny}
        paths[0].write_text(json.dumps({**shared, "threads": order.threads, **plan}, indent=1), encoding="utf-8")
        _, end = run_module(order, process, library, f"benchmarks.speed.{module}", [str(path) for path in paths])
        if not paths[1].exists():
            print(f"{process} wrote no result ({end}): see {order.work / process}.log", flush=True)
            continue
        found += [json.loads(line) for line in paths[1].read_text(encoding="utf-8").splitlines()]
    return found


# ---- the head -------------------------------------------------------------------------------------------------------------


def run_head(order: Order) -> list[dict[str, Any]]:
    return run_sides(order, "head_side", [("head-A1", "posttrain"), ("head-B", "trl")], {})


def table_head(results: list[dict[str, Any]]) -> str:
    is_tiny = results[0]["width"] in head_side.TINY[1]
    size = (head_side.TINY[0], head_side.TINY[2]) if is_tiny else (head_side.TOKENS, head_side.VOCABULARY)
    return head_table(results, *size)


# ---- data -----------------------------------------------------------------------------------------------------------------


def run_data(order: Order) -> list[dict[str, Any]]:
    if not Path(order.tokenizer).is_dir():
        raise SystemExit(
            f"The row data needs a tokenizer; {order.tokenizer} is no folder. Give --tokenizer, or run `make demo`."
        )
    files = [str(path) for path in data_files.write(order.work / "data", order.data_rows)]
    found = []
    for num_proc in order.data_procs:
        sides = [(f"data{num_proc}-A1", "posttrain"), (f"data{num_proc}-B", "trl"), (f"data{num_proc}-A2", "posttrain")]
        plan = {"files": files, "tokenizer": order.tokenizer, "repeats": 1, "num_proc": num_proc, "packing": False}
        found += run_sides(order, "data_side", sides, plan)
    return found


def table_data(results: list[dict[str, Any]]) -> str:
    """Best of the runs of each side."""
    lines = [
        "| rows | processes | posttrain (s) | TRL (s) | ours is | processor time | tokens/s | tokens | peak GiB (ours, TRL) |"
    ]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|---|")
    errors = [f"{one['setting']}, {one['file']}: {one['error']}" for one in results if "error" in one]
    good = [one for one in results if "error" not in one]
    for file, procs in dict.fromkeys((one["file"], one["num_proc"]) for one in good):
        mine = [one for one in good if (one["file"], one["num_proc"]) == (file, procs)]
        best = {one["setting"]: one for one in sorted(mine, key=lambda one: -one["prepare_seconds"])}
        if len(best) < 2:
            continue
        ours, theirs = best["posttrain"], best["trl"]
        ratio = theirs["prepare_seconds"] / ours["prepare_seconds"]
        counted = f"{ours['tokens']:,}" if ours["tokens"] == theirs["tokens"] else "**void**: not the same"
        peaks = " / ".join(f"{one['peak_bytes'] / 2**30:.2f}" for one in (ours, theirs))
        lines.append(
            f"| {file} | {procs} | {ours['prepare_seconds']:.2f} | {theirs['prepare_seconds']:.2f} | {ratio:.2f}x | "
            f"{theirs['processor_seconds'] / ours['processor_seconds']:.2f}x | "
            f"{ours['tokens'] / ours['prepare_seconds']:,.0f} | {counted} | {peaks} |"
        )
    return "\n".join([*lines, *errors])


# ---- the stall of a checkpoint --------------------------------------------------------------------------------------------


def run_stall(order: Order) -> list[dict[str, Any]]:
    """`stall.py` prints a line of JSON for each save and for each run; posttrain only, TRL saves while training waits."""
    order.work.mkdir(parents=True, exist_ok=True)
    _, end = run_module(order, "stall", "posttrain", "benchmarks.speed.stall", ["--device", order.device])
    lines = (order.work / "stall.log").read_text(encoding="utf-8").splitlines()
    found = [{"row": "stall", **json.loads(line)} for line in lines if line.startswith("{")]
    if not found:
        raise RuntimeError(f"the row stall printed no result ({end}): see {order.work / 'stall.log'}")
    return found


def table_stall(results: list[dict[str, Any]]) -> str:
    return "\n".join(json.dumps(one) for one in results)


SPECIAL_ROWS = {
    "head": SpecialRow(run_head, table_head),
    "data": SpecialRow(run_data, table_data),
    "stall": SpecialRow(run_stall, table_stall),
    "import": SpecialRow(import_row.run, import_row.table),
    **{name: SpecialRow(rollout_row.run(name), rollout_row.table) for name in rollout_row.GOALS},
}
