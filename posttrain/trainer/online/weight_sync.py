"""Engines that have weights of their own are given the trainer's, once for each version, and asked whether they arrived."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from posttrain.models.load.model import innermost_model
from posttrain.models.sharding import local_part, reshard
from posttrain.rollout.engines.vllm.sync_probe import BOUNDS, ProbeResult, SyncProbe, scored_by
from posttrain.trainer.online.joint_export import JointExport

if TYPE_CHECKING:
    from posttrain.trainer.online.vllm_setup import EngineOwner as OnlineTrainer

SECONDS, MEAN, LARGEST = "sync/seconds", "sync/logp_difference/mean", "sync/logp_difference/max"


class WeightSync:
    """`ready(version)` before anything is generated; with several processes, in all of them."""

    def __init__(self, trainer: OnlineTrainer) -> None:
        if trainer.args.vllm_sync_tolerance is not None and not getattr(trainer.engine, "is_foreign", False):
            raise ValueError(
                "`vllm_sync_tolerance` is set, and the completions are written from the trainer's own weights: it would have no "
                "effect. Leave it out, or use vLLM (`use_vllm=True`, or `engine=ServedVLLM(...)`)."
            )
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
        reshard(model)  # so that gathered and sharded parameters are not counted in turn
        state = (version, _changes(model))
        is_sent = state == self._done and getattr(engine, "holds_weights", True)  # deep sleep drops them
        if self.trainer.is_fully_sharded:  # all send, or none does
            is_sent = not self.trainer.any_process(not is_sent)
        if is_sent:
            engine.wake()
            return {}
        began = time.perf_counter()
        args = self.trainer.args
        send_weights(engine, version, args.process_index, args.world_size, self.trainer.joint_export)
        engine.wake()
        found = self._checked(version)
        self._done = state
        return {SECONDS: time.perf_counter() - began, MEAN: found.mean, LARGEST: found.largest}

    def _checked(self, version: int) -> ProbeResult:
        """Scores of a fixed batch on both sides; WeightsDiffer stops the run."""
        engine, model = self.trainer.engine, self.trainer.model
        if self._probe is None:
            bound = self.trainer.args.vllm_sync_tolerance
            own = innermost_model(model).config.get_text_config().vocab_size
            self._probe = SyncProbe(min(engine.vocabulary, own), self._coarsest_dtype(), bound=bound)
        here = scored_by(model)(self._probe.sequences)
        joint, world_size = self.trainer.joint_export, self.trainer.args.world_size

        def compared() -> ProbeResult:
            asked = (
                engine.probed(self._probe.sequences) if joint is None else joint.probed(engine, self._probe.sequences)
            )
            results = [
                self._probe.check(lambda _: here, lambda _, scores=scores: scores, version, engine.version, differing)
                for scores, differing in asked
            ]
            return max(results, key=lambda result: result.mean)

        return compared() if joint is None else by_all(compared, world_size, "could not confirm the weights")

    def _coarsest_dtype(self) -> torch.dtype:
        """Of trainer and engine: the one that rounds more says how far apart the two may be."""
        is_sharded = self.trainer.is_fully_sharded  # float32 masters of what computes in bfloat16
        own = self.trainer.args.compute_dtype if is_sharded else next(self.trainer.model.parameters()).dtype
        both = (own, getattr(self.trainer.engine, "dtype", own))
        return max((dtype if dtype in BOUNDS else torch.bfloat16 for dtype in both), key=BOUNDS.__getitem__)


def send_weights(
    engine: Any, version: int, process_index: int, world_size: int, joint: JointExport | None = None
) -> None:
    """To an engine of each process's own, or, where all processes ask the same servers (`follow`), once from process 0.

    `joint`: the weights are sharded, so that all processes walk through them together, whoever sends them.
    """
    if world_size == 1 or not hasattr(engine, "follow"):
        if joint is None:
            engine.load_weights(None, version)
        else:
            by_all(lambda: joint.load(engine, version), world_size, f"could not take version {version} of the weights")
        return
    failed: Exception | None = None
    told: list[Any] = [None, None]
    if process_index == 0:
        try:
            load = lambda: engine.load_weights(None, version)  # noqa: E731
            load() if joint is None else joint.read_by(load)
            told = [dataclasses.replace(engine.target, kept=None), None]
        except Exception as error:  # the other processes wait for a word: they must stop, too
            failed, told = error, [None, str(error)]
    elif joint is not None:
        joint.walk()
    torch.distributed.broadcast_object_list(told, src=0)
    if failed is not None:
        raise failed
    if told[1] is not None:
        raise RuntimeError(f"Process 0 could not send version {version} of the weights: {told[1]}")
    if process_index != 0:
        engine.follow(told[0])


def by_all(action: Callable[[], Any], world_size: int, what_failed: str) -> Any:
    """The result of an action that every process takes; where it fails on one of them, all raise."""
    result, failed = None, None
    try:
        result = action()
    except Exception as error:
        failed = error
    said: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(said, None if failed is None else str(failed))
    if failed is not None:
        raise failed
    for number, error in enumerate(said):
        if error is not None:
            raise RuntimeError(f"Process {number} {what_failed}: {error}")
    return result


def _changes(model: nn.Module) -> int:
    """Grows with every change of a parameter that torch sees: weights that were loaded again have the old step's number.

    Every process makes the same changes, so that all of them send or none does.
    """
    return sum(local_part(parameter)._version for parameter in model.parameters())
