"""Rollouts beside training on a CUDA device: a thread with a stream of its own, and a worker process that shares the GPU."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig

from tests.gpu.test_grpo import trained

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

AHEAD = {"async_rollouts": True, "max_staleness": 4, "max_steps": 30}


@pytest.mark.parametrize("kind", ["thread", "in order", "keep", "lora", "process"])
def test_a_run_learns_beside_its_rollouts(tmp_path, kind):
    options = {
        "in order": {"async_order": "in_order", "async_lead": 2},
        "keep": {"kv_after_update": "keep", "async_lead": 2},
        "lora": {"peft_config": LoraConfig(r=8, target_modules="all-linear"), "learning_rate": 1e-2},
        "process": {"rollout_workers": 1},
    }.get(kind, {})
    made, logs = trained(tmp_path, **{**AHEAD, **options})
    made.close()
    assert max(line["async/token_age/max"] for line in logs) <= 4
    assert max(line["async/token_age/max"] for line in logs) >= 1
    rewards = [line["reward"] for line in logs]
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 0.2


def test_a_token_of_the_newest_weights_has_the_trainers_log_prob(tmp_path):
    """Weights are read while the next step writes others: what is sampled must not be a mixture."""
    made, logs = trained(tmp_path, **{**AHEAD, "async_lead": 0})
    made.close()
    assert max(line["async/token_age/max"] for line in logs) == 0
    apart = max(line["sampling/sampling_logp_difference/max"] for line in logs)
    assert apart < 0.3, apart


def test_without_a_lead_it_is_the_synchronous_run(tmp_path):
    settings = {"full_determinism": True, "max_steps": 6}
    plain, _ = trained(tmp_path / "plain", **settings)
    beside, _ = trained(tmp_path / "beside", async_rollouts=True, async_lead=0, **settings)
    beside.close()
    for one, other in zip(plain.model.parameters(), beside.model.parameters()):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)  # six steps move them by up to 6e-3
