"""Who writes besides the policy: engines for the reference, for its mixture with the policy, and for a teacher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from posttrain.models.load.reference import ModelReference
from posttrain.rollout.engines.mixture import Mixture
from posttrain.rollout.engines.protocol import RolloutEngine, SamplingParams, Session
from posttrain.rollout.rollout import DATASET, MIXTURE, POLICY, REFERENCE, TEACHER


class EngineInContext:
    """An engine that runs inside of a context only: the policy's own model, with its adapter off or another one on.

    It is not the policy's engine in that context: what an engine packs or captures of its weights is then never another's.
    """

    def __init__(self, make: Callable[[nn.Module], RolloutEngine], asked: ModelReference) -> None:
        self._context = asked.context
        with self._context():  # engines try a model out before they take it
            self.engine = make(asked.model)

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def labels_tokens(self) -> bool:
        return self.engine.labels_tokens

    @labels_tokens.setter
    def labels_tokens(self, does: bool) -> None:
        self.engine.labels_tokens = does

    @contextmanager
    def session(self, params: SamplingParams) -> Iterator[Session]:
        with self._context(), self.engine.session(params) as session:
            yield session

    def load_weights(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        self.engine.load_weights(weights, version)

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()


def _wanted(trainer: Any) -> set[str]:
    """Who writes besides the policy in this trainer's method, and needs an engine for it."""
    wanted = trainer.authors() - {POLICY, DATASET}
    unknown = wanted - {REFERENCE, MIXTURE, TEACHER}
    if unknown:
        known = ", ".join((POLICY, REFERENCE, MIXTURE, TEACHER))
        raise ValueError(f"`author_of` returned {sorted(unknown)[0]!r}; known are {known} and {DATASET}.")
    return wanted


def other_authors(
    trainer: Any, wanted: set[str] | None = None, copied: dict[int, Any] | None = None
) -> dict[str, RolloutEngine]:
    """Engines of those who write besides the policy; a sentence where one of them cannot. `wanted` None: whom `author_of` names.
    `copied`: for another thread, which has a copy of the policy that is found there by the policy's id."""
    wanted = _wanted(trainer) if wanted is None else wanted
    if not wanted:
        return {}
    _refuse(trainer, " and ".join(sorted(wanted)))
    policy = trainer.model if copied is None else copied[id(trainer.model)]
    own = lambda asked: asked if copied is None else asked.beside(copied)  # noqa: E731

    def mixed() -> RolloutEngine:
        live = own(trainer.live)
        return trainer.local_engine(policy, mixture=Mixture(live.model, trainer.mixture_weight, live.context))

    engines: dict[str, Callable[[], RolloutEngine]] = {
        REFERENCE: lambda: EngineInContext(trainer.local_engine, own(trainer.live)),
        MIXTURE: mixed,
        TEACHER: lambda: EngineInContext(trainer.local_engine, own(trainer.teacher.asked)),
    }
    return {author: engines[author]() for author in sorted(wanted)}


def refuse_vllm(trainer: Any) -> None:
    """Where others than the policy write; called before vLLM is started, which takes minutes."""
    if wanted := _wanted(trainer):
        raise ValueError(
            f"{type(trainer).__name__} needs completions of the {' and '.join(sorted(wanted))}, and vLLM has the policy's weights "
            "alone. Leave `use_vllm` out: the native engine has both models."
        )


def _refuse(trainer: Any, wanted: str) -> None:
    """Where only the policy can write."""
    name = type(trainer).__name__
    if trainer.live is None and wanted != TEACHER:
        raise ValueError(f"{name} needs completions of the {wanted}, and there is no reference: set `beta` above 0.")
    if trainer.rollout_func is not None:
        raise ValueError(
            f"{name} needs completions of the {wanted}; a `rollout_func` writes the policy's alone. Leave it out."
        )
    if getattr(trainer.engine, "is_foreign", False):
        refuse_vllm(trainer)
    if trainer.is_fully_sharded:
        raise ValueError(
            f"{name} needs completions of the {wanted}, and under FSDP only the policy's weights are gathered for generation. "
            "Use one process per GPU without sharding."
        )
