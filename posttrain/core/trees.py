"""Any nesting of dicts, lists, numbers, texts and tensors as JSON and safetensors, in files or as bytes: nothing is unpickled."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from safetensors.torch import load as tensors_from
from safetensors.torch import save as tensor_bytes
from torch import Tensor

LENGTH = 8  # bytes that say how long the JSON is


def take_tensors(tree: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """Dicts become lists of [key, value] so that integer keys survive; tensors move to `tensors`."""
    if isinstance(tree, Tensor):
        tensors[place] = tree.detach()
        return {"tensor": place}
    if isinstance(tree, dict):
        return {"dict": [[key, take_tensors(value, f"{place}/{key}", tensors)] for key, value in tree.items()]}
    if isinstance(tree, (list, tuple)):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [take_tensors(value, f"{place}/{index}", tensors) for index, value in enumerate(tree)]}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return {"value": tree}
    raise TypeError(
        f"The state at {place or '/'} is a {type(tree).__name__}; only tensors, numbers and text are saved."
    )


def put_tensors(skeleton: Any, tensors: dict[str, Tensor]) -> Any:
    ((kind, content),) = skeleton.items()
    return {
        "tensor": lambda: tensors[content],
        "value": lambda: content,
        "dict": lambda: {key: put_tensors(value, tensors) for key, value in content},
        "list": lambda: [put_tensors(value, tensors) for value in content],
        "tuple": lambda: tuple(put_tensors(value, tensors) for value in content),
    }[kind]()


def tree_digest(tree: Any) -> str:
    """The same for the same nesting, numbers and tensors."""
    tensors: dict[str, Tensor] = {}
    found = hashlib.sha256(json.dumps(take_tensors(tree, "", tensors)).encode())
    for tensor in tensors.values():
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.numel():
            found.update(tensor.cpu().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def tree_to_bytes(tree: Any) -> bytes:
    """The length of the JSON, the JSON, the tensors."""
    tensors: dict[str, Tensor] = {}
    head = json.dumps(take_tensors(tree, "", tensors)).encode()
    content = tensor_bytes({name: tensor.contiguous() for name, tensor in tensors.items()})
    return len(head).to_bytes(LENGTH, "big") + head + content


def tree_from_bytes(content: bytes) -> Any:
    end = LENGTH + int.from_bytes(content[:LENGTH], "big")
    return put_tensors(json.loads(content[LENGTH:end]), tensors_from(content[end:]))
