"""A training process is lost while others wait for their rollouts: all end with what happened. Nobody is lost by waiting long."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from posttrain.core.processes import HERE, RollCall
from posttrain.rollout.feed import feed
from tests.forked import Child, start_group, wait_for_group
from tests.trainer.test_async import NATIVE, logged, odd_sums
from tests.trainer.test_online import trainer
from tests.waiting import eventually

pytestmark = pytest.mark.slow  # two processes each, and waiting
AHEAD = {**NATIVE, "async_rollouts": True, "async_order": "in_order", "async_lead": 1, "max_steps": 3}
SILENT_S = 20
"""What `ddp_timeout` is here: a collective that lasts longer ends the run."""


def start(folder: Path, seconds: float) -> list[Child]:
    """Two processes of a run, of which the first is given its first rewards `seconds` late."""

    def train(rank: int) -> None:
        feed.REPORT_SECONDS = 1.0

        def late(**given: object) -> list[float]:
            begun = folder / f"judges-{rank}"
            is_late = rank == 0 and not begun.exists()
            begun.touch()
            time.sleep(seconds if is_late else 0)
            return odd_sums(**given)

        made = trainer(folder / "run", late, ddp_timeout=SILENT_S, dataset_cache_dir=f"{folder}/cache-{rank}", **AHEAD)
        made.train()
        made.close()
        dist.destroy_process_group()

    return start_group(2, train, folder / "rank")


@pytest.mark.parametrize(
    ("how", "sentence", "within"),
    [
        (signal.SIGKILL, "Process 1 has ended without a word, while others waited for rollouts", 10),
        (
            signal.SIGSTOP,
            f"Process 1 has said nothing for {SILENT_S} s, while others waited for rollouts",
            SILENT_S + 10,
        ),
    ],
    ids=["killed", "stopped"],
)
def test_the_others_end_with_a_sentence(tmp_path, how, sentence, within):
    first, second = start(tmp_path, seconds=2.0 + SILENT_S)  # threads that judge are waited for, too
    eventually(lambda: (tmp_path / "judges-0").exists() and (tmp_path / "judges-1").exists())
    time.sleep(3)  # the second has what it needs by now, and waits for the first
    second.signal(how)
    lost = time.monotonic()
    try:
        assert first.wait(2 * SILENT_S + within) == 1
    finally:
        second.end()
    assert time.monotonic() - lost < SILENT_S + within
    assert f"ProcessLost: {sentence}" in first.output().strip().splitlines()[-1]
    assert "resume_from_checkpoint=True" in first.output()


def test_who_waits_longer_than_a_collective_may_is_waited_for(tmp_path):
    first, second = start(tmp_path, seconds=1.5 * SILENT_S)
    assert wait_for_group([first, second], 6 * SILENT_S) == [0, 0], first.output() + second.output()
    assert len([line for line in logged(tmp_path / "run") if "reward" in line]) == AHEAD["max_steps"]


def test_a_process_that_is_lost_in_a_step_is_named_by_what_is_known(tmp_path):
    first, second = start(tmp_path, seconds=0.0)
    eventually(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
    second.signal(signal.SIGKILL)
    code = first.wait(60)
    second.end()
    if code:  # it may have come to its end before
        assert "ProcessLost: " in first.output().strip().splitlines()[-1]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_of_one_is_an_error_of_all(failing, tmp_path):
    def wait(rank: int) -> None:
        dist.init_process_group("gloo")
        roll_call = RollCall(rank, 3, 30.0)
        with roll_call.together():  # whoever is there first waits for the others
            for _ in range(rank):
                time.sleep(0.1)
                roll_call.waits()
        assert roll_call._round(HERE) == HERE
        try:
            with roll_call.together():
                if rank == failing:
                    raise OSError("no space left on the device")
                roll_call.waits()
        except (OSError, RuntimeError) as error:
            Path(tmp_path, f"said-{rank}").write_text(f"{type(error).__name__}: {error}")
        os._exit(0)

    assert wait_for_group(start_group(3, wait, tmp_path / "rank")) == [0] * 3
    for rank in range(3):
        said = (tmp_path / f"said-{rank}").read_text()
        expected = "OSError: no" if rank == failing else f"ProcessLost: Process {failing} has failed: OSError: no"
        assert said.startswith(f"{expected} space left on the device")
        assert rank == failing or "device. The run ends here" in said
