"""TRL's AsyncGRPO: GRPO with `async_rollouts`, under TRL's names, with its defaults and its numbers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from posttrain.rollout.rollout import ADVANTAGES, POLICY_LOGPS, SAMPLING_LOGPS, Rollout
from posttrain.trainer.options.async_rollouts import SAMPLER
from posttrain.trainer.options.base import option
from posttrain.trainer.options.policy_group import PolicyGroupConfig
from posttrain.trainer.options.trl_async import TrlAsyncConfig
from posttrain.trainer.policy_group_trainer import PolicyGroupTrainer
from posttrain.trainer.trl_async_trainer import TrlAsyncTrainer

logger = logging.getLogger(__name__)


@dataclass
class AsyncGRPOConfig(TrlAsyncConfig, PolicyGroupConfig):
    """Options of asynchronous GRPO: TRL's, and every one of GRPO."""

    lr_scheduler_type: str = option("constant", "Schedule of the learning rate.")
    epsilon: float | None = option(
        0.2, "The ratio is clipped at 1 - epsilon; dppo: the divergence where masking begins."
    )
    proximal_policy: str = option(
        SAMPLER,
        "Centre of the clip: 'sampler', the weights that wrote the token; or 'step_start', the weights that a step begins with, "
        "where tokens of older ones are weighed.",
    )
    advantage_std: str = option(
        "population",
        "Advantages are scaled by the standard deviation of the 'sample' (n - 1) or of the 'population' (n).",
    )
    fork_threshold_tokens: int = option(
        1024,
        "TRL's; it decides nothing here: turns are appended as token ids, so that no conversation is tokenised again.",
    )

    advantage_epsilon = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        if "fork_threshold_tokens" in self.set_by_user():
            logger.warning(
                f"`fork_threshold_tokens`={self.fork_threshold_tokens} decides nothing: turns are appended as token ids, and no "
                "conversation is tokenised again."
            )


class AsyncGRPOTrainer(TrlAsyncTrainer, PolicyGroupTrainer):
    """GRPO (arXiv:2402.03300) on completions that are written while earlier ones are trained on."""

    method, title = "async_grpo", "asynchronous group relative policy optimisation"
    config_class = AsyncGRPOConfig

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: AsyncGRPOConfig | None = None,
        train_dataset: Any = None,
        processing_class: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        tools: Any = None,
        environment_factory: Any = None,
        rollout_worker: Any = None,
        weight_transfer: Any = None,
        **named: Any,
    ) -> None:
        """Arguments in TRL's order; further ones are GRPOTrainer's, by name. A `rollout_worker` has rewards of its own."""
        super().__init__(
            model, reward_funcs=reward_funcs if rollout_worker is None else None, args=args, train_dataset=train_dataset,
            processing_class=processing_class, callbacks=callbacks, optimizers=optimizers, peft_config=peft_config, tools=tools,
            environment_factory=environment_factory, rollout_worker=rollout_worker, weight_transfer=weight_transfer, **named,
        )  # fmt: skip

    # ---- another's worker --------------------------------------------------------------------------------------------

    def foreign_group(self, one: Any) -> int:
        return one.group_id

    def foreign_tokens(self, one: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        logps = np.asarray(one.old_log_probs, dtype=np.float32)
        advantages = np.full(len(logps), one.advantage, dtype=np.float32)
        columns = {SAMPLING_LOGPS: logps, POLICY_LOGPS: logps.copy(), ADVANTAGES: advantages}
        return np.asarray(one.completion_mask, dtype=bool), columns

    def spread(self, rollouts: list[Rollout]) -> None:
        """Of another's worker each sample brings its advantage."""
        if self.rollout_worker is None:
            return super().spread(rollouts)
        for rollout in rollouts:
            rollout.advantage = float(rollout.sample.per_token[ADVANTAGES][0])
