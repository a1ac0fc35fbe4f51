"""What each of two processes does that have not the same to say."""

from __future__ import annotations

import datetime

import torch.distributed as dist

from posttrain import RLOOConfig, RLOOTrainer
from tests.trainer.test_online import logged, rows, trainer


def by_place(completions, **kwargs):
    return [float(i) for i in range(len(completions))]


def metric(folder: str) -> None:
    """`log_metric` on one process only."""

    def reward(completions, log_metric=None, **kwargs):
        if dist.get_rank() == 0:
            log_metric("of_one/number", 7.0)
        return by_place(completions)

    trainer(folder, rewards=reward, max_steps=1).train()
    dist.barrier()
    assert logged(folder)[0]["of_one/number"] == 7.0


def evaluation(folder: str) -> None:
    """One prompt for two processes."""

    def reward(completions, log_metric=None, **kwargs):
        log_metric("number", 7.0)
        return by_place(completions)

    found = trainer(folder, rewards=reward, max_steps=1, eval_dataset=rows(1)).evaluate()
    assert found["eval_number"] == 7.0
    assert found["eval_reward"] == 1.5


def rloo(folder: str) -> None:
    """Every sample of one process is masked."""

    def reward(completions, **kwargs):
        if dist.get_rank() == 1:
            raise ValueError("not today")
        return by_place(completions)

    options = {"beta": 0.1, "max_steps": 1, "per_device_train_batch_size": 4}
    trainer(folder, rewards=reward, cls=RLOOTrainer, config=RLOOConfig, **options).train()
    dist.barrier()
    assert logged(folder)[0]["kl"] < 1e-6


def entropy(folder: str) -> None:
    """A process that had no trained token in the step before the checkpoint goes on from it."""

    def reward(completions, trainer_state=None, **kwargs):
        if dist.get_rank() == 1 and trainer_state.global_step == 1:
            raise ValueError("not today")
        return by_place(completions)

    options = {
        "use_adaptive_entropy": True,
        "entropy_coef": 0.1,
        "entropy_target": 9.0,
        "max_steps": 4,
        "save_steps": 2,
    }
    options |= {"per_device_train_batch_size": 4, "save_strategy": "steps"}
    trainer(folder, rewards=reward, **options).train()
    resumed = trainer(folder, rewards=reward, **options)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert resumed.state.global_step == 4


SCENARIOS = {"metric": metric, "evaluation": evaluation, "rloo": rloo, "entropy": entropy}


def main(scenario: str, folder: str) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    SCENARIOS[scenario](folder)
    print(f"{scenario}: as it should be", flush=True)
    dist.destroy_process_group()
