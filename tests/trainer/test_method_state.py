"""What a method has learnt beside weights is in every checkpoint, and equal on all processes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from posttrain.methods.table import Method
from posttrain.trainer.checkpoints import checkpoint as files
from posttrain.trainer.checkpoints.run_state import METHOD_FILE, load_method_state, save_method_state
from tests.forked import Child
from tests.trainer import resumable_run
from tests.trust.runs import differences

BASELINE = Method("tests.methods.toy_baseline", "BaselineTrainer", "BaselineConfig", "A toy with a running mean")


def run(folder: Path, code: int = 0, **options: Any) -> None:
    def train() -> None:
        from posttrain.methods.table import METHODS  # the child's own, not a copy that travelled

        METHODS["baseline"] = BASELINE
        resumable_run.main("baseline", folder, **options)

    child = Child(train, folder.with_name(f"{folder.name}.log"))
    assert child.wait() == code, child.output()


def test_killed_and_resumed_the_state_is_what_it_would_have_been(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(whole)
    run(killed, -signal.SIGKILL, callbacks=[resumable_run.KillAfter(5)])
    run(killed, resume=True)
    assert not differences(whole, killed)
    states = [
        files.load_tree(folder / f"checkpoint-{step}" / METHOD_FILE) for folder in (whole, killed) for step in (4, 8)
    ]
    assert len({state["mean"] for state in states}) == 2  # it moved, and after the kill it is the same
    assert [state["mean"] for state in states[:2]] == [state["mean"] for state in states[2:]]


def test_a_checkpoint_without_it_is_refused_where_the_method_has_one(tmp_path):
    assert load_method_state(tmp_path, {}) == {}
    with pytest.raises(ValueError, match=r"has no state of its method \(mean\): a version of posttrain without it"):
        load_method_state(tmp_path, {"mean": 0.0})
    save_method_state(tmp_path, {"mean": 0.25, "rows": {3: torch.arange(4)}}, 0, 1)
    state = load_method_state(tmp_path, {"mean": 0.0})
    assert (state["mean"], state["rows"][3].tolist()) == (0.25, [0, 1, 2, 3])


@pytest.mark.parametrize(("differ", "code"), [(False, 0), (True, 1)])
def test_processes_that_disagree_do_not_save(tmp_path, differ, code):
    def one(rank: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=rank, world_size=2)
        save_method_state(tmp_path, {"mean": 1.0 + rank * differ, "none": torch.zeros(0)}, rank, 2)

    children = [Child(lambda rank=rank: one(rank), tmp_path / f"{rank}.log") for rank in range(2)]
    assert [child.wait() for child in children] == [code, code], children[0].output()
    assert (tmp_path / METHOD_FILE).with_suffix(".json").exists() is not differ
    for child in children if differ else ():
        assert "The state of the method (mean, none) of process 1 is not that of process 0." in child.output()
