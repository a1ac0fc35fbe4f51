"""A Hub cache with tiny random models under the names that the pages use, so that every page runs as printed, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests import tiny, tiny_vision

REVISION = "0" * 40
WITH_TEMPLATE = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": "chatml",
    "HuggingFaceTB/SmolLM2-360M-Instruct": "chatml",
    "HuggingFaceTB/SmolLM2-135M": None,
}
"""Model id -> chat format of its tokenizer."""
OTHER_FAMILY = "Qwen/Qwen2.5-0.5B-Instruct"
"""With another tokenizer than the others have."""
SEEING = "llava-hf/llava-interleave-qwen-0.5b-hf"
"""Reads images; its processor needs Pillow alone."""
DEMO_CACHE = Path(".cache/posttrain/smollm2-135m-instruct")


def plant(home: Path) -> None:
    """Fill `home`/hub as `huggingface_hub` would after a download, and the folder in which `posttrain demo` keeps its model."""
    model = tiny.causal_lm(family="llama", max_position_embeddings=4096, tie_word_embeddings=True)
    for name, chat_format in WITH_TEMPLATE.items():
        save(model, snapshot(home, name), tiny.tokenizer(chat_format))
    tokenizer = tiny.merging_tokenizer()
    save(tiny.causal_lm(vocab_size=len(tokenizer)), snapshot(home, OTHER_FAMILY), tokenizer)
    seeing = tiny_vision.vision_model("llava")
    save(seeing.model, snapshot(home, SEEING), seeing.processor)
    save(model, home / DEMO_CACHE, tiny.tokenizer("chatml"))


def snapshot(home: Path, name: str) -> Path:
    """The folder of a model's files, as the Hub's client looks for it."""
    refs = folder_of(home, name).parents[1] / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(REVISION)
    return folder_of(home, name)


def folder_of(home: Path, name: str) -> Path:
    return home / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / REVISION


def save(model: Any, folder: Path, tokenizer: Any) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
