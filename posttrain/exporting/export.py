"""export: a run as merged weights, an adapter or a GGUF file, in a folder that appears when it has been verified, or not at all."""

from __future__ import annotations

import copy
import gc
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig

from posttrain.exporting.gguf_file import GGUF_TYPES, check_gguf, described, family_of, the_package, write_gguf
from posttrain.exporting.verification import (
    BOUNDS,
    ExportRefused,
    Recorded,
    Verified,
    check_answers,
    check_processor,
    record,
    verify,
)
from posttrain.models.load.model import innermost_model
from posttrain.models.load.saved_model import ADAPTER_CONFIG, ADAPTER_WEIGHTS, SavedModel, find_saved
from posttrain.models.load.weight_export import exported_weights, untied_weights

SHARD_BYTES = 5 * 10**9
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = "model-{number:05d}-of-{count:05d}.safetensors"


def write_weights(
    folder: Path, weights: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES
) -> dict[str, str]:
    """Name -> checksum of what was written. One shard is held in memory at a time."""
    sums: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    parts: list[list[str]] = []
    size = total = 0

    def write_part(tensors: dict[str, Tensor]) -> list[str]:
        save_file(tensors, folder / f"part-{len(parts)}.safetensors", metadata={"format": "pt"})
        return list(tensors)

    for name, tensor in weights:
        tensor = tensor.detach().cpu().contiguous().clone()
        if shard and size + tensor.nbytes > shard_bytes:
            parts.append(write_part(shard))
            shard, size = {}, 0
        shard[name], sums[name] = tensor, checksum(tensor)
        size, total = size + tensor.nbytes, total + tensor.nbytes
    parts.append(write_part(shard))
    _name_shards(folder, parts, total)
    return sums


def check_weights(folder: Path, sums: dict[str, str]) -> None:
    """ExportRefused where a file does not hold what was written."""
    found: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                found.add(name)
                if checksum(file.get_tensor(name)) != sums.get(name):
                    raise ExportRefused(
                        f"{path.name} does not hold the numbers of {name} that were written to it.", name
                    )
    if missing := [name for name in sums if name not in found]:
        raise ExportRefused(f"{missing[0]} was written, and is in none of the files.", missing[0])


def checksum(tensor: Tensor) -> str:
    flat = tensor.contiguous().reshape(-1)
    return f"{tuple(tensor.shape)} {tensor.dtype} {xxhash.xxh3_64_hexdigest(flat.view(torch.uint8).numpy())}"


def _name_shards(folder: Path, parts: list[list[str]], total: int) -> None:
    """How many shards there are is known at the end, and is a part of their names."""
    if len(parts) == 1:
        (folder / "part-0.safetensors").rename(folder / SINGLE)
        return
    where: dict[str, str] = {}
    for number, names in enumerate(parts):
        final = SHARD.format(number=number + 1, count=len(parts))
        (folder / f"part-{number}.safetensors").rename(folder / final)
        where |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


MERGED, ADAPTER, GGUF = "merged", "adapter", "gguf"
GGUF_NAME = "model-{kind}.gguf"
TEXTS = (
    "What is 3 + 45? It's 48.", "  two  spaces\n\n\ttab\r\n", "naïve Zürich 東京 🙂 é", "def f(x_1): return x_1 ** 2  # 12345",
    "<|im_start|>user\nHi<|im_end|>\n",
)  # fmt: skip
"""Cut by the tokenizer of an export as by that of the run."""


@dataclass(frozen=True)
class Export:
    """What is wanted."""

    saved: SavedModel
    to: str
    output: Path
    dtype: str | None = None  # "float32", "float16", "bfloat16", of GGUF files also "q8_0"; None: that of the model
    bound: float | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Exported:
    """What was made."""

    path: Path  # the folder, or the GGUF file
    written_as: str
    verified: Verified


def export(wanted: Export) -> Exported:
    """Write, load afresh, compare, publish. ExportRefused, and nothing is left behind, where the comparison fails."""
    _refuse_impossible(wanted)
    written_as = wanted.dtype or _own_dtype(wanted.saved)
    model = wanted.saved.load(torch.float32, wanted.trust_remote_code, quantised=wanted.to != ADAPTER).eval()
    recorded = record(model, wanted.saved.task, wanted.saved.processor(wanted.trust_remote_code))
    staged = wanted.output.with_name(f".{wanted.output.name}.tmp-{os.getpid()}")
    staged.mkdir(parents=True)
    try:
        check_files = WRITERS[wanted.to](wanted, model, staged, written_as)
        del model
        gc.collect()
        check_files()
        verified = _verified(wanted, recorded, staged, written_as)
        if wanted.output.exists():
            wanted.output.rmdir()  # empty: looked at before
        staged.rename(wanted.output)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    name = GGUF_NAME.format(kind=written_as) if wanted.to == GGUF else ""
    return Exported(wanted.output / name, written_as, verified)


def _refuse_impossible(wanted: Export) -> None:
    known = GGUF_TYPES if wanted.to == GGUF else ("float32", "float16", "bfloat16")
    if wanted.dtype is not None and wanted.dtype not in known:
        raise ValueError(f"`dtype` is {wanted.dtype!r}; an export to {wanted.to} takes one of {', '.join(known)}.")
    if wanted.saved.path.endswith(".gguf"):
        raise ValueError(f"{wanted.saved.path} is a GGUF file already: export the run that it was made from.")
    if wanted.to == ADAPTER and not wanted.saved.is_adapter:
        raise ValueError(f"{wanted.saved.path} holds a whole model and no adapter: export it as {MERGED}.")
    if wanted.saved.is_adapter and not (Path(wanted.saved.path) / ADAPTER_WEIGHTS).exists():
        raise ValueError(f"{wanted.saved.path} has no {ADAPTER_WEIGHTS}; pickled adapters are not read.")
    if wanted.to != ADAPTER and (wanted.saved.quantization() or {}).get("load_in_8bit"):
        raise ValueError(
            f"The adapter in {wanted.saved.path} was trained beside weights in 8 bits, whose products round their inputs as well: "
            "no plain weights are that model. Export it as an adapter (--to adapter)."
        )
    if wanted.to == GGUF:
        the_package()
        family_of(AutoConfig.from_pretrained(wanted.saved.base or wanted.saved.path))
        described(wanted.saved.tokenizer(wanted.trust_remote_code))
    if wanted.output.exists() and (not wanted.output.is_dir() or any(wanted.output.iterdir())):
        raise ValueError(f"{wanted.output} exists already; name another folder with --output.")


def _own_dtype(saved: SavedModel) -> str:
    """What the weights were trained in."""
    own = saved.own_dtype()
    if own == "auto":
        own = AutoConfig.from_pretrained(saved.base or saved.path).dtype or torch.float32
    name = str(own).removeprefix("torch.")
    return name if name in BOUNDS else "float32"


# ---- the formats: each writes, and gives a function that reads the files back ------------------------------------------


def _write_merged(wanted: Export, model: nn.Module, folder: Path, written_as: str) -> Callable[[], None]:
    dtype = getattr(torch, written_as)
    processing_class = wanted.saved.processing_class(wanted.trust_remote_code)
    sums = write_model(folder, model, exported_weights(model, dtype), processing_class, dtype)
    return lambda: _check_folder(wanted, folder, sums)


def write_model(
    folder: Path,
    model: nn.Module,
    weights: Iterable[tuple[str, Tensor]],
    processing_class: Any,
    dtype: torch.dtype | None = None,
) -> dict[str, str]:
    """A folder to load: `weights` under the names of `exported_weights(model)`, and what else says how to use them.

    Name -> checksum of each tensor. `dtype` is theirs, where it is not the model's own.
    """
    sums = write_weights(folder, weights)
    innermost = innermost_model(model)
    config = copy.deepcopy(innermost.config)
    config.dtype, config.architectures = dtype or innermost.dtype, [type(innermost).__name__]
    config.__dict__.pop("quantization_config", None)  # what is written is not quantised, whatever the model is
    if untied_weights(model):
        config.tie_word_embeddings = False
    config.save_pretrained(folder)
    _write_companions(processing_class, innermost, folder)
    return sums


def _write_adapter(wanted: Export, model: nn.Module, folder: Path, written_as: str) -> Callable[[], None]:
    """The adapter's own file, in which rows of new tokens stand, too."""
    dtype, source = getattr(torch, written_as), Path(wanted.saved.path)
    tensors = load_file(source / ADAPTER_WEIGHTS)
    sums = write_weights(folder, ((name, tensor.to(dtype)) for name, tensor in tensors.items()), shard_bytes=1 << 62)
    (folder / "model.safetensors").rename(folder / ADAPTER_WEIGHTS)
    config, base = json.loads((source / ADAPTER_CONFIG).read_text(encoding="utf-8")), wanted.saved.base
    config["base_model_name_or_path"] = str(Path(base).resolve()) if Path(base).exists() else base
    config |= {"inference_mode": True, "auto_mapping": None}  # the latter would be a name of code to import
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _write_companions(wanted.saved.processing_class(wanted.trust_remote_code), None, folder)
    return lambda: _check_folder(wanted, folder, sums)


def _write_gguf(wanted: Export, model: nn.Module, folder: Path, written_as: str) -> Callable[[], None]:
    path = folder / GGUF_NAME.format(kind=written_as)
    tokenizer = wanted.saved.tokenizer(wanted.trust_remote_code)
    sums = write_gguf(path, model, tokenizer, written_as, name=Path(wanted.output).name)
    return lambda: check_gguf(path, sums)


WRITERS: dict[str, Callable[[Export, nn.Module, Path, str], Callable[[], None]]] = {
    MERGED: _write_merged,
    ADAPTER: _write_adapter,
    GGUF: _write_gguf,
}


def _check_folder(wanted: Export, folder: Path, sums: dict[str, str]) -> None:
    """Loaders choose a tokenizer's class by the files around it: what is loaded from the export must cut text as in training, and
    make the same of a picture."""
    check_weights(folder, sums)
    exported = SavedModel(str(folder), task=wanted.saved.task)
    trained, fresh = (one.tokenizer(wanted.trust_remote_code) for one in (wanted.saved, exported))
    for text in TEXTS:
        if trained(text)["input_ids"] != fresh(text)["input_ids"]:
            raise ExportRefused(
                f"The tokenizer that is loaded from the export ({type(fresh).__name__}) cuts {text!r} into other tokens than that "
                f"of the run ({type(trained).__name__}): the model would read what it was not trained on."
            )
    if (processor := wanted.saved.processor(wanted.trust_remote_code)) is not None:  # it has the template
        trained, fresh = processor, check_processor(processor, exported, wanted.trust_remote_code)
    if trained.chat_template != fresh.chat_template:
        raise ExportRefused("The chat template that is loaded from the export is not that of the run.")


def _write_companions(processing_class: Any, innermost: nn.Module | None, folder: Path) -> None:
    """Tokenizer with its chat template, the processor around it where the model sees, and a generation config that ends where the
    tokenizer says."""
    processing_class.save_pretrained(folder)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    generation = getattr(innermost, "generation_config", None)
    if generation is None:
        return
    generation = copy.deepcopy(generation)
    named = generation.eos_token_id
    ends = [named] if isinstance(named, int) else [*(named or ())]
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ends:
        generation.eos_token_id = [tokenizer.eos_token_id, *ends]
    if generation.pad_token_id is None:
        generation.pad_token_id = tokenizer.pad_token_id
    try:
        generation.save_pretrained(folder)
    except ValueError:  # a temperature without sampling: many models come so, and transformers refuses to write it
        generation.do_sample = True
        generation.save_pretrained(folder)


# ---- is it the model that was trained? ---------------------------------------------------------------------------------


def _verified(wanted: Export, recorded: Recorded, staged: Path, written_as: str) -> Verified:
    path = staged / GGUF_NAME.format(kind=written_as) if wanted.to == GGUF else staged
    fresh = find_saved(path)
    if fresh.task != wanted.saved.task:
        fresh = SavedModel(fresh.path, fresh.base, wanted.saved.task)
    try:
        model = fresh.load(torch.float32, wanted.trust_remote_code).eval()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ExportRefused(f"The export cannot be loaded: {type(error).__name__}: {error}") from error
    found = verify(recorded, model, written_as, wanted.bound)
    if wanted.to == GGUF and importlib.util.find_spec("llama_cpp"):
        tokenizer = wanted.saved.tokenizer(wanted.trust_remote_code)
        for text, ids in zip(TEXTS, llama_cpp_tokens(path, TEXTS)):
            if ids != tokenizer(text, add_special_tokens=False)["input_ids"]:
                raise ExportRefused(f"llama.cpp cuts {text!r} into other tokens than the run's tokenizer does.")
        answers = llama_cpp_logps(path, recorded.sequences)
        found = replace(found, llama_cpp=check_answers(recorded.answers, answers, found.bound, "llama.cpp"))
    return found


# ---- what llama.cpp itself says about a GGUF file ------------------------------------------------------------------------


def llama_cpp_tokens(path: Path, texts: tuple[str, ...]) -> list[list[int]]:
    """How llama.cpp cuts texts into tokens."""
    from llama_cpp import Llama

    model = Llama(str(path), vocab_only=True, verbose=False)
    found = [model.tokenize(text.encode(), add_bos=False, special=True) for text in texts]
    model.close()
    return found


def llama_cpp_logps(path: Path, sequences: list[np.ndarray]) -> np.ndarray:
    """Log-probs of the tokens after the first of each sequence."""
    from llama_cpp import Llama

    longest = max(map(len, sequences))
    # Type 0 (GGML_TYPE_F32) of keys and values: by default they are rounded to float16.
    model = Llama(str(path), n_ctx=longest + 8, logits_all=True, verbose=False, type_k=0, type_v=0)
    found = []
    for ids in sequences:
        model.reset()
        model.eval(ids.tolist())
        logits = torch.from_numpy(np.array(model.scores[: len(ids) - 1], dtype=np.float64))
        wanted = torch.from_numpy(ids[1:].astype(np.int64))
        found.append(logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0].numpy())
    model.close()
    return np.concatenate(found)
