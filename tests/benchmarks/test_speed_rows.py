"""The arithmetic of the speed benchmark: what is counted, which candidate is taken, when a row is void."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.speed import materials, policy, rollout_row, rollout_side, runner
from benchmarks.speed.__main__ import main
from benchmarks.speed.judge import shortness
from benchmarks.speed.measure import OUT_OF_TIME
from benchmarks.speed.report import agreement
from benchmarks.speed.rows import ROWS, Row, row_named, tiny
from benchmarks.speed.runner import TREE, Order, fastest_candidates, plan_items

ONLINE = [row for row in ROWS if row.is_online]


@pytest.mark.parametrize("row", [*ONLINE, *map(tiny, ONLINE)], ids=lambda row: f"{row.name}-{row.shape.hidden}")
def test_micro_batches_divide_a_step_into_whole_groups(row: Row) -> None:
    sizes = [candidate["per_device_train_batch_size"] for candidate in row.tuned]
    assert all(row.rows % size == 0 for size in sizes)
    assert row.rows == row.prompts * row.group


def test_a_prompt_counts_once_for_its_group_and_with_every_completion_as_fed() -> None:
    row = row_named("grpo-update-0.5b")
    lengths = row.sequence_lengths(2).reshape(2, 256)
    tokens = materials.step_tokens(row, 2)
    assert tokens["unique"] == [16 * 512 + int(step.sum()) for step in lengths]
    assert tokens["as_fed"] == [256 * 512 + int(step.sum()) for step in lengths]
    assert lengths.min() >= 16
    assert lengths.max() <= 1024
    assert materials.step_tokens(row, 1, written=[1000]) == {"unique": [9192], "as_fed": [132_072]}


def test_the_stored_completions_are_those_of_the_table_in_their_order() -> None:
    row = tiny(row_named("grpo-update-0.5b"))
    prompts = [one["prompt"] for one in materials.prompts(row, 2) for _ in range(row.group)]
    answer = policy.rollout_function(row, 2)(prompts, None)
    assert [len(ids) for ids in answer["completion_ids"]] == row.sequence_lengths(2).tolist()
    assert {len(ids) for ids in answer["prompt_ids"]} == {row.lengths.prompt}
    assert len({tuple(ids) for ids in answer["completion_ids"]}) == len(prompts)
    words = materials.tokenizer(row)
    assert [words.encode(prompt) for prompt in prompts[:3]] == answer["prompt_ids"][:3]


def test_the_reward_prefers_the_short_and_tells_equals_apart() -> None:
    short, long = list(range(300, 310)), list(range(300, 400))
    assert shortness(["", ""], [short, long])[0] > shortness(["", ""], [short, long])[1]
    values = shortness([""] * 11, [[300 + place] * 32 for place in range(11)])
    assert len(set(values)) == 11


def test_each_candidate_of_grpo_is_an_item_with_a_limit_on_cuda() -> None:
    order = Order(["grpo-0.5b", "sft-0.5b"], [], "cuda", SimpleNamespace())
    items = plan_items(order, ["tuned"])
    assert [item.get("candidate") for item in items] == [0, 1, 2, None]
    assert [item.get("seconds") for item in items] == [100, 100, 100, None]


def test_the_fastest_candidate_is_kept_and_the_others_are_told() -> None:
    key = {"row": "grpo-0.5b", "setting": "tuned"}
    slow, broken, fast = (
        {**key, "rate": 2.0},
        {**key, "error": "no"},
        {**key, "rate": 3.0, "tried": [{"error": "first"}]},
    )
    (kept,) = fastest_candidates([slow, broken, fast])
    assert kept["rate"] == 3.0
    assert [one.get("rate", one.get("error")) for one in kept["tried"]] == ["first", "no", 2.0]


def test_an_item_that_takes_too_long_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process does one item and is stopped in the second; another one goes on with the third."""
    items = [{"row": name, "setting": "tuned"} for name in ("a", "b", "c")]
    ends = iter([(OUT_OF_TIME, "took longer than it may", 1), (0, "done", 1)])
    seen = []

    def run_items(order: Order, process: str, library: str, left: list[dict[str, Any]], limits: Any) -> tuple[Any, ...]:
        seen.append((process, [item["row"] for item in left]))
        code, told, count = next(ends)
        return code, told, [{**item, "rate": 1.0} for item in left[:count]]

    monkeypatch.setattr(runner, "run_items", run_items)
    found = runner.run_process(Order([], [], "cuda", SimpleNamespace()), "B", "trl", items)
    assert seen == [("B", ["a", "b", "c"]), ("B-2", ["c"])]
    assert [one.get("error") for one in found] == [None, "not run: took longer than it may", None]


@pytest.mark.slow
def test_the_limit_of_an_item_ends_its_process() -> None:
    script = "import time; from benchmarks.speed.measure import limited\nwith limited(0.2): time.sleep(600)"
    done = subprocess.run([sys.executable, "-c", script], cwd=TREE, timeout=500)
    assert done.returncode == OUT_OF_TIME


def sampled(**changed: Any) -> dict[str, Any]:
    return {"setting": "ours", "checksum": "a", "tokens_written": [1000, 990], "rewards_given": 8.0, **changed}


@pytest.mark.parametrize(
    ("changed", "is_same"),
    [
        ({}, True),
        ({"tokens_written": [960, 970]}, True),
        ({"tokens_written": [900, 900]}, False),
        ({"rewards_given": 7.0}, False),
        ({"checksum": "b"}, False),
    ],
)
def test_sampled_rows_must_write_and_judge_the_same_amount(changed: dict[str, Any], is_same: bool) -> None:
    assert agreement(sampled(), sampled(**changed))[0] is is_same


def given(**changed: Any) -> dict[str, Any]:
    options = {"weights": "float32", "bf16": False}
    numbers = {"losses": [0.5, 0.4], "also": {"grad_norm": [1.0, 2.0], "entropy": [7.0, 7.0]}}
    return {"setting": "ours", "checksum": "a", "options": options, **numbers, **changed}


def test_a_row_with_equal_losses_and_other_gradients_is_void() -> None:
    """The loss of GRPO on its own completions does not see the weights."""
    theirs = given(also={"grad_norm": [1.0, 2.1], "entropy": [7.0, 7.0]})
    assert agreement(given(), given())[0]
    agree, told = agreement(given(), theirs)
    assert not agree
    assert "grad_norm 5e-02" in told


def test_steady_decoding_is_told_without_the_prompts() -> None:
    common = {"row": "rollouts-0.5b", "setting": "posttrain", "peak_bytes": 2**30}
    common |= {"weight_bytes": 4_000_000_000, "context_bytes": 800_000_000}
    lines = [
        {**common, "kind": "ragged", "repeat": 0, "seconds": 9.0, "tokens": 1000, "longest": 512},
        {**common, "kind": "ragged", "repeat": 1, "seconds": 2.0, "tokens": 1000, "longest": 512},
        {**common, "kind": "prompts", "repeat": 1, "seconds": 0.5, "tokens": 256, "longest": 1},
        {**common, "kind": "steady", "repeat": 1, "seconds": 1.522, "tokens": 256 * 512, "longest": 512},
    ]
    found = rollout_row.numbers(lines)
    assert found["ragged"] == 500
    assert found["steady"] == pytest.approx(256 * 511 / 1.022)
    assert found["step_ms"] == pytest.approx(2.0)
    assert "| 128,000 |" in rollout_row.table(lines)
    assert found["least_ms"] == pytest.approx(1.0)
    assert "goal 100,000; a step takes 2.00 times as long" in rollout_row.table(lines)


def test_a_row_that_goes_on_after_its_end_is_an_error() -> None:
    pad = materials.PAD
    tokens = np.array([[5, 6, pad, pad], [5, 6, 7, 8]])
    assert rollout_side.written_lengths(tokens, np.array([2, 4])) == [2, 4]
    with pytest.raises(RuntimeError, match="after its end"):
        rollout_side.written_lengths(tokens, np.array([2, 3]))


def test_a_row_for_the_gpu_is_not_run_on_a_cpu_unasked() -> None:
    message = r"^These rows are for another device than --device cpu: sft-0\.5b \(cuda\)\. Pass theirs, or --tiny\.$"
    with pytest.raises(SystemExit, match=message):
        main(["sft-0.5b", "sft-135m-cpu"])
