"""A Hub cache with tiny random models under the names that the pages use, so that every page runs as printed, offline."""

from __future__ import annotations

from pathlib import Path

from tests import tiny

REVISION = "0" * 40
WITH_TEMPLATE = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": "chatml",
    "HuggingFaceTB/SmolLM2-360M-Instruct": "chatml",
    "HuggingFaceTB/SmolLM2-135M": None,
}
"""Model id -> chat format of its tokenizer."""
DEMO_CACHE = Path(".cache/posttrain/smollm2-135m-instruct")


def plant(home: Path) -> None:
    """Fill `home`/hub as `huggingface_hub` would after a download, and the folder in which `posttrain demo` keeps its model."""
    model = tiny.causal_lm(family="llama", max_position_embeddings=4096, tie_word_embeddings=True)
    for name, chat_format in WITH_TEMPLATE.items():
        repository = home / "hub" / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(REVISION)
        save(model, repository / "snapshots" / REVISION, chat_format)
    save(model, home / DEMO_CACHE, "chatml")


def save(model: object, folder: Path, chat_format: str | None) -> None:
    model.save_pretrained(folder)
    tiny.tokenizer(chat_format).save_pretrained(folder)
