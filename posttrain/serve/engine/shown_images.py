"""Images of a prompt on their way into vLLM, which expands what a template writes for each of them by itself.

So vLLM is handed the *collapsed* prompt: what stands for an image in the trainer's tokens is replaced by what the template wrote.
Handed the trainer's own tokens it would expand them a second time. What it makes of the prompt is compared with the trainer's
tokens: that catches another rule for resizing, a forgotten option and another version of a library, whatever they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ShownImage:
    key: str  # of its content
    start: int  # first of the prompt's tokens that stand for it
    stop: int  # one past the last
    picture: Any  # RGB, as Pillow has it


@dataclass(frozen=True)
class ShownImages:
    """All images of one prompt, in their order."""

    images: tuple[ShownImage, ...]
    mark: tuple[int, ...]  # ids of what the template writes for an image
    options: Mapping[str, Any] = field(default_factory=dict)  # of the image processor

    def vllm_prompt(self, ids: Sequence[int]) -> dict[str, Any]:
        """As vLLM takes it. Processed and encoded images are found again by key *and* options: other options, other pixels."""
        options = hashlib.sha256(json.dumps(dict(self.options), sort_keys=True).encode()).hexdigest()[:16]
        prompt: dict[str, Any] = {
            "prompt_token_ids": self.collapsed(ids),
            "multi_modal_data": {"image": [image.picture for image in self.images]},
            "multi_modal_uuids": {"image": [f"{image.key}-{options}" for image in self.images]},
        }
        return prompt | ({"mm_processor_kwargs": dict(self.options)} if self.options else {})

    def collapsed(self, ids: Sequence[int]) -> list[int]:
        found: list[int] = []
        at = 0
        for image in self.images:
            found += [*ids[at : image.start], *self.mark]
            at = image.stop
        return [*found, *ids[at:]]

    def difference(self, ids: Sequence[int], expanded: Sequence[int]) -> str | None:
        """Why `expanded`, vLLM's tokens of the prompt, are not the trainer's `ids`; None: they are."""
        if list(expanded) == list(ids):
            return None
        sizes = ", ".join(f"{image.picture.height} x {image.picture.width}" for image in self.images)
        place = next(
            (i for i, pair in enumerate(zip(ids, expanded)) if pair[0] != pair[1]), min(len(ids), len(expanded))
        )
        return (
            f"vLLM makes {len(expanded)} tokens of a prompt that has {len(ids)} tokens for the trainer; they differ from token "
            f"{place} on. Its images (height x width): {sizes}. So it resizes or writes images differently: compare the versions "
            "of transformers and vLLM, and the options of the image processor, on both sides."
        )
