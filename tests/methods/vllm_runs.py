"""Short runs of online methods with vLLM, and what must hold after them whichever way vLLM is reached."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pyarrow.parquet as pq
import torch
from datasets import Dataset
from transformers import TrainerCallback

from posttrain import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from posttrain.rollout.engines.native.engine import NativeEngine
from posttrain.rollout.engines.protocol import Prompt, SamplingParams, generate
from posttrain.rollout.rollout import POLICY_LOGPS
from posttrain.trainer.online.async_rollouts import versions_of
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
    # Before the options: under ZeRO-3 one that is made after them is in pieces at once.
    policy = options.pop("model", None) or model()
    args = config(
        output_dir=str(output),
        max_steps=STEPS,
        per_device_train_batch_size=options.pop("per_device_train_batch_size", 8),
        num_generations=4,
        max_completion_length=12,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy=options.pop("save_strategy", "no"),
        report_to="none",
        use_cpu=options.pop("use_cpu", True),
        bf16=False,
        use_vllm=options.pop("use_vllm", engine is None),
        reward_workers=0,
        **options,
    )
    prompts = Dataset.from_list([{"prompt": f"Count to {number}:"} for number in range(16)])
    more = {"processing_class": tiny.tokenizer(), "peft_config": peft_config, "engine": engine}
    return kind(policy, shortness, args, train_dataset=prompts, **more)


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


def check_tokens_beside_training(
    update: str, urls: list[str], output: Path, monkeypatch: Any, atol: float = 1e-3
) -> None:
    """Servers write beside the training: every token has its log-prob under the weights of the version that it names."""
    made = trainer(
        "grpo", output, vllm_mode="server", vllm_server_base_url=urls, async_rollouts=True, async_lead=1,
        async_order="first_finished", max_staleness=3, update_in_flight=update,
    )  # fmt: skip
    made.args.max_steps, made.args.max_completion_length = 8, 120
    kept, seen, complete = {0: copy.deepcopy(made.model)}, [], made.collector.complete

    class Keeps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kept[state.global_step] = copy.deepcopy(made.model)

    made.add_callback(Keeps())
    monkeypatch.setattr(made.collector, "complete", lambda written: seen.extend(written.rollouts) or complete(written))
    try:
        made.train()
    finally:
        made.close()
    changed = 0
    for rollout in seen:
        sample = rollout.sample
        versions = versions_of(rollout)[sample.trained].astype(int)
        changed += len(set(versions)) > 1
        with torch.no_grad():
            ids = torch.tensor(sample.input_ids).long()[None]
            scored = [
                kept[v](input_ids=ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0] for v in kept
            ]
        of_token = torch.stack(scored)[versions, torch.tensor(sample.trained[1:]).nonzero()[:, 0]].numpy()
        np.testing.assert_allclose(sample.per_token[POLICY_LOGPS][sample.trained], of_token, atol=atol)
    assert len(seen) == 64
    assert (changed > 0) == (update == "continue")
    assert max(line.get("async/token_age/max", 0) for line in made.state.log_history) <= 3
