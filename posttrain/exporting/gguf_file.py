"""GGUF: one file with weights, shapes and tokenizer, for llama.cpp and what is built on it.

Written for families that llama.cpp reads without further tensors: Llama (Mistral, SmolLM, ...), Qwen2 and Qwen3. The format is that
of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; names of tensors come from the `gguf` package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

from posttrain.exporting.verification import ExportRefused
from posttrain.models.load.image_models import sees_images
from posttrain.models.load.model import innermost_model
from posttrain.models.load.weight_export import exported_weights

GGUF_TYPES = ("float32", "float16", "bfloat16", "q8_0")
TYPE_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
FILE_TYPES = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
BLOCK = 32
"""Numbers that share a scale in Q8_0: rows of another length stay in float16."""


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries and keys in llama.cpp's order: transformers rotates the halves of a head, llama.cpp neighbours."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _llama(name: str, weight: np.ndarray, config: Any) -> np.ndarray:
    heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
    part = ".".join(name.split(".")[-2:])
    return interleaved(weight, heads[part]) if part in heads else weight


def _as_it_is(name: str, weight: np.ndarray, config: Any) -> np.ndarray:
    return weight


@dataclass(frozen=True)
class Family:
    """How llama.cpp calls a family, and what it wants done to its tensors."""

    architecture: str
    change: Callable[[str, np.ndarray, Any], np.ndarray]


FAMILIES = {
    "llama": Family("llama", _llama),
    "mistral": Family("llama", _llama),
    "qwen2": Family("qwen2", _as_it_is),
    "qwen3": Family("qwen3", _as_it_is),
}
"""By `model_type` of transformers' config."""


def write_gguf(path: Path, model: nn.Module, tokenizer: Any, written_as: str, name: str) -> dict[str, str]:
    """Name of a tensor -> checksum of what was written. Adapters are merged into copies on the way."""
    gguf = the_package()
    config = innermost_model(model).config
    family = family_of(config)
    writer = gguf.GGUFWriter(path, family.architecture)
    writer.add_name(name)
    _write_shape(writer, config, gguf.LlamaFileType[FILE_TYPES[written_as]])
    rows = innermost_model(model).get_input_embeddings().num_embeddings
    write_tokenizer(writer, tokenizer, rows)
    sums = {}
    for target, data, kind in _tensors(model, family, config, written_as):
        writer.add_tensor(target, data, raw_dtype=kind)
        sums[target] = _checksum(data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sums


def check_gguf(path: Path, sums: dict[str, str]) -> None:
    """ExportRefused where the file does not hold what was written."""
    found = {tensor.name: _checksum(tensor.data) for tensor in the_package().GGUFReader(path).tensors}
    for name, written in sums.items():
        if found.get(name) != written:
            raise ExportRefused(f"{path.name} does not hold the numbers of {name} that were written to it.", name)


def the_package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ImportError("GGUF files are written with the `gguf` package: pip install posttrain[gguf].") from error
    return gguf


def family_of(config: Any) -> Family:
    """The family, if a file that llama.cpp understands can be written for this model; a sentence that says why not, otherwise."""
    family = FAMILIES.get(config.model_type)
    if sees_images(config.to_dict()):
        raise ValueError(
            f"This model, of the family {config.model_type!r}, sees images, and a GGUF file would hold its text part alone. Export "
            "it as merged, and convert that with llama.cpp's convert_hf_to_gguf.py, which writes the vision tower with --mmproj."
        )
    if family is None:
        raise ValueError(
            f"GGUF files are written for {', '.join(FAMILIES)}; this model is of the family {config.model_type!r}. Export it as "
            "merged, and convert that with llama.cpp's convert_hf_to_gguf.py."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in ("default", None):
        raise ValueError(
            f"This model scales its rotary positions ({rope['rope_type']!r}), which needs tensors that are not written here. "
            "Export it as merged, and convert that with llama.cpp's convert_hf_to_gguf.py."
        )
    has_bias = any(getattr(config, name, False) for name in ("attention_bias", "mlp_bias"))
    if family.architecture == "llama" and has_bias:
        raise ValueError("Llama models with biases are not written as GGUF. Export it as merged.")
    return family


def _write_shape(writer: Any, config: Any, file_type: int) -> None:
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", None) or heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(file_type)


def _tensors(model: nn.Module, family: Family, config: Any, written_as: str) -> Iterator[tuple[str, np.ndarray, Any]]:
    """(llama.cpp's name, encoded numbers, their type)."""
    gguf = the_package()
    kinds = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[family.architecture], config.num_hidden_layers)
    for name, tensor in exported_weights(model, torch.float32):
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise ValueError(f"llama.cpp has no name for {name}: this model is not a plain {family.architecture}.")
        weight = family.change(name, tensor.cpu().numpy(), config)
        kind = gguf.GGMLQuantizationType[_type_of(weight, written_as)]
        yield target, gguf.quants.quantize(np.ascontiguousarray(weight), kind), kind


def _type_of(weight: np.ndarray, written_as: str) -> str:
    if weight.ndim == 1:  # norms and biases: small, and llama.cpp computes with them in float32
        return "F32"
    return "F16" if written_as == "q8_0" and weight.shape[-1] % BLOCK else TYPE_NAMES[written_as]


def _checksum(data: np.ndarray) -> str:
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(data).view(np.uint8).tobytes())


NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Types of tokens in a GGUF file."""

PRE_TOKENIZERS = {
    "smollm": ("Digits",),
    "llama-bpe": (r"\p{N}{1,3}", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"),
    "qwen2": (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",),
}
"""llama.cpp's name of a way to cut text into words -> texts in the tokenizer's own description of it, in order of trial."""
PLAIN = "gpt-2"


def write_tokenizer(writer: Any, tokenizer: Any, rows: int) -> None:
    """`rows`: of the embedding; those without a token are filled with names that no text has."""
    description = described(tokenizer)
    tokens, types = _tokens(tokenizer, rows)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer_name(description))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = description["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for kind in ("bos", "eos", "pad", "unk"):
        number = getattr(tokenizer, f"{kind}_token_id", None)
        if number is not None:
            getattr(writer, f"add_{kind}_token_id")(number)
    starts = tokenizer("a")["input_ids"][:1]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and starts == [tokenizer.bos_token_id])
    writer.add_add_space_prefix(False)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def described(tokenizer: Any) -> dict[str, Any]:
    """tokenizer.json; ValueError for a tokenizer of another kind."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    description = json.loads(backend.to_str()) if backend is not None else {"model": {}}
    byte_level = "ByteLevel" in json.dumps(description.get("decoder"))
    if description["model"].get("type") != "BPE" or not byte_level or not description["model"].get("merges"):
        raise ValueError(
            f"GGUF files are written with byte-level BPE tokenizers (as those of Llama 3, Qwen and SmolLM); this is a "
            f"{type(tokenizer).__name__} of another kind. Export the model as merged, and convert that with llama.cpp's "
            "convert_hf_to_gguf.py."
        )
    return description


def pre_tokenizer_name(description: dict[str, Any]) -> str:
    """llama.cpp knows ways of cutting text by name."""
    cuts = json.dumps(description.get("pre_tokenizer"), ensure_ascii=False)
    for name, marks in PRE_TOKENIZERS.items():
        if all(mark.replace("\\", "\\\\") in cuts for mark in marks):
            return name
    return PLAIN


def _tokens(tokenizer: Any, rows: int) -> tuple[list[str], list[int]]:
    known = {number: token for token, number in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    kinds = dict.fromkeys(known, NORMAL)
    kinds |= {number: CONTROL if token.special else USER_DEFINED for number, token in added.items()}
    tokens = [known.get(number, f"[PAD{number}]") for number in range(rows)]
    return tokens, [kinds[number] if number in known else UNUSED for number in range(rows)]
