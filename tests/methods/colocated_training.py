"""Online methods with vLLM in this process. `test_vllm_training.py` runs this file with an interpreter that has vLLM."""

from __future__ import annotations

import pytest

from posttrain.models.load.adapters import adapter_in_use
from posttrain.models.load.weights import weights_fingerprint
from posttrain.rollout.engines.vllm.sync_probe import WeightsDiffer
from tests.methods import vllm_runs

ON_CPU = {"vllm_max_model_length": 256, "vllm_engine_args": {"max_num_seqs": 16}}


@pytest.fixture
def made(tmp_path):
    """Makes trainers, and ends their vLLM, of which a process has one."""
    trainers = []

    def make(method, **options):
        trainers.append(vllm_runs.trainer(method, tmp_path, **ON_CPU, **options))
        return trainers[-1]

    yield make
    for one in trainers:
        one.engine.close()


@pytest.mark.parametrize("method", vllm_runs.METHODS)
def test_whole_weights(method, made, tmp_path):
    vllm_runs.check_run(made(method), tmp_path)


def test_lora_by_its_adapter(made, tmp_path):
    trainer = made("grpo", peft_config=vllm_runs.lora(), vllm_sync="adapter")
    with adapter_in_use(trainer.model, None):
        base = weights_fingerprint(trainer.model)
    vllm_runs.check_run(trainer, tmp_path)
    with adapter_in_use(trainer.model, None):
        assert weights_fingerprint(trainer.model) == base


def test_lora_by_merged_copies(made, tmp_path):
    vllm_runs.check_run(made("grpo", peft_config=vllm_runs.lora(), vllm_sync="weights"), tmp_path)


def test_a_run_whose_weights_do_not_arrive_stops_at_that_step(made, tmp_path):
    trainer = made("grpo")
    load = trainer.engine.load_weights

    def forgetful(weights, version):
        if version == 2:  # the second update is lost, and nobody says so
            trainer.engine.version = version
            return
        load(weights, version)

    trainer.engine.load_weights = forgetful
    with pytest.raises(WeightsDiffer) as stopped:
        trainer.train()
    assert trainer.state.global_step == 2
    assert stopped.value.tensor in {name for name, _ in trainer.model.named_parameters()}
