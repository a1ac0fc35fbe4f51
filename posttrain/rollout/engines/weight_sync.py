"""Engines that have weights of their own are given the trainer's, once for each version, and asked whether they arrived."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from posttrain.core.processes import of_every_process
from posttrain.models.load.model import innermost_model
from posttrain.models.sharding import local_part, reshard
from posttrain.rollout.engines.joint_export import JointExport
from posttrain.rollout.engines.vllm.sync_probe import BOUNDS, ProbeResult, SyncProbe, WeightsDiffer, scored_by
from posttrain.serve.wire import block_sums

SECONDS, MEAN, LARGEST = "sync/seconds", "sync/logp_difference/mean", "sync/logp_difference/max"
IMAGES = "sync/logp_difference/images"


class WeightSync:
    """`ready(version)` before anything is generated; with several processes, in all of them."""

    def __init__(
        self,
        engine: Any,
        model: nn.Module,
        joint: JointExport | None = None,
        *,
        image_gap: Callable[[Any], float] | None = None,
        tolerance: float | None = None,
        sharded_dtype: torch.dtype | None = None,
        process_index: int = 0,
        world_size: int = 1,
    ) -> None:
        """`joint` and `sharded_dtype` (in which they are computed with) are there where the weights are in pieces.
        `image_gap(engine)`: how far log-probs of trainer and engine are apart after an image, where prompts have some."""
        if tolerance is not None and not getattr(engine, "is_foreign", False):
            raise ValueError(
                "`vllm_sync_tolerance` is set, and the completions are written from the trainer's own weights: it would have no "
                "effect. Leave it out, or use vLLM (`use_vllm=True`, or `engine=ServedVLLM(...)`)."
            )
        self.engine, self.model, self.joint, self.tolerance = engine, model, joint, tolerance
        self.sharded_dtype, self.process_index, self.world_size = sharded_dtype, process_index, world_size
        self.image_gap = image_gap
        self._done: tuple[int, list[Any]] | None = None
        self._probe: SyncProbe | None = None

    def ready(self, version: int) -> dict[str, float]:
        """The engine is awake and has this version; what it took, where something was sent."""
        engine, model = self.engine, self.model
        if not getattr(engine, "is_foreign", False):
            engine.load_weights(None, version)
            engine.wake()
            return {}
        reshard(model)  # so that gathered and sharded parameters are not counted in turn
        state = (version, _changes(model))
        is_sent = state == self._done and getattr(engine, "holds_weights", True)  # deep sleep drops them
        if self.sharded_dtype is not None:  # all send, or none does
            is_sent = all(of_every_process(is_sent, self.world_size))
        if is_sent:
            engine.wake()
            return {}
        began = time.perf_counter()
        send_weights(engine, version, self.process_index, self.world_size, self.joint)
        engine.wake()
        found = self._checked(version)
        numbers = {MEAN: found.mean, LARGEST: found.largest}
        if self.image_gap is not None:
            numbers[IMAGES] = self._checked_after_an_image(version)
        self._done = state
        return {SECONDS: time.perf_counter() - began, **numbers}

    def _checked_after_an_image(self, version: int) -> float:
        """NaN where the engine wrote nothing."""
        apart, bound = self.image_gap(self.engine), self._probe.bound
        if apart > bound:
            raise WeightsDiffer(
                f"After the update to version {version} the engine's log-probs after an image differ from the trainer's by "
                f"{apart:.3g} on average; {bound:g} would be rounding. They agree after texts: so the engine shows its model other "
                "pixels, or what weights of before have made of them."
            )
        return apart

    def _checked(self, version: int) -> ProbeResult:
        """Scores of a fixed batch on both sides; WeightsDiffer stops the run."""
        engine, joint = self.engine, self.joint
        if self._probe is None:
            own = innermost_model(self.model).config.get_text_config().vocab_size
            self._probe = SyncProbe(min(engine.vocabulary, own), self._coarsest_dtype(), bound=self.tolerance)
        probe = self._probe
        here = scored_by(self.model)(probe.sequences)

        def compared() -> ProbeResult:
            asked = engine.probed(probe.sequences) if joint is None else joint.probed(engine, probe.sequences)
            results = [
                probe.check(lambda _: here, lambda _, scores=scores: scores, version, engine.version, differing)
                for scores, differing in asked
            ]
            return max(results, key=lambda result: result.mean)

        return (
            compared()
            if joint is None
            else on_all_processes(compared, self.world_size, "could not confirm the weights")
        )

    def _coarsest_dtype(self) -> torch.dtype:
        """Of trainer and engine: the one that rounds more says how far apart the two may be."""
        own = self.sharded_dtype or next(self.model.parameters()).dtype  # shards are float32 masters
        both = (own, getattr(self.engine, "dtype", own))
        return max((dtype if dtype in BOUNDS else torch.bfloat16 for dtype in both), key=BOUNDS.__getitem__)


def send_weights(
    engine: Any, version: int, process_index: int, world_size: int, joint: JointExport | None = None
) -> None:
    """To an engine of each process's own, or, where all processes ask the same servers (`follow`), once from process 0.

    `joint`: the weights are sharded, so that all processes gather them together, whichever of them sends.
    """
    if world_size == 1 or not hasattr(engine, "follow"):
        if joint is None:
            engine.load_weights(None, version)
        else:
            on_all_processes(
                lambda: joint.load(engine, version), world_size, f"could not take version {version} of the weights"
            )
        return
    failed: Exception | None = None
    outcome: list[Any] = [None, None]  # where the weights went, or what went wrong
    if process_index == 0:
        try:
            load = lambda: engine.load_weights(None, version)  # noqa: E731
            load() if joint is None else joint.read_by(load)
            outcome = [dataclasses.replace(engine.target, kept=None), None]
        except Exception as error:  # the other processes wait for the outcome: they must stop, too
            failed, outcome = error, [None, str(error)]
    elif joint is not None:
        joint.walk()
    torch.distributed.broadcast_object_list(outcome, src=0)
    if failed is not None:
        raise failed
    if outcome[1] is not None:
        raise RuntimeError(f"Process 0 could not send version {version} of the weights: {outcome[1]}")
    if process_index != 0:
        engine.follow(outcome[0])


def on_all_processes(action: Callable[[], Any], world_size: int, what_failed: str) -> Any:
    """The result of an action that every process takes; where it fails on one of them, all raise."""
    result, failed = None, None
    try:
        result = action()
    except Exception as error:
        failed = error
    errors = of_every_process(None if failed is None else str(failed), world_size)
    if failed is not None:
        raise failed
    for number, error in enumerate(errors):
        if error is not None:
            raise RuntimeError(f"Process {number} {what_failed}: {error}")
    return result


def _changes(model: nn.Module) -> list[Any]:
    """Differs after every change of a parameter that torch sees: weights that were loaded again have the old step's number.

    Every process makes the same changes, so that all of them send or none does. ZeRO-3 writes into its pieces behind torch's back:
    there it is their checksums.
    """
    pieces = [(parameter, getattr(parameter, "ds_tensor", None)) for parameter in model.parameters()]
    return [
        local_part(parameter)._version if piece is None else block_sums.of_tensor(piece.detach().view(torch.uint8))
        for parameter, piece in pieces
    ]
