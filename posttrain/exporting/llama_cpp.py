"""What llama.cpp itself says about a GGUF file, where its Python bindings are installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch

F32 = 0  # GGML_TYPE_F32, for keys and values: by default they are rounded to float16


def is_installed() -> bool:
    return importlib.util.find_spec("llama_cpp") is not None


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
    model = Llama(str(path), n_ctx=longest + 8, logits_all=True, verbose=False, type_k=F32, type_v=F32)
    found = []
    for ids in sequences:
        model.reset()
        model.eval(ids.tolist())
        logits = torch.from_numpy(np.array(model.scores[: len(ids) - 1], dtype=np.float64))
        wanted = torch.from_numpy(ids[1:].astype(np.int64))
        found.append(logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0].numpy())
    model.close()
    return np.concatenate(found)
