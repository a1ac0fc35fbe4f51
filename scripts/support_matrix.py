"""docs/support.md from the results of the tests: what is shown to work, by how many tests, for which method.

    make support

`make test` and `make test-slow` leave their results there. A cell without a test is empty, whatever anybody believes.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

from posttrain.cli.options.table import method_names
from scripts import gpu_receipt

PAGE = Path(__file__).resolve().parents[1] / "docs" / "support.md"
MATRIX = r"test_gradient_matrix::test_gradient_equals_the_oracle\[{method}-.*"
FEATURES: tuple[tuple[str, str], ...] = (
    ("gradients equal a float64 oracle, ragged batches", MATRIX + "-ragged-"),
    ("... padded batches", MATRIX + "-padded-"),
    ("... packed batches", MATRIX + "-packed-"),
    ("... prompts computed once", MATRIX + "-shared-"),
    ("... with LoRA", MATRIX + "-lora-"),
    ("the numbers of TRL 1.16.0", r"test_trl_parity_recorded::test_numbers_of_trl\[{method}"),
    (
        "killed at random instants, resumed, bit-identical",
        r"test_kill::test_killed_at_random_instants.*\[{method}-short",
    ),
    ("the same seed twice is bit-identical", r"test_numbers::test_the_same_seed_twice.*{method}"),
    ("two processes equal one", r"test_two_processes::test_two_processes_equal_one.*\[{method}"),
    ("FSDP2 equals one process", r"test_fsdp::test_ends_where_one_process_does\[{method}"),
    ("from the command line", r"test_train::test_a_file_and_flags_train_the_same\[{method}\]"),
    ("vLLM servers", r"test_vllm_training::test_two_servers\[{method}\]"),
)
"""What is said -> which tests show it."""
TITLE = """# What is supported

Generated from the results of the tests (`make test`, `make test-slow`, then `make support`): a number is how many tests of that
kind passed, `n failed` how many did not, and an empty cell means that no test shows it. All of these run on the CPU; the
receipt of the tests on a GPU is at the end, and measurements are in [benchmarks/README.md](../benchmarks/README.md),
[trust](trust.md) and [vLLM](vllm.md).

"""


def outcomes(files: list[Path]) -> dict[str, str]:
    """module::test -> "passed", "failed" or "skipped"."""
    found = {}
    for file in files:
        for case in ET.parse(file).getroot().iter("testcase"):
            module = case.get("classname", "").rsplit(".", 1)[-1]
            kinds = {child.tag for child in case}
            state = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            found[f"{module}::{case.get('name')}"] = state
    return found


def page(results: dict[str, str]) -> str:
    methods = method_names()
    lines = ["| | " + " | ".join(name.upper() for name in methods) + " |", "|---|" + "---:|" * len(methods)]
    for told, pattern in FEATURES:
        cells = [cell(results, pattern.format(method=method)) for method in methods]
        lines.append(f"| {told} | " + " | ".join(cells) + " |")
    counted = Counter(results.values())
    kinds = ", ".join(f"{counted[kind]:,} {kind}" for kind in ("passed", "failed", "skipped"))
    total = f"\nOf {len(results):,} tests: {kinds}.\n\n{gpu_receipt.in_words(gpu_receipt.read())}\n"
    return TITLE + "\n".join(lines) + "\n" + total


def cell(results: dict[str, str], pattern: str) -> str:
    states = Counter(state for name, state in results.items() if re.match(pattern, name))
    if states["failed"]:
        return f"{states['failed']} failed"
    return str(states["passed"] or "")


def main() -> int:
    files = [Path(name) for name in sys.argv[1:]]
    if not files:
        print(__doc__)
        return 2
    PAGE.write_text(page(outcomes(files)), encoding="utf-8")
    print(f"{PAGE} written from {len(files)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
