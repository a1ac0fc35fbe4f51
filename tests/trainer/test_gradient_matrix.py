"""The gradient matrix: every method, every batch layout, one gradient.

The oracle is a plain transformers model in float64, run on one sequence at a time with full logits, its loss written from the
formula over the concatenated batch. A cell runs the trainer's own step: the micro-batches of an optimizer step laid out ragged,
padded or packed, with some head chunk, split 1x8, 2x4, 8x1 or with a partial last window, on one process or on two of which one
may be empty, for full weights or LoRA. Its gradient must be the oracle's.
"""

from __future__ import annotations

import pytest

from tests.trainer import gradient_cells as cells
from tests.trainer.gradient_workers import WorkerPair


@pytest.fixture(scope="module")
def workers():
    """Two long-lived processes that share all two-process cells."""
    with WorkerPair() as pair:
        yield pair


@pytest.mark.parametrize("cell", cells.single_process(), ids=str)
def test_gradient_equals_the_oracle(cell):
    cells.check(cell, cells.gradient(cell))


def test_two_processes(workers):
    """Uneven rows, and one process without any: all two-process cells, reported together."""
    failures = []
    for cell in cells.two_processes():
        try:
            cells.check(cell, workers.gradient(cell))
        except AssertionError as error:
            failures.append(f"{cell}: {error}")
    assert not failures, "\n".join(failures)


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
    for method, loss in (("sft", "nll"), ("dpo", "sigmoid")):
        mine = [c for c in cells.single_process() if (c.method, c.loss) == (method, loss)]
        assert len(mine) == 3 * 3 * 5 * 2 * 2  # layouts x chunks x splits x adapters x dtypes
