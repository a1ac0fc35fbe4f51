"""TrlAsyncTrainer: what TRL's asynchronous trainers take and ours do not. Mixed in before the trainer of a method."""

from __future__ import annotations

from typing import Any

import numpy as np

from posttrain.rollout.collector import Written
from posttrain.trainer import construction
from posttrain.trainer.online.async_rollouts import AsyncRollouts
from posttrain.trainer.online.foreign_worker import ForeignRollouts, ForeignWorker, WeightTransfer, under_trl_names
from posttrain.trainer.online_trainer import OnlineTrainer

WORKER_DECIDES = (
    *("async_lead", "async_order", "on_stale", "update_in_flight", "kv_after_update", "rollout_workers"),
    *("drop_zero_variance", "replay_buffer_size", "num_remains_in_group", "scale_rewards", "advantage_std"),
    *("reward_weights", "multi_objective_aggregation", "use_vllm"),
)
"""Options of what another's worker does by itself."""


class NamedAsTrl(AsyncRollouts):
    """What is logged has TRL's names as well."""

    def next_window(self) -> Written:
        written = super().next_window()
        written.numbers |= under_trl_names(written.numbers, self.run.args.num_generations)
        return written


class TrlAsyncTrainer(OnlineTrainer):
    """Servers are used where there are any, and another's worker (`rollout_worker`) takes the place of our own."""

    def __init__(
        self,
        model: Any,
        *given: Any,
        args: Any = None,
        rollout_worker: ForeignWorker | None = None,
        weight_transfer: WeightTransfer | None = None,
        **named: Any,
    ) -> None:
        args = construction.config_of(args, self.config_class, model, type(self).__name__, self.method)
        self.rollout_worker, self.weight_transfer = rollout_worker, weight_transfer
        if (rollout_worker is None) != (weight_transfer is None):
            raise ValueError(
                "`rollout_worker` and `weight_transfer` belong together: our own worker is sent its weights by us, and another "
                "one by its own `weight_transfer`. Give both (a `weight_transfer` may do nothing, where the worker finds its "
                "weights itself), or neither."
            )
        if rollout_worker is not None:
            self._hand_over(args)
        self.said_of_servers = args.look_for_servers()
        super().__init__(model, *given, args=args, **named)

    def _hand_over(self, args: Any) -> None:
        if ignored := sorted({*WORKER_DECIDES} & args.set_by_user()):
            raise ValueError(
                f"`{ignored[0]}` is set, and `rollout_worker` decides that by itself: it would have no effect. Leave it out."
            )
        args.use_vllm = False
        self.needs_rewards = False  # they are the worker's

    def rollouts_ahead(self, *given: Any) -> AsyncRollouts | ForeignRollouts:
        if self.rollout_worker is None:
            return NamedAsTrl(self, *given)
        return ForeignRollouts(self, self.rollout_worker, self.weight_transfer, self.foreign_tokens, self.foreign_group)

    def foreign_tokens(self, one: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Of a sample of `rollout_worker`'s: which of its tokens are trained, and what it says of them, under our names."""
        raise NotImplementedError

    def foreign_group(self, one: Any) -> int:
        """The number of its prompt."""
        raise NotImplementedError

    def plan_lines(self, max_steps: int) -> dict[str, str]:
        lines = super().plan_lines(max_steps)
        if self.rollout_worker is not None:
            who = type(self.rollout_worker).__name__
            return lines | {"rollouts": f"written and judged by {who}, as `rollout_worker`"}
        said = f"; {self.said_of_servers}" if self.said_of_servers else ""
        return lines | {"rollouts": f"{lines['rollouts']}{said}"}
