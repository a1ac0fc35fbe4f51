"""Engines by name. Each is imported when it is asked for: options name engines, and need no torch kernels for that."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from posttrain.rollout.engines.protocol import FP8, Decode, RolloutEngine

logger = logging.getLogger(__name__)


def _native(
    model: nn.Module, decode: Decode | None = None, max_context: int | None = None, **options: Any
) -> RolloutEngine:
    """The native engine where a probe shows that it can run this model; the plain one, and a sentence, elsewhere."""
    from posttrain.rollout.engines.native.engine import NativeEngine

    engine = NativeEngine(model, decode, max_context=max_context, **options)
    reason = engine.why_not()
    if reason is None:
        return engine
    if engine.rounds:
        set_ones = {"rollout_kv_dtype": engine.rounds_cache, "rollout_weight_dtype": engine.rounds_weights}
        names = " and ".join(f"`{name}`" for name, is_set in set_ones.items() if is_set)
        raise ValueError(
            f"{names}: only the native engine computes with {FP8!r}, and it does not run {type(engine.innermost).__name__}: "
            f"{reason}. Leave {names} out."
        )
    logger.warning(f"{type(engine.innermost).__name__} is generated from by transformers, which is slower: {reason}.")
    shared = {name: value for name, value in options.items() if name in ("max_slots", "mixture", "pixels")}
    return _transformers(model, decode=decode, max_context=max_context, **shared)


def _transformers(model: nn.Module, max_slots: int | None = None, **options: Any) -> RolloutEngine:
    from posttrain.rollout.engines.transformers import BATCH_SIZE, TransformersEngine

    return TransformersEngine(model, batch_size=max_slots or BATCH_SIZE, **options)


ENGINES: dict[str, Callable[..., RolloutEngine]] = {"native": _native, "transformers": _transformers}
"""Name -> function of (model, decode=..., and options of that engine)."""
