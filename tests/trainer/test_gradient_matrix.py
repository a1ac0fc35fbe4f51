"""The gradient matrix: every method, every batch layout, one gradient.

The oracle is a plain transformers model in float64, run on one sequence at a time with full logits, its loss written from the
formula over the concatenated batch. A method that has none yet is held against its own gradient for one padded batch of all rows:
an entry of METHODS is enough to be in the matrix. A cell runs the trainer's own step: the micro-batches of an optimizer step laid
out ragged, padded or packed, with some head chunk, split 1x8, 2x4, 8x1 or with a partial last window, on one process or on two of
which one may be empty, for full weights or LoRA. Its gradient must be the oracle's.
"""

from __future__ import annotations

import json

import pytest
import torch

from tests.forked import start_group, wait_for_group
from tests.trainer import gradient_cells as cells

SHARDS = 6  # so that the workers of pytest share the two-process cells


@pytest.mark.parametrize("cell", cells.single_process(), ids=str)
def test_gradient_equals_the_oracle(cell):
    cells.check(cell, cells.gradient(cell))


@pytest.mark.trust
@pytest.mark.parametrize("cell", cells.single_process(nightly=True), ids=str)
def test_gradient_equals_the_oracle_nightly(cell):
    cells.check(cell, cells.gradient(cell))


@pytest.mark.parametrize("shard", range(SHARDS))
def test_two_processes(shard, tmp_path):
    """Uneven rows, and one process without any: the cells of some losses, reported together."""
    check_on_two_processes(shard, cells.two_processes(), tmp_path)


@pytest.mark.trust
@pytest.mark.parametrize("shard", range(SHARDS))
def test_two_processes_nightly(shard, tmp_path):
    check_on_two_processes(shard, cells.two_processes(nightly=True), tmp_path)


def check_on_two_processes(shard, every, tmp_path):
    losses = cells.variants()[shard::SHARDS]
    mine = [cell for cell in every if (cell.method, cell.loss) in losses]
    known = {cell: cells.expected_gradient(cell) for cell in mine if cell.method not in cells.ORACLES}
    group = start_group(2, lambda rank: gradients(rank, mine, known, tmp_path / "failures.json"), tmp_path / "rank")
    assert wait_for_group(group, 500) == [0, 0], "\n".join(child.output() for child in group)
    checked, failures = json.loads((tmp_path / "failures.json").read_text())
    assert checked == len(mine) > 0
    assert not failures, "\n".join(failures)


def gradients(rank, chosen, known, answer):
    """In each of two processes; the first one, which has the whole gradient as the other has, checks it. `known`: what one process
    has computed for methods without an oracle."""
    failures = []
    for cell in chosen:
        print(cell, flush=True)
        made = cells.trainer(cell.method, cell.loss, cell.lora, cell.dtype)
        if made.model_wrapped is made.model:  # Trainer wraps for DDP when training begins; do it once for each trainer
            made.model_wrapped = torch.nn.parallel.DistributedDataParallel(made.model)
        found = cells.gradient(cell, rank, 2)
        try:
            if rank == 0:
                cells.check(cell, found, known.get(cell))
        except AssertionError as error:
            failures.append(f"{cell}: {error}")
    if rank == 0:
        answer.write_text(json.dumps([len(chosen), failures]))
    torch.distributed.destroy_process_group()


def test_no_method_and_no_loss_is_missing():
    from posttrain.losses.policy import POLICY_LOSSES
    from posttrain.losses.preference import PREFERENCE_LOSSES
    from posttrain.methods.table import METHODS

    covered = {cell.method for cell in cells.single_process()} & {cell.method for cell in cells.two_processes()}
    assert covered == set(METHODS), f"not in the gradient matrix: {set(METHODS) - covered}"
    for every in (cells.single_process(), cells.two_processes()):
        losses = {cell.loss for cell in every if cell.method == "dpo"}
        assert losses >= set(PREFERENCE_LOSSES), f"not in the gradient matrix: {set(PREFERENCE_LOSSES) - losses}"
        losses = {cell.loss for cell in every if cell.method in cells.POLICY_METHODS}
        assert losses >= set(POLICY_LOSSES), f"not in the gradient matrix: {set(POLICY_LOSSES) - losses}"


def test_full_product_for_sft_and_dpo_sigmoid():
    for method, loss in cells.WHOLE_PRODUCT:
        now, later = (
            [c for c in cells.single_process(n) if (c.method, c.loss) == (method, loss)] for n in (False, True)
        )
        assert len({*now, *later}) == 3 * 3 * 5 * 2 * 2  # layouts x chunks x splits x adapters x dtypes
        assert len({(c.layout, c.chunk, c.split) for c in now}) == len(now) == 3 * 3 * 5
        assert len({(c.split, c.lora, c.dtype) for c in now}) == 5 * 2 * 2


def test_no_pair_of_axes_waits_for_the_night():
    """What one loss leaves out another of the same method takes."""
    shape = lambda c: (c.layout, c.chunk, c.split, c.lora, c.dtype, c.shares)  # noqa: E731
    for method in ("sft", "dpo", "reward", "grpo"):
        for cover in (cells.single_process, cells.two_processes):
            now, later = ([c for c in cover(n) if c.method == method and c.loss != "sigmoid"] for n in (False, True))
            later = [c for c in later if (c.method, c.loss) not in cells.WHOLE_PRODUCT]
            assert {shape(cell) for cell in now} >= {shape(cell) for cell in later}
