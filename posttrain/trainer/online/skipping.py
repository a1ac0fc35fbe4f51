"""How a resumed run gets past the batches that it has used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers.trainer

from posttrain.rollout.loader import RolloutLoader


@contextmanager
def skipping_by_position() -> Iterator[None]:
    """Trainer skips the batches of a resumed epoch by rebuilding torch's DataLoader; ours knows where it stands."""
    original = transformers.trainer.skip_first_batches

    def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
        return loader.skip_first(num_batches) if isinstance(loader, RolloutLoader) else original(loader, num_batches)

    transformers.trainer.skip_first_batches = skip_first_batches
    try:
        yield
    finally:
        transformers.trainer.skip_first_batches = original
