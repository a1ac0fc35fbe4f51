"""The rows of rollouts: each way in a process of its own, and their table."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from typing import Any

from benchmarks.speed.measure import OUT_OF_TIME
from benchmarks.speed.runner import Order, run_module

USUAL = ("posttrain", "generate", "continuous batching", "generate, static cache", "vllm")
ORDER = (*USUAL, "weights in 8 bits", "keys and values in 8 bits")
NEEDED = {"vllm": "vllm"}
TIMES_OTHERS = {"generate": 10, "continuous batching": 8, "vllm": 1.5}
GOALS = {"rollouts-0.5b": 100_000, "rollouts-1.5b": 60_000, "rollouts-7b": 21_600, "rollouts-1.5b-16k": 5_700}
"""Steady tokens a second. The last two: within 1.5 times of what an H200 needs to read weights, keys and values once a step."""
BANDWIDTH = 4.8e12  # bytes a second of an H200


def run(row: str) -> Callable[[Order], list[dict[str, Any]]]:
    def run_row(order: Order) -> list[dict[str, Any]]:
        return [entry for way in ORDER if way in (order.ways or USUAL) for entry in run_way(order, row, way)]

    return run_row


def run_way(order: Order, row: str, way: str) -> list[dict[str, Any]]:
    entry = {"row": row, "setting": way}
    if way in NEEDED and importlib.util.find_spec(NEEDED[way]) is None:
        return [{**entry, "error": f"not run: {NEEDED[way]} is not installed"}]
    process = f"{row}-{way.replace(', ', '-').replace(' ', '-')}"
    plan, results = (order.work / f"{process}.{suffix}" for suffix in ("plan.json", "jsonl"))
    order.work.mkdir(parents=True, exist_ok=True)
    results.unlink(missing_ok=True)
    given = {"process": process, "device": order.device, "tiny": order.tiny, "threads": order.threads}
    plan.write_text(json.dumps({**entry, **given, "way": way}, indent=1), encoding="utf-8")
    code, end = run_module(order, process, "posttrain", "benchmarks.speed.rollout_side", [str(plan), str(results)])
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    found = [json.loads(line) for line in lines]
    if code != 0:
        told = "stopped by its time limit" if code == OUT_OF_TIME else end
        found.append({**entry, "error": told if found else f"not run: {told}"})
    return found


# ---- table --------------------------------------------------------------------------------------------------------------


def table(results: list[dict[str, Any]]) -> str:
    """Of several repeats the fastest that is not the first, where there is one: that has warmed up."""
    lines = [
        "| row | way | tokens/s (ragged) | ours is | steady tokens/s | ours is | ms a steady step | prompts (s) | "
        "peak GiB | tokens | |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    row = results[0]["row"]
    ways = {way: numbers([one for one in results if one["setting"] == way]) for way in ORDER}
    ours = ways["posttrain"]
    for way, found in ways.items():
        if not any(one["setting"] == way for one in results):
            continue
        told = "; ".join(one["error"] for one in results if one["setting"] == way and "error" in one)
        if not found:
            lines.append(f"| {row} | {way} | | | | | | | | | {told} |")
            continue
        ratios = {
            name: f"{ours[name] / found[name]:.1f}x" if way != "posttrain" and name in ours and name in found else ""
            for name in ("ragged", "steady")
        }
        shown = {name: f"{found[name]:,.0f}" if name in found else "" for name in ("ragged", "steady", "tokens")}
        lines.append(
            f"| {row} | {way} | {shown['ragged']} | {ratios['ragged']} | {shown['steady']} | {ratios['steady']} | "
            f"{found.get('step_ms', float('nan')):.2f} | {found.get('prompts', float('nan')):.3f} | {found['peak']:.1f} | "
            f"{shown['tokens']} | {told} |"
        )
    return "\n".join([*lines, "", *(f"- {line}" for line in goals(row, ways))])


def numbers(entries: list[dict[str, Any]]) -> dict[str, float]:
    """Rates of one way. The steady rate is that of decoding: the time of the prompts, which is told apart, is taken off."""
    good = [one for one in entries if "error" not in one]
    if not good:
        return {}
    best = {kind: fastest([one for one in good if one["kind"] == kind]) for kind in ("ragged", "prompts", "steady")}
    found = {"peak": max(one["peak_bytes"] for one in good) / 2**30}
    if best["ragged"]:
        found |= {"ragged": best["ragged"]["tokens"] / best["ragged"]["seconds"], "tokens": best["ragged"]["tokens"]}
    if best["prompts"]:
        found["prompts"] = best["prompts"]["seconds"]
    if best["prompts"] and best["steady"]:
        steady, prompts = best["steady"], best["prompts"]
        decoding = steady["seconds"] - prompts["seconds"]
        found["steady"] = (steady["tokens"] - prompts["tokens"]) / decoding
        found["step_ms"] = 1000 * decoding / (steady["longest"] - 1)
        found["least_ms"] = 1000 * (steady["weight_bytes"] + steady["context_bytes"]) / BANDWIDTH
    return found


def fastest(entries: list[dict[str, Any]]) -> dict[str, Any]:
    warm = [one for one in entries if one["repeat"] > 0] or entries
    return min(warm, key=lambda one: one["seconds"]) if warm else {}


def goals(row: str, ways: dict[str, dict[str, float]]) -> list[str]:
    ours, rate = ways["posttrain"], GOALS[row]
    if "steady" not in ours:
        return []
    lines = [
        f"{row}: {ours['steady']:,.0f} tokens/s steady, goal {rate:,}{missed(ours['steady'] >= rate)}; a step takes "
        f"{ours['step_ms'] / ours['least_ms']:.2f} times as long as an H200 needs to read weights, keys and values"
    ]
    for way, goal in TIMES_OTHERS.items():
        kind = "steady" if way == "vllm" else "ragged"
        if kind in ways[way] and kind in ours:
            ratio = ours[kind] / ways[way][kind]
            lines.append(f"{row}: {ratio:.1f}x {way}, goal {goal}x{missed(ratio >= goal)}")
    return lines


def missed(is_reached: bool) -> str:
    return "" if is_reached else " (missed)"
