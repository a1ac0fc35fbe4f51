"""Small real things: a byte-level tokenizer with a chat format, models of a few thousand weights, rows of every kind."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3MoeConfig,
)

from posttrain.data.render.templates import use_chat_format

P = ParamSpec("P")
T = TypeVar("T")
SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
SENTENCES = [" ".join(f"What is {i}? It is {i}. Hello, hi" for i in range(20))]
FAMILIES = {
    "qwen2": Qwen2Config,
    "llama": LlamaConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "gpt_oss": GptOssConfig,
    "lfm2": Lfm2Config,
}


def tokenizer(chat_format: str | None = "chatml") -> PreTrainedTokenizerFast:
    """One token per byte, plus the control tokens of ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>"],
    )
    if chat_format:
        use_chat_format(fast, chat_format)
    return fast


def merging_tokenizer(
    texts: list[str] = SENTENCES, words: int = 330, chat_format: str | None = "chatml"
) -> PreTrainedTokenizerFast:
    """Bytes and what can be merged of them in a few sentences: another vocabulary than `tokenizer`'s."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=words, initial_alphabet=alphabet, show_progress=False)
    )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<pad>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    if chat_format:
        use_chat_format(made, chat_format)
    return made


def made_once(make: Callable[P, T]) -> Callable[P, T]:
    """Copies of the model that `make` makes of these arguments, with the random numbers that come after it: tests ask for the same
    few models thousands of times, and to copy one takes a third of the time."""
    kept: dict[str, tuple[T, torch.Tensor]] = {}

    @wraps(make)
    def copied(*args: P.args, **kwargs: P.kwargs) -> T:
        key = repr((args, sorted(kwargs.items()), torch.get_default_dtype(), torch.get_default_device()))
        if key not in kept:
            kept[key] = make(*args, **kwargs), torch.get_rng_state()
        model, random = kept[key]
        torch.set_rng_state(random)
        return copy.deepcopy(model)

    return copied


@cache
def _vocabulary() -> int:
    return len(tokenizer(None))


def config(family: str = "qwen2", **changes: Any) -> Any:
    vocabulary = _vocabulary()
    extra = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} if "moe" in family else {}
    ends = {"pad_token_id": 257, "eos_token_id": 256, "bos_token_id": None}
    return FAMILIES[family](**{**SHAPE, "vocab_size": vocabulary, **ends, **extra, **changes})


@made_once
def causal_lm(seed: int = 0, dtype: torch.dtype = torch.float32, family: str = "qwen2", **changes: Any) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(family, **changes)).to(dtype)
    with torch.no_grad():  # larger weights than the default initialisation, so that gradients are not all alike
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model


@torch.no_grad()
def padded(model: Any, more: int) -> Any:
    """With further words that no tokenizer has and that are likely: what counts them is far off."""
    words = model.config.vocab_size
    model.resize_token_embeddings(words + more, mean_resizing=False)
    head = model.get_output_embeddings().weight
    head[words:] = 2 * head[:more]
    return model


@made_once
def reward_model(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    torch.manual_seed(seed)
    made = config(**changes)
    made.num_labels = 1
    return AutoModelForSequenceClassification.from_config(made).to(dtype)


@made_once
def process_reward_model(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    torch.manual_seed(seed)
    made = config(**changes)
    made.num_labels = 2
    return AutoModelForTokenClassification.from_config(made).to(dtype)


def with_exact_norms(model: Any) -> Any:
    """transformers' RMSNorm rounds to float32 even in a float64 model: a difference of 1e-16 before it may be 1e-8 after it."""

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        variance, is_gemma = hidden.pow(2).mean(-1, keepdim=True), hasattr(self, "eps")
        epsilon = self.eps if is_gemma else self.variance_epsilon
        return (self.weight + is_gemma) * hidden * torch.rsqrt(variance + epsilon)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(forward, module)
    return model


def chats(count: int = 20) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"What is {i} + {i}?" + " Please." * (i % 3)},
                {"role": "assistant", "content": f"It is {2 * i}." + " Indeed." * (i % 4)},
            ]
        }
        for i in range(count)
    ]


def pairs(count: int = 20) -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"What is {i} + {i}?",
            "chosen": f" It is {2 * i}." + " Sure." * (i % 3),
            "rejected": f" Perhaps {2 * i + 1}." + " Who knows." * (i % 2),
        }
        for i in range(count)
    ]


def steps(count: int = 20) -> list[dict[str, Any]]:
    """Sums, some of whose steps are wrong."""
    return [
        {
            "prompt": f"What is {i} + {i}, doubled?\n",
            "completions": [f"{i} + {i} = {2 * i}", f"Doubled: {4 * i + i % 2}", "Done."][: 2 + i % 2],
            "labels": [True, i % 2 == 0, i % 4 == 0][: 2 + i % 2],
        }
        for i in range(count)
    ]
