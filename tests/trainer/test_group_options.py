"""What GRPO and RLOO log and bound of the divergence from the reference, and by which deviation they scale."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig

from posttrain import RLOOConfig, RLOOTrainer
from posttrain.losses.advantages import group_normalised
from posttrain.models.load.reference import FrozenCopy
from posttrain.rollout.rollout import ADVANTAGES
from tests.trainer.test_online import Peek, logged, numbered, trainer, weights

RLOO = {"cls": RLOOTrainer, "config": RLOOConfig}
LORA = {"peft_config": LoraConfig(r=2, task_type="CAUSAL_LM")}


def steps(folder):
    return [entry for entry in logged(folder) if "kl" in entry]


@pytest.mark.parametrize("method", [{}, RLOO], ids=["grpo", "rloo"])
@pytest.mark.parametrize("adapter", [{}, LORA], ids=["full", "lora"])
def test_log_kl_measures_and_changes_nothing(tmp_path, method, adapter):
    """The weights are those of a run without it; the divergence grows from 0; an adapter needs no second model."""
    runs = {}
    for name, log_kl in (("plain", False), ("measured", True)):
        runs[name] = trainer(
            tmp_path / name, numbered, beta=0.0, log_kl=log_kl, max_steps=3, learning_rate=2e-2, **method, **adapter
        )
        runs[name].train()
    for name, weight in weights(runs["plain"]).items():
        assert torch.equal(weight, weights(runs["measured"])[name]), name
    assert runs["plain"].live is None
    assert not steps(tmp_path / "plain")
    assert isinstance(runs["measured"].live, FrozenCopy) == (not adapter)
    if adapter:
        assert runs["measured"].live.model is runs["measured"].model
    found = [entry["kl"] for entry in steps(tmp_path / "measured")]
    assert found[0] == pytest.approx(0, abs=1e-6)
    assert abs(found[-1]) > 1e-4
    assert runs["measured"].has_old_logps is False  # one pass for the reference, none for the policy


def test_log_kl_logs_what_a_weight_would(tmp_path):
    """The first step after a move: the same numbers as with a weight that is too small to matter."""
    for name, options in (("logged", {"log_kl": True}), ("weighted", {"beta": 1e-12})):
        trainer(tmp_path / name, numbered, max_steps=2, learning_rate=2e-2, **options).train()
    logged_only, weighted = (steps(tmp_path / name)[1]["kl"] for name in ("logged", "weighted"))
    assert logged_only == pytest.approx(weighted, rel=1e-5)
    assert logged_only > 1e-5


def test_rloo_bounds_the_divergence_of_a_token_in_its_reward(tmp_path):
    """r' = r - beta * sum of clip(old - reference, -kl_clip, kl_clip), worked out from the log-probs of the samples."""
    made = trainer(
        tmp_path, numbered, beta=0.5, kl_clip=0.01, max_steps=2, learning_rate=5e-2, num_generations=2, **RLOO
    )
    peek = Peek(made)
    made.train()
    samples = peek.windows[1]  # of a policy that has moved
    assert steps(tmp_path)[1]["kl_clip_ratio"] > 0
    for sample in samples:
        differences = (sample.per_token["old_logps"] - sample.per_token["reference_logps"])[sample.trained]
        assert sample.scalars["kl_sum"] == pytest.approx(sum(max(-0.01, min(d, 0.01)) for d in differences), abs=1e-6)
        assert abs(sample.scalars["kl_sum"]) <= 0.01 * len(differences) + 1e-9
    assert abs(steps(tmp_path)[1]["kl"]) <= 0.01


def test_the_population_s_deviation_in_a_run(tmp_path):
    """Groups of four: advantages are sqrt(4 / 3) times those of the sample's deviation."""
    made = trainer(tmp_path, numbered, advantage_std="population", max_steps=1)
    peek, rewards = Peek(made), []
    credit = made.credit
    made.credit = lambda table, totals: rewards.append((totals, table.groups)) or credit(table, totals)
    made.train()
    found = [sample.per_token[ADVANTAGES][-1] for sample in peek.windows[0]]
    expected = group_normalised(*rewards[0], epsilon=0.0) * (4 / 3) ** 0.5
    assert found == pytest.approx(expected.tolist(), rel=1e-3)


def test_rloo_scales_by_a_deviation_only_where_it_scales(tmp_path):
    with pytest.raises(ValueError, match="without `normalize_advantages` no advantage is scaled"):
        RLOOConfig(output_dir=str(tmp_path), use_cpu=True, advantage_std="population")
