"""What a run costs: passes and operations of an optimizer step, memory of each phase. Its models are on the meta device.

Bytes are those of `models/memory`, by which a run on a GPU decides about checkpointing; here they are put together by what is on
the device at the same time. Settings are the run's own, or those that its trainer would choose on a device of a given size.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from posttrain.models.layers.kernels import COMPILED, LIGER, PLAIN
from posttrain.models.load.model import innermost_model
from posttrain.models.load.teacher import BASE, LIVE
from posttrain.models.memory import fit as memory
from posttrain.models.memory.fit import FULL, NONE, SELECTIVE
from posttrain.models.memory.shape import Shape
from posttrain.models.scoring.head_kernels import STATISTICS
from posttrain.rollout.engines.native.cache import LayerShape
from posttrain.rollout.engines.native.engine import MAX_SLOTS
from posttrain.rollout.engines.protocol import FP8
from posttrain.trainer.references.setup import ADAPTER_OFF, COMPUTED_BEFORE, COPY, NO_REFERENCE
from posttrain.trainer.step.memory_fit import (
    apply,
    batch_tokens,
    image_cost,
    is_decided,
    laid_out_share,
    looked_at,
    memory_overrides,
    plan_memory,
)

if TYPE_CHECKING:
    from posttrain.trainer.base import BaseTrainer
    from posttrain.trainer.plan.arithmetic import RunCounts

CONTEXT_BYTES = int(0.6 * 2**30)
"""CUDA's own, and what libraries take when they are first called."""
MAX_TOKENS = 2**24
"""Where the search for the largest micro-batch stops."""


@dataclass(frozen=True)
class PlannedModel:
    """A run, its figures and the models that it will have."""

    side: BaseTrainer  # its model is on the meta device
    counts: RunCounts
    shape: Shape
    reference: str  # `kind_of_reference`
    reward_models: Iterable[nn.Module] = ()  # on the meta device, too
    teacher: nn.Module | None = None  # likewise


# ---- memory ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Phase:
    """Terms that are on the device at the same time."""

    name: str
    terms: dict[str, float]

    @classmethod
    def of(cls, name: str, terms: dict[str, float]) -> Phase:
        return cls(name, {term: size for term, size in terms.items() if size})

    @property
    def peak(self) -> float:
        return sum(self.terms.values())

    @property
    def binding(self) -> str:
        return max(self.terms, key=self.terms.get)


class RunMemory:
    """The memory of one process, as a function of the tokens of a pass and the level of checkpointing; and what a run will need.

    With its own settings, or with those that its trainer chooses on a device of `gpu` bytes. Sizes in bytes.
    """

    def __init__(self, run: PlannedModel, gpu: int | None = None) -> None:
        self.run, self.args, self.shape = run, run.side.args, run.shape
        bounds = [size for size in (gpu, self.args.memory_bytes) if size is not None]
        self.gpu = min(bounds, default=None)
        self.dtype = str(run.shape.dtype).removeprefix("torch.")
        # Whether compiled layers are faster, which long runs find out, is not known here: they keep less.
        is_plain = self.args.use_liger_kernel is False
        self.kernels = COMPILED if self.args.compile_layers else PLAIN if is_plain else LIGER
        innermost = innermost_model(run.side.model)
        self.activations = run.shape.activations(self.kernels) + image_cost(run.side, innermost, run.shape.dtype)
        head = innermost.get_output_embeddings()
        self.state = memory.state_cost(run.side.model.parameters(), head, self.args.world_size)
        self._place_models()
        self._choose_settings()

    def _teacher_bytes(self) -> float:
        """Another model's; of the policy as its own teacher, what is copied of it, and averages in float32."""
        teacher, kind = self.run.teacher, getattr(self.args, "teacher_model_kind", None)
        if teacher is None or kind == LIVE:
            return 0.0
        if kind is None:
            return float(sum(parameter.nbytes for parameter in teacher.parameters()))
        if kind == BASE:
            return 0.0 if self.shape.is_adapter else float(self.shape.weight_bytes)
        moved = [one for one in teacher.parameters() if one.requires_grad or not self.shape.is_adapter]
        return float(sum(one.nbytes + (4 * one.numel() if one.element_size() < 4 else 0) for one in moved))

    def _place_models(self) -> None:
        """What lies on the device: when all are loaded, from then on, and while completions are written and scored."""
        run, args, shape, counts, weights = self.run, self.args, self.shape, self.run.counts, self.shape.weight_bytes
        judges = float(sum(parameter.nbytes for judge in run.reward_models for parameter in judge.parameters()))
        self.resident = {"weights": weights, "reward models": judges, "reference": weights * (run.reference == COPY)}
        self.resident["teacher"] = self._teacher_bytes()
        self.loaded = dict(self.resident)
        if run.reference == COMPUTED_BEFORE and not shape.is_adapter and args.sharding is not None:
            self.loaded["reference"] = weights  # it answers before training, and goes; else the policy itself answers
        self.generation: dict[str, float] = {}
        self.scores = counts.rollouts is not None and (run.side.needs_old_logps or run.side.needs_reference)
        if counts.rollouts is not None and args.use_vllm:
            self.generation = {"vLLM": args.vllm_share * (self.gpu or 0)}
            self.resident |= self.generation if args.vllm_resident_share else {}
        elif counts.rollouts is not None:
            slots = args.max_rollout_slots or MAX_SLOTS["cuda"]
            slots = min(slots, counts.rollouts.completions_per_generation // counts.processes)
            prompts = -(-slots // args.num_generations) * counts.rollouts.longest_prompt
            if args.rollout_weight_dtype == FP8:
                self.resident["weights in 8 bits"] = shape.active
            width, in_eight_bits = shape.widths[2], args.rollout_kv_dtype == FP8
            a_token = shape.layers * LayerShape(1, width, width, shape.dtype, in_eight_bits).bytes
            self.generation = {
                "keys and values": a_token * (slots * args.max_completion_length + prompts),
                "logits": 2 * slots * shape.vocabulary * 4,
            }

    def _choose_settings(self) -> None:
        """As `fit_memory` does for a run."""
        side, gpu, batch = self.run.side, self.gpu, batch_tokens(self.run.side)
        self.share_trained, self.sentence = _share_trained(self.run, batch), None
        self.tokens, self.longest = batch.largest, batch.longest  # of a pass, of a unit
        is_open = self.args.memory is not None or not is_decided(memory_overrides(side))
        if is_open and (gpu is not None or self.args.memory is not None):
            free = math.inf if gpu is None else gpu - CONTEXT_BYTES - sum(self.resident.values())
            plan = plan_memory(side, free, self.activations, self.state)
            apply(side, plan)
            self.sentence, self.tokens = plan.sentence, plan.tokens_per_pass or batch.largest
        chosen = memory_overrides(side)
        self.level, self.offload = chosen.checkpointing or NONE, bool(chosen.offload)
        self.in_one_pass = self.args.steps_in_one_pass
        if self.scores:  # all rollouts of a generation, in passes that need no more memory than an update
            whole, _ = side.batch_limits(self.args.writing_schedule().share)
            most = memory.tokens_without_gradient(torch.device("cuda"))
            self.scored = min(whole, most, self.args.max_tokens_per_pass or most)

    def standing(self) -> dict[str, float]:
        """From the first step on."""
        optim = self.args.optim
        return self.resident | {"masters": self.state.masters_of(optim), "moments": self.state.moments(optim)}

    def update(self, tokens: int, level: str, offload: bool = False) -> Phase:
        """The worst of three moments: the head on top of all that is kept, the last layer's backward, the end of the backward."""
        trained = int(tokens * self.share_trained)
        args, state, shape = self.args, self.state, self.shape
        kept = tokens * self.activations.waiting(level, offload)
        in_backward = tokens * self.activations.in_backward(level)
        keeps_logits = bool(args.keep_logits) and self.run.side.recomputes_logits()
        exact = any(name not in STATISTICS for name in self.run.side.token_stats)
        # kept ones need no chunk
        head = shape.head_bytes(trained, True, 0 if keeps_logits else args.chunk_tokens, exact)
        reads_low = args.optim.startswith("adamw_torch") or args.optim == memory.EIGHT_BIT
        stay_as_written = self.in_one_pass and state.masters and reads_low
        until = {
            "gradients": state.buckets + (0 if self.in_one_pass else state.sums),
            "logits": trained * shape.vocabulary * shape.dtype.itemsize if keeps_logits else 0,
        }
        moments = (
            until | {"head": head + state.head_gradient if shape.head else 0, "activations": kept},
            until | {"head": state.head_gradient, "activations": kept + in_backward},
            {"gradients": state.written if stay_as_written else state.gradients, "activations": in_backward},
        )
        return max((Phase.of("update", self.standing() | moment) for moment in moments), key=lambda phase: phase.peak)

    @property
    def phases(self) -> list[Phase]:
        found = [Phase.of("load", self.loaded)]
        if any(self.generation.values()):
            found.append(Phase.of("generation", self.standing() | self.generation))
        if self.scores:
            head = self.shape.head_bytes(int(self.scored * self.share_trained), False, self.args.chunk_tokens)
            work = {"head": head, "activations": self.scored * self.activations.layer}
            found.append(Phase.of("scoring", self.standing() | work))
        return [*found, self.update(self.tokens, self.level, self.offload)]

    @property
    def worst(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.peak)

    @property
    def by_level(self) -> dict[str, float]:
        return {level: self.update(self.tokens, level).peak for level in (NONE, SELECTIVE, FULL)}

    @property
    def room(self) -> float | None:
        """What may be used: the models that stay, whose size is known, and of the rest as much as a run would claim."""
        if self.gpu is None:
            return None
        resident = sum(self.resident.values())
        return resident + memory.HEAD_ROOM * (self.gpu - CONTEXT_BYTES - resident)

    @property
    def fitting(self) -> dict[str, dict[str, Any]]:
        """Level -> the largest pass that fits `gpu`, and its rows."""
        most = {} if self.gpu is None else {level: self.largest_pass(level) for level in (NONE, SELECTIVE, FULL)}
        rows = max(self.longest, 1)
        return {level: {"tokens": n, "rows": n // rows, "fits": n >= self.tokens} for level, n in most.items()}

    def largest_pass(self, level: str) -> int:
        """Tokens of the largest pass whose update fits into `room`."""
        tokens = range(MAX_TOKENS + 1)
        return max(bisect.bisect_right(tokens, self.room, key=lambda one: self.update(one, level).peak) - 1, 0)

    def as_json(self) -> dict[str, Any]:
        names = (
            "dtype", "kernels", "tokens", "longest", "level", "offload", "by_level", "gpu", "room", "fitting", "sentence",
        )  # fmt: skip
        phases = {p.name: {"peak": p.peak, "binding": p.binding, "terms": p.terms} for p in self.phases}
        return {name: getattr(self, name) for name in names} | {"phases": phases, "is_estimate": True}


def _share_trained(run: PlannedModel, batch: memory.BatchTokens) -> float:
    """Of the tokens of a pass, those that the head is asked about; all completions as long as they may be."""
    args, counted = run.side.args, run.counts.per_step
    if run.counts.rollouts is not None:
        return min(args.schedule().batch_size * args.max_completion_length / max(batch.largest, 1), 1.0)
    if not run.counts.steps_counted:
        return 1.0
    return min(counted["trained"].total / max(counted["tokens"].total, 1) / laid_out_share(run.side), 1.0)


# ---- work ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """One kind of pass: how often in an optimizer step (of all processes, on average), over how many tokens, for what."""

    what: str
    times: float
    tokens: float
    operations: float  # an estimate

    @property
    def line(self) -> str:
        return f"{self.what}: {self.times:g} of {self.tokens / max(self.times, 1e-9):,.0f} tokens"


class Work:
    """Of one optimizer step, and of the whole run. Operations are estimates; times and tokens are counted."""

    def __init__(self, run: PlannedModel, level: str) -> None:
        """`level` of checkpointing."""
        shape, counted = run.shape, run.counts.per_step
        self.reference, self.steps = run.reference, run.counts.optimizer_steps
        tokens, passes, asked = (counted[name].mean for name in ("tokens", "passes", "trained"))
        length = tokens / max(counted["samples"].mean, 1)
        forward = _forward(shape, tokens, length, asked)
        # The backward is twice the forward, by activations and by weights; frozen weights have the first part only.
        frozen = 1 - min(shape.trained / max(shape.parameters, 1), 1) if shape.is_adapter else 0.0
        seen, learnt = _of_images(run, counted["rows"].mean)
        graphs, work = run.side.graphs, (3 - frozen + (level == FULL)) * forward + learnt
        own = Pass("policy, forward and backward", passes * graphs, tokens * graphs, work * graphs)
        is_live = run.reference in (ADAPTER_OFF, COPY)
        before = run.side.forward_before_step(passes)
        more = {
            "reference, forward": is_live,
            f"policy, forward, {before}": before is not None,
            "reference, forward, for the same": is_live and before is not None,
        }
        others = [Pass(what, passes, tokens, forward + seen) for what, is_made in more.items() if is_made]
        self.per_step = [own, *(others if run.counts.rollouts is None else _of_rollouts(run, length))]
        if run.teacher is not None:
            self.per_step += _of_teacher(
                run, passes, tokens, forward, _forward(Shape(run.teacher, None), tokens, length, asked)
            )
        self.before_training = []
        if run.reference == COMPUTED_BEFORE:
            share = (run.counts.rows_of_dataset or 0) / max(counted["rows"].mean, 1)
            once = Pass("reference, forward, once over all rows", share, tokens * share, forward * share)
            self.before_training.append(once)
        if samples := getattr(run.side.args, "num_value_samples", 0):  # A2PO
            completions = samples * (run.counts.rows_of_dataset or 0)
            written = completions * run.side.args.max_completion_length
            what, work = "generation, for V* of each row (at most)", _forward(shape, written, length, written)
            self.before_training.append(Pass(what, completions, written, work))
        self.operations_per_step = sum(one.operations for one in self.per_step)
        before = sum(one.operations for one in self.before_training)
        self.operations = self.steps * self.operations_per_step + before

    def as_json(self) -> dict[str, Any]:
        lists = {name: [asdict(one) for one in getattr(self, name)] for name in ("per_step", "before_training")}
        return vars(self) | lists


def _forward(shape: Shape, tokens: float, length: float, asked: float) -> float:
    """Multiplications and additions of `tokens` tokens in samples of `length`, `asked` of which go through the head.

    2 for each weight and token; in attention 4 for each pair of tokens, width and layer, half of which are masked.
    """
    attention = 2 * shape.layers * shape.widths[1] * length * tokens
    return 2 * shape.active * tokens + attention + 2 * shape.head * asked


def _of_images(run: PlannedModel, rows: float) -> tuple[float, float]:
    """Of tower and projector, for the images of so many rows: a forward, and a pass that trains."""
    units = getattr(run.side.train_dataset, "prepared", run.side.train_dataset)
    if run.shape.tower is None or not hasattr(units, "__len__"):
        return 0.0, 0.0
    tower, found = run.shape.tower, np.zeros(2)
    for unit in (units := looked_at(units)):
        distinct = {image.key: image for sample in unit for image in sample.images}.values()
        tiles = [tower.family.pixel_rows(image.grid) for image in distinct]
        features = sum(image.stop - image.start for image in distinct)
        found += sum(tower.forward(tiles, features)), tower.training(tiles, features)
    seen, learnt = rows * found / max(len(units), 1)
    return float(seen), float(learnt)


def _of_teacher(run: PlannedModel, passes: float, tokens: float, policy: float, teacher: float) -> list[Pass]:
    """The teacher's over what a step trains, or over each rollout when it is collected; there the policy may be asked for its sake.

    `policy`, `teacher`: operations of a forward over a step.
    """
    side = run.side
    made = [Pass("teacher, forward", passes, tokens, teacher)] if side.teaches_in_steps else []
    share = 1 / side.args.num_iterations  # a rollout is read once, and trained on so many times
    return made + [
        Pass(f"{who}, forward, once for each rollout", passes * share, tokens * share, operations * share)
        for who, operations in (("teacher", teacher), ("policy", policy))
        if who in side.scores_rollouts
    ]


def _of_rollouts(run: PlannedModel, length: float) -> list[Pass]:
    """Passes that a generation makes, as shares of the optimizer steps that it feeds. Completions as long as they may be."""
    args, rollouts, steps = run.side.args, run.counts.rollouts, max(run.counts.optimizer_steps, 1)
    completions = rollouts.completions / steps
    written = completions * args.max_completion_length
    prompts = (rollouts.prompt_tokens or 0) / steps
    scored = (completions, prompts + written, written)
    passes = {  # what -> times, tokens, tokens that the head is asked about
        "generation, prompts read (once for a group)": (rollouts.prompts / steps, prompts / args.num_generations, 0),
        "generation, tokens written (at most)": (completions, written, written),
        "policy, forward, for the log-probs before the update": scored if run.side.needs_old_logps else None,
        "reference, forward, once for each rollout": scored if run.reference != NO_REFERENCE else None,
    }
    made = {what: numbers for what, numbers in passes.items() if numbers is not None}
    return [
        Pass(what, times, tokens, _forward(run.shape, tokens, length, asked))
        for what, (times, tokens, asked) in made.items()
    ]
