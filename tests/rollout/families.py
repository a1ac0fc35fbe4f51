"""Models of a few thousand weights, one for each family that the native engine runs unmodified."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
)

from posttrain.models.load.model import LoadOptions, load_model
from posttrain.rollout.engines.protocol import Completion, Prompt, SamplingParams

VOCABULARY = 200
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "smollm": (LlamaConfig, {"tie_word_embeddings": True, "num_attention_heads": 6, "hidden_size": 48}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "mistral": (MistralConfig, {"sliding_window": 20}),
    "gemma2": (
        Gemma2Config,
        {"head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0,
         "final_logit_softcapping": 5.0},
    ),
    "gemma3": (Gemma3TextConfig, {"head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 16, "num_hidden_layers": 7}),
    "phi3": (Phi3Config, {}),
    "qwen2_moe": (Qwen2MoeConfig, {"num_experts": 4, **EXPERTS}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        GptOssConfig, {"head_dim": 16, "sliding_window": 20, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
         "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **EXPERTS},
    ),
}  # fmt: skip


def model_of(family: str, **changes: Any) -> Any:
    """Weights larger than the default initialisation: the softmax is neither flat nor a point."""
    kind, own = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**{**SHAPE, **own, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.eval()


def prompts(
    count: int = 24, longest: int = 70, seed: int = 0, samples: int = 1, vocabulary: int = VOCABULARY
) -> list[Prompt]:
    """Groups of `samples`, their lengths mixed."""
    rng = np.random.default_rng(seed)
    found = []
    for key in range(count):
        ids = rng.integers(3, vocabulary, rng.integers(1, longest))
        found += [Prompt(ids, key=key, sample=sample) for sample in range(samples)]
    return found


def loaded(family: str, device: str = "cpu", **changes: Any) -> Any:
    """Ready for the trainer, and so for an engine."""
    model = model_of(family, **changes).to(device)
    if family == "gemma2":
        model.set_attn_implementation("eager")  # transformers' SDPA leaves the soft-cap out
    load_model(model, LoadOptions())
    return model


def texts(completions: list[Completion]) -> list[list[int]]:
    return [completion.ids.tolist() for completion in completions]


def letters(ids: Any) -> str:
    """A detokeniser."""
    return "".join(chr(97 + token % 26) for token in ids)


SEEDED = SamplingParams(max_tokens=24, stop_ids=(1, 2), seed=5)  # more than a page of keys and values


def groups() -> list[Prompt]:
    """Sixteen, of four samples each."""
    return prompts(16, samples=4)
