"""Engines that have weights of their own are given the trainer's, once for each version, and asked whether they arrived."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from posttrain.models.load import innermost_model
from posttrain.rollout.vllm_engine.sync_probe import BOUNDS, ProbeResult, SyncProbe, scored_by

if TYPE_CHECKING:
    from posttrain.trainer.online import OnlineTrainer

SECONDS, MEAN, LARGEST = "sync/seconds", "sync/logp_difference/mean", "sync/logp_difference/max"


class WeightSync:
    """`ready(version)` before anything is generated; with several processes, in all of them."""

    def __init__(self, trainer: OnlineTrainer) -> None:
        self.trainer = trainer
        self._done: tuple[int, int] | None = None
        self._probe: SyncProbe | None = None

    def ready(self, version: int) -> dict[str, float]:
        """The engine is awake and has this version; what it took, where something was sent."""
        engine, model = self.trainer.engine, self.trainer.model
        if not getattr(engine, "is_foreign", False):
            engine.load_weights(None, version)
            engine.wake()
            return {}
        state = (version, _changes(model))
        if state == self._done:
            engine.wake()
            return {}
        began = time.perf_counter()
        send_weights(engine, version, self.trainer.args.process_index, self.trainer.args.world_size)
        engine.wake()
        found = self._checked(version)
        self._done = state
        return {SECONDS: time.perf_counter() - began, MEAN: found.mean, LARGEST: found.largest}

    def _checked(self, version: int) -> ProbeResult:
        """Scores of a fixed batch on both sides; WeightsDiffer stops the run."""
        engine, model = self.trainer.engine, self.trainer.model
        if self._probe is None:
            dtype = next(model.parameters()).dtype
            bound = self.trainer.args.vllm_sync_tolerance
            own = innermost_model(model).config.get_text_config().vocab_size
            self._probe = SyncProbe(
                min(engine.vocabulary, own), dtype if dtype in BOUNDS else torch.bfloat16, bound=bound
            )
        here = scored_by(model)(self._probe.sequences)
        results = [
            self._probe.check(lambda _: here, lambda _, scores=scores: scores, version, engine.version, differing)
            for scores, differing in engine.probed(self._probe.sequences)
        ]
        return max(results, key=lambda result: result.mean)


def send_weights(engine: Any, version: int, process_index: int, world_size: int) -> None:
    """To an engine of each process's own, or, where all processes ask the same servers (`follow`), once from process 0."""
    if world_size == 1 or not hasattr(engine, "follow"):
        engine.load_weights(None, version)
        return
    failed: Exception | None = None
    told: list[Any] = [None, None]
    if process_index == 0:
        try:
            engine.load_weights(None, version)
            told = [dataclasses.replace(engine.target, kept=None), None]
        except Exception as error:  # the other processes wait for a word: they must stop, too
            failed, told = error, [None, str(error)]
    torch.distributed.broadcast_object_list(told, src=0)
    if failed is not None:
        raise failed
    if told[1] is not None:
        raise RuntimeError(f"Process 0 could not send version {version} of the weights: {told[1]}")
    if process_index != 0:
        engine.follow(told[0])


def _changes(model: nn.Module) -> int:
    """Grows with every change of a parameter that torch sees: weights that were loaded again have the old step's number.

    Every process makes the same changes, so that all of them send or none does.
    """
    return sum(parameter._version for parameter in model.parameters())
