"""What a run needs on its device, phase by phase (load, generation, scoring, update), from a model on the meta device.

Bytes are those of `models/memory`, by which a run on a GPU decides about checkpointing; here they are put together by what is on
the device at the same time. Settings are the run's own, or those that its trainer would choose on a device of a given size.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from posttrain.models.layers.kernels import COMPILED, LIGER, PLAIN
from posttrain.models.load.model import innermost_model
from posttrain.models.memory import fit as memory
from posttrain.models.memory.fit import FULL, NONE, SELECTIVE
from posttrain.models.memory.shape import Shape
from posttrain.models.scoring.head_kernels import STATISTICS
from posttrain.rollout.engines.native.cache import LayerShape
from posttrain.rollout.engines.native.engine import MAX_SLOTS
from posttrain.trainer.references.setup import COMPUTED_BEFORE, COPY
from posttrain.trainer.step.memory_fit import apply, batch_tokens, laid_out_share, memory_overrides, plan_memory

if TYPE_CHECKING:
    from posttrain.trainer.base import BaseTrainer
    from posttrain.trainer.plan.arithmetic import RunCounts

CONTEXT_BYTES = int(0.6 * 2**30)
"""CUDA's own, and what libraries take when they are first called."""
MOST_TOKENS = 2**24
"""Where the search for the largest micro-batch stops."""


@dataclass(frozen=True)
class Phase:
    """Terms that are on the device at the same time."""

    name: str
    terms: dict[str, float]

    @classmethod
    def of(cls, name: str, *terms: dict[str, float]) -> Phase:
        return cls(name, {term: size for part in terms for term, size in part.items() if size})

    @property
    def peak(self) -> float:
        return sum(self.terms.values())

    @property
    def binding(self) -> str:
        return max(self.terms, key=self.terms.get)


class MemoryModel:
    """The memory of one process as a function of the tokens of a pass and the level of checkpointing."""

    def __init__(
        self,
        side: BaseTrainer,
        shape: Shape,
        counts: RunCounts,
        reference: str,
        reward_models: Iterable[nn.Module] = (),
        gpu: int | None = None,
    ) -> None:
        self.side, self.args, self.shape = side, side.args, shape
        self.kernels = planned_kernels(self.args)
        self.activations = shape.activations(self.kernels)
        head = innermost_model(side.model).get_output_embeddings()
        self.state = memory.state_cost(side.model.parameters(), head, self.args.world_size)
        online = counts.rollouts is not None
        self.scores = online and (side.needs_old_logps or side.needs_reference)  # passes without gradient over rollouts
        judges = float(sum(parameter.nbytes for judge in reward_models for parameter in judge.parameters()))
        self.resident = {"weights": shape.weight_bytes, "reward models": judges}
        answers_first = reference == COMPUTED_BEFORE and not shape.is_adapter  # and goes
        copied = {"reference": shape.weight_bytes}
        self.loaded = self.resident | (copied if reference == COPY or answers_first else {})
        self.resident |= copied if reference == COPY else {}
        self.generation: dict[str, float] = {}
        if online and self.args.use_vllm:
            self.generation = {"vLLM": self.args.vllm_share * (gpu or 0)}
            self.resident |= self.generation if self.args.vllm_resident_share else {}
        elif online:
            self.generation = self._native_engine(counts)

    def _native_engine(self, counts: RunCounts) -> dict[str, float]:
        args, shape, rollouts = self.args, self.shape, counts.rollouts
        slots = min(
            args.max_rollout_slots or MAX_SLOTS["cuda"], rollouts.completions_per_generation // counts.processes
        )
        prompts = -(-slots // args.num_generations) * rollouts.longest_prompt
        a_token = shape.layers * LayerShape(1, shape.widths[2], shape.dtype).bytes
        keys_and_values = a_token * (slots * args.max_completion_length + prompts)
        return {"keys and values": keys_and_values, "logits": 2 * slots * shape.vocabulary * 4}

    @property
    def optim(self) -> str:
        return getattr(self.args.optim, "value", self.args.optim)

    def standing(self) -> dict[str, float]:
        """From the first step on."""
        return self.resident | {"masters": self.state.masters, "moments": self.state.moments(self.optim)}

    def head(self, tokens: int) -> float:
        """When it is asked with a gradient. Logits that are kept need no chunk besides."""
        chunk_tokens = 0 if self.keeps_logits else self.args.chunk_tokens
        exact = any(name not in STATISTICS for name in self.side.token_stats)
        gradient = self.state.head_gradient if self.shape.head else 0
        return self.shape.head_bytes(tokens, True, chunk_tokens, exact) + gradient

    @property
    def keeps_logits(self) -> bool:
        return bool(self.args.keep_logits) and self.side.recomputes_logits()

    def gradients(self) -> float:
        """All of them, after a backward."""
        stay_as_written = self.args.steps_in_one_pass and self.state.masters and self.optim.startswith("adamw_torch")
        return self.state.written if stay_as_written else self.state.gradients

    def update(self, tokens: int, trained: int, level: str, offload: bool) -> Phase:
        """The worst of three moments: the head on top of all that is kept, the last layer's backward, the end of the backward."""
        kept = tokens * self.activations.waiting(level, offload)
        in_backward = tokens * self.activations.in_backward(level)
        before = self.state.buckets + (0 if self.args.steps_in_one_pass else self.state.sums)
        logits = trained * self.shape.vocabulary * self.shape.dtype.itemsize if self.keeps_logits else 0.0
        until = {"gradients": before, "logits": logits}
        moments = (
            until | {"head": self.head(trained), "activations": kept},
            until | {"head": self.state.head_gradient, "activations": kept + in_backward},
            {"gradients": self.gradients(), "activations": in_backward},
        )
        return max((Phase.of("update", self.standing(), moment) for moment in moments), key=lambda phase: phase.peak)

    def phases(self, tokens: int, trained: int, level: str, offload: bool) -> list[Phase]:
        found = [Phase.of("load", self.loaded)]
        if any(self.generation.values()):
            found.append(Phase.of("generation", self.standing() | self.generation))
        if self.scores:
            head = self.shape.head_bytes(trained, False, self.args.chunk_tokens)
            work = {"head": head, "activations": tokens * self.activations.layer}
            found.append(Phase.of("scoring", self.standing(), work))
        return [*found, self.update(tokens, trained, level, offload)]

    def largest_pass(self, room: float, level: str, offload: bool, share_trained: float) -> int:
        """Tokens of the largest pass whose update fits into `room`."""

        def peak(tokens: int) -> float:
            return self.update(tokens, int(tokens * share_trained), level, offload).peak

        return max(bisect.bisect_right(range(MOST_TOKENS + 1), room, key=peak) - 1, 0)


@dataclass
class MemoryReport:
    """What is printed about memory. Sizes in bytes."""

    dtype: str
    kernels: str
    tokens: int  # of the largest micro-batch
    longest: int  # unit
    level: str
    offload: bool
    phases: list[Phase]
    by_level: dict[str, float]  # update peak
    gpu: int | None = None
    room: float | None = None
    fitting: dict[str, dict[str, Any]] = field(default_factory=dict)
    sentence: str | None = None

    @property
    def worst(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.peak)

    def as_json(self) -> dict[str, Any]:
        phases = {p.name: {"peak": p.peak, "binding": p.binding, "terms": p.terms} for p in self.phases}
        return vars(self) | {"phases": phases, "is_estimate": True}


def planned_kernels(args: Any) -> str:
    """Of the layers on a GPU. Whether compiled ones are faster, which long runs find out, is not known here: they keep less."""
    if args.compile_layers:
        return COMPILED
    return PLAIN if args.use_liger_kernel is False else LIGER


def explain_memory(
    side: BaseTrainer,
    shape: Shape,
    counts: RunCounts,
    reference: str,
    reward_models: Iterable[nn.Module],
    gpu: int | None,
) -> MemoryReport:
    """The phases of the run with its own settings, or with those that its trainer chooses on a device of `gpu` bytes."""
    model = MemoryModel(side, shape, counts, reference, reward_models, gpu)
    batch, sentence = batch_tokens(side), None
    share = _share_trained(side, counts, batch)
    if gpu is not None:
        plan = plan_memory(side, gpu - CONTEXT_BYTES - sum(model.resident.values()), model.activations, model.state)
        apply(side, plan)
        sentence = plan.sentence
        batch = replace(batch, largest=plan.tokens_per_pass or batch.largest)
    chosen = memory_overrides(side)
    level, offload = chosen.checkpointing or NONE, bool(chosen.offload)
    trained = int(batch.largest * share)
    report = MemoryReport(
        dtype=str(shape.dtype).removeprefix("torch."),
        kernels=model.kernels,
        tokens=batch.largest,
        longest=batch.longest,
        level=level,
        offload=offload,
        phases=model.phases(batch.largest, trained, level, offload),
        by_level={one: model.update(batch.largest, trained, one, False).peak for one in (NONE, SELECTIVE, FULL)},
        gpu=gpu,
        sentence=sentence,
    )
    if gpu is not None:
        report.room = memory.HEAD_ROOM * (gpu - CONTEXT_BYTES)
        for one in report.by_level:
            tokens = model.largest_pass(report.room, one, False, share)
            rows = tokens // max(batch.longest, 1)
            report.fitting[one] = {"tokens": tokens, "rows": rows, "fits": tokens >= batch.largest}
    return report


def _share_trained(side: Any, counts: RunCounts, batch: memory.BatchTokens) -> float:
    """Of the tokens of a pass, those that the head is asked about; all completions as long as they may be."""
    if counts.rollouts is not None:
        return min(side.args.per_device_train_batch_size * side.args.max_completion_length / max(batch.largest, 1), 1.0)
    if not counts.steps_counted:
        return 1.0
    return min(counts.per_step["trained"].total / max(counts.per_step["tokens"].total, 1) / laid_out_share(side), 1.0)
