"""What each of two processes does that have not the same to say."""

from __future__ import annotations

import datetime
import math

import pyarrow.parquet
import pytest
import torch
import torch.distributed as dist

from posttrain import BasePairwiseJudge, NashMDConfig, NashMDTrainer, RLOOConfig, RLOOTrainer, WinRateCallback
from posttrain.core.processes import of_every_process
from posttrain.models.load.reference import PRECOMPUTED
from posttrain.rollout.rollout import ADVANTAGES, OLD_LOGPS, RETURNS, VALUES
from tests import tiny
from tests.losses.test_gae import naive
from tests.methods import test_ppo
from tests.methods.test_ppo import PlainLoop, prompts
from tests.trainer.resumable_run import checksum
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


class FewerBytes(BasePairwiseJudge):
    """Knows nothing of processes."""

    def judge(self, prompts, completions, shuffle_order=True):
        return [int(len(second) < len(first)) for first, second in completions]


def judges(folder: str) -> None:
    """Groups of two on each process, three prompts to evaluate, a judge on the first process alone; a split group is refused."""
    options = {"max_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "eval_dataset": rows(3)}
    made = trainer(folder, rewards=FewerBytes(), num_generations=2, **options)
    made.add_callback(WinRateCallback(FewerBytes(), made))
    made.train()
    dist.barrier()
    found = [entry for entry in logged(folder) if "eval_judge_ties" in entry]
    kept = pyarrow.parquet.read_table(f"{folder}/win_rate/step_1.parquet").to_pydict()
    assert kept["prompt"] == ["Say 0", "Say 1", "Say 2"]
    winners = [int(len(b) < len(a)) for a, b in zip(kept["reference_model"], kept["policy"])]
    assert kept["winner_index"] == winners
    assert [entry["eval_win_rate"] for entry in found] == [sum(winners) / 3]
    assert made.state.log_history[-2]["eval_win_rate"] == sum(winners) / 3  # on both processes
    split = {"num_generations": 4, "per_device_train_batch_size": 2, "max_steps": 1}
    with pytest.raises(
        ValueError, match="FewerBytes compares the completions of a prompt, which here lie on several processes"
    ):
        trainer(folder, rewards=FewerBytes(), **split)


def ppo(folder: str) -> None:
    """One process has fewer samples: what is whitened, and what the controller follows, is that of both, in float64."""

    def reward(completion_ids, **kwargs):
        if dist.get_rank() == 1 and sum(completion_ids[0]) % 3 == 0:
            raise ValueError("not today")
        return checksum(completion_ids)

    shape = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 1, "reward_batching": "sample"}
    options = {
        "max_steps": 2,
        "learning_rate": 1e-2,
        "kl_coef": 0.3,
        "adap_kl_ctrl": True,
        "target": 0.001,
        "horizon": 99.0,
    }
    policy = tiny.with_exact_norms(tiny.causal_lm(0, torch.float64))
    made = test_ppo.trainer(
        folder, policy, reward, shape | options | {"whiten_rewards": True}, train_dataset=prompts(24)
    )
    made.train()
    before = made.controller.coefficient
    made.loader.source.next_window()
    (collected,) = made.loader.source.take_finished()
    made._measure(collected, "train")
    names = (OLD_LOGPS, PRECOMPUTED, VALUES, ADVANTAGES, RETURNS)
    mine = [
        (rollout.reward, *(rollout.sample.read_trained(name).tolist() for name in names))
        for rollout in collected.rollouts
        if not rollout.masked
    ]
    parts = of_every_process(mine, 2)
    assert 0 < len(parts[1]) < len(parts[0])
    samples = [dict(zip(("score", "old", "ref", "V", "A", "R"), sample)) for part in parts for sample in part]
    divergences = [[old - ref for old, ref in zip(s["old"], s["ref"])] for s in samples]
    expected = [[-before * k for k in one] for one in divergences]
    for rewards, sample in zip(expected, samples):
        rewards[-1] += sample["score"]
    mean, scale = PlainLoop.moments([r for one in expected for r in one])
    expected = [naive([(r - mean) / scale + mean for r in one], s["V"], 1.0, 0.95) for one, s in zip(expected, samples)]
    for advantages, sample in zip(expected, samples):
        assert sample["R"] == pytest.approx([a + v for a, v in zip(advantages, sample["V"])], abs=1e-9)
    mean, scale = PlainLoop.moments([a for one in expected for a in one])
    for advantages, sample in zip(expected, samples):
        assert sample["A"] == pytest.approx([(a - mean) / scale for a in advantages], abs=1e-9)
    error = min(max(math.fsum(map(sum, divergences)) / len(samples) / 0.001 - 1, -0.2), 0.2)
    assert made.controller.coefficient == pytest.approx(before * (1 + error * len(samples) / 99), rel=1e-12)
    assert before != 0.3


def authors(folder: str) -> None:
    """Policy and mixture on both processes, one of which has no reward in the second step; three prompts to evaluate."""

    def reward(completions, trainer_state=None, **kwargs):
        if dist.get_rank() == 1 and trainer_state.global_step == 1:
            raise ValueError("not today")
        return by_place(completions)

    options = {"max_steps": 2, "per_device_train_batch_size": 2, "max_completion_length": 6, "logging_steps": 1}
    args = NashMDConfig(str(folder), report_to="none", use_cpu=True, save_strategy="no", reward_workers=0, **options)
    made = NashMDTrainer(
        tiny.causal_lm(),
        None,
        reward,
        args,
        train_dataset=rows(),
        processing_class=tiny.tokenizer(),
        eval_dataset=rows(3),
    )
    made.train()
    loses = 1 / (1 + math.exp(1))  # the mixture's completion is the second of its group
    assert made.evaluate()["eval_rewards/probabilities"] == pytest.approx(loses)
    dist.barrier()
    found = [entry for entry in logged(folder) if "rollouts/masked" in entry]
    assert [entry["rollouts/masked"] for entry in found[:2]] == [0.0, 0.5]
    assert [entry["rewards/probabilities"] for entry in found[:2]] == [pytest.approx(loses)] * 2


SCENARIOS = {"metric": metric, "evaluation": evaluation, "rloo": rloo, "entropy": entropy, "judges": judges, "ppo": ppo}
SCENARIOS["authors"] = authors


def main(scenario: str, folder: str) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    SCENARIOS[scenario](folder)
    print(f"{scenario}: as it should be", flush=True)
    dist.destroy_process_group()
