"""Writes the JSONL files of the data row: conversations and prompt-completion rows, made of paragraphs of docstrings.

Docstrings of the installed torch and transformers are a few megabytes of prose, lists and code that every machine with either
library has; no paragraph is in the pool twice, so that a cache of words meets as many new ones as in texts of people.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

SOURCES = ("transformers", "torch")
CHARACTERS_PER_TOKEN = 3.6
MEAN_TOKENS = 400
POOL_CHARACTERS = 8_000_000
CONTROL = "<"  # control tokens in texts are ordinary text to posttrain and control tokens to TRL: tokens would differ


def paragraphs() -> list[str]:
    """Of the docstrings, each once, in an order that does not depend on the file system."""
    found: dict[str, None] = {}
    size = 0
    for package in SOURCES:
        folder = Path(importlib.util.find_spec(package).origin).parent
        for path in sorted(folder.rglob("*.py")):
            for docstring in re.findall(r'"""(.+?)"""', path.read_text(encoding="utf-8", errors="ignore"), re.DOTALL):
                for paragraph in inspect.cleandoc(docstring).split("\n\n"):
                    if 60 < len(paragraph) < 800 and paragraph not in found and CONTROL not in paragraph:
                        found[paragraph] = None
                        size += len(paragraph)
            if size > POOL_CHARACTERS:
                return list(found)
    return list(found)


def write(folder: Path, rows: int) -> list[Path]:
    """chat.jsonl and completion.jsonl of `rows` rows, about 400 tokens each, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{kind}-{rows}.jsonl" for kind in KINDS]
    pool = [] if all(path.exists() for path in paths) else paragraphs()
    for path, make in zip(paths, KINDS.values()):
        if path.exists():
            continue
        rng = np.random.default_rng(5)
        with open(path, "w", encoding="utf-8") as out:
            for _ in range(rows):
                out.write(json.dumps(make(rng, pool)) + "\n")
    return paths


def text(rng: np.random.Generator, pool: list[str], mean_tokens: float) -> str:
    """Paragraphs until a length is reached whose logarithm is normal; cut there."""
    characters = int(CHARACTERS_PER_TOKEN * rng.lognormal(np.log(mean_tokens / 1.28), 0.7))  # exp(0.7^2 / 2) = 1.28
    parts, size = [], 0
    while size < max(characters, 20):
        parts.append(pool[rng.integers(len(pool))])
        size += len(parts[-1]) + 2
    return "\n\n".join(parts)[: max(characters, 20)].strip()


def chat(rng: np.random.Generator, pool: list[str]) -> dict[str, Any]:
    turns = int(rng.integers(1, 4))
    share = MEAN_TOKENS / turns / 2
    roles = ("user", "assistant") * turns
    return {"messages": [{"role": role, "content": text(rng, pool, share)} for role in roles]}


def completion(rng: np.random.Generator, pool: list[str]) -> dict[str, Any]:
    return {"prompt": text(rng, pool, MEAN_TOKENS / 2) + " ", "completion": text(rng, pool, MEAN_TOKENS / 2)}


KINDS = {"chat": chat, "completion": completion}
