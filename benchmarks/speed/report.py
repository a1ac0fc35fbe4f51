"""From the lines of both libraries to one table: medians, ratios, memory, and whether the losses agree."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.speed.rows import GUARDS, ROWS
from benchmarks.speed.settings import LIBRARY

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
ALSO_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""Of norms of gradients and of entropies (TRL's of a step is the mean of its micro-batches' means, ours that of its tokens)."""
SAME_AMOUNT = 0.05
BEFORE_ROUNDING = 2  # losses: of the weights as they were given, and after one step
GIB = 2**30
HEADER = "| row | setting | tokens/s | ours is | peak GiB | ours needs | losses | micro-batch, checkpointing, other options |"
RULE = "|---|---|---:|---:|---:|---:|---|---|"
SHOWN_APART = ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "weights")


def table(results: list[dict[str, Any]]) -> str:
    """Markdown. `ours` is the median of the runs before and after TRL's; `void` where the losses disagree."""
    lines = [HEADER, RULE]
    for row in dict.fromkeys(one["row"] for one in results):
        mine = [one for one in results if one["row"] == row]
        lines += [line(one, mine) for one in representative(mine)]
    return "\n".join(lines)


def representative(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each setting; runs of the same setting are merged by the median of their rates."""
    merged = []
    for setting in ("ours", "default", "tuned", "packed", "matched"):
        runs = [one for one in results if one["setting"] == setting]
        good = [one for one in runs if "error" not in one]
        if good:
            rates = [one["rate"] for one in good]
            peak = max(one["peak_bytes"] for one in good)
            spread = max((apart(good[0], other) for other in good[1:] if "losses" in other), default=0.0)
            merged.append(
                {**good[0], "rate": statistics.median(rates), "rates": rates, "peak_bytes": peak, "own_spread": spread}
            )
        elif runs:
            merged.append(runs[0])
    return merged


def apart(one: dict[str, Any], other: dict[str, Any], count: int | None = None) -> float:
    """Largest relative difference of the first `count` losses of two runs."""
    pairs = list(zip(one["losses"], other["losses"]))[:count]
    return max((abs(a - b) / max(abs(a), abs(b), 1e-30) for a, b in pairs), default=0.0)


def line(one: dict[str, Any], of_row: list[dict[str, Any]]) -> str:
    merged = {entry["setting"]: entry for entry in representative(of_row)}
    ours = merged.get("ours", {})
    name = {"default": "TRL as it comes", "tuned": "TRL tuned", "packed": "TRL tuned, packed"}
    setting = name.get(one["setting"], one["setting"])
    if "error" in one:
        return f"| {one['row']} | {setting} | | {bound(one)} | | | | {one['error']} |"
    is_theirs = one["setting"] in name
    speed = f"{ours['rate'] / one['rate']:.2f}x" if is_theirs and "rate" in ours else ""
    rival = merged.get("matched", ours) if one["setting"] == "tuned" else ours
    memory = f"{rival['peak_bytes'] / one['peak_bytes']:.2f}x" if is_theirs and "peak_bytes" in rival else ""
    verdict = agreement(ours, one)[1] if "losses" in ours and one["setting"] != "ours" else ""
    return (
        f"| {one['row']} | {setting} | {one['rate']:,.0f} | {speed} | {one['peak_bytes'] / GIB:.1f} | {memory} | {verdict} | "
        f"{phases_in_words(one)}{options_in_words(one['options'])}{others_in_words(one)} |"
    )


def phases_in_words(one: dict[str, Any]) -> str:
    """Of rows that are more than an update; phases of TRL are taken from outside, those that could not be are left out."""
    if "phases" not in one:
        return ""
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in one["phases"].items())
    return f"**{statistics.median(one['step_seconds']):.2f} s a step** ({parts or 'phases not seen'}); "


def bound(one: dict[str, Any]) -> str:
    """Where TRL was stopped: at least so many times our step."""
    return f"> {one['at_least']:.1f}x" if "at_least" in one else ""


def options_in_words(options: dict[str, Any]) -> str:
    size, steps = options["per_device_train_batch_size"], options["gradient_accumulation_steps"]
    checkpointing = {True: "on", False: "off"}.get(options["gradient_checkpointing"], options["gradient_checkpointing"])
    others = ", ".join(f"{name}={value}" for name, value in options.items() if name not in SHOWN_APART)
    return f"{steps} x {size}, checkpointing {checkpointing}, {options['weights']} weights, {others}"


def others_in_words(one: dict[str, Any]) -> str:
    """What became of the candidates that were not the fastest."""
    told = []
    for other in one.get("tried", []):
        options = {k: v for k, v in other.get("options", {}).items() if one["options"].get(k) != v}
        outcome = f"{other['rate']:,.0f} tokens/s" if "rate" in other else other.get("error", "")[:80]
        if options:
            told.append(f"; with {', '.join(f'{name}={value}' for name, value in options.items())}: {outcome}")
    return "".join(told)


def agreement(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[bool, str]:
    """Whether both did the same work. Samples have no losses that could be compared: there the amounts must be the same."""
    return amounts_agree(ours, theirs) if "tokens_written" in theirs else losses_agree(ours, theirs)


def amounts_agree(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[bool, str]:
    written = [statistics.mean(one["tokens_written"]) for one in (ours, theirs)]
    told = f"sampled: {written[1]:,.0f} tokens, {theirs['rewards_given']:.0f} rewards a step; ours {written[0]:,.0f}, "
    told += f"{ours['rewards_given']:.0f}"
    if ours["checksum"] != theirs["checksum"]:
        return False, "**void**: other weights"
    if abs(written[0] / written[1] - 1) > SAME_AMOUNT or ours["rewards_given"] != theirs["rewards_given"]:
        return False, f"**void**: {told}"
    return True, told


def losses_agree(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[bool, str]:
    """Relative difference of each of the first losses, the direction they move in, and the weights they start from.

    TRL on bfloat16 weights has no accurate copy of them: what is too small for 8 bits of mantissa is lost in every step, and its
    losses part from everybody's. Those are compared as long as they belong to the same weights; what came of it is told.

    In bfloat16 on a GPU the same run twice is not the same run either (the backward of attention adds in any order), and AdamW
    amplifies it: nobody is asked to agree better with us than we agree with ourselves.
    """
    pairs = list(zip(ours["losses"], theirs["losses"]))
    drift = ""
    if rounds_its_steps(theirs):
        drift = f"; loss {len(pairs)} is {pairs[-1][1]:.4g}, ours {pairs[-1][0]:.4g}: bfloat16 weights without masters"
        pairs = pairs[:BEFORE_ROUNDING]
    low = "bfloat16" in (precision(ours["options"]), precision(theirs["options"]))
    allowed = max(TOLERANCE["bfloat16" if low else "float32"], 1.5 * ours.get("own_spread", 0.0) if low else 0.0)
    worst = apart(ours, theirs, len(pairs))
    told = f"{len(pairs)} within {worst:.0e}"
    if worst > TOLERANCE["bfloat16"] and low:
        told += f" (our own two runs: {ours['own_spread']:.0e})"
    if ours["checksum"] != theirs["checksum"]:
        return False, "**void**: other weights"
    if worst > allowed:
        return False, f"**void**: {worst:.1e} apart, {allowed:.0e} allowed"
    if not same_trend(*map(list, zip(*pairs))):
        return False, f"**void**: {told}, but they move in opposite directions"
    others = others_apart(ours, theirs, len(pairs))
    told += "".join(f", {name} {worst:.0e}" for name, worst in others.items())
    if any(worst > ALSO_TOLERANCE["bfloat16" if low else "float32"] for worst in others.values()):
        return False, f"**void**: {told}"
    return True, told + drift


def others_apart(ours: dict[str, Any], theirs: dict[str, Any], count: int) -> dict[str, float]:
    """Largest relative difference of each of the other numbers of the first `count` steps."""
    columns = {name: zip(ours["also"][name][:count], values) for name, values in theirs.get("also", {}).items()}
    return {name: max(abs(a - b) / max(abs(a), abs(b), 1e-30) for a, b in pairs) for name, pairs in columns.items()}


def rounds_its_steps(one: dict[str, Any]) -> bool:
    return LIBRARY[one["setting"]] == "trl" and one["options"]["weights"] == "bfloat16"


def precision(options: dict[str, Any]) -> str:
    return "bfloat16" if options["weights"] == "bfloat16" or options.get("bf16") else "float32"


def same_trend(ours: list[float], theirs: list[float]) -> bool:
    """Both fall or both rise from the first third to the last; movements below 0.1 % are none."""
    part = max(1, len(ours) // 3)
    moves = [statistics.mean(one[-part:]) / statistics.mean(one[:part]) - 1 for one in (ours, theirs)]
    return all(abs(move) < 1e-3 for move in moves) or moves[0] * moves[1] > 0 or abs(moves[0] - moves[1]) < 1e-3


def in_processor_time(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """The ratio once more, without what other programs of the machine took meanwhile."""
    if not ours.get("processor_seconds") or not theirs.get("processor_seconds"):
        return ""
    taken = [sum(one["processor_seconds"]) / sum(one["step_tokens"]) for one in (ours, theirs)]
    return f"; {taken[1] / taken[0]:.2f}x in processor time"


def goals(results: list[dict[str, Any]]) -> list[str]:
    """For each row: what was asked for and what was reached."""
    lines = []
    for row in (*ROWS, *GUARDS):
        merged = {one["setting"]: one for one in representative([r for r in results if r["row"] == row.name])}
        if "rate" not in merged.get("ours", {}):
            continue
        for setting, goal in zip(("default", "tuned"), row.goal):
            if "rate" in merged.get(setting, {}):
                ratio = merged["ours"]["rate"] / merged[setting]["rate"]
                lines.append(
                    f"{row.name}: {ratio:.2f}x TRL {setting}, goal {goal}x{'' if ratio >= goal else ' (missed)'}"
                    f"{in_processor_time(merged['ours'], merged[setting])}"
                )
    return lines
