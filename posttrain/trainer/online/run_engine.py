"""RunEngine: what writes answers beside the training of a run, for task scores and win rates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn
from transformers import TrainerState

from posttrain.evaluation.run import engine_for
from posttrain.models.load.model import CAUSAL_LM
from posttrain.models.load.vocabulary import tokenizer_of
from posttrain.rollout.engines.gathered_engine import GatheredEngine
from posttrain.rollout.engines.protocol import RolloutEngine
from posttrain.trainer.options.base import DEEPSPEED, BaseConfig


class WritingRun(Protocol):
    """What is asked of the trainer. An online one has besides an `engine` and a `weight_sync`, which are used."""

    task: str
    args: BaseConfig
    state: TrainerState
    model: nn.Module
    processing_class: Any
    is_fully_sharded: bool


class RunEngine:
    """An engine with the weights of the step: the trainer's own where it has one, else one that is made when it is first needed."""

    def __init__(self, trainer: WritingRun, wanted: str) -> None:
        """`wanted`: what the answers are for; runs that cannot write are refused with it."""
        if trainer.task != CAUSAL_LM:
            raise ValueError(f"{type(trainer).__name__} trains a model that writes nothing: it has no {wanted}.")
        if trainer.args.sharding == DEEPSPEED:
            raise ValueError("Answers are written with whole weights; under DeepSpeed they are in pieces. Use FSDP.")
        self.trainer = trainer
        self._engine: RolloutEngine | None = None
        if trainer.is_fully_sharded and getattr(trainer, "engine", None) is None:
            self._engine = self._made(trainer.model)  # now: a model that is in pieces cannot be copied

    @contextmanager
    def writing(self) -> Iterator[RolloutEngine]:
        engine = self._ready()
        try:
            yield engine
        finally:
            if isinstance(engine, GatheredEngine) or getattr(engine, "is_foreign", False):
                engine.sleep()

    @contextmanager
    def writing_of(self, model: nn.Module) -> Iterator[RolloutEngine]:
        """Of another model than the one that is trained, once. It must be whole."""
        engine = self._made(model)
        engine.load_weights(None, 0)
        engine.wake()
        try:
            yield engine
        finally:
            engine.sleep()

    def close(self) -> None:
        """Until it is needed again."""
        if not self.trainer.is_fully_sharded:
            self._engine = None

    def _ready(self) -> RolloutEngine:
        trainer, step = self.trainer, self.trainer.state.global_step
        if getattr(trainer, "engine", None) is not None:
            trainer.weight_sync.ready(step)
            return trainer.engine
        if self._engine is None:
            self._engine = self._made(trainer.model)
        self._engine.load_weights(None, step)
        self._engine.wake()
        return self._engine

    def _made(self, model: nn.Module) -> RolloutEngine:
        make, args = engine_for("native", tokenizer_of(self.trainer.processing_class)), self.trainer.args
        if self.trainer.is_fully_sharded:
            return GatheredEngine(model, make, args.device, args.compute_dtype)
        return make(model)
