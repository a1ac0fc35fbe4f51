"""Keeps TRL's numbers of some four dozen cases for the test suite, which then guards parity where TRL is not installed.

python -m benchmarks.parity.record RESULTS tests/methods/trl_recorded.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RECORDED = (
    "sft-text@1x4",
    "sft-text@2x2",
    "sft-assistant-only-turns@1x4",
    "sft-prompt-completion-chat@2x2",
    "sft-dft@1x4",
    "sft-packed@1x4",
    "sft-lora@2x2",
    "dpo-loss-sigmoid@1x4",
    "dpo-mpo@1x4",
    "dpo-ld-alpha@2x2",
    "dpo-tr-dpo@2x2",
    "dpo-lora-loaded@1x4",
    "reward-margin-centred@2x2",
    "reward-lora@1x4",
    "sft-images-llava-mixed@1x4",
    "sft-images-qwen2_5_vl-two@1x4",
    "sft-images-gemma3-completions@1x4",
    "dpo-images-llava_next-sigmoid@2x2",
    "cpo-loss-sigmoid@1x4",
    "cpo-loss-simpo@1x4",
    "orpo-plain@1x4",
    "tpo-loss-tpo-l@1x4",
    "kto-plain@1x4",
    "kto-apo@1x4",
    "bco-delta-first@1x4",
    "prm-plain@1x4",
    "prm-last-step@1x4",
    "gkd-beta-0.5@1x4",
    "distillation-beta-1.0@1x4",
    "server-distillation-between@1x4",
    "iw-opd-counted@1x4",
    "iw-opd-jsd-top-3@1x4",
    "gold-reverse@1x4",
    "gold-uld-merging-boundaries@1x4",
    "sdft-topk@1x8",
    "sdft-ema@1x8",
    "sdpo-mixed@1x8",
    "minillm-discounted@1x8",
    "minillm-after-step@1x8",
    "ssd-plain@1x4",
    "grpo-loss-dapo@1x8",
    "grpo-loss-vespo@2x4",
    "grpo-sequence-grpo@2x4",
    "grpo-kl@1x8",
    "grpo-some-opinions-normalised@2x4",
    "grpo-evaluation@1x8",
    "rloo-normalised@1x8",
    "rloo-weights@2x4",
)
COMMAND = "benchmarks/parity/run.sh --record"


def shortened(value: Any) -> Any:
    """Eight significant digits: float32 has no more."""
    if isinstance(value, float):
        return float(f"{value:.8g}")
    if isinstance(value, dict):
        return {name: shortened(item) for name, item in value.items()}
    return [shortened(item) for item in value] if isinstance(value, list) else value


def record(results: Path, target: Path) -> None:
    """Cases that were not run keep the numbers that they have."""
    known = json.loads(target.read_text(encoding="utf-8"))
    files = {name: results / "trl" / f"{name}.json" for name in RECORDED}
    runs = {
        name: json.loads(file.read_text(encoding="utf-8")) if file.exists() else known[name]
        for name, file in files.items()
    }
    kept = {name: shortened({part: run[part] for part in ("logs", "weights")}) for name, run in runs.items()}
    header = {
        "what": "numbers logged by TRL 1.16.0 (BCO, PRM, MiniLLM, SSD: 1.10.0), float32 on the CPU",
        "command": COMMAND,
    }
    lines = [f"{json.dumps(name)}: {json.dumps(run, separators=(',', ':'))}" for name, run in kept.items()]
    target.write_text(f'{{"header": {json.dumps(header)},\n' + ",\n".join(lines) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    record(Path(sys.argv[1]), Path(sys.argv[2]))
