"""The table of the head row: one line for each width and way."""

from __future__ import annotations

from typing import Any

LIMIT_TFLOPS = 790.0  # bf16 products of an H200, as measured
FLOPS = 6  # of N * H * V: the forward, the gradient of the hidden states, the gradient of the weight


def head_table(results: list[dict[str, Any]], tokens: int, vocabulary: int) -> str:
    lines = ["| width | head | ms | ours is | GiB besides inputs and gradients | loss, gradient norms | limit (ms) |"]
    lines.append("|---:|---|---:|---:|---:|---|---:|")
    for width in dict.fromkeys(one["width"] for one in results):
        entries = {one["setting"]: one for one in results if one["width"] == width}
        ours = entries.get("posttrain", {})
        limit = FLOPS * tokens * width * vocabulary / LIMIT_TFLOPS / 1e9
        for name, one in entries.items():
            if "error" in one:
                lines.append(f"| {width} | {name} | | | | {one['error']} | |")
                continue
            ratio = f"{one['milliseconds'] / ours['milliseconds']:.2f}x" if "milliseconds" in ours else ""
            lines.append(
                f"| {width} | {name} | {one['milliseconds']:.1f} | {ratio} | {one['extra_bytes'] / 2**30:.2f} | "
                f"{difference(ours, one)} | {limit:.1f} |"
            )
    return "\n".join(lines)


def difference(ours: dict[str, Any], other: dict[str, Any]) -> str:
    """Largest relative difference of the loss and of the two gradient norms."""
    if "loss" not in ours:
        return ""
    pairs = zip([ours["loss"], *ours["gradient_norms"]], [other["loss"], *other["gradient_norms"]])
    worst = max(abs(a - b) / max(abs(a), abs(b)) for a, b in pairs)
    return f"{worst:.0e} apart" + ("" if worst < 1e-2 else ", **void**")
