"""Names of trl.experimental: the module is looked at, since some have trainers under the names of stable ones."""

from __future__ import annotations

import pytest

import posttrain
from posttrain.methods import grpo
from posttrain.migration import grpo_relatives
from posttrain.migration.trl_names import UnsupportedByPosttrain, found

HOMES = {
    "gfpo": ("GFPOTrainer", "GFPOConfig"),
    "dppo": ("DPPOTrainer", "DPPOConfig"),
    "gmpo": ("GMPOTrainer", "GMPOConfig"),
    "grpo_with_replay_buffer": ("GRPOWithReplayBufferTrainer", "GRPOWithReplayBufferConfig"),
    "kto": ("KTOTrainer", "KTOConfig"),
    "papo": ("PAPOTrainer", "PAPOConfig"),
    "async_grpo": ("AsyncGRPOTrainer", "AsyncGRPOConfig"),
    "async_distillation": ("AsyncDistillationTrainer", "AsyncDistillationConfig"),
    "gspo_token": ("GRPOTrainer",),
    "bema_for_ref_model": ("DPOTrainer", "BEMACallback"),
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in HOMES.items() for name in names])
def test_a_name_is_found_in_its_module(module, name):
    assert found(name, f"trl.experimental.{module}") is getattr(posttrain, name)
    if name.endswith("Trainer"):
        assert found(name, f"trl.experimental.{module}.{module}_trainer") is getattr(posttrain, name)


@pytest.mark.parametrize("module", ["papo", "gfpo", "a_module_to_come"])
def test_another_module_s_trainer_of_a_known_name_is_not_ours(module):
    with pytest.raises(
        UnsupportedByPosttrain, match=f"GRPOTrainer from trl.experimental.{module}, which is another trainer"
    ):
        found("GRPOTrainer", f"trl.experimental.{module}")


def test_stable_names_are_found_wherever_trl_had_them():
    for module in ("trl", "trl.trainer", "trl.trainer.grpo_trainer"):
        assert found("GRPOTrainer", module) is grpo.GRPOTrainer


def test_defaults_are_trl_s(tmp_path):
    """And what the names do not say is GRPO's."""
    made = {
        name: getattr(grpo_relatives, name)(output_dir=str(tmp_path), use_cpu=True)
        for name in ("GFPOConfig", "DPPOConfig", "GMPOConfig", "GRPOWithReplayBufferConfig")
    }
    dppo, gmpo = made["DPPOConfig"], made["GMPOConfig"]
    assert made["GFPOConfig"].num_remains_in_group is None
    assert (dppo.loss_type, dppo.divergence_type, dppo.divergence_topk, dppo.clip_ratio_c) == (
        "dppo",
        "binary_tv",
        20,
        20.0,
    )
    assert (gmpo.loss_type, gmpo.epsilon, gmpo.epsilon_high) == ("gmpo", 0.4, None)
    assert made["GRPOWithReplayBufferConfig"].replay_buffer_size == 64
    with pytest.raises(
        ValueError, match="`loss_type` is 'dapo', and DPPOConfig is for dppo: leave it out, or use GRPOConfig"
    ):
        grpo_relatives.DPPOConfig(output_dir=str(tmp_path), use_cpu=True, loss_type="dapo")
