"""Short runs of online methods with vLLM, and what must hold after them whichever way vLLM is reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pyarrow.parquet as pq
import torch
from datasets import Dataset

from posttrain import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from posttrain.rollout.engines.native.engine import NativeEngine
from posttrain.rollout.engines.protocol import Prompt, SamplingParams, generate
from tests import tiny

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2}
"""vLLM's attention on the CPU wants heads of 32 at least."""
METHODS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
STEPS = 3


def model(seed: int = 0) -> Any:
    return tiny.causal_lm(seed, family="llama", **SHAPE)


def lora() -> peft.LoraConfig:
    return peft.LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)


def shortness(completion_ids, **columns):
    return [-len(ids) / 16 + len(set(ids)) / 32 for ids in completion_ids]


def trainer(method: str, output: Path, peft_config: Any = None, engine: Any = None, **options: Any) -> Any:
    """With `engine`, that one writes; otherwise vLLM as the options say."""
    kind, config = METHODS[method]
    args = config(
        output_dir=str(output),
        max_steps=STEPS,
        per_device_train_batch_size=options.pop("per_device_train_batch_size", 8),
        num_generations=4,
        max_completion_length=12,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        use_vllm=engine is None,
        reward_workers=0,
        **options,
    )
    prompts = Dataset.from_list([{"prompt": f"Count to {number}:"} for number in range(16)])
    more = {"processing_class": tiny.tokenizer(), "peft_config": peft_config, "engine": engine}
    return kind(model(), shortness, args, train_dataset=prompts, **more)


def check_run(made: Any, output: Path) -> None:
    """Weights moved and arrived after every step, log-probs of both sides agree, and every rollout names its version."""
    before = {name: tensor.clone() for name, tensor in made.model.named_parameters()}
    made.train()
    assert any(not torch.equal(before[name], tensor) for name, tensor in made.model.named_parameters())
    logs = [entry for entry in made.state.log_history if "reward" in entry]
    assert len(logs) == STEPS
    for entry in logs:
        assert entry["sync/logp_difference/mean"] < 1e-4
        if isinstance(made, GRPOTrainer):
            assert entry["sampling/sampling_logp_difference/max"] < 1e-3
    files = sorted(output.glob("rollouts/step=*/*.parquet"))
    assert len(files) == STEPS
    for step, file in enumerate(files):
        rows = pq.read_table(file).to_pylist()
        assert len(rows) == 8
        assert {row["policy_version"] for row in rows} == {step}
    made.weight_sync.ready(made.state.global_step)
    assert_same_answers(made)


def assert_same_answers(made: Any) -> None:
    """vLLM's most likely completions are those of our own engine with the trained weights."""
    prompts = [Prompt(np.array([40 + n, 60 + n, 80]), key=n) for n in range(6)]
    params = SamplingParams(10, temperature=0.0)
    theirs, ours = (generate(engine, prompts, params) for engine in (made.engine, NativeEngine(made.model)))
    for one, other in zip(theirs, ours):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_allclose(one.policy_logps, other.policy_logps, atol=1e-4)
