"""Which text families of transformers train and write here, and how: each built small from its config, with random weights.

    python -m scripts.families [--in-bfloat16] [FAMILY ...]

For each family: the loss of the first step of SFT on three rows of unequal lengths, in float32, against a plain forward of each
row; the layout of its batches and the engine that writes its rollouts, with the reason where they are not the fast ones; and the
log-probs that the sampler reports, against a plain forward of what it wrote. Dropout is off and so is the routers' jitter: they
are meant to change answers. Prints a line of JSON each.

With `--in-bfloat16` layout and engine are found in both precisions, and must be the same: a probe that tells segments that read on
from segments apart by more than rounding cannot decide otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import logging
import tempfile
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from posttrain import SFTConfig, SFTTrainer
from posttrain.models.load.model import LoadOptions, disable_dropout, load_model
from posttrain.rollout.engines.native.engine import NativeEngine
from posttrain.rollout.engines.protocol import Prompt, SamplingParams, generate
from posttrain.rollout.engines.select import ENGINES
from tests import tiny

VOCABULARY, EOS, PAD, BOS = 260, 256, 257, 258
ROW_LENGTHS, PROMPT_LENGTHS = (9, 23, 31), (1, 5, 22, 40)
BOUND = 1e-5
LARGEST = 5_000_000
"""Weights of a model that counts as small."""


def _of(size: int, *names: str) -> dict[str, int]:
    return dict.fromkeys(names, size)


SHAPE: dict[str, Any] = {
    **_of(32, "hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "lru_width", "attention_hidden_size"),
    **_of(4, "num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers", "decoder_layers"),
    **_of(4, "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "num_q_heads"),
    **_of(48, "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim"),
    **_of(48, "shared_expert_intermediate_size"),
    **_of(16, "moe_intermediate_size", "q_lora_rank", "kv_lora_rank"),
    **_of(4, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    **_of(2, "num_experts_per_tok", "moe_k", "num_key_value_heads", "mamba_expand", "linear_num_key_heads"),
    **_of(8, "head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "attention_head_size"),
    **_of(8, "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
    **_of(8, "state_size", "linear_key_head_dim", "linear_value_head_dim"),
    **_of(1, "n_group", "topk_group", "first_k_dense_replace", "mamba_n_groups", "n_groups"),
    **_of(256, "max_position_embeddings", "n_positions"),
    "mamba_d_ssm": 64,
    "linear_num_value_heads": 4,
    "sliding_window": 20,
}
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": BOS}
OWN: dict[str, dict[str, Any]] = {
    **{name: {"rotary_dim": 4} for name in ("gptj", "codegen")},
    **{name: {"head_dim": 8} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    **{name: {"index_topk": 12} for name in ("axk2", "deepseek_v32", "glm_moe_dsa")},  # shorter than rows
    "bamba": {"attn_layer_indices": [1, 3]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma3n_text": {
        "activation_sparsity_pattern": [0.5, 0.0] * 2,
        "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "gemma4_text": {
        "head_dim": 8,
        "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "longcat_flash": {"head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "llama4_text": {"attention_chunk_size": 12, "floor_scale": 8},
    "mamba2": {"num_heads": 8, "expand": 2, "n_groups": 1},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_headdim": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""What a family needs besides."""
LEFT_OUT = {
    "reads in both directions, or is one half of a translator": (
        "bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text electra ernie "
        "marian mbart megatron-bert mvp pegasus plbart prophetnet reformer rembert roberta roberta-prelayernorm roc_bert roformer "
        "trocr xlm xlm-roberta xlm-roberta-xl xlnet xmod moshi musicgen musicgen_melody whisper"
    ),
    "is trained as a model with images or audio, or through its text part, which stands in the table by itself": (
        "blt emu3 fuyu gemma3 gemma3n gemma4 gemma4_assistant gemma4_unified gemma4_unified_assistant git got_ocr2 llama4 mllama "
        "phi4_multimodal qwen3_5 qwen3_5_moe"
    ),
}


def families() -> list[str]:
    left_out = {name for names in LEFT_OUT.values() for name in names.split()}
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - left_out)


def small_config(family: str) -> Any:
    kind = CONFIG_MAPPING[family]
    plain = kind()
    plain.allow_global_per_layer_attribute_access = True  # of Gemma 4, which refuses to say its head size otherwise
    wanted = {
        name: size for name, size in SHAPE.items() if getattr(plain, name, None) is not None and _can_set(kind, name)
    }
    if "kv_lora_rank" in wanted:  # latent attention: every head has keys of its own, in two parts
        wanted.pop("head_dim", None)
        wanted["num_key_value_heads"] = wanted["num_attention_heads"]
    return kind(**{**wanted, **TOKENS, **OWN.get(family, {})})


def _can_set(kind: type, name: str) -> bool:
    found = getattr(kind, name, None)
    return not isinstance(found, property) or found.fset is not None


def small_model(family: str) -> nn.Module:
    config = small_config(family)
    with torch.device("meta"):
        weights = sum(one.numel() for one in AutoModelForCausalLM.from_config(config).parameters())
    if weights > LARGEST:
        raise ValueError(f"{weights:,} weights: {family} needs a line in OWN.")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # the softmax shall be neither flat nor a point
                parameter.mul_(4)
    disable_dropout(model)
    return model


@torch.no_grad()
def plain_logps(model: nn.Module, ids: Tensor) -> Tensor:
    """Of tokens 1 and later of one row, by transformers' own forward."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, EOS, (length,), generator=generator) for length in ROW_LENGTHS]


def first_loss(model: nn.Module) -> float:
    dataset = [{"input_ids": row.tolist()} for row in rows()]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        options = {
            "output_dir": folder,
            "dataset_cache_dir": f"{folder}/cache",
            "report_to": "none",
            "verbosity": "quiet",
        }
        options |= {
            "max_steps": 1,
            "per_device_train_batch_size": len(dataset),
            "save_strategy": "no",
            "logging_steps": 1,
        }
        args = SFTConfig(**options, use_cpu=True, bf16=False, router_aux_loss_coef=0.0)
        trainer = SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tiny.tokenizer())
        trainer.train()
    return trainer.state.log_history[0]["loss"]


def sampling_gap(engine: Any, plain: nn.Module) -> float:
    """The largest difference between the log-probs that a sampler reports and those of a plain forward."""
    draw = np.random.default_rng(0)
    prompts = [Prompt(draw.integers(3, EOS, length), key=key) for key, length in enumerate(PROMPT_LENGTHS)]
    gaps = []
    for prompt, written in zip(
        prompts, generate(engine, prompts, SamplingParams(max_tokens=24, seed=5, stop_ids=(EOS,)))
    ):
        if written.error:
            raise RuntimeError(written.error)
        ids = torch.from_numpy(np.concatenate([prompt.ids, written.ids])).long()
        scored = plain_logps(plain, ids)[len(prompt.ids) - 1 :].numpy()
        gaps.append(float(np.abs(scored - written.policy_logps).max()))
    return max(gaps)


def looked_at(family: str) -> dict[str, Any]:
    """What is found before an exception is found, too."""
    found: dict[str, Any] = {"family": family}
    try:
        model = small_model(family)
        wanted = -torch.cat([plain_logps(model, row) for row in rows()]).mean().item()
    except Exception as problem:  # of transformers, before anything of ours: the table says so
        return found | {"not_built": f"{type(problem).__name__}: {problem}".splitlines()[0][:200]}
    try:
        found |= {"model": type(model).__name__, "loss_gap": abs(first_loss(copy.deepcopy(model)) - wanted)}
        run = copy.deepcopy(model)
        loaded = load_model(run, LoadOptions())
        native = NativeEngine(run)
        found |= {"layout": loaded.layout, "notes": loaded.notes, "why_not_native": native.why_not()}
        engine = native if found["why_not_native"] is None else ENGINES["native"](run)
        found["sampling_gap"] = sampling_gap(engine, model)
    except Exception as problem:  # what this table is for
        found["error"] = f"{type(problem).__name__}: {problem}"[:600]
    return found


def decisions(family: str, dtype: torch.dtype) -> tuple[str, bool]:
    """(layout, whether the native engine writes for it), as found when it is loaded in this precision."""
    loaded = load_model(small_model(family).to(dtype), LoadOptions(share_prefixes=True))
    return loaded.layout, NativeEngine(loaded.model, max_slots=4).why_not() is None


def in_both_precisions(family: str) -> dict[str, Any]:
    found: dict[str, Any] = {"family": family}
    for dtype in (torch.float32, torch.bfloat16):
        try:
            found[str(dtype)] = decisions(family, dtype)
        except Exception as problem:  # of transformers, or our sentence about a family that is refused
            found[str(dtype)] = f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
    kinds = [value if isinstance(value, tuple) else "refused" for value in list(found.values())[1:]]
    return found | {"is_equal": kinds[0] == kinds[1]}


def is_right(found: dict[str, Any]) -> bool:
    return "error" not in found and found["loss_gap"] <= BOUND and found["sampling_gap"] <= BOUND


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--in-bfloat16", action="store_true")
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    look = in_both_precisions if asked.in_bfloat16 else looked_at
    for name in asked.families or families():
        print(json.dumps(look(name)), flush=True)


if __name__ == "__main__":
    main()
