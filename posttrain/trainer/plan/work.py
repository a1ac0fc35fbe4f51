"""Which passes a run makes over its models, and about how many operations they are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from posttrain.losses.preference import PREFERENCE_LOSSES
from posttrain.models.memory.fit import FULL
from posttrain.trainer.online_trainer import OnlineTrainer
from posttrain.trainer.options.base import ReferenceConfig
from posttrain.trainer.references.setup import rows_carry_reference

if TYPE_CHECKING:
    from posttrain.trainer.base import BaseTrainer
    from posttrain.trainer.plan.arithmetic import RunCounts
    from posttrain.trainer.plan.memory import Shape

NO_REFERENCE, FROM_ROWS, PRECOMPUTED, ADAPTER_OFF, COPY = (
    "none", "brought by the rows", "computed once, before training", "the model without its adapter", "a frozen copy",
)  # fmt: skip


def reference_of(side: BaseTrainer, parts: dict[str, Any]) -> str:
    """Who the policy is compared with; the rules are those of `ReferenceSetup` and of online trainers."""
    args = side.args
    if isinstance(side, OnlineTrainer):
        if not side.needs_reference:
            return NO_REFERENCE
    elif not isinstance(args, ReferenceConfig):
        return NO_REFERENCE
    elif rows_carry_reference(side.train_dataset):
        return FROM_ROWS
    elif args.precompute_ref_log_probs:
        return PRECOMPUTED
    return ADAPTER_OFF if parts.get("peft_config") is not None else COPY


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


@dataclass(frozen=True)
class Work:
    """Of one optimizer step, and of the whole run. Operations are estimates; times and tokens are counted."""

    reference: str
    per_step: list[Pass]
    before_training: list[Pass]
    steps: int

    @property
    def operations_per_step(self) -> float:
        return sum(one.operations for one in self.per_step)

    @property
    def operations(self) -> float:
        return self.steps * self.operations_per_step + sum(one.operations for one in self.before_training)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"operations_per_step": self.operations_per_step, "operations": self.operations}


@dataclass(frozen=True)
class Operations:
    """Multiplications and additions of `tokens` tokens in samples of `length`, `asked` of which go through the head."""

    shape: Shape

    def forward(self, tokens: float, length: float, asked: float) -> float:
        """2 for each weight and token; in attention 4 for each pair of tokens, width and layer, half of which are masked."""
        attention = 2 * self.shape.layers * self.shape.queries * length * tokens
        return 2 * self.shape.active * tokens + attention + 2 * self.shape.head * asked

    def backward(self, tokens: float, length: float, asked: float) -> float:
        """Twice the forward: by activations and by weights. Frozen weights have the first part only."""
        frozen = 1 - min(self.shape.trained / max(self.shape.parameters, 1), 1) if self.shape.is_adapter else 0.0
        return (2 - frozen) * self.forward(tokens, length, asked)


def explain_work(side: BaseTrainer, shape: Shape, counts: RunCounts, parts: dict[str, Any], level: str) -> Work:
    reference = reference_of(side, parts)
    counted, operations = counts.per_step, Operations(shape)
    tokens, passes = counted["tokens"].mean, counted["passes"].mean
    length = tokens / max(counted["samples"].mean, 1)
    asked = counted["trained"].mean if counts.rollouts is None else tokens - _prompt_tokens_of_step(counts)
    forward, backward = operations.forward(tokens, length, asked), operations.backward(tokens, length, asked)
    again = forward if level == FULL else 0.0
    found = [Pass("policy, forward and backward", passes, tokens, forward + backward + again)]
    if counts.rollouts is not None:
        found += _of_rollouts(side, counts, operations, reference, length)
        return Work(reference, found, [], counts.optimizer_steps)
    without_gradient = []
    if reference in (ADAPTER_OFF, COPY):
        found.append(Pass("reference, forward", passes, tokens, forward))
    if _is_coupled(side) and passes > 1:
        found.append(Pass("policy, forward, to compare the pairs of the step", passes, tokens, forward))
        if reference in (ADAPTER_OFF, COPY):
            found.append(Pass("reference, forward, for the same", passes, tokens, forward))
    if reference == PRECOMPUTED:
        share = (counts.rows_of_dataset or 0) / max(counted["rows"].mean, 1)
        without_gradient.append(Pass("reference, forward, once over all rows", share, tokens * share, forward * share))
    return Work(reference, found, without_gradient, counts.optimizer_steps)


def _is_coupled(side: BaseTrainer) -> bool:
    names = getattr(side.args, "loss_type", ())
    return isinstance(names, list) and any(PREFERENCE_LOSSES[name].coupled for name in names)


def _of_rollouts(side: Any, counts: RunCounts, operations: Operations, reference: str, length: float) -> list[Pass]:
    """Passes that a generation makes, as shares of the optimizer steps that it feeds. Completions as long as they may be."""
    args, rollouts, steps = side.args, counts.rollouts, max(counts.optimizer_steps, 1)
    completions = rollouts.completions / steps
    written = completions * args.max_completion_length
    prompts = (rollouts.prompt_tokens or 0) / steps
    read = prompts / args.num_generations
    all_tokens = prompts + written
    found = [
        Pass(
            "generation, prompts read (once for a group)",
            rollouts.prompts / steps,
            read,
            operations.forward(read, length, 0),
        ),
        Pass(
            "generation, tokens written (at most)", completions, written, operations.forward(written, length, written)
        ),
    ]
    scored = operations.forward(all_tokens, length, written)
    if side.needs_old_logps:
        found.append(Pass("policy, forward, for the log-probs before the update", completions, all_tokens, scored))
    if reference != NO_REFERENCE:
        found.append(Pass("reference, forward, once for each rollout", completions, all_tokens, scored))
    return found


def _prompt_tokens_of_step(counts: RunCounts) -> float:
    rollouts = counts.rollouts
    return (rollouts.prompt_tokens or 0) / max(rollouts.completions, 1) * counts.per_step["samples"].mean
