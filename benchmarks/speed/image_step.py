"""Steps on rows with images: SFT, DPO and GRPO of Qwen2.5-VL-3B's shape, or another `--family`'s, with random weights. Run by
`whole_step.py`.

A row shows one image, whose sides are log-normal between 224 and 1600 pixels, and asks one question; answers have 16 to
256 tokens (a token is a byte here). Images are smooth noise, made once and stored as JPEG bytes, so that both libraries
decode, resize and cut the same pictures: of SFT 64 rows a step, of DPO 32 pairs, of GRPO eight prompts with eight
completions of 128 tokens, which each library writes itself. TRL as it comes has float32 weights, checkpoints and no
workers for its data; tuned: bfloat16, checkpoints (without them four rows of SFT, or two pairs, do not fit), workers,
`max_length=None`, fused AdamW; of SFT and DPO it is given half of a step's rows, as it comes a quarter, since it takes
micro-batches in turn. `tuned flash` is TRL tuned with our attention in the tower, as flash-attn would give it, which is
not at hand here, and Liger in SFT. `ours checkpoints` has TRL's checkpoints and micro-batches. `--tiny` is the model of
the tests, with small images. TRL's GRPO fails on prompts of different lengths with this family (transformers 5.19;
`image-uneven-prompts` in the differences), so all images of GRPO have 600 x 600 pixels. `lora` has adapters of rank
16 on all projections of the language model. `ours least` asks for the smallest peak (`memory="least"`). `tuned vllm` and
`ours vllm` write their completions with vLLM in the process, which has three tenths of the memory. `ours padded` and
`ours unshared` are ours without ragged batches and without shared prompts.

`update_seconds` of GRPO are those of a step without the writing and paying of completions. `first_loss` is that of the
same rows and weights. transformers gives Qwen2.5-VL no count of a step's tokens, so that TRL's loss of SFT in several
micro-batches is a mean of their means, and differs; `matched` sizes of one micro-batch agree to 1e-5 by `--tiny`.
"""

from __future__ import annotations

import copy
import functools
import importlib
import io
import time
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from PIL import Image

from posttrain.data.vision.families import FAMILIES
from posttrain.models.vision.tower import install_tower_attention
from posttrain.rollout.source import RolloutSource
from tests import tiny_vision

WRITES = "_generate_and_score_completions"
FAMILY, ANSWER_TOKENS, WRITTEN, GROUP = "qwen2_5_vl", (16, 256), 128, 8
ADAPTED = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
NAMES = {"sft_images": "SFT", "dpo_images": "DPO", "grpo_images": "GRPO"}
ROWS = {"sft_images": 64, "dpo_images": 32, "grpo_images": 64}
SETTINGS: dict[str, dict[str, list[dict[str, int]]]] = {
    "sft_images": {
        "ours": [{"samples": 64, "micro": 64}, {"samples": 64, "micro": 16}],
        "tuned": [{"samples": 32, "micro": 8}, {"samples": 32, "micro": 4}],
        "tuned flash": [{"samples": 32, "micro": 8}, {"samples": 32, "micro": 4}],
        "default": [{"samples": 16, "micro": 8}, {"samples": 16, "micro": 4}],
        "ours checkpoints": [{"samples": 64, "micro": 8}],
        "ours least": [{"samples": 64, "micro": 8}],
        "ours padded": [{"samples": 64, "micro": 16}, {"samples": 64, "micro": 8}],
        "ours lora": [{"samples": 64, "micro": 64}, {"samples": 64, "micro": 16}],
        "tuned flash lora": [{"samples": 32, "micro": 8}, {"samples": 32, "micro": 4}],
    },
    "dpo_images": {
        "ours": [{"samples": 32, "micro": 32}, {"samples": 32, "micro": 8}],
        "tuned": [{"samples": 16, "micro": 4}, {"samples": 16, "micro": 2}],
        "tuned flash": [{"samples": 16, "micro": 4}, {"samples": 16, "micro": 2}],
        "default": [{"samples": 8, "micro": 4}, {"samples": 8, "micro": 2}],
        "ours checkpoints": [{"samples": 32, "micro": 4}],
        "ours padded": [{"samples": 32, "micro": 8}, {"samples": 32, "micro": 4}],
        "ours unshared": [{"samples": 32, "micro": 32}, {"samples": 32, "micro": 8}],
    },
    "grpo_images": {
        "ours": [{"samples": 64, "micro": 64}, {"samples": 64, "micro": 16}],
        "tuned": [{"samples": 64, "micro": 16}, {"samples": 64, "micro": 8}],
        "tuned flash": [{"samples": 64, "micro": 16}, {"samples": 64, "micro": 8}],
        "ours checkpoints": [{"samples": 64, "micro": 16}],
        "tuned vllm": [{"samples": 64, "micro": 16}, {"samples": 64, "micro": 8}],
        "ours vllm": [{"samples": 64, "micro": 64}, {"samples": 64, "micro": 16}],
        "default": [{"samples": 16, "micro": 8}],
        "ours padded": [{"samples": 64, "micro": 16}, {"samples": 64, "micro": 8}],
        "ours unshared": [{"samples": 64, "micro": 64}, {"samples": 64, "micro": 16}],
    },
}
FROM_DISK = "tuned vllm"
"""TRL's vLLM reads the model's files: they are written to a folder, whose time is not counted."""


def model_and_processor(
    family: str, is_tiny: bool, dtype: torch.dtype, device: str, for_vllm: bool = False
) -> tuple[Any, Any]:
    with tiny_vision.widened() if for_vllm else nullcontext():
        options = {} if is_tiny else PIXELS.get(family, {})
        model_class, config, made, _ = tiny_vision.BUILDERS[family](family, options)
    processor = made()
    if not is_tiny:
        SHAPES[family](config, processor)
    torch.manual_seed(0)
    with torch.device(device):
        model = model_class(config).to(dtype)
    if family == "gemma3":  # starts at zero: the model would be blind
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.2)
    return model, processor


def qwen2_5_vl_3b(config: Any, processor: Any) -> None:
    text, tower = config.text_config, config.vision_config
    text.hidden_size, text.intermediate_size, text.num_hidden_layers = 2048, 11_008, 36
    text.num_attention_heads, text.num_key_value_heads, text.vocab_size = 16, 2, 151_936
    text.layer_types, text.max_window_layers = ["full_attention"] * 36, 36
    text.rope_parameters = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}
    text.tie_word_embeddings = config.tie_word_embeddings = True
    tower.depth, tower.hidden_size, tower.num_heads, tower.intermediate_size = 32, 1280, 16, 3420
    tower.out_hidden_size, tower.window_size, tower.fullatt_block_indexes = 2048, 112, [7, 15, 23, 31]


def siglip_400m(tower: Any, image_size: int) -> None:
    tower.hidden_size, tower.intermediate_size, tower.num_hidden_layers = 1152, 4304, 27
    tower.num_attention_heads, tower.image_size, tower.patch_size = 16, image_size, 14


def smolvlm_2b(config: Any, processor: Any) -> None:
    """SmolVLM2-2.2B: an image is cut into tiles of 384, each of which becomes 81 tokens."""
    text = config.text_config
    text.hidden_size, text.intermediate_size, text.num_hidden_layers, text.head_dim = 2048, 8192, 24, 64
    text.num_attention_heads, text.num_key_value_heads, text.vocab_size = 32, 32, 49_280
    text.max_position_embeddings, config.scale_factor = 8192, 3
    siglip_400m(config.vision_config, 384)
    processor.image_seq_len = 81


def gemma3_4b(config: Any, processor: Any) -> None:
    """Gemma 3 4B: an image of any size becomes 256 tokens, which see each other."""
    text = config.text_config
    text.hidden_size, text.intermediate_size, text.num_hidden_layers, text.head_dim = 2560, 10_240, 34, 256
    text.num_attention_heads, text.num_key_value_heads, text.vocab_size = 8, 4, 262_208
    text.layer_types = ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(34)]
    text.sliding_window, text.query_pre_attn_scalar, config.mm_tokens_per_image = 1024, 256, 256
    siglip_400m(config.vision_config, 896)
    processor.image_seq_length = 256
    words = processor.tokenizer
    processor.full_image_sequence = f"\n\n{words.boi_token}{words.image_token * 256}{words.eoi_token}\n\n"


SHAPES = {"qwen2_5_vl": qwen2_5_vl_3b, "smolvlm": smolvlm_2b, "gemma3": gemma3_4b}
PIXELS = {
    "qwen2_5_vl": {"min_pixels": 56 * 56, "max_pixels": 1600 * 1600},
    "smolvlm": {"size": {"longest_edge": 1536}, "max_image_size": {"longest_edge": 384}},
    "gemma3": {"size": {"height": 896, "width": 896}},
}
"""With which the family's own processor comes, but that Qwen's shrinks no image of 1600 x 1600."""


def picture(rng: np.random.Generator, is_tiny: bool, spread: float = 0.5) -> bytes:
    """Smooth noise as a JPEG of quality 90."""
    height, width = np.clip(np.exp(rng.normal(np.log(600), spread, 2)), 224, 1600).astype(int) // (8 if is_tiny else 1)
    coarse = rng.integers(0, 256, (max(height // 16, 2), max(width // 16, 2), 3), dtype=np.uint8)
    stored = io.BytesIO()
    Image.fromarray(coarse).resize((int(width), int(height)), Image.Resampling.BICUBIC).save(stored, "JPEG", quality=90)
    return stored.getvalue()


def words(rng: np.random.Generator, tokens: int) -> str:
    return "".join(rng.choice(list("abcdefghij klmnop"), tokens))


def rows_of(method: str, samples: int, steps: int, is_tiny: bool) -> Any:
    """As a dataset of stored bytes: an image is decoded whenever it is read, by both libraries."""
    import datasets

    rng, low, high = np.random.default_rng(7), *(size // (4 if is_tiny else 1) for size in ANSWER_TOKENS)
    each = GROUP if method == "grpo_images" else 1

    def said(role: str, tokens: int) -> list[dict[str, str]]:
        return [{"role": role, "content": words(rng, tokens)}]

    made = []
    for _ in range(max(samples // each, 1) * steps):
        shown = picture(rng, is_tiny, spread=0.0 if method == "grpo_images" else 0.5)
        row = {"images": [{"bytes": shown, "path": None}], "prompt": said("user", 40)}
        for column in {"sft_images": ["completion"], "dpo_images": ["chosen", "rejected"]}.get(method, []):
            row[column] = said("assistant", int(rng.integers(low, high)))
        made.append(row)
    return datasets.Dataset.from_list(made).cast_column("images", datasets.List(datasets.Image()))


def options_of(method: str, setting: str, shared: dict[str, Any], steps: int) -> dict[str, Any]:
    made = shared | {"max_steps": steps, "dataloader_num_workers": 0 if setting == "default" else 8}
    made.pop("temperature", None)
    on_gpu = torch.cuda.is_available()
    made |= {} if on_gpu else {"bf16": False, "dataloader_num_workers": 0}
    if method == "grpo_images" and setting.startswith("ours"):
        made["dataloader_num_workers"] = 0  # ours writes its rollouts in this process
    if method == "grpo_images":
        made |= {"max_completion_length": WRITTEN if on_gpu else 16, "num_generations": GROUP, "temperature": 1.0}
    elif not setting.startswith("ours"):
        made |= {"max_length": None}
    if method == "sft_images":
        made |= {"completion_only_loss": True}
    # TRL without: not even four rows, or two pairs, fit.
    if setting.startswith("tuned") or setting == "ours checkpoints":
        made |= {"gradient_checkpointing": on_gpu}
    if method == "sft_images" and setting.startswith("tuned flash"):
        made |= {"use_liger_kernel": on_gpu}
    if setting.endswith("vllm"):
        made |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.3,
            "vllm_max_model_length": 1024,
        }
    if setting == "ours least":
        made |= {"memory": "least"}
    if setting in ("ours padded", "ours unshared") and method != "sft_images":
        made |= {"share_prompts": False}
    made |= {"padding_free": False} if setting == "ours padded" else {}
    return made | (
        {"shuffle_dataset": False} if setting.startswith("ours") else {"train_sampling_strategy": "sequential"}
    )


def length_reward(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(one[-1]["content"]) % 7) for one in completions]


def trainer_of(
    method: str, family: str, setting: str, sizes: dict[str, int], shared: dict[str, Any], steps: int, dtype: torch.dtype,
    is_tiny: bool, callbacks: list[Any],
) -> Any:  # fmt: skip
    library = importlib.import_module("posttrain" if setting.startswith("ours") else "trl")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, processor = model_and_processor(family, is_tiny, dtype, device, is_tiny and setting.endswith("vllm"))
    if setting.startswith(("tuned flash", FROM_DISK)):
        install_tower_attention(model.model, FAMILIES[family])
    config = getattr(library, f"{NAMES[method]}Config")(**options_of(method, setting, shared, steps))
    more = {"reward_funcs": length_reward} if method == "grpo_images" else {}
    if setting.endswith("lora"):
        more["peft_config"] = LoraConfig(r=16, lora_alpha=32, target_modules=ADAPTED, task_type="CAUSAL_LM")
    if setting == FROM_DISK:
        folder = shared["output_dir"] + "/model"
        for part in (model, processor):
            part.save_pretrained(folder)
        model.name_or_path = folder
    if method == "dpo_images" and not setting.startswith("ours"):  # TRL would look for its reference on the hub
        more["ref_model"] = copy.deepcopy(model)
    return getattr(library, f"{NAMES[method]}Trainer")(
        model=model,
        args=config,
        train_dataset=rows_of(method, sizes["samples"], steps, is_tiny),
        processing_class=processor,
        callbacks=callbacks,
        **more,
    )


def watch_writing(trainer: Any, setting: str) -> list[tuple[float, float]]:
    """Seconds, by the clock and of the processor, of every call that writes completions and pays for them."""
    owner, name = (RolloutSource, "next_window") if setting.startswith("ours") else (type(trainer), WRITES)
    plain, seen = getattr(owner, name), []

    @functools.wraps(plain)
    def watched(*given: Any, **named: Any) -> Any:
        before = clocks()
        made = plain(*given, **named)
        seen.append(tuple(after - start for after, start in zip(clocks(), before)))
        return made

    setattr(owner, name, watched)
    return seen


def clocks() -> tuple[float, float]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def figures(logs: list[dict[str, float]]) -> dict[str, Any]:
    losses = [entry["loss"] for entry in logs if "loss" in entry]
    tokens = [entry["num_tokens"] for entry in logs if "num_tokens" in entry]
    return {"first_loss": losses[0], "losses": losses, "num_tokens": tokens[-1:]}
