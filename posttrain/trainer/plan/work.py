"""Which passes a run makes over its models, and about how many operations they are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from posttrain.losses.preference import PREFERENCE_LOSSES
from posttrain.models.memory.fit import FULL
from posttrain.models.memory.shape import Shape
from posttrain.trainer.references.setup import ADAPTER_OFF, COMPUTED_BEFORE, COPY, NO_REFERENCE

if TYPE_CHECKING:
    from posttrain.trainer.base import BaseTrainer
    from posttrain.trainer.plan.arithmetic import RunCounts


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


def explain_work(side: BaseTrainer, shape: Shape, counts: RunCounts, reference: str, level: str) -> Work:
    counted = counts.per_step
    tokens, passes, asked = (counted[name].mean for name in ("tokens", "passes", "trained"))
    length = tokens / max(counted["samples"].mean, 1)
    forward = _forward(shape, tokens, length, asked)
    # The backward is twice the forward, by activations and by weights; frozen weights have the first part only.
    frozen = 1 - min(shape.trained / max(shape.parameters, 1), 1) if shape.is_adapter else 0.0
    again = 1 if level == FULL else 0
    found = [Pass("policy, forward and backward", passes, tokens, (3 - frozen + again) * forward)]
    if counts.rollouts is not None:
        found += _of_rollouts(side, counts, shape, reference, length)
        return Work(reference, found, [], counts.optimizer_steps)
    is_live = reference in (ADAPTER_OFF, COPY)
    is_compared = passes > 1 and _is_coupled(side)
    more = {
        "reference, forward": is_live,
        "policy, forward, to compare the pairs of the step": is_compared,
        "reference, forward, for the same": is_live and is_compared,
    }
    found += [Pass(what, passes, tokens, forward) for what, is_made in more.items() if is_made]
    before = []
    if reference == COMPUTED_BEFORE:
        share = (counts.rows_of_dataset or 0) / max(counted["rows"].mean, 1)
        before.append(Pass("reference, forward, once over all rows", share, tokens * share, forward * share))
    return Work(reference, found, before, counts.optimizer_steps)


def _forward(shape: Shape, tokens: float, length: float, asked: float) -> float:
    """Multiplications and additions of `tokens` tokens in samples of `length`, `asked` of which go through the head.

    2 for each weight and token; in attention 4 for each pair of tokens, width and layer, half of which are masked.
    """
    attention = 2 * shape.layers * shape.widths[1] * length * tokens
    return 2 * shape.active * tokens + attention + 2 * shape.head * asked


def _is_coupled(side: BaseTrainer) -> bool:
    names = getattr(side.args, "loss_type", ())
    return isinstance(names, list) and any(PREFERENCE_LOSSES[name].coupled for name in names)


def _of_rollouts(side: Any, counts: RunCounts, shape: Shape, reference: str, length: float) -> list[Pass]:
    """Passes that a generation makes, as shares of the optimizer steps that it feeds. Completions as long as they may be."""
    args, rollouts, steps = side.args, counts.rollouts, max(counts.optimizer_steps, 1)
    completions = rollouts.completions / steps
    written = completions * args.max_completion_length
    prompts = (rollouts.prompt_tokens or 0) / steps
    both = prompts + written
    passes = [
        ("generation, prompts read (once for a group)", rollouts.prompts / steps, prompts / args.num_generations, 0)
    ]
    passes.append(("generation, tokens written (at most)", completions, written, written))
    if side.needs_old_logps:
        passes.append(("policy, forward, for the log-probs before the update", completions, both, written))
    if reference != NO_REFERENCE:
        passes.append(("reference, forward, once for each rollout", completions, both, written))
    return [Pass(what, times, tokens, _forward(shape, tokens, length, asked)) for what, times, tokens, asked in passes]
